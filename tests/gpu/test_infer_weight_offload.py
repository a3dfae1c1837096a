"""Weights that stay on the host and come to a GPU for each product; an 8-bit cache there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


def _tokens(model: Any, **fields: Any) -> list[int]:
    options = EngineConfig(**({"dtype": "fp32", "max_batch": 2, "max_length": 96} | fields))
    engine = load_engine(model, options)
    engine.add(Request("r", list(range(20)), SamplingParams(temperature=0, max_tokens=12)))
    found: list[int] = []
    while engine.has_work():
        for output in engine.step():
            found += output.token_ids
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_streamed_to_the_device(kind: str) -> None:
    model = tiny_decoder(kind)
    want = _tokens(model, device="cpu")
    torch.cuda.reset_peak_memory_stats()
    assert _tokens(model, device="cuda", stream="cpu") == want
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_a_cache_of_8_bits_on_the_device(cache: str) -> None:
    model = tiny_decoder("llama")
    assert len(_tokens(model.cuda(), device="cuda", kv_cache_dtype=cache)) == 12
