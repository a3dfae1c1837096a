"""Where the pieces of a logical tensor lie.

A tensor's *box* is a hyper-rectangle in its global index space.  Each rank holds some
boxes (one for ``Shard`` and ``Replicate``, several where a strided shard interleaves);
a file holds boxes too; loading is nothing but the intersection of the two sets, so the
world sizes, meshes and stages of save and load need have nothing in common.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from thalweg.checkpoint.errors import UnstorableState

Interval = tuple[int, int]  # [start, stop) along one dim


@dataclass(frozen=True, order=True)
class Box:
    """``size[d]`` indices from ``offset[d]`` on, in each dim d; a 0-dim tensor has empty tuples."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where it would be empty."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """This box as slices of a tensor whose first element is at ``origin``."""
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.offset, origin, self.size, strict=True))

    def moved(self, by: tuple[int, ...]) -> Box:
        """The box shifted by ``by``."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.size)


@dataclass(frozen=True)
class LocalPiece:
    """A box of the global tensor, and where it begins in this rank's local tensor."""

    box: Box
    local_offset: tuple[int, ...]


def whole(shape: Iterable[int]) -> Box:
    """The box of an entire tensor."""
    size = tuple(int(n) for n in shape)
    return Box((0,) * len(size), size)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's storage of a plain tensor or DTensor, detached, sharing memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_pieces(name: str, tensor: torch.Tensor) -> list[LocalPiece]:
    """The non-empty pieces that this rank holds of ``tensor``; a plain tensor is one whole piece."""
    if not isinstance(tensor, DTensor):
        return [LocalPiece(whole(tensor.shape), (0,) * tensor.dim())] if tensor.numel() else []
    if tensor.device_mesh.get_coordinate() is None:
        return []
    per_dim = _intervals(name, tensor)
    held = tuple(sum(stop - start for start, stop in spans) for spans in per_dim)
    actual = tuple(local_tensor(tensor).shape)
    if held != actual and 0 not in held and 0 not in actual:
        raise UnstorableState(
            f"{name}: the placements {tensor.placements} of shape {tuple(tensor.shape)} give the local shape "
            f"{held}, but the local tensor has {actual}; redistribute it to Shard or Replicate"
        )
    pieces = []
    for combination in itertools.product(*[_with_local(spans) for spans in per_dim]):
        box = Box(tuple(s for s, _, _ in combination), tuple(e - s for s, e, _ in combination))
        if box.numel:
            pieces.append(LocalPiece(box, tuple(local for _, _, local in combination)))
    return pieces


def _with_local(spans: list[Interval]) -> list[tuple[int, int, int]]:
    found, position = [], 0
    for start, stop in spans:
        found.append((start, stop, position))
        position += stop - start
    return found


def _intervals(name: str, tensor: DTensor) -> list[list[Interval]]:
    """For each dim the global intervals whose concatenation is the local tensor.

    Mesh axes act from left to right, each splitting what the axes before it left, as
    ``torch.chunk`` does: pieces of ceil(n / parts), the last ones shorter or empty.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    per_dim: list[list[Interval]] = [[(0, int(n))] for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not hasattr(placement, "dim"):
            raise UnstorableState(
                f"{name}: placement {placement} holds unreduced values; redistribute it to Shard or Replicate"
            )
        dim = placement.dim % tensor.dim()  # type: ignore[attr-defined]
        spans = getattr(placement, "spans", None)  # a cut that names its indices
        if spans is not None:
            own = [_cut(per_dim[dim], start, stop) for start, stop in spans[coordinate[axis]]]
            per_dim[dim] = [span for cut in own for span in cut]
            continue
        stride = int(getattr(placement, "split_factor", 1))
        parts = tensor.device_mesh.size(axis)
        total = sum(stop - start for start, stop in per_dim[dim])
        chunk = -(-total // (parts * stride))
        kept: list[Interval] = []
        for turn in range(stride):
            first = (coordinate[axis] + turn * parts) * chunk
            kept += _cut(per_dim[dim], min(first, total), min(first + chunk, total))
        per_dim[dim] = kept
    return [spans or [(0, 0)] for spans in per_dim]


def _cut(spans: list[Interval], start: int, stop: int) -> list[Interval]:
    """Positions [start, stop) of the concatenated spans."""
    found, position = [], 0
    for a, b in spans:
        low, high = max(start, position), min(stop, position + b - a)
        if low < high:
            found.append((a + low - position, a + high - position))
        position += b - a
    return found


def split(box: Box, itemsize: int, limit: int) -> list[Box]:
    """Cut a box into pieces of at most ``limit`` bytes, along its first dims as far as need be."""
    dim = next((d for d, n in enumerate(box.size) if n > 1), None)
    total = box.numel * itemsize
    if dim is None or total <= limit:
        return [box]
    rows = max(1, limit * box.size[dim] // total)
    pieces = []
    for start in range(0, box.size[dim], rows):
        offset, size = list(box.offset), list(box.size)
        offset[dim] += start
        size[dim] = min(rows, box.size[dim] - start)
        pieces += split(Box(tuple(offset), tuple(size)), itemsize, limit)
    return pieces


def tiles(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover ``shape`` exactly once."""
    return _tiles(tuple(sorted(boxes)), shape)


@functools.lru_cache(maxsize=64)  # the tensors of a model have few distinct shapes
def _tiles(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> bool:
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    if any(a + n > m for box in boxes for a, n, m in zip(box.offset, box.size, shape, strict=True)):
        return False
    partial = {d for box in boxes for d, n in enumerate(box.size) if n != shape[d]}
    dim = min(partial, default=0)
    begun: list[Box] = []  # boxes that reach the sweep's position along ``dim``
    for box in sorted(boxes, key=lambda b: b.offset[dim : dim + 1]):
        begun = [other for other in begun if other.offset[dim] + other.size[dim] > box.offset[dim]]
        if any(box.intersect(other) for other in begun):
            return False
        begun.append(box)
    return True
