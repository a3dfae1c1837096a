"""Which attention heads each tensor rank computes, and which rows of the projections that means.

Query heads are dealt out in whole heads, as evenly as they go; the heads of a key-value
group stay together while there are at least as many groups as ranks.  With fewer key-value
heads than ranks, each rank keeps an equal share of their rows and gathers those that its
query heads need when it computes (the rows are few), so no element has two owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thalweg.parallel.cuts import Cut, Span, even
from thalweg.parallel.layers import Shared


@dataclass(frozen=True)
class Heads:
    """Query and key-value heads of one attention, each ``width`` features."""

    num_query: int
    num_key_value: int
    width: int

    @property
    def group(self) -> int:
        """Query heads of one key-value head."""
        return self.num_query // self.num_key_value


@dataclass(frozen=True)
class Deal:
    """Heads dealt out: ``query[rank]`` a span, ``key_value[rank]`` the heads it uses, each for
    ``repeat[rank]`` query heads."""

    heads: Heads
    query: tuple[Span, ...]
    key_value: tuple[tuple[int, ...], ...]
    repeat: tuple[int, ...]
    owned: bool  # whether each key-value head is used by one rank only

    def num_query(self, rank: int) -> int:
        """Query heads of ``rank``."""
        return self.query[rank][1] - self.query[rank][0]


def deal(heads: Heads, world: int, in_groups: bool = False) -> Deal:
    """Deal the heads out to ``world`` ranks.

    With fewer key-value heads than ranks, no rank's query heads are of two groups where that costs nobody a
    head more, or ``in_groups`` asks for it.

    Raises:
        ValueError: there are fewer query heads than ranks.
    """
    if heads.num_query < world:
        raise ValueError(
            f"tensor_parallel.autotp_size = {world} is more than the model's {heads.num_query} attention "
            f"heads; set it to at most {heads.num_query}"
        )
    group = heads.group
    if heads.num_key_value >= world:
        spans = even(heads.num_key_value, world)
        return Deal(
            heads,
            query=tuple((start * group, stop * group) for start, stop in spans),
            key_value=tuple(tuple(range(start, stop)) for start, stop in spans),
            repeat=(group,) * world,
            owned=True,
        )
    query = tuple(even(heads.num_query, world))
    whole = _within_groups(heads, world)
    if in_groups or max(stop - start for start, stop in whole) <= query[0][1]:
        query = whole
    used, repeat = [], []
    for start, stop in query:
        each = [head // group for head in range(start, stop)]
        distinct = sorted(set(each))
        counts = {each.count(head) for head in distinct}
        used.append(tuple(distinct) if len(counts) == 1 else tuple(each))
        repeat.append(counts.pop() if len(counts) == 1 else 1)
    return Deal(heads, query, tuple(used), tuple(repeat), owned=False)


def _within_groups(heads: Heads, world: int) -> tuple[Span, ...]:
    """Query heads by rank, each of one group: every group has ranks of its own, as evenly as they go."""
    found: list[Span] = []
    for index, (first, last) in enumerate(even(world, heads.num_key_value)):
        start = index * heads.group
        found += [(start + low, start + high) for low, high in even(heads.group, last - first)]
    return tuple(found)


Fused = tuple[Cut, Callable[[int], Shared | None]]


def query_rows(deal: Deal, dim: int, per_head: int) -> Cut:
    """Rows that belong to query heads, ``per_head`` of them each."""
    spans = tuple(((start * per_head, stop * per_head),) for start, stop in deal.query)
    return Cut(dim, deal.heads.num_query * per_head, spans)


def key_value_rows(deal: Deal, dim: int) -> Fused:
    """Rows of a key or value projection."""
    return _tailed(deal, dim, [()] * len(deal.query), 0, sections=1)


def group_rows(deal: Deal, dim: int) -> Fused:
    """Rows interleaved by key-value head: its query heads, its key, its value."""
    heads, width = deal.heads, deal.heads.width
    unit, pair = (heads.group + 2) * width, 2 * width
    size = heads.num_key_value * unit
    if deal.owned:
        spans = tuple(((own[0] * unit, (own[-1] + 1) * unit),) for own in deal.key_value)
        return Cut(dim, size, spans), lambda rank: None
    if any(len(own) > 1 for own in deal.key_value):
        raise ValueError(
            f"tensor_parallel.autotp_size = {len(deal.query)} cuts a rank's query heads across key-value "
            f"heads, which this model's fused projection interleaves; set it to a divisor or a multiple of "
            f"{heads.num_key_value}"
        )
    tails = even(heads.num_key_value * pair, len(deal.query))

    def key_value_spans(start: int, stop: int) -> list[Span]:
        """Where rows [start, stop) of all key-value rows, joined, lie in the projection."""
        found = []
        for j in range(heads.num_key_value):
            low, high = max(start, j * pair), min(stop, (j + 1) * pair)
            shift = j * unit + heads.group * width - j * pair
            if low < high:
                found.append((low + shift, high + shift))
        return found

    spans = []
    for (first, last), (start, stop) in zip(deal.query, tails, strict=True):
        group = first // heads.group
        begin = group * unit + (first - group * heads.group) * width
        spans.append(((begin, begin + (last - first) * width), *key_value_spans(start, stop)))

    def shared(rank: int) -> Shared:
        group = deal.key_value[rank][0]
        own = deal.num_query(rank) * width
        rows = tuple(range(group * pair, (group + 1) * pair))
        return Shared(own, tuple(stop - start for start, stop in tails), rows)

    return Cut(dim, size, tuple(spans)), shared


def section_rows(deal: Deal, dim: int, first: bool = True) -> Fused:
    """Rows fused in sections: queries (unless not ``first``), keys, values."""
    width = deal.heads.width
    queries: Sequence[tuple[Span, ...]] = [((start * width, stop * width),) for start, stop in deal.query]
    offset = deal.heads.num_query * width
    if not first:
        queries, offset = [()] * len(deal.query), 0
    return _tailed(deal, dim, queries, offset, sections=2)


def _tailed(deal: Deal, dim: int, before: Sequence[tuple[Span, ...]], offset: int, sections: int) -> Fused:
    """``before`` of each rank, then ``sections`` of key-value rows from ``offset`` on."""
    width, world = deal.heads.width, len(deal.query)
    length = deal.heads.num_key_value * width
    size = offset + sections * length
    if deal.owned:
        spans = tuple(
            (
                *before[rank],
                *(
                    (offset + k * length + own[0] * width, offset + k * length + (own[-1] + 1) * width)
                    for k in range(sections)
                ),
            )
            for rank, own in enumerate(deal.key_value)
        )
        return Cut(dim, size, spans), lambda rank: None
    tails = even(sections * length, world)
    spans = tuple(
        (*before[rank], (offset + start, offset + stop)) for rank, (start, stop) in enumerate(tails)
    )
    sizes = tuple(stop - start for start, stop in tails)

    def shared(rank: int) -> Shared:
        rows = [
            k * length + head * width + i
            for k in range(sections)
            for head in deal.key_value[rank]
            for i in range(width)
        ]
        own = sum(stop - start for start, stop in before[rank])
        return Shared(own, sizes, None if rows == list(range(sections * length)) else tuple(rows))

    return Cut(dim, size, spans), shared
