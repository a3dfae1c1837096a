"""Tiny random models of every family, in shapes that exercise their variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from thalweg.infer import Request, SamplingParams
from thalweg.infer.engine.engine import LLMEngine

_BASE = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 256}
_LLAMA = _BASE | {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_MOE = _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


def _long(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.1] * 4, "long_factor": [2.0, 3.5] * 4}
    return _rope("longrope", factor=4.0, original_max_position_embeddings=original, **factors)


DECODER_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "llama_bias_tied": (
        "Llama", _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama3_rope": (
        "Llama",
        _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral_window": ("Mistral", _LLAMA | {"sliding_window": 9}),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen3": ("Qwen3", _LLAMA | {"head_dim": 32}),
    "gemma": ("Gemma", _LLAMA | {"head_dim": 32}),
    "gemma2": (  # SDPA has no cap on scores, and transformers of before 5.23 takes it all the same
        "Gemma2",
        _LLAMA
        | {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 24, "attn_implementation": "eager"},
    ),
    "gemma3": ("Gemma3Text", _LLAMA | {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "phi": ("Phi", _LLAMA | {"num_key_value_heads": 4}),
    "phi3": ("Phi3", _LLAMA | {"pad_token_id": 0}),
    "gpt2": ("GPT2", {"vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "opt": (
        "OPT",
        _BASE | {"ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    ),
    "bloom": ("Bloom", {"vocab_size": 131, "hidden_size": 96, "n_layer": 3, "n_head": 6}),
    "gpt_neox": ("GPTNeoX", _BASE | {"intermediate_size": 96, "num_attention_heads": 2}),
    "gpt_neox_serial": (
        "GPTNeoX", _BASE | {"intermediate_size": 96, "num_attention_heads": 2, "use_parallel_residual": False}
    ),
    "falcon7": (
        "Falcon",
        _BASE | {"num_attention_heads": 4, "multi_query": True, "new_decoder_architecture": False},
    ),
    "falcon40": (
        "Falcon",
        _BASE
        | {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    ),
    "mixtral": ("Mixtral", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3Moe", _MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "odd_sizes": ("Llama", _LLAMA | {"hidden_size": 40, "intermediate_size": 37, "num_attention_heads": 4}),
    "gptj": (
        "GPTJ",
        {"vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    ),
    "stablelm": ("StableLm", _LLAMA | {"use_qkv_bias": True}),
    "stablelm_parallel": ("StableLm", _LLAMA | {"use_parallel_residual": True}),
    "olmo": ("Olmo", _LLAMA),
    "cohere": ("Cohere", _LLAMA | {"logit_scale": 0.3}),
    "starcoder2": ("Starcoder2", _LLAMA | {"sliding_window": 11, "use_bias": True}),
    "granite": (
        "Granite",
        _LLAMA
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
           "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3", _LLAMA | {"no_rope_layer_interval": 2}),
    "opt_350m": (
        "OPT",
        _BASE
        | {"ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    ),
    "dynamic_rope": ("Llama", _LLAMA | {"rope_parameters": _rope("dynamic", factor=4.0)}),
    "phi3_long": (
        "Phi3",
        _LLAMA
        | {"pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": _long(128)},
    ),
    # These run through their own modelling code.
    "falcon_alibi": (
        "Falcon", _BASE | {"num_attention_heads": 4, "alibi": True, "new_decoder_architecture": False}
    ),
    "phi3_longer": (  # the prompt of 40 tokens ends where the rotation of all positions changes
        "Phi3",
        _LLAMA | {"pad_token_id": 0, "original_max_position_embeddings": 43, "rope_parameters": _long(43)},
    ),
    "olmo2": ("Olmo2", _LLAMA),
    "mamba": ("Mamba", {"vocab_size": 131, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
}  # fmt: skip


_OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
_REASON = "before transformers 5.23 its generate reads a part of the prompt where phi3's rotation changes (5.17 seen)"


def in_generate(name: str) -> Any:
    """A parameter of tests that hold a decoder to its own ``generate``, which must be right itself."""
    return pytest.param(name, marks=pytest.mark.skipif(_OLD and name == "phi3_longer", reason=_REASON))


def tiny_decoder(name: str, seed: int = 0, **changes: Any) -> Any:
    """Build one, fp32, weights large enough that its outputs vary."""
    kind, fields = DECODER_CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**(fields | changes))
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}{suffix}")
    torch.manual_seed(seed)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "mixer" in label:
                continue  # decays and steps of states must stay what they are
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=scale)
            else:
                parameter.copy_(noise * scale)
    return model


_T5 = {
    "vocab_size": 131, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3,
    "num_heads": 3, "decoder_start_token_id": 0,
}  # fmt: skip
_GATED = _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_BART = {
    "vocab_size": 131, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 96,
    "decoder_start_token_id": 2,
}  # fmt: skip
SEQ2SEQ_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "flan_t5": ("T5", _GATED | {"relative_attention_max_distance": 24, "relative_attention_num_buckets": 12}),
    "mt5": ("MT5", _GATED),
    "umt5": ("UMT5", _T5),
    "bart": ("Bart", _BART | {"scale_embedding": True}),
    "mbart": ("MBart", _BART),
    "pegasus": ("Pegasus", _BART),
    "marian": ("MarianMT", _BART | {"activation_function": "swish", "pad_token_id": 0}),
    "blenderbot": ("Blenderbot", _BART),
    "m2m_100": ("M2M100", _BART | {"scale_embedding": False, "pad_token_id": 1}),
    "blenderbot_small": ("BlenderbotSmall", _BART),  # through its own modelling code
}
_BERT = _BASE | {"intermediate_size": 96, "num_attention_heads": 4}
ENCODER_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _BERT),
    "bert_masked_lm": ("BertForMaskedLM", _BERT | {"hidden_act": "gelu_new"}),
    "roberta": ("RobertaModel", _BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm_roberta": ("XLMRobertaModel", _BERT | {"pad_token_id": 1}),
    "distilbert": (
        "DistilBertModel",
        {"vocab_size": 131, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    ),
    "electra": ("ElectraModel", _BERT | {"embedding_size": 64}),
    "t5_encoder": ("T5EncoderModel", _T5),
    "mpnet": ("MPNetModel", _BERT),  # through its own modelling code
}


def tiny_encoder(name: str, seed: int = 0, **changes: Any) -> Any:
    """Build one that listens, or only encodes; large weights, none tied that need not be."""
    kind, fields = SEQ2SEQ_CONFIGS.get(name) or ENCODER_CONFIGS[name]
    family = kind.split("For")[0].removesuffix("EncoderModel").removesuffix("Model").removesuffix("MT")
    config = getattr(transformers, f"{family}Config")(**(fields | changes))
    torch.manual_seed(seed)
    suffix = "" if name in ENCODER_CONFIGS else "Model" if kind == "MarianMT" else "ForConditionalGeneration"
    model = getattr(transformers, f"{kind}{suffix}")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.3)
            else:
                wide = 1.0 if "relative" in label else parameter.shape[-1] ** 0.5
                parameter.copy_(noise * 1.5 / wide)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape, generator=generator) * 0.3)
    if name in SEQ2SEQ_CONFIGS:
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
        model.config.eos_token_id = None
    return model


def greedy_generate(engine: LLMEngine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` tokens after each prompt or source, all in flight at once; no block is held after that."""
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=count)))
    token_ids: dict[str, list[int]] = {str(n): [] for n in range(len(prompts))}
    while engine.has_work():
        for output in engine.step():
            token_ids[output.request_id] += output.token_ids
            assert output.num_prompt_tokens == len(prompts[int(output.request_id)])
    assert engine.stats().kv_blocks_used == 0
    return list(token_ids.values())


def generate_ragged(engine: LLMEngine, sizes: list[tuple[int, int]]) -> dict[str, list[int]]:
    """Greedy tokens of requests whose prompts have the first of ``sizes``, and which end after the second."""
    for number, (length, count) in enumerate(sizes):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine.add(Request(str(number), [(7 * i + 31 * number) % 131 for i in range(length)], params))
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found
