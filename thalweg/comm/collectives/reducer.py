"""What all reductions of a module's gradients have in common: FSDP2's form, the mean, the sum and its memory.

*The sum* (:func:`sum_rows`) is in rank order, in fp32 and in pieces that stay in a core's cache, whoever calls it.

*Memory.*  Gradients live from a backward pass to the next ``zero_grad`` and have the same size in
each step.  Taken from the allocator they are fresh pages every time, which the kernel
clears on first touch, and they fragment the heap; kept here they are neither.  Each
tensor is made over a memoryview of its own, which its storage keeps alive: when the last
storage over the block is gone, so is the memoryview, and a weak reference to it says so.
"""

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.comms_logger import CollectiveCall, CommsLog

# Takes a piece of work to do it in the background, or returns False.
TrySubmit = Callable[[Callable[[], None]], bool]
# Adds up a 1-D tensor over the ranks that hold the same shard, in place.
ReplicaReduce = Callable[[Tensor, CollectiveCall], None]

# 256 KiB of fp32: the piece being summed and its two operands stay in a core's L2.
CHUNK_NUMEL = 1 << 16


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


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


class _Block:
    """Anonymous memory, in use by one tensor (and its views) at a time."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._user: weakref.ref[memoryview] | None = None

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = memoryview(self._memory)
        self._user = weakref.ref(buffer)
        return torch.frombuffer(buffer, dtype=dtype, count=prod(shape)).view(*shape)


class BufferPool:
    """Blocks for many users: a free one that is large enough goes to whoever asks next.

    It holds as many blocks as are in use at once: where gradients leave soon after they came, few.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor over the smallest free block that holds it, or over a new one."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        fitting = [block for block in self._blocks if block.is_free and block.num_bytes >= num_bytes]
        if not fitting:
            fitting = [_Block(num_bytes)]
            self._keep(fitting[0])
        return min(fitting, key=lambda block: block.num_bytes).tensor(shape, dtype)

    def release_memory(self) -> None:
        """Give back the blocks that nobody uses."""
        self._blocks = [block for block in self._blocks if not block.is_free]

    def _keep(self, new_block: _Block) -> None:
        # A free one is too small: it is exchanged, not kept beside the new one.
        self._blocks = [*(block for block in self._blocks if not block.is_free), new_block]


class ReusableBuffer(BufferPool):
    """Hands one block out; while that is in use, another takes its place and it is forgotten."""

    def _keep(self, new_block: _Block) -> None:
        self._blocks = [new_block]


@dataclass
class GradDivisor:
    """What reduced gradients are divided by beside the mean: the loss scale.  One for all reducers of a model."""

    value: float = 1.0


@dataclass
class ReplicaSync:
    """Whether reductions cross to ranks that hold the same parameters (or shard).  One for all reducers of a model.

    Off, gradients are means over the ranks of a shard alone: what the replicas agree on is the optimiser's affair.
    """

    enabled: bool = True


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

    def release(self) -> None:
        """Give back what gradients that left have used: it would lie idle at the next peak, and the last unit to be
        reduced, the root, is the largest in most models."""
        for pool in (self.inputs, self.outputs):
            if pool is not None:
                pool.release_memory()


@dataclass(frozen=True)
class ReduceOptions:
    """What a reduction is to do beside moving bytes.

    ``output_dtype``: of reduced gradients, by default that of the input; ``num_replicas``: ranks that hold the same
    shard, over which ``replica_reduce`` adds up; ``replica_mean``: takes gradients that are whole, and a mean over this
    host's ranks, to the mean over all hosts; ``try_submit`` may do the work in the background.
    """

    ledger: CommsLog = field(default_factory=CommsLog)
    output_dtype: torch.dtype | None = None
    divisor: GradDivisor = field(default_factory=GradDivisor)
    sync: ReplicaSync = field(default_factory=ReplicaSync)
    memory: GradientMemory = field(default_factory=GradientMemory)
    num_replicas: int = 1
    replica_reduce: ReplicaReduce | None = None
    replica_mean: Callable[[Tensor], None] | None = None
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
    lacking = ""  # which of the module's trained parameters have no part in the reduction at hand, in words

    def __init__(self, name: str, options: ReduceOptions | None = None) -> None:
        self._name, self._options = name, options or ReduceOptions()
        self._ledger = self._options.ledger
        self._output_block = ReusableBuffer()
        self._error_feedback: Any = None  # what has errors of earlier sums to make up for
        self._has_allocated_input = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """FSDP2's hook: add up ``input_tensor`` (1-D, a shard for each rank) into ``output_tensor``, now or later."""

        def reduce_scatter() -> None:
            world_size = group.size()
            scale = self.mean_scale(world_size if op == dist.ReduceOp.AVG else 1)
            with self._ledger.timed(
                "reduce_scatter", self._name, self.transport, input_tensor.nbytes, world_size
            ) as call:
                rows = input_tensor.view(world_size, -1)
                replica_reduce = self._options.replica_reduce if self._options.sync.enabled else None
                self.sum_shards(rows, output_tensor, scale if replica_reduce is None else 1.0, call)
                if replica_reduce is not None:
                    replica_reduce(output_tensor, call)
                    output_tensor.mul_(scale)

        self.submit(reduce_scatter)

    def submit(self, work: Callable[[], None]) -> None:
        """Do a reduction's work now, or hand it to ``try_submit`` if that takes it."""
        if self._options.try_submit is None or not self._options.try_submit(work):
            work()

    def sum_shards(self, rows: Tensor, output: Tensor, scale: float, call: CollectiveCall) -> None:
        """Write ``scale`` times the sum over ranks of this rank's row into ``output``."""
        raise NotImplementedError

    def mean_scale(self, num_ranks: int) -> float:
        """The factor of a sum over ``num_ranks``, and over the copies of the shard."""
        num_replicas = self._options.num_replicas if self._options.sync.enabled else 1
        return 1.0 / (num_ranks * num_replicas * self._options.divisor.value)

    def reset_error_feedback(self) -> None:
        """Forget what earlier sums have left to be made up for, as in a new process."""
        if self._error_feedback is not None:
            self._error_feedback.reset_error_feedback()

    def reset(self) -> None:
        """Forget a reduction that an exception has cut short."""
        self._has_allocated_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook: the input of a reduction, then its output."""
        self._has_allocated_input = not self._has_allocated_input
        if self._has_allocated_input:
            return self._allocate_input(size, dtype, device)
        return self._allocate_output(size, self._options.output_dtype or dtype, device)

    def _allocate_output(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return (self._options.memory.outputs or self._output_block).allocate(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if (pool := self._options.memory.inputs) is not None and device.type == "cpu":
            return pool.allocate(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device)


class ReplicatedReducer(Reducer, ABC):
    """Base of the all-reduces (means) for FSDP2 over a mesh of one rank.

    FSDP2 copies such gradients from input to output without a collective, then hands the
    output to the hook given to ``set_all_reduce_hook``: the subclass's ``reduce``.  Where both have one dtype they are
    one tensor: torch leaves a copy onto itself out, and a unit's gradients exist once.
    """

    _input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See the base."""
        given, self._input = self._input, None
        if given is not None:
            self._has_allocated_input = False
            return given
        return super().allocate(size, dtype=dtype, device=device)

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype != (self._options.output_dtype or dtype):
            return super()._allocate_input(size, dtype, device)
        self._input = self._allocate_output(size, dtype, device)
        return self._input

    def reset(self) -> None:
        """See the base."""
        super().reset()
        self._input = None

    def reduce_or_keep(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks, or by this worker's gradient: see ``ReplicaSync``."""
        options = self._options
        if options.replica_mean is not None:
            self.reduce(output)
            if options.sync.enabled:
                options.replica_mean(output)
        elif options.sync.enabled:
            self.reduce(output)
        elif (scale := self.mean_scale(1)) != 1.0:
            output.mul_(scale)

    @abstractmethod
    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
