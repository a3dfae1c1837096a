"""What an update reads and writes, cut into chunks that fit a buffer.

    item      one parameter in this step, with its operands
    operand   one flat tensor of it: the master, the gradient, each state tensor, the compute copy
    piece     elements [start, stop) of an item, the same for all its operands
    chunk     pieces whose operands fit one buffer together

An operand has an ``offset`` if it lies in the swap file on a page boundary; then its bytes pass through the
buffer.  Any other is used where it is.  Pieces are cut at multiples of ``ALIGN_ELEMENTS`` elements from the start of
the parameter, for two reasons: such a cut is a page boundary in every dtype, and it is a multiple of every
vector length, so that torch's kernels treat each element as they would in one call over the whole parameter
(their scalar tails may round differently).

Invariant: a tensor that begins on a page boundary of the swap file owns the pages up to its end.  Hence no
page belongs to two chunks, and neighbours in the file can be read and written in one transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from thalweg.storage_io import IoFuture, SwapFile, combine_futures
from thalweg.storage_io.allocator import PAGE, round_up

ALIGN_ELEMENTS = PAGE


@dataclass
class StepTensor:
    """A flat tensor, whether it is needed and changed, and its place in the swap file if it has one; new
    values go there, or to ``shadow_offset``, another place that is as large."""

    tensor: Tensor
    file_offset: int | None
    read: bool = True
    write: bool = False
    shadow_offset: int | None = None

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes in the swap file."""
        return round_up(self.tensor.nbytes)


@dataclass
class ParamStep:
    """One parameter in this step; ``scalar_state`` is the part of its state that is not cut."""

    group: dict[str, Any]
    param: Tensor
    numel: int
    step_tensors: dict[str, StepTensor]
    state_keys: tuple[str, ...]
    scalar_state: dict[str, Any]
    is_new_state: bool
    new_scalar_state: dict[str, Any] = field(default_factory=dict)

    def buffer_bytes(self, num_elements: int) -> int:
        """Bytes of buffer that ``num_elements`` elements take."""
        return sum(
            round_up(num_elements * step_tensor.tensor.itemsize)
            for step_tensor in self.step_tensors.values()
            if step_tensor.file_offset is not None
        )


class IoRange(NamedTuple):
    """Bytes that move together between the file and a buffer."""

    file_offset: int
    buffer_offset: int
    nbytes: int


@dataclass
class ParamSlice:
    """Elements ``[start, stop)`` of an item; ``buffer_offsets`` is where its operands lie in the buffer."""

    param_step: ParamStep
    start: int
    stop: int
    buffer_offsets: dict[str, int] = field(default_factory=dict)

    def get_tensor(self, name: str, buffer: Tensor | None) -> Tensor:
        """The operand's elements, in the buffer or in memory."""
        step_tensor, offset = self.param_step.step_tensors[name], self.buffer_offsets.get(name)
        if offset is None:
            return step_tensor.tensor[self.start : self.stop]
        assert buffer is not None
        nbytes = (self.stop - self.start) * step_tensor.tensor.itemsize
        return buffer[offset : offset + nbytes].view(step_tensor.tensor.dtype)


@dataclass
class IoChunk:
    """Pieces that share a buffer, and the transfers that fill and empty it."""

    slices: list[ParamSlice]
    reads: list[IoRange]
    writes: list[IoRange]

    def begin_read(self, swap: SwapFile, buffer: Tensor) -> IoFuture:
        """Fill the buffer."""
        return combine_futures(
            swap.read(s.file_offset, buffer[s.buffer_offset : s.buffer_offset + s.nbytes]) for s in self.reads
        )

    def begin_write(self, swap: SwapFile, buffer: Tensor) -> IoFuture:
        """Store what has changed."""
        return combine_futures(
            swap.write(s.file_offset, buffer[s.buffer_offset : s.buffer_offset + s.nbytes]) for s in self.writes
        )


def split_into_chunks(param_steps: Iterable[ParamStep], buffer_bytes: int, max_elements: int) -> list[IoChunk]:
    """Cut ``param_steps``, in their order, into chunks of at most ``buffer_bytes`` and ``max_elements``.

    Raises:
        ValueError: not even ``ALIGN_ELEMENTS`` elements of an item fit a buffer.
    """
    chunks: list[list[ParamSlice]] = [[]]
    bytes_left, elements_left = buffer_bytes, max_elements
    for param_step in param_steps:
        start = 0
        while True:
            num_elements = _max_elements_that_fit(param_step, param_step.numel - start, bytes_left, elements_left)
            if num_elements is None:
                if not chunks[-1]:
                    raise ValueError(
                        f"buffers of {buffer_bytes} bytes are too small for this optimiser: it needs at "
                        f"least {param_step.buffer_bytes(ALIGN_ELEMENTS)}; raise buffer_size"
                    )
                chunks.append([])
                bytes_left, elements_left = buffer_bytes, max_elements
                continue
            chunks[-1].append(ParamSlice(param_step, start, start + num_elements))
            bytes_left, elements_left, start = (
                bytes_left - param_step.buffer_bytes(num_elements),
                elements_left - num_elements,
                start + num_elements,
            )
            if start >= param_step.numel:
                break
    return [_build_chunk(pieces) for pieces in chunks if pieces]


def _max_elements_that_fit(param_step: ParamStep, num_elements: int, bytes_left: int, elements_left: int) -> int | None:
    if num_elements <= elements_left and param_step.buffer_bytes(num_elements) <= bytes_left:
        return num_elements
    unit_bytes = param_step.buffer_bytes(ALIGN_ELEMENTS)
    num_units = min(elements_left // ALIGN_ELEMENTS, bytes_left // unit_bytes if unit_bytes else elements_left)
    return min(num_units * ALIGN_ELEMENTS, num_elements) if num_units > 0 else None


def _build_chunk(slices: list[ParamSlice]) -> IoChunk:
    ranges = []
    for piece in slices:
        for name, step_tensor in piece.param_step.step_tensors.items():
            if step_tensor.file_offset is not None and piece.stop > piece.start:
                size = step_tensor.tensor.itemsize
                nbytes = round_up((piece.stop - piece.start) * size)
                ranges.append((step_tensor.file_offset + piece.start * size, nbytes, piece, name, step_tensor))
    # In the order of the file, so that neighbours there are neighbours in the buffer.
    ranges.sort(key=lambda r: r[0])
    reads: list[IoRange] = []
    writes: list[IoRange] = []
    buffer_offset = 0
    for offset, nbytes, piece, name, step_tensor in ranges:
        piece.buffer_offsets[name] = buffer_offset
        if step_tensor.read:
            _append_or_merge(reads, IoRange(offset, buffer_offset, nbytes))
        if step_tensor.write:
            shadow_shift = (
                0
                if step_tensor.shadow_offset is None or step_tensor.file_offset is None
                else step_tensor.shadow_offset - step_tensor.file_offset
            )
            _append_or_merge(writes, IoRange(offset + shadow_shift, buffer_offset, nbytes))
        buffer_offset += nbytes
    return IoChunk(slices, reads, writes)


def _append_or_merge(io_ranges: list[IoRange], io_range: IoRange) -> None:
    last = io_ranges[-1] if io_ranges else None
    if (
        last
        and last.file_offset + last.nbytes == io_range.file_offset
        and last.buffer_offset + last.nbytes == io_range.buffer_offset
    ):
        io_ranges[-1] = IoRange(last.file_offset, last.buffer_offset, last.nbytes + io_range.nbytes)
    else:
        io_ranges.append(io_range)


def split_into_batches(slices: Sequence[ParamSlice], max_elements: int) -> list[list[ParamSlice]]:
    """Cut the pieces of a chunk further, into batches of about ``max_elements`` that stay in the cache."""
    split: list[list[ParamSlice]] = [[]]
    elements_left = max_elements
    for piece in slices:
        start = piece.start
        while True:
            num_remaining = piece.stop - start
            num_elements = (
                num_remaining
                if num_remaining <= elements_left
                else min(elements_left // ALIGN_ELEMENTS * ALIGN_ELEMENTS, num_remaining)
            )
            if num_elements <= 0 < num_remaining:
                split.append([])
                elements_left = max_elements
                continue
            split[-1].append(_subslice(piece, start, start + num_elements))
            start, elements_left = start + num_elements, elements_left - num_elements
            if start >= piece.stop:
                break
    return [batch for batch in split if batch]


def _subslice(param_slice: ParamSlice, start: int, stop: int) -> ParamSlice:
    if (start, stop) == (param_slice.start, param_slice.stop):
        return param_slice
    buffer_offsets = {
        name: offset + (start - param_slice.start) * param_slice.param_step.step_tensors[name].tensor.itemsize
        for name, offset in param_slice.buffer_offsets.items()
    }
    return ParamSlice(param_slice.param_step, start, stop, buffer_offsets)
