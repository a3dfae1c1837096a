"""What all reductions of a module's gradients have in common: FSDP2's form, the mean and the sum.

*The sum* (:func:`sum_rows`) is in rank order, in fp32 and in pieces that stay in a core's cache, whoever calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.buffer_pool import BufferPool, ReusableBuffer
from thalweg.comm.comms_logger import CollectiveCall, CommsLog

# Takes a piece of work to do it in the background, or returns False.
TrySubmit = Callable[[Callable[[], None]], bool]
# Adds up a 1-D tensor over the ranks that hold the same shard, in place.
ReplicaReduce = Callable[[Tensor, CollectiveCall], None]

# 256 KiB of fp32: the piece being summed and its two operands stay in a core's L2.
CHUNK_NUMEL = 1 << 16


def sum_rows(rows: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
    """Write ``scale * (rows[0] + rows[1] + ...)`` into ``out``; all 1-D of one length.

    Rows may be of a lower precision than ``out``: the sum is taken in ``out``'s dtype,
    in the order given, so equal inputs give equal bits wherever it runs.
    """
    numel = out.numel()
    step = CHUNK_NUMEL if out.device.type == "cpu" else max(1, numel)
    same_dtype = all(row.dtype == out.dtype for row in rows)
    for start in range(0, numel, step):
        length = min(step, numel - start)
        chunk = out.narrow(0, start, length)
        row_chunks = [row.narrow(0, start, length) for row in rows]
        if same_dtype and len(row_chunks) > 1:
            torch.add(row_chunks[0], row_chunks[1], out=chunk)
            remaining = row_chunks[2:]
        else:
            chunk.copy_(row_chunks[0])
            remaining = row_chunks[1:]
        for row_chunk in remaining:
            chunk.add_(row_chunk)
        if scale != 1.0:
            chunk.mul_(scale)


@dataclass
class GradDivisor:
    """What reduced gradients are divided by beside the mean: the loss scale.  One for all reducers of a model."""

    value: float = 1.0


class GradientMemory:
    """Where the gradients of a model's units lie, as they are reduced and afterwards.

    Each reducer has a block of its own, as gradients stay until ``zero_grad``.  Where they leave as soon as they
    are reduced (:meth:`share`) one pool for the inputs of reductions and one for their outputs serve all.
    """

    def __init__(self) -> None:
        self.inputs: BufferPool | None = None
        self.outputs: BufferPool | None = None

    def share(self) -> None:
        """Gradients leave at once from here on."""
        self.inputs, self.outputs = BufferPool(), BufferPool()


@dataclass(frozen=True)
class ReduceOptions:
    """What a reduction is to do beside moving bytes.

    ``output_dtype``: of reduced gradients, by default that of the input; ``num_replicas``: ranks that hold the same
    shard, over which ``replica_reduce`` adds up; ``try_submit`` may do the work in the background.
    """

    ledger: CommsLog = field(default_factory=CommsLog)
    output_dtype: torch.dtype | None = None
    divisor: GradDivisor = field(default_factory=GradDivisor)
    memory: GradientMemory = field(default_factory=GradientMemory)
    num_replicas: int = 1
    replica_reduce: ReplicaReduce | None = None
    try_submit: TrySubmit | None = None


class Reducer:
    """Base of the objects given to FSDP2's ``set_custom_reduce_scatter``.

    FSDP2 calls ``allocate`` twice a reduction: for the input, into which it writes the
    unsharded gradients, then for the output, which becomes the sharded gradient.  The output
    is in ``output_dtype`` if given: a low-precision sum is kept in the master's dtype, where
    FSDP2 would cast it next.

    A subclass adds up in :meth:`sum_shards` and multiplies by the scale it is given: one over
    the ranks where FSDP2 asks for a mean, over the divisor, and over the replicas of the shard.
    """

    transport = "wire"

    def __init__(self, name: str, options: ReduceOptions | None = None) -> None:
        self._name, self._options = name, options or ReduceOptions()
        self._ledger = self._options.ledger
        self._output_block = ReusableBuffer()
        self._has_allocated_input = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """FSDP2's hook: :meth:`_reduce`, now or later."""
        self.submit(lambda: self._reduce(output_tensor, input_tensor, group, op))

    def submit(self, work: Callable[[], None]) -> None:
        """Do a reduction's work now, or hand it to ``try_submit`` if that takes it."""
        if self._options.try_submit is None or not self._options.try_submit(work):
            work()

    def _reduce(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    ) -> None:
        """Add up ``input_tensor`` (1-D, a shard for each rank) into ``output_tensor``."""
        world_size = group.size()
        scale = self.mean_scale(world_size if op == dist.ReduceOp.AVG else 1)
        with self._ledger.timed(
            "reduce_scatter",
            self._name,
            self.transport,
            full_bytes=input_tensor.nbytes,
            world_size=world_size,
        ) as call:
            rows = input_tensor.view(world_size, -1)
            replica_reduce = self._options.replica_reduce
            if replica_reduce is None:
                self.sum_shards(rows, output_tensor, group, scale, call)
            else:
                self.sum_shards(rows, output_tensor, group, 1.0, call)
                replica_reduce(output_tensor, call)
                output_tensor.mul_(scale)

    def sum_shards(
        self, rows: Tensor, output: Tensor, group: dist.ProcessGroup, scale: float, call: CollectiveCall
    ) -> None:
        """Write ``scale`` times the sum over ranks of this rank's row into ``output``."""
        raise NotImplementedError

    def mean_scale(self, num_ranks: int) -> float:
        """The factor of a sum over ``num_ranks``, and over the copies of the shard."""
        return 1.0 / (num_ranks * self._options.num_replicas * self._options.divisor.value)

    def reset_error_feedback(self) -> None:
        """Forget what earlier sums have left to be made up for."""

    def reset(self) -> None:
        """Forget a reduction that an exception has cut short."""
        self._has_allocated_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook: the input of a reduction, then its output."""
        self._has_allocated_input = not self._has_allocated_input
        if self._has_allocated_input:
            return self._allocate_input(size, dtype, device)
        output_dtype = self._options.output_dtype or dtype
        if device.type == "cpu":
            return (self._options.memory.outputs or self._output_block).allocate(size, output_dtype)
        return torch.empty(*size, dtype=output_dtype, device=device)

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if (pool := self._options.memory.inputs) is not None and device.type == "cpu":
            return pool.allocate(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device)


class ReplicatedReducer(Reducer, ABC):
    """Base of the all-reduces (means) for FSDP2 over a mesh of one rank.

    FSDP2 copies such gradients from input to output without a collective, then hands the
    output to the hook given to ``set_all_reduce_hook``: the subclass's ``reduce``.
    """

    @abstractmethod
    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
