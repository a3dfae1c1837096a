"""One rank's part of a decoder.

Three ways to cut, which go together.  *Stages* (``pipeline``): each has some of the layers, the first the
embedding, the last the head.  Within a stage *tensor* parallelism (Shoeybi et al. 2019, section 3): each rank
has some of the heads with their rows of queries, keys and values, some of the inner units of each MLP or of
every expert, and some of the vocabulary.  *Expert* parallelism deals whole experts out instead.

What the output and down projections give are parts that must be added up over a stage's ranks, their bias on
the first rank alone; norms, router, embedding and positions are on every rank.  Parts may differ in size: 25
heads go to two ranks as 12 and 13.  With more ranks for experts than for heads, some have no heads at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thalweg.infer.api import EngineOptions
from thalweg.infer.describe import MLP, Attention, Decoder, Experts, Linear

_VOCAB_UNIT = 32  # columns of a packed panel


@dataclass(frozen=True)
class Degrees:
    """Into how many parts heads, layers and experts are cut."""

    tensor: int = 1
    stages: int = 1
    experts: int = 1

    @staticmethod
    def of(options: EngineOptions) -> Degrees:
        """Return those that options ask for."""
        return Degrees(options.tensor_parallel, options.pipeline_parallel, options.expert_parallel)

    @property
    def places(self) -> int:
        """Ranks of a stage."""
        return max(self.tensor, self.experts)

    @property
    def size(self) -> int:
        """Ranks of all."""
        return self.stages * self.places


def part(decoder: Decoder, rank: int, degrees: Degrees) -> Decoder:
    """Return what a rank has: that of place ``rank % places`` in stage ``rank // places``.

    Raises ValueError, naming the degrees that work, where layers, heads or experts cannot be dealt out so.
    """
    number, place = divmod(rank, degrees.places)
    mixtures = [x.mlp for x in decoder.layers if isinstance(x.mlp, Experts)]
    most = min((len(m.up) for m in mixtures), default=1)
    if degrees.experts > most:
        has = most if mixtures else "no"
        raise ValueError(f"expert_parallel is {degrees.experts}; this model has {has} experts")
    layers = stage(decoder, number, degrees.stages)
    return shard(layers, place, degrees.places, degrees.tensor, degrees.experts)


def stage(decoder: Decoder, number: int, stages: int) -> Decoder:
    """Return the layers of a stage; what only the first or the last needs is empty elsewhere."""
    count = len(decoder.layers)
    if stages > count:
        raise ValueError(f"pipeline_parallel is {stages}; this model has {count} layers")
    layers = decoder.layers[count * number // stages : count * (number + 1) // stages]
    made = replace(decoder, layers=layers)
    if number > 0:
        made = replace(made, embed=decoder.embed[:0], embed_norm=None, positions=None)
    if number < stages - 1:
        made = replace(made, head=decoder.head.part(0, 0), norm=None)
    return made


def shard(decoder: Decoder, rank: int, size: int, tensor: int | None = None, experts: int = 1) -> Decoder:
    """Return the part of ``rank`` out of ``size``; ``vocab`` stays the whole one's.

    ``tensor``: how many of the ranks have heads, by default all.  ``experts``: into how many parts the set of
    experts is cut, 1 for parts of every expert.
    """
    tensor = tensor or size
    heads = min(x.attention.heads for x in decoder.layers)
    if tensor > heads or any(not _splits(x.attention, tensor) for x in decoder.layers):
        works = [n for n in range(1, heads + 1) if all(_splits(x.attention, n) for x in decoder.layers)]
        raise ValueError(
            f"tensor_parallel is {tensor}; this model's heads can be dealt out to "
            + ", ".join(map(str, works))
        )
    head = decoder.head
    if head.outputs:
        head = _rows(head, [vocab_part(decoder.vocab, rank, size)])
    layers = [
        replace(
            layer,
            attention=_heads(layer.attention, rank, size, tensor),
            mlp=_experts(layer.mlp, rank, size, experts)
            if isinstance(layer.mlp, Experts)
            else _mlp(layer.mlp, rank, size),
        )
        for layer in decoder.layers
    ]
    return replace(decoder, layers=layers, head=head)


def vocab_part(vocab: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first token of a rank's part of the vocabulary, and the one after the last."""
    units = -(-vocab // _VOCAB_UNIT)
    return tuple(min(units * r // size * _VOCAB_UNIT, vocab) for r in (rank, rank + 1))  # type: ignore[return-value]


def _splits(a: Attention, size: int) -> bool:
    return size <= a.kv_heads or (size % a.kv_heads == 0 and a.heads % size == 0)


def _heads(a: Attention, rank: int, size: int, tensor: int) -> Attention:
    """Return a rank's heads, where every ``size // tensor``-th rank has some."""
    each = size // tensor
    if rank % each == 0:
        return _attention(a, rank // each, tensor)
    out = _columns(a.out, 0, 0, rank)
    return replace(a, heads=0, kv_heads=0, qkv=a.qkv.part(0, 0), out=out, slopes=None, relative=None)


def _attention(a: Attention, rank: int, size: int) -> Attention:
    if size == 1:
        return a
    group = a.heads // a.kv_heads
    if size <= a.kv_heads:
        first, last = a.kv_heads * rank // size, a.kv_heads * (rank + 1) // size
        low, high = first * group, last * group
    else:  # several ranks share a head of keys and values, and keep it twice
        low, high = a.heads // size * rank, a.heads // size * (rank + 1)
        first, last = low // group, low // group + 1
    keys = a.heads * a.dim
    values = keys + a.kv_heads * a.dim
    ranges = [
        (low * a.dim, high * a.dim),
        (keys + first * a.dim, keys + last * a.dim),
        (values + first * a.dim, values + last * a.dim),
    ]
    return replace(
        a,
        heads=high - low,
        kv_heads=last - first,
        qkv=_rows(a.qkv, ranges),
        out=_columns(a.out, low * a.dim, high * a.dim, rank),
        slopes=None if a.slopes is None else a.slopes[low:high],
    )


def _mlp(m: MLP, rank: int, size: int) -> MLP:
    if size == 1:
        return m
    inner = m.down.inputs
    low, high = _inner(inner, rank, size)
    ranges = [(low, high), (inner + low, inner + high)] if m.gated else [(low, high)]
    return replace(m, up=_rows(m.up, ranges), down=_columns(m.down, low, high, rank))


def _experts(m: Experts, rank: int, size: int, parts: int) -> Experts:
    """Return a rank's experts: of its part of them all, or of all, some of the inner units."""
    if size == 1:
        return m
    each = size // parts
    begin, end = (len(m.up) * n // parts for n in (rank // each, rank // each + 1))
    inner = m.down.shape[2]
    low, high = _inner(inner, rank % each, each)
    up = torch.cat([m.up[begin:end, low:high], m.up[begin:end, inner + low : inner + high]], 1)
    shared = None if m.shared is None else _mlp(m.shared, rank, size)
    down = m.down[begin:end, :, low:high].contiguous()
    return replace(m, up=up, down=down, shared=shared, first=m.first + begin)


def _inner(inner: int, rank: int, size: int) -> tuple[int, int]:
    """Return a part of the inner units: whole groups of the quantised formats, where there are enough."""
    unit = next(u for u in (32, 16, 1) if (inner % u == 0 and inner // u >= size) or u == 1)
    units = inner // unit
    if units < size:
        raise ValueError(f"{size} ranks share each layer; an MLP of {inner} inner units has too few for that")
    return units * rank // size * unit, units * (rank + 1) // size * unit


def _rows(layer: Linear, ranges: list[tuple[int, int]]) -> Linear:
    def pick(t: Tensor) -> Tensor:
        return t[slice(*ranges[0])] if len(ranges) == 1 else torch.cat([t[a:b] for a, b in ranges])

    bias = None if layer.bias is None else pick(layer.bias)
    return Linear(lambda: pick(layer.weight), bias, (sum(b - a for a, b in ranges), layer.inputs))


def _columns(layer: Linear, low: int, high: int, rank: int) -> Linear:
    bias = layer.bias if rank == 0 else None
    return Linear(lambda: layer.weight[:, low:high], bias, (layer.outputs, high - low))
