"""Plans for the model families whose own config has none, or an incomplete one.

A rule maps the end of a module's name to its role; the first that fits counts.  Roles:

    query, key_value, out    the projections of attention, cut by whole heads
    qkv_fused, kv_fused      fused [q | k | v] or [k | v], one section behind the other
    qkv_interleaved          fused by head: q, k, v of head 0, then of head 1, ...
    gqa_interleaved          fused by key-value head: its queries, its key, its value
    column, row, gate_up_fused  a linear layer cut by outputs, by inputs, by outputs in two sections
    bias_table               an embedding whose columns are heads
    embedding, head          cut by vocabulary
    grad_all_reduce          whole parameters that see a part of the heads
    replicated               left alone

The parents of layers with a role of whole heads are attention.  What they keep of the whole model's numbers
(``LOCAL_ATTRIBUTES``, by name: ``query`` or ``key_value`` heads, query heads for each of the latter (``repeat``), or
``width``, query heads times head width) becomes this rank's; of ``config.attention`` the module gets a config of its
own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOCAL_ATTRIBUTES = {
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_heads", "n_head"), "query"),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), "key_value"),
    **dict.fromkeys(("split_size", "inner_dim", "all_head_size"), "width"),
    "num_key_value_groups": "repeat",
}
HEAD_ROLES = ("query", "key_value", "qkv_fused", "kv_fused", "qkv_interleaved", "gqa_interleaved")


@dataclass(frozen=True)
class Family:
    """Rules of one family; ``per_head_args``: arguments of its attention that carry all heads."""

    rules: Mapping[str, str]
    per_head_args: tuple[str, ...] = ()
    local_attributes: Mapping[str, str] = field(default_factory=LOCAL_ATTRIBUTES.copy)


_QKV = {"self_attn.q_proj": "query", "self_attn.k_proj": "key_value", "self_attn.v_proj": "key_value"}
_GATED_MLP = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
_DENSE_MLP = {"mlp.dense_h_to_4h": "column", "mlp.dense_4h_to_h": "row"}
_CROSS = {"crossattention.c_attn": "kv_fused", "crossattention.q_attn": "query", "crossattention.c_proj": "out"}
_T5_ATTENTION = {"q": "query", "k": "query", "v": "query", "o": "out", "relative_attention_bias": "bias_table"}
_LLAMA_NORMS = {"self_attn.q_norm": "grad_all_reduce", "self_attn.k_norm": "grad_all_reduce"}
_PHI_NORMS = {"self_attn.q_layernorm": "grad_all_reduce", "self_attn.k_layernorm": "grad_all_reduce"}

_GPT2 = Family({**_CROSS, "attn.c_attn": "qkv_fused", "attn.c_proj": "out", "mlp.c_fc": "column", "mlp.c_proj": "row"})
_LLAMA = Family({**_QKV, "self_attn.o_proj": "out", **_LLAMA_NORMS, **_GATED_MLP})
_PHI = Family({**_QKV, "self_attn.dense": "out", **_PHI_NORMS, "mlp.fc1": "column", "mlp.fc2": "row"})
_PHI3 = Family(
    {"self_attn.qkv_proj": "qkv_fused", "self_attn.o_proj": "out", "mlp.gate_up_proj": "gate_up_fused", **_GATED_MLP},
    local_attributes={**LOCAL_ATTRIBUTES, "config.num_attention_heads": "query"},
)
_OPT = Family({**_QKV, "self_attn.out_proj": "out", "fc1": "column", "fc2": "row"})
_BLOOM = Family(
    {"self_attention.query_key_value": "qkv_interleaved", "self_attention.dense": "out", **_DENSE_MLP}, ("alibi",)
)
_GPT_NEOX = Family({"attention.query_key_value": "qkv_interleaved", "attention.dense": "out", **_DENSE_MLP})
_FALCON = {
    kind: Family(
        {"self_attention.query_key_value": kind, "self_attention.dense": "out", **_DENSE_MLP},
        ("alibi", "attention_mask"),
    )
    for kind in ("gqa_interleaved", "qkv_fused", "qkv_interleaved")
}
_T5 = Family(
    {f"{block}.{name}": r for block in ("SelfAttention", "EncDecAttention") for name, r in _T5_ATTENTION.items()}
    | dict.fromkeys(("DenseReluDense.wi", "DenseReluDense.wi_0", "DenseReluDense.wi_1"), "column")
    | {"DenseReluDense.wo": "row"}
)
_BERT = Family(
    dict.fromkeys(("self.query", "self.key", "self.value"), "query")
    | {"attention.output.dense": "out", "intermediate.dense": "column", "output.dense": "row"}
)
_REFERENCE = Family(
    {"attention.qkv": "qkv_fused", "attention.proj": "out", "mlp.up": "column", "mlp.down": "row"}
    | {"wte": "embedding", "head": "head"}
)
FAMILIES: Mapping[str, Family] = (
    dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA)
    | {"gpt2": _GPT2, "phi": _PHI, "phi3": _PHI3, "opt": _OPT, "bloom": _BLOOM, "gpt_neox": _GPT_NEOX}
    | {"t5": _T5, "mt5": _T5, "bert": _BERT, "roberta": _BERT}
)


def get_family(model: Any) -> Family | None:
    """The family of a Hugging Face model by its ``model_type``, or of the reference GPT."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type == "falcon":
        if config.new_decoder_architecture:
            return _FALCON["gqa_interleaved"]
        return _FALCON["qkv_fused" if config.multi_query else "qkv_interleaved"]
    if model_type is None and f"{type(model).__module__}.{type(model).__qualname__}" == "thalweg.nn.transformer.GPT":
        return _REFERENCE
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None
