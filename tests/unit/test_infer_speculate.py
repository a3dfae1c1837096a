"""Guessed tokens change the number of steps, never a token, a text or a log-probability."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.infer_models import tiny
from thalweg.infer import EngineOptions, Request, SamplingParams, load_engine
from thalweg.infer.speculate import Lookup
from thalweg.ops import native


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Two models: one whose greedy output soon repeats itself, one that is drawn from."""
    torch.set_num_threads(1)
    return [tiny("llama"), tiny("gpt2")]


def work(model: Any, speculate: int, seed: int, runner: str | None = None) -> tuple[dict[Any, Any], Any]:
    """Serve a random load; return what every sequence got, and the engine's counters."""
    options = EngineOptions(
        dtype="fp32", max_batch=5, max_length=100, max_step_tokens=40, speculate=speculate,
        kv_memory=160 * 1024, batch_invariant=runner is not None,
    )  # fmt: skip
    engine = load_engine(model, options, runner=runner)
    generator = random.Random(seed)
    for number in range(7):
        piece = [generator.randrange(131) for _ in range(generator.randrange(2, 9))]
        params = SamplingParams(
            temperature=generator.choice((0, 0, 0.4)), seed=number, n=generator.choice((1, 1, 2)),
            max_tokens=generator.randrange(1, 40), logprobs=2,
            repetition_penalty=generator.choice((1, 1, 1.1)),
            stop_token_ids=(generator.randrange(131),),
        )  # fmt: skip
        engine.add(Request(str(number), piece * generator.randrange(1, 5), params))
    found: dict[Any, Any] = {}
    while engine.has_work():
        for output in engine.step():
            entry = found.setdefault((output.request_id, output.index), [])
            entry += [(x.token_id, x.logprob, x.top) for x in output.logprobs or ()]
            if output.finished:
                entry.append((output.finish_reason, output.stop_reason, output.num_generated_tokens))
    return found, engine.stats()


@pytest.mark.skipif(bool(native.missing("fp32")), reason=native.missing("fp32"))
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.sampled_from((1, 3, 7)), st.integers(0, 1))
def test_the_output_is_the_same_in_fewer_steps(models: Any, seed: int, speculate: int, which: int) -> None:
    want, plain = work(models[which], 0, seed)
    got, stats = work(models[which], speculate, seed)
    assert got == want
    assert stats.generated_tokens == plain.generated_tokens and plain.guessed_tokens == 0
    assert stats.steps <= plain.steps and stats.guessed_right <= stats.guessed_tokens
    assert stats.kv_blocks_used == 0


def test_other_runners_and_a_text_that_repeats_itself(models: Any) -> None:
    want, _ = work(models[0], 0, 3, "eager")
    got, stats = work(models[0], 4, 3, "eager")
    assert got == want and stats.guessed_tokens > 0
    _, foreign = work(models[0], 4, 3, "foreign")
    assert foreign.guessed_tokens == 0
    # A model that always says the same: nearly every guess is right.
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    steps = {}
    for speculate in (0, 6):
        options = EngineOptions(dtype="fp32", max_batch=1, max_length=100, speculate=speculate)
        engine = load_engine(model, options)
        engine.add(Request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=60)))
        while engine.has_work():
            engine.step()
        steps[speculate] = engine.stats().steps
    assert steps[0] == 60 and steps[6] <= 16


def test_the_lookup_finds_what_followed() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    assert Lookup().guess(tokens, 3) == [4, 9, 1]
    assert Lookup().guess([1, 2, 5, 2, 1, 2], 2) == [5, 2]
    assert Lookup().guess([7, 7, 7], 5) == [7] * 5
    assert Lookup().guess([1, 2, 3], 4) == [] and Lookup().guess([1], 4) == []
    lookup, grown = Lookup(), [1, 2]
    for token in (3, 1, 2):  # grows as the text does, and the latest place counts
        lookup.guess(grown, 1)
        grown.append(token)
    assert lookup.guess(grown, 2) == [3, 1]
