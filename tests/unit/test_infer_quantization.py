"""Quantised weights keep a trained model's perplexity: int8 within 0.5%, int4 within 3%; bf16 within 0.5%."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import nightly
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine


@pytest.fixture(scope="module")
def trained() -> tuple[Any, list[list[int]]]:
    """A byte-level Llama, trained on a module of the standard library, and held-out pieces of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    text = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    limit = len(text) - 2000
    for step in range(120):
        starts = torch.randint(limit - 64, (16,))
        batch = torch.stack([text[s : s + 64] for s in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * (1 - step / 120)
    held_out = [text[s : s + 128].tolist() for s in range(limit, len(text) - 128, 256)]
    return model.eval(), held_out


def perplexity(model: Any, pieces: list[list[int]], runner: str | None = None, **options: Any) -> float:
    """Score the pieces through the engine, in several steps each."""
    fields: dict[str, Any] = {"dtype": "fp32", "max_num_seqs": 4, "max_model_len": 160, "max_num_batched_tokens": 100}
    engine = load_engine(model, EngineConfig(**(fields | options)), runner=runner)
    for number, piece in enumerate(pieces):
        engine.add(Request(str(number), piece, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    scores: list[float] = []
    while engine.has_work():
        for output in engine.step():
            assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
            scores += [x.logprob for x in output.prompt_logprobs if x is not None]
    engine.close()
    assert len(scores) == sum(len(piece) - 1 for piece in pieces)
    return math.exp(-sum(scores) / len(scores))


@pytest.fixture(scope="module")
def exact(trained: Any) -> float:
    model, pieces = trained
    with torch.no_grad():
        losses = [model(input_ids=torch.tensor([p]), labels=torch.tensor([p])).loss.item() for p in pieces]
    value = math.exp(sum(losses) / len(losses))
    assert 2 < value < 20, "trained well below the 128 of chance"
    assert perplexity(model, pieces) == pytest.approx(value, rel=1e-5)
    return value


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"quantize": "int8"}, 0.005),
        ({"quantize": "int4"}, 0.03),
        ({"dtype": "bf16"}, 0.005),
        ({"kv_cache_dtype": "int8"}, 0.002),
        ({"quantize": "int8", "kv_cache_dtype": "int8"}, 0.005),
        ({"kv_cache_dtype": "fp8"}, 0.01),
    ],
    ids=["int8", "int4", "bf16", "cache8", "int8_cache8", "cache_fp8"],
)
@pytest.mark.parametrize("runner", [None, nightly("torch")])
def test_perplexity(trained: Any, exact: float, options: dict[str, Any], limit: float, runner: str) -> None:
    if runner == "torch" and "dtype" in options:
        pytest.skip("plain bf16 activations: torch's own rounding, not ours")
    if runner is None and options.get("kv_cache_dtype") == "fp8":
        pytest.skip("the native kernels keep 8 bits as int8")
    got = perplexity(*trained, runner=runner, **options)
    assert 0 < abs(got / exact - 1) < limit


def test_a_coarser_weight_would_be_noticed(trained: Any, exact: float) -> None:
    """Negative control: linear weights of three values."""
    import copy

    model, pieces = trained
    coarse = copy.deepcopy(model)
    with torch.no_grad():
        for module in coarse.modules():
            if isinstance(module, torch.nn.Linear):
                step = module.weight.abs().amax(1, keepdim=True)
                module.weight.copy_((module.weight / step).round() * step)
    assert perplexity(coarse, pieces) > 1.03 * exact
