"""One rank's part of a decoder, for tensor parallelism (Shoeybi et al. 2019, section 3).

Each rank has some of the heads with their rows of queries, keys and values, some of the inner units of each
MLP or of every expert, and some of the vocabulary.  What the output and down projections give are parts that
must be added up over the ranks, their bias on the first rank alone; norms, router, embedding and positions
are on every rank.  Parts may differ in size: 25 heads go to two ranks as 12 and 13.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from thalweg.infer.describe import MLP, Attention, Decoder, Experts, Layer, Linear

_VOCAB_UNIT = 32  # columns of a packed panel


def shard(decoder: Decoder, rank: int, size: int) -> Decoder:
    """Return the part of ``rank`` out of ``size``; ``vocab`` stays the whole one's.

    Raises ValueError, naming the degrees that work, where the heads cannot be dealt out.
    """
    heads = min(x.attention.heads for x in decoder.layers)
    if size > heads or any(not _splits(x.attention, size) for x in decoder.layers):
        works = [n for n in range(1, heads + 1) if all(_splits(x.attention, n) for x in decoder.layers)]
        raise ValueError(
            f"tensor_parallel is {size}; this model's heads can be dealt out to {', '.join(map(str, works))}"
        )
    head = _rows(decoder.head, [vocab_part(decoder.vocab, rank, size)])
    layers = [_layer(layer, rank, size) for layer in decoder.layers]
    return replace(decoder, layers=layers, head=head)


def vocab_part(vocab: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first token of a rank's part of the vocabulary, and the one after the last."""
    units = -(-vocab // _VOCAB_UNIT)
    return tuple(min(units * r // size * _VOCAB_UNIT, vocab) for r in (rank, rank + 1))  # type: ignore[return-value]


def _splits(a: Attention, size: int) -> bool:
    return size <= a.kv_heads or (size % a.kv_heads == 0 and a.heads % size == 0)


def _layer(layer: Layer, rank: int, size: int) -> Layer:
    mlp = layer.mlp
    part = _experts(mlp, rank, size) if isinstance(mlp, Experts) else _mlp(mlp, rank, size)
    return replace(layer, attention=_attention(layer.attention, rank, size), mlp=part)


def _attention(a: Attention, rank: int, size: int) -> Attention:
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
    inner = m.down.inputs
    low, high = _inner(inner, rank, size)
    ranges = [(low, high), (inner + low, inner + high)] if m.gated else [(low, high)]
    return replace(m, up=_rows(m.up, ranges), down=_columns(m.down, low, high, rank))


def _experts(m: Experts, rank: int, size: int) -> Experts:
    inner = m.down.shape[2]
    low, high = _inner(inner, rank, size)
    up = torch.cat([m.up[:, low:high], m.up[:, inner + low : inner + high]], 1)
    shared = None if m.shared is None else _mlp(m.shared, rank, size)
    return replace(m, up=up, down=m.down[:, :, low:high].contiguous(), shared=shared)


def _inner(inner: int, rank: int, size: int) -> tuple[int, int]:
    """Return a part of the inner units: whole groups of the quantised formats, where there are enough."""
    unit = next(u for u in (32, 16, 1) if (inner % u == 0 and inner // u >= size) or u == 1)
    units = inner // unit
    if units < size:
        raise ValueError(f"tensor_parallel is {size}; an MLP of {inner} inner units has too few for that")
    return units * rank // size * unit, units * (rank + 1) // size * unit


def _rows(layer: Linear, ranges: list[tuple[int, int]]) -> Linear:
    def pick(t: Tensor) -> Tensor:
        return t[slice(*ranges[0])] if len(ranges) == 1 else torch.cat([t[a:b] for a, b in ranges])

    bias = None if layer.bias is None else pick(layer.bias)
    return Linear(lambda: pick(layer.weight), bias, (sum(b - a for a, b in ranges), layer.inputs))


def _columns(layer: Linear, low: int, high: int, rank: int) -> Linear:
    bias = layer.bias if rank == 0 else None
    return Linear(lambda: layer.weight[:, low:high], bias, (layer.outputs, high - low))
