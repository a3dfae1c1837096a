"""Decoding steps that are one launch: CUDA graphs, by the stand-in of ``tests/fake_graphs.py``."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests import fake_graphs
from tests.fake_graphs import counts
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.infer_models import generate_ragged, tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.runners import torch_runner
from thalweg.infer.runners.base import ModelInput, QuerySpan

pytest.importorskip("transformers")
REUSE_RANKS = True
# Lengths of prompts, and how many tokens follow: sequences begin and end in the middle of others.
RAGGED = [(3, 30), (70, 9), (1, 44), (300, 25), (17, 3), (255, 12), (40, 18), (5, 5), (90, 21), (2, 33), (260, 8)]


def _generate(model: Any, device: str = "cpu", **options: Any) -> tuple[dict[str, list[int]], Any]:
    """Greedy tokens of ragged prompts, of which five run at a time, and the engine's runner."""
    sizes = {"max_num_seqs": 5, "max_model_len": 600, "max_num_batched_tokens": 400}
    config = EngineConfig(dtype="fp32", device=device, **{**sizes, **options})
    engine: Any = load_engine(model, config, runner="torch")
    return generate_ragged(engine, RAGGED), engine.runner


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = fake_graphs.module()
    monkeypatch.setattr(torch_runner, "graph_module", lambda device: fakes)


FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", nightly("bloom"), nightly("cohere")]
LONG = {"max_position_embeddings": 640}


def _model(family: str) -> Any:
    return tiny_decoder(family, **({"n_positions": 640} if family == "gpt2" else {} if family == "bloom" else LONG))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_single_launches(family: str, graphs: None) -> None:
    model = _model(family)
    plain, runner = _generate(model, enforce_eager=True)
    assert counts["captures"] == 0 and runner._graph_module is None
    found, runner = _generate(model)
    assert found == plain
    # Two lengths, 1 to 5 sequences at a time, and many more steps than buckets.
    assert counts["captures"] == len(runner._graphs) >= 4 and counts["replays"] > 40, counts
    assert {keys for _, keys in runner._graphs} == {256, 512} and {1, 4, 5} <= {rows for rows, _ in runner._graphs}


@pytest.mark.parametrize("fault", ["trash", "inputs"])
def test_the_comparison_would_notice(fault: str, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: rows without a sequence write to a sequence's block; a graph's inputs stay."""
    model = _model("llama")
    plain, _ = _generate(model, enforce_eager=True)
    if fault == "trash":
        decode = torch_runner.TorchRunner._decode

        def broken(self: Any, inputs: Any, num_rows: int, num_keys: int) -> Any:
            return decode(
                self, torch.where(inputs == self.num_blocks, inputs[2 * num_rows], inputs), num_rows, num_keys
            )

        monkeypatch.setattr(torch_runner.TorchRunner, "_decode", broken)
    else:
        capture = torch_runner.TorchRunner._capture

        def deaf(self: Any, key: Any, inputs: Any) -> Any:
            found: Any = capture(self, key, inputs)
            found.inputs = inputs.clone()
            return found

        monkeypatch.setattr(torch_runner.TorchRunner, "_capture", deaf)
    found, _ = _generate(model)
    assert found != plain


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": "int8"}, {"num_speculative_tokens": 2}, {"kv_cache_bytes": 64 * 16 * 3 * 2 * 2 * 16 * 4}],
    ids=["int8 cache", "lookup", "small cache"],
)
def test_options_that_graphs_go_along_with(options: dict[str, Any], graphs: None) -> None:
    model = _model("llama")
    plain, _ = _generate(model, enforce_eager=True, **options)
    found, _ = _generate(model, **options)
    assert found == plain and counts["replays"] > 20, counts


def test_the_graphs_that_are_kept_are_few(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runner, "_MAX_GRAPHS", 2)
    model = _model("llama")
    found, runner = _generate(model)
    assert len(runner._graphs) == 2 < counts["captures"] and found == _generate(model, enforce_eager=True)[0]


def test_sleep_drops_graphs_and_new_weights_are_captured_anew(graphs: None) -> None:
    model = _model("llama")
    engine: Any = load_engine(model, EngineConfig(dtype="fp32", device="cpu", max_num_seqs=2), runner="torch")

    def generate() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=12)
        return [t for x in engine.run_requests([Request("r", [1, 2, 3], params)]) for t in x.token_ids]

    first = generate()
    engine.sleep()
    assert not engine.runner._graphs and engine.runner._graph_logits is None
    from thalweg.infer.models import build_decoder_spec

    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.flip(0))
    engine.wake_up(build_decoder_spec(model))
    changed = generate()
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert changed == expected != first and engine.runner._graphs


def test_one_that_is_much_longer_than_the_others_is_not_padded_to(graphs: None) -> None:
    """Padding would cost more than launches: 8 times 4096 keys, where 2580 are there."""
    model = tiny_decoder("llama", max_position_embeddings=4096)
    engine: Any = load_engine(model, EngineConfig(dtype="fp32", device="cpu", max_num_seqs=8), runner="torch")
    batch = [QuerySpan(slot, 2500 if slot == 0 else 20, 1) for slot in range(5)]
    tables = [[slot] * 200 for slot in range(5)]
    step = ModelInput([1] * 5, batch, range(5), tables)
    assert engine.runner._run_graph(step) is None and engine.runner._graph_module is not None
    assert engine.runner._run_graph(ModelInput([1] * 4, batch[1:], range(4), tables[1:])) is not None


def test_a_capture_that_fails_says_why_once_and_steps_go_on(
    graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fake_graphs._Recorder, "__torch_dispatch__", fail)
    model = _model("llama")
    with caplog.at_level(logging.WARNING):
        found, runner = _generate(model)
    assert caplog.text.count("not permitted when stream is capturing") == 1
    assert found == _generate(model, enforce_eager=True)[0] and runner._graph_module is None


def _on_device(rank: int, world: int, family: str) -> tuple[Any, Any, dict[str, int]]:
    """On another device than the current one, where there are several."""
    from tests import simdevice

    device = f"{simdevice.accelerator()}:{(rank + 1) % world}"
    fakes = fake_graphs.module()
    torch_runner.graph_module = lambda device: fakes
    model = _model(family)
    plain, _ = _generate(model, device, enforce_eager=True)
    found, _ = _generate(model, device)
    return plain, found, dict(counts)


@pytest.mark.parametrize("family", ["llama", nightly("gemma2"), nightly("mixtral")])
def test_nothing_in_a_captured_step_waits_for_the_device_or_copies_from_the_host(family: str) -> None:
    ((plain, found, seen),) = run_ranks(_on_device, 1, family, device="simulated")
    assert found == plain and seen["replays"] > 40 > seen["captures"] > 0


def test_graphs_are_of_the_engines_device_whichever_is_the_current_one() -> None:
    """They were empty where that was another: each replay gave the logits of the capture."""
    for plain, found, seen in run_ranks(_on_device, 2, "llama", device="simulated"):
        assert found == plain and seen["replays"] > 40 > seen["captures"] > 0
