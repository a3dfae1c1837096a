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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from thalweg.checkpoint.errors import UnserializableStateError

Interval = tuple[int, int]  # [start, stop) along one dim


@dataclass(frozen=True, order=True)
class TensorChunk:
    """``size[d]`` indices from ``offset[d]`` on, in each dim d; a 0-dim tensor has empty tuples."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.size)

    def intersect(self, other: TensorChunk) -> TensorChunk | None:
        """The common box, or None where it would be empty."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        return TensorChunk(start, size) if all(n > 0 for n in size) else None

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """This box as slices of a tensor whose first element is at ``origin``."""
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.offset, origin, self.size, strict=True))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's storage of a plain tensor or DTensor, detached, sharing memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_chunks(name: str, tensor: torch.Tensor) -> list[tuple[TensorChunk, tuple[int, ...]]]:
    """The non-empty pieces that this rank holds of ``tensor`` (a plain one is one whole piece), each with the *origin*
    from which ``TensorChunk.slices`` counts its place in the local tensor."""
    if not isinstance(tensor, DTensor):
        start = (0,) * tensor.dim()
        return [(TensorChunk(start, tuple(tensor.shape)), start)] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    per_dim = _local_intervals(name, tensor, coordinate)
    expected_shape = tuple(sum(stop - start for start, stop in spans) for spans in per_dim)
    local_shape = tuple(local_tensor(tensor).shape)
    if expected_shape != local_shape and 0 not in expected_shape and 0 not in local_shape:
        raise UnserializableStateError(
            f"{name}: the placements {tensor.placements} of shape {tuple(tensor.shape)} give the local shape "
            f"{expected_shape}, but the local tensor has {local_shape}; redistribute it to Shard or Replicate"
        )
    chunks = []
    for combination in itertools.product(*map(_with_origins, per_dim)):
        starts, sizes, origin = zip(*combination, strict=True) if combination else ((), (), ())
        if math.prod(sizes):
            chunks.append((TensorChunk(starts, sizes), origin))
    return chunks


def _with_origins(spans: list[Interval]) -> list[tuple[int, int, int]]:
    """(start, size, origin) of each span of a concatenation."""
    ends = itertools.accumulate((stop - start for start, stop in spans), initial=0)
    return [(start, stop - start, start - position) for (start, stop), position in zip(spans, ends, strict=False)]


def _local_intervals(name: str, tensor: DTensor, coordinate: Sequence[int]) -> list[list[Interval]]:
    """For each dim the global intervals whose concatenation is the local tensor.

    Mesh axes act from left to right, each splitting what the axes before it left, as
    ``torch.chunk`` does: pieces of ceil(n / parts), the last ones shorter or empty.
    """
    per_dim: list[list[Interval]] = [[(0, int(n))] for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not hasattr(placement, "dim"):
            raise UnserializableStateError(
                f"{name}: placement {placement} holds unreduced values; redistribute it to Shard or Replicate"
            )
        dim = placement.dim % tensor.dim()  # type: ignore[attr-defined]
        spans = getattr(placement, "spans", None)  # a cut that names its indices
        if spans is not None:
            selected = [_intersect_intervals(per_dim[dim], start, stop) for start, stop in spans[coordinate[axis]]]
            per_dim[dim] = [span for cut in selected for span in cut]
            continue
        stride = int(getattr(placement, "split_factor", 1))
        num_shards = tensor.device_mesh.size(axis)
        total = sum(stop - start for start, stop in per_dim[dim])
        shard_size = -(-total // (num_shards * stride))
        local: list[Interval] = []
        for repeat in range(stride):
            first = (coordinate[axis] + repeat * num_shards) * shard_size
            local += _intersect_intervals(per_dim[dim], min(first, total), min(first + shard_size, total))
        per_dim[dim] = local
    return [spans or [(0, 0)] for spans in per_dim]


def _intersect_intervals(spans: list[Interval], start: int, stop: int) -> list[Interval]:
    """Positions [start, stop) of the concatenated spans."""
    result, position = [], 0
    for a, b in spans:
        low, high = max(start, position), min(stop, position + b - a)
        if low < high:
            result.append((a + low - position, a + high - position))
        position += b - a
    return result


def split_chunk(chunk: TensorChunk, itemsize: int, max_bytes: int) -> list[TensorChunk]:
    """Cut a box into pieces of at most ``max_bytes`` bytes, along its first dims as far as need be."""
    dim = next((d for d, n in enumerate(chunk.size) if n > 1), None)
    total = chunk.numel * itemsize
    if dim is None or total <= max_bytes:
        return [chunk]
    rows = max(1, max_bytes * chunk.size[dim] // total)
    chunks = []
    for start in range(0, chunk.size[dim], rows):
        offset, size = list(chunk.offset), list(chunk.size)
        offset[dim] += start
        size[dim] = min(rows, chunk.size[dim] - start)
        chunks += split_chunk(TensorChunk(tuple(offset), tuple(size)), itemsize, max_bytes)
    return chunks


def covers_exactly(chunks: list[TensorChunk], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover ``shape`` exactly once."""
    return _covers_exactly(tuple(sorted(chunks)), shape)


@functools.lru_cache(maxsize=64)  # the tensors of a model have few distinct shapes
def _covers_exactly(chunks: tuple[TensorChunk, ...], shape: tuple[int, ...]) -> bool:
    if sum(box.numel for box in chunks) != math.prod(shape):
        return False
    if any(a + n > m for box in chunks for a, n, m in zip(box.offset, box.size, shape, strict=True)):
        return False
    partial = {d for box in chunks for d, n in enumerate(box.size) if n != shape[d]}
    dim = min(partial, default=0)
    active: list[TensorChunk] = []  # boxes that reach the sweep's position along ``dim``
    for box in sorted(chunks, key=lambda b: b.offset[dim : dim + 1]):
        active = [other for other in active if other.offset[dim] + other.size[dim] > box.offset[dim]]
        if any(box.intersect(other) for other in active):
            return False
        active.append(box)
    return True
