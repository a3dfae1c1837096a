"""Tiny Hugging Face models of each family, with the shapes that break tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB_SIZE = 67  # divides by no number of ranks
SEQ_LEN = 10


def _llama(kind: str, **changes: Any) -> nn.Module:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 46,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _gpt2(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=32, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **changes,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _gemma3() -> nn.Module:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=46, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, head_dim=8,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"], pad_token_id=0,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def _opt(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, ffn_dim=50, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, **changes,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def _bloom(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, **changes
    )
    return transformers.BloomForCausalLM(config)


def _neox(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.GPTNeoXConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=50, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, **changes,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def _falcon(**changes: Any) -> nn.Module:
    import transformers

    shape: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 32, **changes}
    config = transformers.FalconConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=2, max_position_embeddings=32, **shape)
    return transformers.FalconForCausalLM(config)


def _t5(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=46, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, **changes,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bert(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=50, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **changes,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _reference(**changes: Any) -> nn.Module:
    from thalweg.nn.transformer import GPT, GPTConfig

    shape: dict[str, Any] = {"n_head": 4, "n_embd": 32, "tied": True, **changes}
    return GPT(GPTConfig(vocab_size=VOCAB_SIZE, n_layer=2, block_size=32, **shape))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reference": _reference,
    "reference, 5 heads": lambda: _reference(n_head=5, n_embd=40, tied=False),
    "gpt2": _gpt2,
    "gpt2, eager": lambda: _gpt2(attn_implementation="eager"),
    "llama": lambda: _llama("Llama"),
    "llama, 4 heads on 1": lambda: _llama("Llama", num_key_value_heads=1),
    "llama, 6 heads on 3, tied": lambda: _llama(
        "Llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True
    ),
    "llama, biases": lambda: _llama("Llama", attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "mistral": lambda: _llama("Mistral"),
    "mistral, window": lambda: _llama("Mistral", sliding_window=4),
    "qwen2": lambda: _llama("Qwen2"),
    "qwen3": lambda: _llama("Qwen3", head_dim=8),
    "gemma": lambda: _llama("Gemma", head_dim=8),
    "gemma2": lambda: _llama("Gemma2", head_dim=8),
    "gemma3": lambda: _gemma3(),
    "phi": lambda: _llama("Phi", num_key_value_heads=4),
    "phi3, 6 heads on 2": lambda: _llama("Phi3", hidden_size=48, num_attention_heads=6),
    "opt": _opt,
    "bloom": _bloom,
    "gpt_neox": _neox,
    "falcon, multi-query": lambda: _falcon(multi_query=True),
    "falcon, 5 heads": lambda: _falcon(multi_query=True, num_attention_heads=5, hidden_size=40),
    "falcon, new": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon, new, 6 heads on 2": lambda: _falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_attention_heads=6, hidden_size=48
    ),
    "falcon, alibi": lambda: _falcon(multi_query=False, alibi=True),
    "t5": _t5,
    "flan-t5": lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bert": _bert,
    "mixtral": lambda: _llama("Mixtral", intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
}


def build_model(name: str, seed: int = 0) -> nn.Module:
    """The named model with reproducible weights, large enough that a mistake shows."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    scale = 1.0 if "t5" in name else 3.0  # T5 does not scale its attention by width
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(step: int, rows: int, length: int = SEQ_LEN) -> Tensor:
    """Token ids (rows, length) of a step, alike on every rank."""
    generator = torch.Generator().manual_seed(500 + step)
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)


def compute_loss(model: Any, tokens: Tensor) -> Tensor:
    """The model's own loss on a batch."""
    inner = getattr(model, "module", model)
    if not hasattr(inner, "main_input_name"):
        return model(tokens[:, :-1], tokens[:, 1:])
    return model(input_ids=tokens, labels=tokens).loss
