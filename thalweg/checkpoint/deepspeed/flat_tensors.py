"""Tensors of a foreign checkpoint as logical ones: flat ranges of stored tensors, cut into boxes.

DeepSpeed's ZeRO flattens a group of parameters and deals the flat vector out, so a rank holds elements [a, b) of a
parameter in row-major order: no box, in general, but at most ``2 * dims - 1`` of them, each contiguous in the flat
vector.  As boxes they are what a checkpoint's reader intersects with the shards of any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from thalweg.checkpoint.errors import CorruptCheckpointError
from thalweg.checkpoint.format.chunks import TensorChunk


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of a logical tensor, in row-major order: those of ``source`` from ``first`` on."""

    start: int
    stop: int
    source: torch.Tensor
    first: int = 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the logical tensor."""
        offset = self.first - self.start
        return self.source.detach().reshape(-1)[offset + start : offset + stop]


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor by its fragments, which cover it once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]

    @classmethod
    def of(cls, shape: Sequence[int], fragments: Sequence[Fragment], name: str) -> LogicalTensor:
        """The tensor that ``fragments`` make up; ``name`` is for the error where they do not."""
        shape, position = tuple(int(n) for n in shape), 0
        for fragment in fragments:
            if fragment.start != position or fragment.first + fragment.stop - fragment.start > fragment.source.numel():
                break
            position = fragment.stop
        if position != math.prod(shape):
            raise CorruptCheckpointError(
                f"{name} has shape {list(shape)}, but of its {math.prod(shape)} elements the ranks' files hold "
                f"{position} in order: a file is missing or comes from another save, or the ranks shared it in another "
                "way than ZeRO does (MiCS)"
            )
        dtype = fragments[0].source.dtype if fragments else torch.float32
        return cls(dtype, shape, tuple(fragments))

    @classmethod
    def whole(cls, stored: torch.Tensor) -> LogicalTensor:
        """One stored tensor."""
        return cls(stored.dtype, tuple(stored.shape), tuple(whole_fragments(stored)))


def whole_fragments(stored: torch.Tensor, numel: int | None = None) -> list[Fragment]:
    """All of a stored tensor, or its first ``numel`` elements, as fragments of a logical one."""
    numel = stored.numel() if numel is None else numel
    return [Fragment(0, numel, stored)] if numel else []


def flat_range_chunks(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorChunk]:
    """The boxes that elements [start, stop) of a tensor fill, in order; each is contiguous in the flat tensor."""
    if start >= stop:
        return
    if not shape:
        yield TensorChunk((), ())
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        if within or stop - start < row:
            end = min(stop, (index + 1) * row)
            for chunk in flat_range_chunks(rest, within, end - index * row):
                yield TensorChunk((index, *chunk.offset), (1, *chunk.size))
        else:
            num_rows = (stop - start) // row
            end = start + num_rows * row
            yield TensorChunk((index, *(0 for _ in rest)), (num_rows, *rest))
        start = end


def flat_start(chunk: TensorChunk, shape: Sequence[int]) -> int:
    """The place in the flat tensor of a box's first element."""
    return int(numpy.ravel_multi_index(chunk.offset, tuple(shape)))


def cut_concatenation(
    shapes: Mapping[str, Sequence[int]], parts: Sequence[torch.Tensor]
) -> Iterator[tuple[str, tuple[int, ...], list[Fragment]]]:
    """Parameters that lie one after another in a vector of which ``parts[r]`` is rank r's equal share (stages 1, 2).

    Only the last shares may be shorter, by padding that was cut off.
    """
    share, position = parts[0].numel(), 0
    for name, shape in shapes.items():
        start, stop = position, position + math.prod(shape)
        fragments = []
        while start < stop and share:
            rank, first = divmod(start, share)
            if rank >= len(parts) or first >= parts[rank].numel():
                break
            end = min(stop, rank * share + parts[rank].numel())
            fragments.append(Fragment(start - position, end - position, parts[rank], first))
            start = end
        yield name, tuple(shape), fragments
        position = stop


def cut_parameter_shares(
    shapes: Mapping[str, Sequence[int]], ranks: Sequence[torch.Tensor]
) -> Iterator[tuple[str, tuple[int, ...], list[Fragment]]]:
    """Parameters of which each rank holds an equal share, padded (stage 3); ``ranks[r]`` is rank r's vector, in which
    its shares lie one after another."""
    position = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        share = -(-numel // len(ranks))
        fragments = []
        for rank, vector in enumerate(ranks):
            start = rank * share
            stop = min(start + share, numel, start + vector.numel() - position)
            if start < stop:
                fragments.append(Fragment(start, stop, vector, position))
        yield name, tuple(shape), fragments
        position += share
