"""What a model is made of, as data: one description serves every runner.

A family's file in ``models/`` turns a live Hugging Face model into a :class:`Decoder`, which may have an
:class:`Encoder` of its own, or into an :class:`Encoder` alone.  The tensors are the
model's own wherever that is possible (views, no copies); runners pack or cast them as they like.  All linear
weights are (outputs, inputs); queries, keys and values are stacked in one, gate and up projection too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Unsupported(ValueError):
    """The family's file does not know this variant: the model runs through its own modelling code."""


class Linear:
    """y = x @ weight.T + bias.

    A weight that is stacked or reordered out of the model's own ones is put together each time it is asked
    for: describing copies nothing, and a model that lies in a file stays there.
    """

    def __init__(
        self,
        weight: Tensor | Callable[[], Tensor],
        bias: Tensor | None = None,
        shape: Any = None,
        *,
        modules: Sequence[nn.Module] = (),
        order: Tensor | None = None,
        factor: float = 1.0,
        copy: Callable[[int, int, Tensor], None] | None = None,
    ) -> None:
        self._weight, self.bias, self._copy = weight, bias, copy
        self.modules, self.order = tuple(modules), order
        """The model's modules whose outputs are stacked here, and the order they were then brought into."""
        self.factor = factor
        """What the modules' outputs are multiplied by."""
        if isinstance(weight, Tensor):
            shape = weight.shape
        assert shape is not None, "a weight made on demand says what shape it will have"
        self.outputs, self.inputs = int(shape[0]), int(shape[1])

    @property
    def weight(self) -> Tensor:
        """The weight (outputs, inputs)."""
        return self._weight if isinstance(self._weight, Tensor) else self._weight()

    def copy_rows(self, start: int, stop: int, out: Tensor) -> None:
        """Copy the weights of outputs ``start`` to ``stop`` into ``out``; of no others, where that can be."""
        if self._copy is not None:
            self._copy(start, stop, out)
        else:
            out.copy_(self.weight[start:stop])

    def part(self, start: int, stop: int) -> Linear:
        """Return the layer of outputs ``start`` to ``stop`` alone."""
        bias = None if self.bias is None else self.bias[start:stop]

        def copy(first: int, last: int, out: Tensor) -> None:
            self.copy_rows(start + first, start + last, out)

        return Linear(lambda: self.weight[start:stop], bias, (stop - start, self.inputs), copy=copy)


@dataclass(frozen=True)
class Norm:
    """``rms``: x / rms(x) * weight; ``layer``: (x - mean) / std * weight + bias."""

    style: str
    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Tables (length, pairs) of cosines and sines for the leading ``2 * pairs`` dims of each head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    reach: int = 0
    """The longest sequence for which they hold, where the model rotates longer ones otherwise; 0: any."""


@dataclass(frozen=True)
class Relative:
    """A learned bias for each head and bucket of relative positions (Raffel et al. 2020, section 2.1)."""

    weight: Tensor
    """(buckets, heads)"""
    bucket: Callable[[Tensor], Tensor]
    """Turns j - i, for a key j and a query i, into numbers of buckets."""

    def table(self, reach: int) -> Tensor:
        """Return fp32 (heads, 2 * reach + 16): the bias of key j before query i at ``reach + j - i``."""
        distance = torch.arange(-reach, reach + 16)
        return self.weight.float()[self.bucket(distance)].t().contiguous()


@dataclass(frozen=True)
class Attention:
    """Self-attention; ``qkv`` has heads * dim, then twice kv_heads * dim outputs."""

    heads: int
    kv_heads: int
    dim: int
    qkv: Linear
    out: Linear
    scale: float
    rotary: Rotary | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int = 0
    softcap: float = 0.0
    slopes: Tensor | None = None
    """ALiBi's (heads,) slopes (Press et al. 2022)."""
    relative: Relative | None = None


@dataclass(frozen=True)
class Cross:
    """Attention to what the encoder said: x += out(attend(q(norm(x)), kv(source))), then ``after``.

    Heads are as wide and as many as the layer's self-attention has, whose blocks keep its keys and values.
    """

    norm: Norm | None
    q: Linear
    kv: Linear
    """kv_heads * dim keys, then as many values."""
    out: Linear
    scale: float
    after: Norm | None = None


@dataclass(frozen=True)
class MLP:
    """down(act(up(x))), or down(act(gate) * value) where ``up`` yields gate and value one after the other."""

    up: Linear
    down: Linear
    activation: str
    gated: bool


@dataclass(frozen=True)
class Experts:
    """A mixture: the router's softmax picks ``top_k`` of the stacked experts for each token."""

    router: Tensor
    up: Tensor
    """(experts, 2 * inner, width): gate and value."""
    down: Tensor
    """(experts, width, inner)."""
    top_k: int
    normalise: bool
    activation: str
    shared: MLP | None = None
    shared_gate: Tensor | None = None
    """(1, width): its sigmoid scales the shared expert."""
    first: int = 0
    """Which of the router's experts ``up`` and ``down`` begin with, where they are a part of all."""
    packed: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] | None = None
    """Each expert's two products, where a runner has packed them; ``up`` and ``down`` are empty then."""

    @property
    def count(self) -> int:
        """How many experts are here."""
        return len(self.up) if self.packed is None else len(self.packed)


@dataclass(frozen=True)
class Layer:
    """x += post1(attention(norm1(x))); cross; x += post2(mlp(norm2(x))).  ``parallel``: both read the same x.

    ``after1`` and ``after2`` normalise x itself behind each sum, as the first transformers did.
    """

    norm1: Norm | None
    attention: Attention
    mlp: MLP | Experts
    norm2: Norm | None
    parallel: bool = False
    post1: Norm | None = None
    post2: Norm | None = None
    after1: Norm | None = None
    after2: Norm | None = None
    cross: Cross | None = None


@dataclass(frozen=True)
class Encoder:
    """A stack in which every token sees the whole of its sequence."""

    vocab: int
    width: int
    max_length: int
    embed: Tensor
    layers: Sequence[Layer]
    norm: Norm | None = None
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    positions: Tensor | None = None
    """(length, width) learned positions, offset applied; token types of the only kind added."""
    pad: int = -1
    """A token that takes no position: wherever it stands it has the table's first row, and others count from
    the second.  -1: there is none."""

    def places(self, tokens: Tensor) -> Tensor:
        """Return which rows of ``positions`` the tokens of a sequence have."""
        if self.pad < 0:
            return torch.arange(len(tokens), device=tokens.device)
        counted = (tokens != self.pad).long()
        return counted.cumsum(0) * counted


@dataclass(frozen=True)
class Decoder:
    """A causal language model, or the speaking half of one that listens to an ``encoder``."""

    vocab: int
    width: int
    max_length: int
    embed: Tensor
    layers: Sequence[Layer]
    norm: Norm | None
    head: Linear
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    positions: Tensor | None = None
    """(length, width) learned positions, offset applied."""
    logit_softcap: float = 0.0
    encoder: Encoder | None = None
    notes: dict[str, Any] = field(default_factory=dict)


_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


def activation(name: Any) -> str:
    """Return our name of one of Hugging Face's activations, or raise Unsupported."""
    if name not in _ACTIVATIONS:
        raise Unsupported(f"activation {name!r}")
    return _ACTIVATIONS[name]


def linear(*modules: nn.Module) -> Linear:
    """Stack the weights of several nn.Linear (or Hugging Face's Conv1D) along their outputs."""
    weights, biases = [], []
    for module in modules:
        weight: Any = module.weight
        if type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "dequantize"):
            weight = weight.dequantize()  # a tensor of numbers in somebody's own format
        transposed = type(module).__name__ == "Conv1D"
        if not transposed and not isinstance(module, nn.Linear):
            raise Unsupported(f"a linear layer of type {type(module).__name__}")
        weights.append((weight.t() if transposed else weight).detach())
        bias: Any = getattr(module, "bias", None)
        biases.append(None if bias is None else bias.detach())
    whole = weights[0] if len(weights) == 1 else lambda: torch.cat(weights)
    shape = (sum(w.shape[0] for w in weights), weights[0].shape[1])
    copy = partial(_copy_stacked, weights)
    if all(bias is None for bias in biases):
        return Linear(whole, None, shape, modules=modules, copy=copy)
    filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    bias = filled[0] if len(filled) == 1 else torch.cat(filled)
    return Linear(whole, bias, shape, modules=modules, copy=copy)


def _copy_stacked(weights: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
    """Copy rows ``start`` to ``stop`` of the stack."""
    at = 0
    for weight in weights:
        first, last = max(start - at, 0), min(stop - at, len(weight))
        if first < last:
            out[at + first - start : at + last - start] = weight[first:last]
        at += len(weight)


def rows(layer: Linear, order: Tensor) -> Linear:
    """Return the layer with its outputs in another order."""
    bias = None if layer.bias is None else layer.bias[order]
    whole = order if layer.order is None else layer.order[order]
    shape = (len(order), layer.inputs)
    ends = [*(torch.where(order.diff() != 1)[0] + 1).tolist(), len(order)]  # of runs of neighbours

    def copy(start: int, stop: int, out: Tensor) -> None:
        first = 0
        for last in ends:
            low, high = max(first, start), min(last, stop)
            if low < high:
                source = int(order[low])
                layer.copy_rows(source, source + high - low, out[low - start : high - start])
            first = last

    return Linear(lambda: layer.weight[order], bias, shape, modules=layer.modules, order=whole, copy=copy)


def interleaved_heads(layer: Linear, heads: int, dim: int) -> Linear:
    """Sort outputs that come as (head, q/k/v, dim) into all queries, all keys, all values."""
    order = torch.arange(heads * 3 * dim).view(heads, 3, dim).transpose(0, 1).reshape(-1)
    return rows(layer, order)


def layer_norm(module: Any) -> Norm:
    """Describe an nn.LayerNorm."""
    given = getattr(module, "bias", None)
    weight = torch.ones(module.normalized_shape) if module.weight is None else module.weight.detach()
    bias = torch.zeros_like(weight) if given is None else given.detach()
    return Norm("layer", weight, bias, module.eps)


def rms_norm(module: Any, offset: float = 0.0) -> Norm:
    """Describe an RMS norm; ``offset`` is added to its weight (Gemma stores weight - 1)."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    assert eps is not None
    weight = module.weight.detach()
    return Norm("rms", weight if offset == 0 else weight.float() + offset, None, eps)


def rotary(module: Any, length: int, *args: Any, interleaved: bool = False) -> Rotary:
    """Tabulate a Hugging Face rotary embedding for positions below ``length``.

    ``interleaved``: it turns neighbouring dims, not those of two halves.
    """
    kind: Any = getattr(module, "rope_type", "default")
    if isinstance(kind, dict):
        kind = kind[args[0]]
    reach = 0
    if kind == "dynamic":
        reach = module.original_max_seq_len
    elif kind == "longrope":
        parameters = module.config.rope_parameters
        reach = (parameters[args[0]] if args else parameters)["original_max_position_embeddings"]
    device = next(iter(module.buffers())).device
    x = torch.zeros(1, device=device)
    with torch.no_grad():
        for count in (1, min(length, reach) if reach else length):
            # A module that has seen a longer sequence goes back to its first numbers with the short one.
            cos, sin = module(x, torch.arange(count, device=device)[None], *args)
    part = slice(None, None, 2) if interleaved else slice(cos.shape[-1] // 2)
    return Rotary(cos[0, :, part].contiguous(), sin[0, :, part].contiguous(), interleaved, reach)
