"""What a model is made of, as data: one description serves every runner.

A family's file in ``models/`` turns a live Hugging Face model into a :class:`DecoderSpec`, which may have an
:class:`EncoderSpec` of its own, or into an :class:`EncoderSpec` alone.  The tensors are the
model's own wherever that is possible (views, no copies); runners pack or cast them as they like.  All linear
weights are (outputs, inputs); queries, keys and values are stacked in one, gate and up projection too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.infer.config import EngineConfig, limit_length


class UnsupportedModelError(ValueError):
    """The family's file does not know this variant: the model runs through its own modelling code."""


class LinearSpec:
    """y = x @ weight.T + bias.

    A weight that is stacked or reordered out of the model's own ones is built each time it is read: describing
    copies nothing, and a model that lies in a file stays there.
    """

    def __init__(
        self,
        weight: Tensor | Callable[[], Tensor],
        bias: Tensor | None = None,
        shape: Any = None,
        *,
        modules: Sequence[nn.Module] = (),
        output_permutation: Tensor | None = None,
        output_scale: float = 1.0,
        copy_rows_fn: Callable[[int, int, Tensor], None] | None = None,
    ) -> None:
        self._weight, self.bias, self._copy_rows_fn = weight, bias, copy_rows_fn
        # The model's modules whose outputs are stacked here, and the order they were then brought into.
        self.modules, self.output_permutation = tuple(modules), output_permutation
        # What the modules' outputs are multiplied by.
        self.output_scale = output_scale
        if isinstance(weight, Tensor):
            shape = weight.shape
        assert shape is not None, "a weight made on demand says what shape it will have"
        self.out_features, self.in_features = int(shape[0]), int(shape[1])

    @property
    def is_stored(self) -> bool:
        """Whether the weight is a tensor that the model has, and not built when it is read."""
        return isinstance(self._weight, Tensor)

    @property
    def weight(self) -> Tensor:
        """The weight (outputs, inputs)."""
        return self._weight if isinstance(self._weight, Tensor) else self._weight()

    def copy_rows(self, start: int, stop: int, out: Tensor) -> None:
        """Copy the weights of outputs ``start`` to ``stop`` into ``out``; of no others, where that can be."""
        if self._copy_rows_fn is not None:
            self._copy_rows_fn(start, stop, out)
        else:
            out.copy_(self.weight[start:stop])

    def select(self, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the part of the weight that ``pick`` takes out of it."""
        return pick(self.weight)

    def slice_outputs(self, *ranges: tuple[int, int]) -> LinearSpec:
        """Return the layer of some outputs alone: of the first range, then of the second, ..."""

        def pick(t: Tensor) -> Tensor:
            return t[slice(*ranges[0])] if len(ranges) == 1 else torch.cat([t[low:high] for low, high in ranges])

        bias = None if self.bias is None else pick(self.bias)
        shape = sum(high - low for low, high in ranges), self.in_features
        return LinearSpec(lambda: self.select(pick), bias, shape, copy_rows_fn=partial(self.copy_ranges, ranges))

    def copy_ranges(self, ranges: Sequence[tuple[int, int]], start: int, stop: int, out: Tensor) -> None:
        """Copy rows ``start`` to ``stop`` of these ranges of outputs, one behind the other."""
        offset = 0
        for low, high in ranges:
            first, last = max(start, offset), min(stop, offset + high - low)
            if first < last:
                self.copy_rows(low + first - offset, low + last - offset, out[first - start : last - start])
            offset += high - low

    def slice_inputs(self, low: int, high: int, *, keep_bias: bool) -> LinearSpec:
        """Return the layer of inputs ``low`` to ``high`` alone: a part of the sum that makes each output."""

        def copy(start: int, stop: int, out: Tensor) -> None:
            rows = out.new_empty(stop - start, self.in_features)
            self.copy_rows(start, stop, rows)
            out.copy_(rows[:, low:high])

        shape = self.out_features, high - low
        bias = self.bias if keep_bias else None
        return LinearSpec(lambda: self.select(lambda t: t[:, low:high]), bias, shape, copy_rows_fn=copy)


@dataclass(frozen=True)
class NormSpec:
    """``rms``: x / rms(x) * weight; ``layer``: (x - mean) / std * weight + bias."""

    norm_type: str
    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class RopeTable:
    """Tables (length, pairs) of cosines and sines for the leading ``2 * pairs`` dims of each head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    # The longest sequence for which they hold, where the model rotates longer ones otherwise; 0: any.
    max_valid_length: int = 0


@dataclass(frozen=True)
class RelativePositionBias:
    """A learned bias for each head and bucket of relative positions (Raffel et al. 2020, section 2.1)."""

    # (buckets, heads)
    weight: Tensor
    # Turns j - i, for a key j and a query i, into numbers of buckets.
    to_bucket: Callable[[Tensor], Tensor]

    def build_table(self, max_distance: int) -> Tensor:
        """Return fp32 (heads, 2 * max_distance + 16): the bias of key j for query i at ``max_distance + j - i``."""
        distance = torch.arange(-max_distance, max_distance + 16)
        return self.weight.float()[self.to_bucket(distance)].t().contiguous()


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention; ``qkv`` has num_heads * head_dim, then twice num_kv_heads * head_dim outputs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: LinearSpec
    out: LinearSpec
    scale: float
    rope: RopeTable | None = None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    sliding_window: int = 0
    softcap: float = 0.0
    # ALiBi's (heads,) slopes (Press et al. 2022).
    alibi_slopes: Tensor | None = None
    relative_bias: RelativePositionBias | None = None


@dataclass(frozen=True)
class CrossAttentionSpec:
    """Attention to the encoder states: x += out(attend(q(norm(x)), kv(states))), then ``residual_norm``.

    Heads are as wide and as many as the layer's self-attention has, whose blocks hold its keys and values.
    """

    norm: NormSpec | None
    q: LinearSpec
    # kv_heads * dim keys, then as many values.
    kv: LinearSpec
    out: LinearSpec
    scale: float
    residual_norm: NormSpec | None = None


@dataclass(frozen=True)
class MLPSpec:
    """down(act(up(x))), or down(act(gate) * value) where ``up`` yields gate and value one after the other."""

    up: LinearSpec
    down: LinearSpec
    activation: str
    gated: bool


@dataclass(frozen=True)
class MoESpec:
    """A mixture: the router's softmax picks ``top_k`` of the stacked experts for each token."""

    router: Tensor
    # (experts, 2 * inner, width): gate and value.
    up: Tensor
    # (experts, width, inner).
    down: Tensor
    top_k: int
    norm_topk_prob: bool
    activation: str
    shared_expert: MLPSpec | None = None
    # (1, width): its sigmoid scales the shared expert.
    shared_expert_gate: Tensor | None = None
    # Which of the router's experts ``up`` and ``down`` begin with, where they are a shard of all.
    first_expert: int = 0
    # Each expert's two products, where a runner has packed them; ``up`` and ``down`` are empty then.
    packed_experts: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] | None = None

    @property
    def num_experts(self) -> int:
        """How many experts are here."""
        return len(self.up) if self.packed_experts is None else len(self.packed_experts)


@dataclass(frozen=True)
class DecoderLayerSpec:
    """x += post_attn_norm(attention(attn_norm(x))); cross; x += post_mlp_norm(mlp(mlp_norm(x))).

    ``parallel_residual``: both read the same x.

    ``attn_residual_norm`` and ``mlp_residual_norm`` normalise x itself after each sum, as the first transformers did.
    """

    attn_norm: NormSpec | None
    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    mlp_norm: NormSpec | None
    parallel_residual: bool = False
    post_attn_norm: NormSpec | None = None
    post_mlp_norm: NormSpec | None = None
    attn_residual_norm: NormSpec | None = None
    mlp_residual_norm: NormSpec | None = None
    cross_attention: CrossAttentionSpec | None = None


@dataclass(frozen=True)
class _StackSpec:
    vocab_size: int
    hidden_size: int
    max_length: int
    embed: Tensor
    layers: Sequence[DecoderLayerSpec]
    final_norm: NormSpec | None = None
    embed_scale: float = 1.0
    embed_norm: NormSpec | None = None
    # (length, width) learned positions, offset applied; in an encoder token types of the only kind added.
    position_embeddings: Tensor | None = None


@dataclass(frozen=True)
class EncoderSpec(_StackSpec):
    """A stack in which every token sees the whole of its sequence."""

    # A token that takes no position: wherever it stands it has the table's first row, and others count from
    # the second.  -1: there is none.
    pad_token_id: int = -1

    def position_ids(self, tokens: Tensor) -> Tensor:
        """Return which rows of ``position_embeddings`` the tokens of a sequence have."""
        if self.pad_token_id < 0:
            return torch.arange(len(tokens), device=tokens.device)
        not_pad = (tokens != self.pad_token_id).long()
        return not_pad.cumsum(0) * not_pad


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(_StackSpec):
    """A causal language model, or the decoder of a model with an ``encoder``."""

    lm_head: LinearSpec
    # What ``final_norm`` multiplies by on behalf of the logits: the model's own last states are without it.
    final_norm_scale: float = 1.0
    logit_softcap: float = 0.0
    encoder: EncoderSpec | None = None


def map_linears(part: Any, change: Callable[[LinearSpec], LinearSpec]) -> Any:
    """Return a description with its linear layers changed; a part in which none is stays the same object."""
    if isinstance(part, LinearSpec):
        return change(part)
    if isinstance(part, list | tuple):
        items = [map_linears(item, change) for item in part]
        return items if any(new is not old for new, old in zip(items, part, strict=True)) else part
    if not is_dataclass(part) or isinstance(part, type):
        return part
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    changed = {key: new for key, value in values.items() if (new := map_linears(value, change)) is not value}
    return replace(part, **changed) if changed else part


def list_linears(part: Any) -> list[LinearSpec]:
    """Return a description's linear layers, in an order that its structure alone gives."""
    return list(_walk(part, LinearSpec))


def list_tensors(part: Any) -> Iterator[Tensor]:
    """Yield the tensors of a description but for the weights of its linear layers, in an order that its structure alone
    gives."""
    return _walk(part, Tensor)


def _walk(part: Any, kind: type) -> Iterator[Any]:
    if isinstance(part, kind):
        yield part
    elif isinstance(part, LinearSpec):
        yield from _walk(part.bias, kind)
    elif isinstance(part, Sequence) and not isinstance(part, str):
        for item in part:
            yield from _walk(item, kind)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from _walk(getattr(part, field.name), kind)


def get_max_model_len(spec: DecoderSpec | EncoderSpec, requested: int | None) -> int:
    """Return the longest sequence for a described model: the tokens requested (``max_model_len``), or its own.

    Relative positions, and an encoder's without learned ones, have no end of their own.
    """
    is_unbounded = spec.position_embeddings is None and (isinstance(spec, EncoderSpec) or spec.encoder is not None)
    return requested or spec.max_length if is_unbounded else limit_length(spec.max_length, requested)


def stretch_length(c: Any, length: int) -> int:
    """Return how many positions a model has whose config names ``length``: more where YaRN or a factor stretches them.

    What ``dynamic`` stretches is described up to ``length`` alone.
    """
    rope = getattr(c, "rope_parameters", None) or getattr(c, "rope_scaling", None) or {}
    if rope.get("rope_type") not in ("yarn", "linear"):
        return length
    return max(length, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or length)))


def length_unsupported_reason(spec: DecoderSpec, config: EngineConfig) -> str | None:
    """Return why a description does not hold for the longest sequence, or None where it does."""
    max_length = get_max_model_len(spec, config.max_model_len)
    rope_limits = [x.attention.rope.max_valid_length for x in spec.layers if x.attention.rope is not None]
    rope_limit = min((x for x in rope_limits if x), default=max_length)
    if max_length > rope_limit:
        return f"positions that change with lengths above {rope_limit}, which max_model_len may set"
    return None


_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


def activation_name(name: Any) -> str:
    """Return our name of one of Hugging Face's activations, or raise UnsupportedModelError."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r}")
    return _ACTIVATIONS[name]


def build_linear(*modules: nn.Module) -> LinearSpec:
    """Stack the weights of several nn.Linear (or Hugging Face's Conv1D) along their outputs."""
    weights, biases = [], []
    for module in modules:
        weight: Any = module.weight
        if type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "dequantize"):
            weight = weight.dequantize()  # a tensor of numbers in somebody's own format
        transposed = type(module).__name__ == "Conv1D"
        if not transposed and not isinstance(module, nn.Linear):
            raise UnsupportedModelError(f"a linear layer of type {type(module).__name__}")
        weights.append((weight.t() if transposed else weight).detach())
        bias: Any = getattr(module, "bias", None)
        biases.append(None if bias is None else bias.detach())
    stacked = weights[0] if len(weights) == 1 else lambda: torch.cat(weights)
    shape = (sum(w.shape[0] for w in weights), weights[0].shape[1])
    copy = partial(_copy_stacked, weights)
    filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    bias = None if all(b is None for b in biases) else filled[0] if len(filled) == 1 else torch.cat(filled)
    return LinearSpec(stacked, bias, shape, modules=modules, copy_rows_fn=copy)


def _copy_stacked(weights: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
    """Copy rows ``start`` to ``stop`` of the stack."""
    offset = 0
    for weight in weights:
        first, last = max(start - offset, 0), min(stop - offset, len(weight))
        if first < last:
            out[offset + first - start : offset + last - start] = weight[first:last]
        offset += len(weight)


def permute_outputs(layer: LinearSpec, permutation: Tensor) -> LinearSpec:
    """Return the layer with its outputs in another order."""
    bias = None if layer.bias is None else layer.bias[permutation]
    combined = permutation if layer.output_permutation is None else layer.output_permutation[permutation]
    shape = (len(permutation), layer.in_features)
    runs = [0, *(torch.where(permutation.diff() != 1)[0] + 1).tolist(), len(permutation)]  # of neighbours
    ranges = [(int(permutation[first]), int(permutation[last - 1]) + 1) for first, last in pairwise(runs)]
    copy = partial(layer.copy_ranges, ranges)
    order: dict[str, Any] = {"modules": layer.modules, "output_permutation": combined, "copy_rows_fn": copy}
    return LinearSpec(lambda: layer.weight[permutation], bias, shape, **order)


def deinterleave_qkv(layer: LinearSpec, num_heads: int, head_dim: int) -> LinearSpec:
    """Sort outputs that come as (head, q/k/v, dim) into all queries, all keys, all values."""
    permutation = torch.arange(num_heads * 3 * head_dim).view(num_heads, 3, head_dim).transpose(0, 1).reshape(-1)
    return permute_outputs(layer, permutation)


def build_layer_norm(module: Any) -> NormSpec:
    """Describe an nn.LayerNorm, or a family's own."""
    raw_bias = getattr(module, "bias", None)
    weight = torch.ones(module.normalized_shape) if module.weight is None else module.weight.detach()
    bias = torch.zeros_like(weight) if raw_bias is None else raw_bias.detach()
    return NormSpec("layer", weight, bias, _norm_eps(module))


def _norm_eps(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def build_rms_norm(module: Any, offset: float = 0.0) -> NormSpec:
    """Describe an RMS norm; ``offset`` is added to its weight (Gemma stores weight - 1)."""
    weight = module.weight.detach()
    return NormSpec("rms", weight if offset == 0 else weight.float() + offset, None, _norm_eps(module))


def build_norm(module: Any) -> NormSpec:
    """Describe a norm by its type."""
    return build_layer_norm(module) if isinstance(module, nn.LayerNorm) else build_rms_norm(module)


def build_attention(
    qkv: LinearSpec,
    out: nn.Module,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int = 0,
    scale: float | None = None,
    **fields: Any,
) -> AttentionSpec:
    """Describe self-attention: where nothing else is said, each head has keys and values of its own, and scores are
    divided by the root of ``head_dim``."""
    scale = float(head_dim**-0.5) if scale is None else scale
    return AttentionSpec(num_heads, num_kv_heads or num_heads, head_dim, qkv, build_linear(out), scale, **fields)


def build_plain_mlp(up: nn.Module, down: nn.Module, activation: Any) -> MLPSpec:
    """Describe an MLP without a gate."""
    return MLPSpec(build_linear(up), build_linear(down), activation_name(activation), gated=False)


def build_layer(
    attention: AttentionSpec, mlp: MLPSpec, first: Any, second: Any, *, post_norm: bool = False, **fields: Any
) -> DecoderLayerSpec:
    """Describe a layer whose two norms stand before attention and MLP or, ``post_norm``, behind their sums with x."""
    before, after = build_norm(first), build_norm(second)
    if post_norm:
        fields |= {"attn_residual_norm": before, "mlp_residual_norm": after}
    norms = (None, None) if post_norm else (before, after)
    return DecoderLayerSpec(norms[0], attention, mlp, norms[1], **fields)


def assemble_decoder(
    model: Any, layers: Sequence[DecoderLayerSpec], final_norm: NormSpec | None, *, max_length: int = 0, **fields: Any
) -> DecoderSpec:
    """Describe a decoder by its layers and what is the same in all of Hugging Face's."""
    c, head = model.config, model.get_output_embeddings()
    sizes = {"vocab_size": c.vocab_size, "hidden_size": c.hidden_size}
    sizes["max_length"] = max_length or stretch_length(c, c.max_position_embeddings)
    fields.setdefault("embed", model.get_input_embeddings().weight.detach())
    fields.setdefault("lm_head", build_linear(head))
    return DecoderSpec(**sizes, layers=layers, final_norm=final_norm, **fields)


def build_rope(module: Any, max_length: int, *args: Any, interleaved: bool = False) -> RopeTable:
    """Tabulate a Hugging Face rotary embedding for positions below ``max_length``, or for those it is stretched to.

    ``interleaved``: it turns neighbouring dims, not those of two halves.
    """
    rope_type: Any = getattr(module, "rope_type", "default")
    if isinstance(rope_type, dict):
        rope_type = rope_type[args[0]]
    max_valid_length, max_length = 0, stretch_length(module.config, max_length)
    if rope_type == "dynamic":
        max_valid_length = module.original_max_seq_len
    elif rope_type == "longrope":
        parameters = module.config.rope_parameters
        max_valid_length = (parameters[args[0]] if args else parameters)["original_max_position_embeddings"]
    device = next(iter(module.buffers())).device
    x = torch.zeros(1, device=device)
    with torch.no_grad():
        for seq_len in (1, min(max_length, max_valid_length) if max_valid_length else max_length):
            # A module that has seen a longer sequence goes back to its first numbers with the short one.
            cos, sin = module(x, torch.arange(seq_len, device=device)[None], *args)
    dims = slice(None, None, 2) if interleaved else slice(cos.shape[-1] // 2)
    return RopeTable(cos[0, :, dims].contiguous(), sin[0, :, dims].contiguous(), interleaved, max_valid_length)
