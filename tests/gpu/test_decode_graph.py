"""Decoding steps as CUDA graphs on a GPU: the tokens of steps that launch their kernels one by one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.unit.infer_models import generate_ragged, tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
    pytest.mark.usefixtures("without_tf32"),
]


def _model(family: str) -> Any:
    length = "n_positions" if family == "gpt2" else "max_position_embeddings"
    return tiny_decoder(family, **{length: 640}).cuda()


def _generate(model: Any, batch: int, **options: Any) -> tuple[dict[str, list[int]], Any]:
    """Greedy tokens of ragged prompts that end at different times, a few more of them than run together."""
    sizes = {"max_num_seqs": batch, "max_model_len": 600, "max_num_batched_tokens": 512}
    engine: Any = load_engine(model, EngineConfig(dtype="fp32", device="cuda", **sizes, **options), runner="torch")
    ragged = [((3, 70, 1, 245, 17, 300)[number % 6], 6 + 5 * number % 23) for number in range(batch + 2)]
    return generate_ragged(engine, ragged), engine


@pytest.mark.parametrize("batch", [1, 3, 8, 33])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_tokens_are_those_of_single_launches(family: str, batch: int, caplog: pytest.LogCaptureFixture) -> None:
    model = _model(family)
    plain, engine = _generate(model, batch, enforce_eager=True)
    assert not engine.runner._graphs
    engine.close()
    with caplog.at_level(logging.WARNING):
        found, engine = _generate(model, batch)
    assert "no CUDA graphs" not in caplog.text and engine.runner._graphs, caplog.text
    engine.close()
    assert found == plain


def test_the_comparison_would_notice_inputs_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: replays of what the capture saw."""
    from thalweg.infer.runners.torch_runner import TorchRunner

    model, capture, read = _model("llama"), TorchRunner._capture, []

    def deaf(self: Any, key: Any, inputs: Any) -> Any:
        found = capture(self, key, inputs)
        assert found is not None
        read.append(inputs)  # freed, they would be any numbers: an index out of bounds ends the process' CUDA
        return type(found)(found.graph, inputs.clone())

    plain, engine = _generate(model, 3, enforce_eager=True)
    engine.close()
    monkeypatch.setattr(TorchRunner, "_capture", deaf)
    found, engine = _generate(model, 3)
    engine.close()
    assert found != plain


def test_the_cache_leaves_room_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of free memory the engine takes 90%: capturing must not fail for want of the rest."""
    model = _model("llama")
    sizes: Any = {"max_num_seqs": 64, "max_model_len": 600}
    # As on a device of 1 GiB, without taking the rest from other processes.
    torch.cuda.empty_cache()
    total, all_bytes = torch.cuda.memory_reserved() + (1 << 30), torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda _=None: (total - torch.cuda.memory_reserved(), total)
    )
    torch.cuda.set_per_process_memory_fraction(total / all_bytes)
    try:
        engine: Any = load_engine(model, EngineConfig(dtype="fp32", device="cuda", **sizes), runner="torch")
        for number in range(64):
            engine.add(Request(str(number), [1 + number] * 200, SamplingParams(temperature=0, max_tokens=80)))
        while engine.has_work():
            assert all(output.error is None for output in engine.step())
        assert engine.runner._graphs and engine.runner._graph_module is not None
        engine.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
