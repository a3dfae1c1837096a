"""Shapes that nobody chose: random ones of every described family give Hugging Face's tokens.

Heads 1 to 7 in any groups, widths that suit no vector, vocabularies of any size, every kind of rotation,
windows shorter than the prompt; prompts cut into pieces, and found again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.infer_models import DECODER_CONFIGS, greedy_generate, tiny_decoder
from thalweg.infer import EngineConfig, load_engine

pytestmark = pytest.mark.usefixtures("one_thread")
_FREE = ("llama", "mistral_window", "qwen3", "gemma", "gemma2", "mixtral", "qwen3_moe", "phi3_long")
_TIED = ("qwen2", "phi", "gpt_neox", "opt", "stablelm", "olmo", "cohere", "granite", "starcoder2", "smollm3")
"""Families whose heads have a width of their own, and such whose heads fill the model's."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(_FREE + _TIED))
    heads = draw(st.integers(1, 7))
    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    dim = draw(st.sampled_from([8, 12, 16, 20, 32, 48]))
    fields: dict[str, Any] = {
        "num_attention_heads": heads, "hidden_size": heads * dim, "vocab_size": draw(st.integers(64, 200)),
        "num_hidden_layers": draw(st.integers(1, 3)), "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    if name not in ("gpt_neox", "opt"):
        fields["num_key_value_heads"] = draw(st.sampled_from(groups))
    if name == "phi":
        fields["num_key_value_heads"] = heads
    inner = draw(st.sampled_from([24, 37, 48, 96]))
    fields["ffn_dim" if name == "opt" else "intermediate_size"] = inner
    if name == "opt":
        fields["word_embed_proj_dim"] = fields["hidden_size"]
    if name == "phi3_long":
        factors = {"short_factor": [1.0 + i / 9 for i in range(dim // 2)], "long_factor": [2.0] * (dim // 2)}
        fields["rope_parameters"] = DECODER_CONFIGS[name][1]["rope_parameters"] | factors
    elif name in _FREE:
        width = draw(st.sampled_from([heads * dim, heads * 16, heads * 24]))
        fields |= {"head_dim": dim, "hidden_size": width}
        fields["rope_parameters"] = draw(st.sampled_from(_ROTATIONS))
    if name in ("mistral_window", "gemma2", "starcoder2"):
        fields["sliding_window"] = draw(st.sampled_from([2, 5, 16, 17]))
    return name, fields


_BASE = {"rope_theta": 10000.0}
_ROTATIONS: list[dict[str, Any]] = [
    {"rope_type": "default", **_BASE},
    {"rope_type": "linear", "factor": 2.0, **_BASE},
    {"rope_type": "dynamic", "factor": 4.0, **_BASE},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **_BASE},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32, **_BASE},
]  # fmt: skip


@settings(max_examples=14, deadline=None, derandomize=True)
@given(shapes(), st.integers(0, 99), st.sampled_from([7, 24, 90]))
def test_tokens_equal_hugging_face(shape: tuple[str, dict[str, Any]], seed: int, step: int) -> None:
    name, fields = shape
    model = tiny_decoder(name, seed, **fields)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(fields["vocab_size"], (n,), generator=generator).tolist() for n in (1, 16, 41)]
    want = [model.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False)[0, len(p) :].tolist() for p in prompts]
    options = EngineConfig(dtype="fp32", max_num_seqs=3, max_model_len=64, max_num_batched_tokens=step)
    engine = load_engine(model, options)
    assert type(engine.runner).__name__ != "TransformersRunner", "every one of these is described"
    assert greedy_generate(engine, prompts, 6) == want
    assert greedy_generate(engine, prompts, 6) == want
    engine.close()
