"""What all reductions of a module's gradients have in common: FSDP2's form, the mean, two allocations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.buffer_pool import BufferPool, ReusableBuffer
from thalweg.comm.comms_logger import CollectiveCall, CommsLog

# Takes a piece of work to do it in the background, or returns False.
TrySubmit = Callable[[Callable[[], None]], bool]
# Adds up a 1-D tensor over the ranks that hold the same shard, in place.
ReplicaReduce = Callable[[Tensor, CollectiveCall], None]


class Reducer:
    """Base of the objects given to FSDP2's ``set_custom_reduce_scatter``.

    FSDP2 calls ``allocate`` twice a reduction: for the input, into which it writes the
    unsharded gradients, then for the output, which becomes the sharded gradient.  The output
    is in ``output_dtype`` if given: a low-precision sum is kept in the master's dtype, where
    FSDP2 would cast it next.

    A subclass adds up in :meth:`sum_shards` and multiplies by the scale it is given: one over
    the ranks where FSDP2 asks for a mean, over ``divisor`` (the loss scale), and over
    ``num_replicas``, the ranks that hold the same shard.  ``replica_reduce``, if set, adds up over those.
    ``try_submit``, if set, may do the work in the background.
    """

    transport = "wire"

    def __init__(self, name: str, ledger: CommsLog | None, output_dtype: torch.dtype | None) -> None:
        self._name, self._ledger, self._output_dtype = name, ledger or CommsLog(), output_dtype
        # Where outputs (and inputs) come from: exchanged for common pools where gradients leave at once.
        self.output_buffers: ReusableBuffer | BufferPool = ReusableBuffer()
        self.input_buffers: BufferPool | None = None
        self._has_allocated_input = False
        self.divisor = 1.0
        self.num_replicas = 1
        self.replica_reduce: ReplicaReduce | None = None
        self.try_submit: TrySubmit | None = None

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
        if self.try_submit is None or not self.try_submit(work):
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
            if self.replica_reduce is None:
                self.sum_shards(rows, output_tensor, group, scale, call)
            else:
                self.sum_shards(rows, output_tensor, group, 1.0, call)
                self.replica_reduce(output_tensor, call)
                output_tensor.mul_(scale)

    def sum_shards(
        self, rows: Tensor, output: Tensor, group: dist.ProcessGroup, scale: float, call: CollectiveCall
    ) -> None:
        """Write ``scale`` times the sum over ranks of this rank's row into ``output``."""
        raise NotImplementedError

    def mean_scale(self, num_ranks: int) -> float:
        """The factor of a sum over ``num_ranks``, and over the copies of the shard."""
        return 1.0 / (num_ranks * self.num_replicas * self.divisor)

    def reset(self) -> None:
        """Forget a reduction that an exception has cut short."""
        self._has_allocated_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook: the input of a reduction, then its output."""
        self._has_allocated_input = not self._has_allocated_input
        if self._has_allocated_input:
            return self._allocate_input(size, dtype, device)
        output_dtype = self._output_dtype or dtype
        if device.type == "cpu":
            return self.output_buffers.allocate(size, output_dtype)
        return torch.empty(*size, dtype=output_dtype, device=device)

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input_buffers is not None and device.type == "cpu":
            return self.input_buffers.allocate(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device)


class ReplicatedReducer(Reducer, ABC):
    """Base of the all-reduces (means) for FSDP2 over a mesh of one rank.

    FSDP2 copies such gradients from input to output without a collective, then hands the
    output to the hook given to ``set_all_reduce_hook``: the subclass's ``reduce``.
    """

    @abstractmethod
    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
