"""fp16 attention on a CPU in fp32: for one model, by name; the others stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch

from thalweg.ops.attention import upcast

transformers = pytest.importorskip("transformers")


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**small, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=64)
    config._attn_implementation = "sdpa"
    return transformers.LlamaForCausalLM(config).half().eval()


def test_one_model_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcast, "upcast_is_faster", lambda: True)
    plain, model = build(), build()
    calls = []
    whole = upcast.F.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *args, **kwargs: calls.append(q.dtype) or whole(q, *args, **kwargs),
    )
    tokens = torch.randint(61, (2, 20))
    padding = torch.ones_like(tokens)
    padding[0, :5] = 0
    assert upcast.apply_upcast_sdpa(model)
    exact = copy.deepcopy(plain).float()
    for mask in (None, padding):
        calls.clear()
        wide = model(input_ids=tokens, attention_mask=mask).logits
        assert set(calls) == {torch.float32} and wide.dtype == torch.float16
        calls.clear()
        narrow = plain(input_ids=tokens, attention_mask=mask).logits
        assert set(calls) == {torch.float16}
        want = exact(input_ids=tokens, attention_mask=mask).logits
        real = slice(5, None) if mask is not None else slice(None)
        assert (wide - want)[:, real].abs().max() <= 1.5 * (narrow - want)[:, real].abs().max() + 1e-4
    assert plain.config._attn_implementation == "sdpa"


def test_what_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcast, "upcast_is_faster", lambda: True)
    assert not upcast.apply_upcast_sdpa(torch.nn.Linear(2, 2))
    eager = build()
    eager.set_attn_implementation("eager")
    assert not upcast.apply_upcast_sdpa(eager)
    monkeypatch.setattr(upcast, "upcast_is_faster", lambda: False)
    assert not upcast.apply_upcast_sdpa(build())


def test_the_measurement_gives_an_answer() -> None:
    assert upcast.upcast_is_faster() in (True, False)
