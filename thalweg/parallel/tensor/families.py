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

``attributes`` are numbers that a model's attention keeps and that must become this rank's:
``query`` and ``key_value`` heads, or ``width`` (query heads times head width); of ``config.attention`` the
module gets a config of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """Rules of one family; ``attention_modules`` ends the names of the modules that hold ``local_attributes``."""

    rules: Mapping[str, str]
    attention_modules: tuple[str, ...]
    local_attributes: Mapping[str, str] = field(default_factory=dict)
    per_head_args: tuple[str, ...] = ()


_QKV = {"self_attn.q_proj": "query", "self_attn.k_proj": "key_value", "self_attn.v_proj": "key_value"}
_DENSE_MLP = {"mlp.dense_h_to_4h": "column", "mlp.dense_4h_to_h": "row"}

_GPT2 = Family(
    {
        "crossattention.c_attn": "kv_fused",
        "crossattention.q_attn": "query",
        "crossattention.c_proj": "out",
        "attn.c_attn": "qkv_fused",
        "attn.c_proj": "out",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    },
    attention_modules=("attn", "crossattention"),
    local_attributes={"num_heads": "query", "split_size": "width"},
)
_LLAMA = Family(
    {
        **_QKV,
        "self_attn.o_proj": "out",
        "self_attn.q_norm": "grad_all_reduce",
        "self_attn.k_norm": "grad_all_reduce",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    },
    attention_modules=("self_attn",),
    local_attributes={"num_key_value_groups": "repeat", "num_heads": "query", "num_key_value_heads": "key_value"},
)
_PHI = Family(
    {
        **_QKV,
        "self_attn.dense": "out",
        "self_attn.q_layernorm": "grad_all_reduce",
        "self_attn.k_layernorm": "grad_all_reduce",
        "mlp.fc1": "column",
        "mlp.fc2": "row",
    },
    attention_modules=("self_attn",),
    local_attributes={"num_key_value_groups": "repeat"},
)
_PHI3 = Family(
    {
        "self_attn.qkv_proj": "qkv_fused",
        "self_attn.o_proj": "out",
        "mlp.gate_up_proj": "gate_up_fused",
        "mlp.down_proj": "row",
    },
    attention_modules=("self_attn",),
    local_attributes={
        "num_key_value_groups": "repeat",
        "num_key_value_heads": "key_value",
        "config.num_attention_heads": "query",
    },
)
_OPT = Family(
    {**_QKV, "self_attn.out_proj": "out", "fc1": "column", "fc2": "row"},
    attention_modules=("self_attn",),
    local_attributes={"num_heads": "query"},
)
_BLOOM = Family(
    {"self_attention.query_key_value": "qkv_interleaved", "self_attention.dense": "out", **_DENSE_MLP},
    attention_modules=("self_attention",),
    local_attributes={"num_heads": "query"},
    per_head_args=("alibi",),
)
_GPT_NEOX = Family(
    {"attention.query_key_value": "qkv_interleaved", "attention.dense": "out", **_DENSE_MLP},
    attention_modules=("attention",),
)
_FALCON = {
    kind: Family(
        {"self_attention.query_key_value": kind, "self_attention.dense": "out", **_DENSE_MLP},
        attention_modules=("self_attention",),
        local_attributes={"num_heads": "query", "num_kv_heads": "key_value"},
        per_head_args=("alibi", "attention_mask"),
    )
    for kind in ("gqa_interleaved", "qkv_fused", "qkv_interleaved")
}
_T5 = Family(
    {
        **{
            f"{block}.{name}": role
            for block in ("SelfAttention", "EncDecAttention")
            for name, role in (
                ("q", "query"),
                ("k", "query"),
                ("v", "query"),
                ("o", "out"),
                ("relative_attention_bias", "bias_table"),
            )
        },
        "DenseReluDense.wi": "column",
        "DenseReluDense.wi_0": "column",
        "DenseReluDense.wi_1": "column",
        "DenseReluDense.wo": "row",
    },
    attention_modules=("SelfAttention", "EncDecAttention"),
    local_attributes={"n_heads": "query", "inner_dim": "width"},
)
_BERT = Family(
    {
        "self.query": "query",
        "self.key": "query",
        "self.value": "query",
        "attention.output.dense": "out",
        "intermediate.dense": "column",
        "output.dense": "row",
    },
    attention_modules=("attention.self", "crossattention.self"),
    local_attributes={"num_attention_heads": "query", "all_head_size": "width"},
)
_REFERENCE = Family(
    {
        "attention.qkv": "qkv_fused",
        "attention.proj": "out",
        "mlp.up": "column",
        "mlp.down": "row",
        "wte": "embedding",
        "head": "head",
    },
    attention_modules=("attention",),
    local_attributes={"n_head": "query"},
)

FAMILIES: Mapping[str, Family] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "phi": _PHI,
    "phi3": _PHI3,
    "opt": _OPT,
    "bloom": _BLOOM,
    "gpt_neox": _GPT_NEOX,
    "t5": _T5,
    "mt5": _T5,
    "bert": _BERT,
    "roberta": _BERT,
}


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
