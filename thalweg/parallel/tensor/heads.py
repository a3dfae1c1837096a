"""Which attention heads each tensor rank computes, and which rows of the projections that means.

Query heads are dealt out in whole heads, as evenly as they go; the heads of a key-value
group stay together while there are at least as many groups as ranks.  With fewer key-value
heads than ranks, each rank keeps an equal share of their rows and gathers those that its
query heads need when it computes (the rows are few), so no element has two owners.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.parallel.shard_spec import ShardSpec, Span, split_evenly
from thalweg.parallel.tensor.layers import SharedRows


@dataclass(frozen=True)
class AttentionHeads:
    """Query and key-value heads of one attention, each ``head_dim`` features."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads of one key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class HeadAssignment:
    """Heads dealt out: ``query_spans[rank]`` a span, ``kv_heads[rank]`` the heads it uses, each for
    ``kv_repeats[rank]`` query heads."""

    heads: AttentionHeads
    query_spans: tuple[Span, ...]
    kv_heads: tuple[tuple[int, ...], ...]
    kv_repeats: tuple[int, ...]
    kv_exclusive: bool  # whether each key-value head is used by one rank only

    def num_local_heads(self, rank: int) -> int:
        """Query heads of ``rank``."""
        return self.query_spans[rank][1] - self.query_spans[rank][0]


def assign_heads(heads: AttentionHeads, world_size: int, align_to_kv_groups: bool = False) -> HeadAssignment:
    """Deal the heads out to ``world_size`` ranks.

    With fewer key-value heads than ranks, no rank's query heads are of two groups where that costs nobody a
    head more, or ``align_to_kv_groups`` asks for it.

    Raises:
        ValueError: there are fewer query heads than ranks.
    """
    if heads.num_heads < world_size:
        raise ValueError(
            f"tensor_parallel.autotp_size = {world_size} is more than the model's {heads.num_heads} attention "
            f"heads; set it to at most {heads.num_heads}"
        )
    queries_per_kv = heads.num_queries_per_kv
    if heads.num_kv_heads >= world_size:
        spans = split_evenly(heads.num_kv_heads, world_size)
        return HeadAssignment(
            heads,
            query_spans=tuple((start * queries_per_kv, stop * queries_per_kv) for start, stop in spans),
            kv_heads=tuple(tuple(range(start, stop)) for start, stop in spans),
            kv_repeats=(queries_per_kv,) * world_size,
            kv_exclusive=True,
        )
    query_spans = tuple(split_evenly(heads.num_heads, world_size))
    aligned_spans = _group_aligned_spans(heads, world_size)
    if align_to_kv_groups or max(stop - start for start, stop in aligned_spans) <= query_spans[0][1]:
        query_spans = aligned_spans
    kv_heads, kv_repeats = [], []
    for start, stop in query_spans:
        kv_of_query = [head // queries_per_kv for head in range(start, stop)]
        distinct = sorted(set(kv_of_query))
        counts = {kv_of_query.count(head) for head in distinct}
        kv_heads.append(tuple(distinct) if len(counts) == 1 else tuple(kv_of_query))
        kv_repeats.append(counts.pop() if len(counts) == 1 else 1)
    return HeadAssignment(heads, query_spans, tuple(kv_heads), tuple(kv_repeats), kv_exclusive=False)


def _group_aligned_spans(heads: AttentionHeads, world_size: int) -> tuple[Span, ...]:
    """Query heads by rank, each of one group: every group has ranks of its own, as evenly as they go."""
    spans: list[Span] = []
    for index, (first, last) in enumerate(split_evenly(world_size, heads.num_kv_heads)):
        start = index * heads.num_queries_per_kv
        spans += [(start + low, start + high) for low, high in split_evenly(heads.num_queries_per_kv, last - first)]
    return tuple(spans)


def query_spec(assignment: HeadAssignment, dim: int, rows_per_head: int) -> ShardSpec:
    """Rows that belong to query heads, ``rows_per_head`` of them each."""
    spans = tuple(((start * rows_per_head, stop * rows_per_head),) for start, stop in assignment.query_spans)
    return ShardSpec(dim, assignment.heads.num_heads * rows_per_head, spans)


def kv_spec(
    assignment: HeadAssignment, dim: int, rank: int, num_sections: int = 1, with_queries: bool = False
) -> tuple[ShardSpec, SharedRows | None]:
    """Rows of a key or value projection, or of both fused in ``num_sections``, if ``with_queries`` behind queries.

    Where several ranks use a key-value head, all sections joined are dealt out evenly as each rank's tail.
    """
    head_dim, world_size = assignment.heads.head_dim, len(assignment.query_spans)
    queries = query_spec(assignment, dim, head_dim)
    leading_spans, offset = (queries.spans, queries.size) if with_queries else (((),) * world_size, 0)
    length = assignment.heads.num_kv_heads * head_dim
    size = offset + num_sections * length
    if assignment.kv_exclusive:
        sections = range(offset, size, length)
        tails = [
            tuple((start + own[0] * head_dim, start + (own[-1] + 1) * head_dim) for start in sections)
            for own in assignment.kv_heads
        ]
        return ShardSpec(dim, size, tuple(own + tail for own, tail in zip(leading_spans, tails, strict=True))), None
    tail_spans = split_evenly(num_sections * length, world_size)
    tails = [(offset + start, offset + stop) for start, stop in tail_spans]
    spans = tuple((*own, tail) for own, tail in zip(leading_spans, tails, strict=True))
    used = [section * length + head * head_dim for section in range(num_sections) for head in assignment.kv_heads[rank]]
    row_spans = tuple((first, first + head_dim) for first in used)
    num_exclusive = sum(stop - start for start, stop in leading_spans[rank])
    used_spans = None if used == list(range(0, num_sections * length, head_dim)) else row_spans
    return ShardSpec(dim, size, spans), SharedRows(num_exclusive, _lengths(tail_spans), used_spans)


def gqa_interleaved_spec(assignment: HeadAssignment, dim: int, rank: int) -> tuple[ShardSpec, SharedRows | None]:
    """Rows interleaved by key-value head: its query heads, its key, its value."""
    heads, head_dim = assignment.heads, assignment.heads.head_dim
    unit, pair = (heads.num_queries_per_kv + 2) * head_dim, 2 * head_dim
    size = heads.num_kv_heads * unit
    if assignment.kv_exclusive:
        spans = tuple(((own[0] * unit, (own[-1] + 1) * unit),) for own in assignment.kv_heads)
        return ShardSpec(dim, size, spans), None
    if any(len(own) > 1 for own in assignment.kv_heads):
        raise ValueError(
            f"tensor_parallel.autotp_size = {len(assignment.query_spans)} cuts a rank's query heads across key-value "
            f"heads, which this model's fused projection interleaves; set it to a divisor or a multiple of "
            f"{heads.num_kv_heads}"
        )
    tail_spans = split_evenly(heads.num_kv_heads * pair, len(assignment.query_spans))
    spans = []
    for (first, last), (start, stop) in zip(assignment.query_spans, tail_spans, strict=True):
        kv_head = first // heads.num_queries_per_kv
        query_start = kv_head * unit + (first - kv_head * heads.num_queries_per_kv) * head_dim
        own = [(query_start, query_start + (last - first) * head_dim)]
        for j in range(heads.num_kv_heads):  # where rows [start, stop) of all key-value rows, joined, lie
            low, high = max(start, j * pair), min(stop, (j + 1) * pair)
            shift = (j + 1) * unit - (j + 1) * pair
            if low < high:
                own.append((low + shift, high + shift))
        spans.append(tuple(own))
    local_kv_head, num_exclusive = assignment.kv_heads[rank][0], assignment.num_local_heads(rank) * head_dim
    row_spans = ((local_kv_head * pair, (local_kv_head + 1) * pair),)
    return ShardSpec(dim, size, tuple(spans)), SharedRows(num_exclusive, _lengths(tail_spans), row_spans)


def _lengths(spans: Sequence[Span]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in spans)
