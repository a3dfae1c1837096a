"""What people give the plan as a model: odd configs are errors in words, and the right class is taken."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.plan.source import open_source

pytest.importorskip("transformers")
SMALL = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 100}
SMALL |= {"encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1, "decoder_start_token_id": 2}
SMALL |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "bos_token_id": 3, "eos_token_id": 4}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'?"),
        ({"model_type": "gpt2", "n_embd": "abc"}, "n_embd"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 3, "n_layer": 1}, "num_heads"),
        ({"vocab_size": 64, "n_layer": 1, "n_head": 4, "n_embd": 66}, "not a multiple of n_head"),
        ({"vocab_size": "many", "n_layer": 1, "n_head": 4, "n_embd": 64}, "no model can be made"),
        ({"hidden_size": 64}, "no model_type"),
        ({}, "no model_type"),
    ],
)
def test_a_config_that_makes_no_model_is_an_error_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_source(fields)
    assert words in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model_type": "whisper", **SMALL}, "WhisperForConditionalGeneration"),
        ({"model_type": "bart", **SMALL}, "BartForConditionalGeneration"),
        (
            {"model_type": "opt", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "OPTFor",
        ),
        ({"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, "ViT"),
    ],
)
def test_the_class_that_is_trained_is_taken(fields: dict[str, Any], name: str) -> None:
    assert open_source(fields).name.startswith(name)
