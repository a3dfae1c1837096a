"""How one parameter is cut over tensor ranks: spans of indices along one dim.

A *cut* says, for each tensor rank, which indices of one dim it holds, as half-open spans
in rising order of use.  Equal chunks are one case; whole heads, three fused sections each
split by heads, and a tail of shared rows are others.  The spans of all ranks cover the
dim exactly once, so a cut parameter has one owner per element: nothing is stored,
counted or saved twice.

At rest a cut is a DTensor placement, :class:`Pieces`: a ``Shard`` that knows its spans and can
be gathered, split and saved like any other.  Also one that agrees with ``torch.chunk``: DTensor's
cache of layouts asks ``==`` alone, and ``RaggedShard`` has to equal the plain ``Shard`` of its dim (see
there), so that no parameter may carry a plain one where another carries ``RaggedShard``.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from thalweg.comm.collectives.wire import pad_to_length
from thalweg.parallel_dims import control_group

Span = tuple[int, int]
Spans = tuple[Span, ...]


@dataclass(frozen=True)
class ShardSpec:
    """Spans of ``dim`` by rank; ``size`` is the logical length of that dim."""

    dim: int
    size: int
    spans: tuple[Spans, ...]

    def __post_init__(self) -> None:
        covered = sorted(span for spans in self.spans for span in spans if span[0] < span[1])
        ends = [0, *(stop for _, stop in covered)]
        if [start for start, _ in covered] != ends[:-1] or ends[-1] != self.size:
            raise AssertionError(f"the spans {self.spans} do not cover {self.size} indices once")

    def local_size(self, rank: int) -> int:
        """Indices that ``rank`` holds."""
        return sum(stop - start for start, stop in self.spans[rank])

    def local_slice(self, full: Tensor, rank: int) -> Tensor:
        """This rank's piece of the full tensor, contiguous and in memory of its own."""
        slices = [full.narrow(self.dim, start, stop - start) for start, stop in self.spans[rank]]
        if not slices:
            return full.narrow(self.dim, 0, 0).clone()
        return torch.cat(slices, self.dim) if len(slices) > 1 else slices[0].clone().contiguous()

    def placement(self) -> RaggedShard:
        """The DTensor placement on the tensor axis that says the same; never a plain ``Shard``."""
        _keep_ragged_shards()
        return RaggedShard(self.dim, self.spans)


class RaggedShard(Shard):
    """A ``Shard`` whose pieces are given spans; ``spans[rank]`` as in :class:`Cut`."""

    spans: tuple[Spans, ...]

    def __init__(self, dim: int, spans: tuple[Spans, ...]) -> None:
        super().__init__(dim)  # pyright: ignore[reportCallIssue]
        self.spans = spans

    @property
    def size(self) -> int:
        """The logical length of the dim."""
        return max((stop for spans in self.spans for _, stop in spans), default=0)

    @property
    def chunked(self) -> bool:
        """Whether these are the pieces of ``torch.chunk``, those of a plain ``Shard``."""
        size = self.size
        rows = -(-size // len(self.spans))
        ends = [(min(rank * rows, size), min((rank + 1) * rows, size)) for rank in range(len(self.spans))]
        return self.spans == tuple((end,) for end in ends)

    def _spec(self, size: int) -> ShardSpec:
        return ShardSpec(self.dim, int(size), self.spans)

    def local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """Length of a rank's piece and its first index (further spans begin elsewhere)."""
        spans = self.spans[rank]
        return sum(stop - start for start, stop in spans), spans[0][0] if spans else 0

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: Any, rank: Any) -> Any:
        return self.local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        spec = self._spec(tensor.size(self.dim))
        shards = [spec.local_slice(tensor, rank) for rank in range(num_chunks)]
        longest = max(piece.size(self.dim) for piece in shards)
        pads = [longest - piece.size(self.dim) if with_padding else 0 for piece in shards]
        return [pad_to_length(piece, self.dim, longest) if with_padding else piece for piece in shards], pads

    def _select_split_tensor(self, tensor: Tensor, num_chunks: Any, index: Any, **_: object) -> Tensor:
        return self._spec(tensor.size(self.dim)).local_slice(tensor, int(index))

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> Tensor:
        spec = self._spec(current_logical_shape[self.dim])
        return gather_shards(local_tensor, spec, mesh.get_group(mesh_dim))

    def _to_new_shard_dim(
        self,
        local_tensor: Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[Any],
        new_shard_dim: int,
    ) -> Tensor:
        full = self._to_replicate_tensor(local_tensor, mesh, mesh_dim, current_logical_shape)
        chunks, _ = Shard(new_shard_dim)._split_tensor(full, mesh.size(mesh_dim), with_padding=False)  # pyright: ignore[reportCallIssue]
        return chunks[mesh.get_local_rank(mesh_dim)].clone()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RaggedShard):
            return self.dim == other.dim and self.spans == other.spans
        # Loose on purpose: DTensor asks whether this shards that dim (`placement != Shard(dim)`), and its
        # in-place operations compare with a plain Shard that they made. Its C++ cache compares keys that
        # share a bucket by == and not by hash: hence no plain Shard on a tensor axis (Cut.placement).
        return isinstance(other, Shard) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash((self.dim, self.spans))

    def __repr__(self) -> str:
        return f"Pieces(dim={self.dim}, spans={self.spans})"

    def __str__(self) -> str:
        return f"P({self.dim})"

    def __reduce__(self) -> Any:
        return RaggedShard, (self.dim, self.spans)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self


@cache
def _keep_ragged_shards() -> None:
    """Let results of DTensor operations be cut as their inputs are.  torch 2.15 makes the placements of most results
    anew, plain ones for every kind of ``Shard`` but its own two, and takes equal chunks where there are none."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagate = propagator.propagate_op_sharding_non_cached

    def propagate_cuts(op_schema: Any) -> Any:
        result = propagate(op_schema)
        axes = {
            axis: placement
            for spec in op_schema.args_spec
            for axis, placement in enumerate(spec.placements)
            if isinstance(placement, RaggedShard)
        }
        if axes and result.output_spec is not None:
            specs = result.output_spec
            one = isinstance(specs, DTensorSpec)
            cut = [spec and _with_cuts(spec, axes) for spec in ((specs,) if one else specs)]
            result.output_spec = cut[0] if one else type(specs)(cut)
        return result

    propagator.propagate_op_sharding_non_cached = propagate_cuts
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(propagate_cuts)


def _with_cuts(spec: DTensorSpec, axes: Mapping[int, RaggedShard]) -> DTensorSpec:
    """``spec`` with the spans of ``axes`` on the axes where it has a plain ``Shard`` of a dim as long."""
    placements = list(spec.placements)
    for axis, ragged in axes.items():
        placement = placements[axis]
        if type(placement) is Shard and spec.shape[placement.dim] == ragged.size:
            placements[axis] = RaggedShard(placement.dim, ragged.spans)
    cut = copy.copy(spec)  # torch may hold the one that it made
    cut.placements = tuple(placements)
    return cut


def gather_shards(local: Tensor, spec: ShardSpec, group: dist.ProcessGroup) -> Tensor:
    """The full tensor from every rank's piece; collective over ``group``."""
    world_size = dist.get_world_size(group)
    sizes = [spec.local_size(rank) for rank in range(world_size)]
    sent = pad_to_length(local.detach(), spec.dim, max(sizes)).contiguous()
    received = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(received, sent, group=control_group(group, sent.device))
    shape = list(local.shape)
    shape[spec.dim] = spec.size
    full = local.new_empty(shape)
    for rank, shard in enumerate(received):
        position = 0
        for start, stop in spec.spans[rank]:
            full.narrow(spec.dim, start, stop - start).copy_(shard.narrow(spec.dim, position, stop - start))
            position += stop - start
    return full


def split_evenly(size: int, world_size: int, unit: int = 1) -> list[Span]:
    """One span a rank, in whole units, lengths differing by at most one unit (the first are longer)."""
    units, remainder = divmod(size // unit, world_size)
    spans, start = [], 0
    for rank in range(world_size):
        stop = start + (units + (rank < remainder)) * unit
        spans.append((start, stop))
        start = stop
    assert start == size, (size, unit)
    return spans


def contiguous_spec(dim: int, size: int, world_size: int, unit: int = 1) -> ShardSpec:
    """Contiguous pieces in whole units."""
    return ShardSpec(dim, size, tuple((span,) for span in split_evenly(size, world_size, unit)))


def aligned_spec(dim: int, size: int, world_size: int, block: int = 1) -> ShardSpec:
    """Contiguous pieces of a layer's inner width, in multiples of 8 (kernels want aligned rows), and of what ``size``
    and ``block`` (numbers with one scale) have in common, where that leaves nobody without."""
    units = max(math.gcd(size, block), 8), 8
    unit = next((unit for unit in units if size % unit == 0 and size // unit >= world_size), 1)
    return contiguous_spec(dim, size, world_size, unit)


def sections_spec(dim: int, sizes: Sequence[int], world_size: int, block: int = 1) -> ShardSpec:
    """Fused sections one behind the other, each cut as by :func:`aligned_spec`."""
    spans: list[Spans] = [()] * world_size
    for offset, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        section = aligned_spec(dim, size, world_size, block).spans
        spans = [(*own, (start + offset, stop + offset)) for own, ((start, stop),) in zip(spans, section, strict=True)]
    return ShardSpec(dim, sum(sizes), tuple(spans))
