"""Batched, chunked, preempted, cancelled and prefix-sharing decoding equals one-by-one, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.engine.engine import LLMEngine
from thalweg.ops import cpu_kernels

RUNNER = "torch" if cpu_kernels.unsupported_reason() else "cpu"
BASE = [(7 * i * i + 3) % 131 for i in range(80)]
Key = tuple[tuple[int, ...], tuple[tuple[str, Any], ...]]


@cache
def engine_of(blocks: int) -> LLMEngine:
    torch.set_num_threads(1)
    model = tiny_decoder("qwen3")
    per_block = 3 * 2 * 2 * 32 * 4 * 16
    options = EngineConfig(
        dtype="fp32", max_num_seqs=5, max_model_len=128, max_num_batched_tokens=160, kv_cache_bytes=blocks * per_block
    )
    engine = load_engine(model, options, runner=RUNNER)
    assert engine.runner.num_blocks == blocks
    return engine


def fresh(blocks: int, step_tokens: int, prefix_cache: bool, max_batch: int = 5) -> LLMEngine:
    """An engine of its own around the runner that all examples share."""
    shared = engine_of(blocks)
    return LLMEngine(
        shared.runner, shared.metadata, max_num_seqs=max_batch, max_num_batched_tokens=step_tokens,
        prefix_cache=prefix_cache,
    )  # fmt: skip


def drain(engine: LLMEngine, got: dict[str, list[Any]]) -> None:
    for output in engine.step():
        sample = got.setdefault(f"{output.request_id}/{output.index}", [])
        for token, logprob in zip(output.token_ids, output.logprobs or (None,), strict=False):
            # The plain operators add up in an order that depends on the batch; the native kernels do not.
            exact = RUNNER == "cpu" and logprob is not None
            sample.append((token, logprob.logprob if exact else None))


@cache
def alone(prompt: tuple[int, ...], settings_of: tuple[tuple[str, Any], ...]) -> dict[str, list[Any]]:
    """What the request gives on a roomy engine with nobody else, its prompt in one piece."""
    engine = fresh(40, 160, prefix_cache=False)
    engine.add(Request("r", prompt, SamplingParams(**dict(settings_of))))
    got: dict[str, list[Any]] = {}
    while engine.has_work():
        drain(engine, got)
    return {name.partition("/")[2]: tokens for name, tokens in got.items()}


requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # length of the prompt: all of them share beginnings
        st.sampled_from([None, 0, 1]),  # what is put before it, if anything
        st.integers(1, 24),  # tokens to generate
        st.sampled_from([0.0, 0.8]),
        st.sampled_from([1, 1, 1, 2]),  # samples
        st.integers(0, 12),  # the step before which it arrives
        st.one_of(st.none(), st.none(), st.integers(1, 20)),  # cancelled so many steps later
        st.integers(-1, 1),  # priority
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=16, deadline=None)
@given(requests, st.integers(7, 14), st.integers(1, 40), st.booleans())
def test_any_company_gives_the_same_tokens(
    wanted: list[Any], blocks: int, step_tokens: int, prefix_cache: bool
) -> None:
    engine = fresh(7 if blocks < 10 else 14, step_tokens, prefix_cache)
    arrivals: dict[int, list[Any]] = {}
    cancels: dict[int, list[str]] = {}
    want: dict[str, list[Any]] = {}
    cancelled = set()
    for number, (length, before, count, heat, samples, arrival, cancel, priority) in enumerate(wanted):
        prompt = (*(() if before is None else (before,)), *BASE[:length])
        fields = (("logprobs", 0), ("max_tokens", count), ("n", samples), ("seed", 5), ("temperature", heat))
        params = SamplingParams(**dict(fields))
        arrivals.setdefault(arrival, []).append(Request(str(number), prompt, params, priority=priority))
        if cancel is not None:
            cancels.setdefault(arrival + cancel, []).append(str(number))
            cancelled.add(str(number))
        for index, tokens in alone(prompt, fields).items():
            want[f"{number}/{index}"] = tokens
    got: dict[str, list[Any]] = {}
    step = 0
    while arrivals or engine.has_work():
        for request in arrivals.pop(step, []):
            engine.add(request)
        for name in cancels.pop(step, []):
            engine.abort(name)
        drain(engine, got)
        step += 1
        assert step < 2000, "no progress"
    for name, tokens in want.items():
        if name.split("/")[0] in cancelled:
            assert got.get(name, []) == tokens[: len(got.get(name, []))]
        else:
            assert got[name] == tokens, name
    assert engine.stats().kv_blocks_used == 0 and engine.stats().running == 0


def test_the_cases_do_preempt_and_do_hit_prefixes() -> None:
    """What the property test is worth: under the same pressure both things happen, and blocks return."""
    engine = fresh(7, 40, prefix_cache=True)
    for number in range(5):
        engine.add(Request(str(number), BASE[:17], SamplingParams(temperature=0, max_tokens=40)))
    got: dict[str, list[Any]] = {}
    peak = 0
    while engine.has_work():
        drain(engine, got)
        peak = max(peak, engine.stats().kv_blocks_used)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.cached_tokens > 0 and peak >= 6
    assert stats.kv_blocks_used == 0 and stats.finished == {"length": 5}


def test_a_prompt_that_is_put_back_amid_its_pieces_is_scored_once() -> None:
    """It comes back with pieces of another size, which begin before what was scored and end behind it."""
    engine = fresh(14, 4, prefix_cache=True)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    for number in range(3):
        plain = SamplingParams(temperature=0, max_tokens=70)
        engine.add(Request(str(number), BASE[number : number + 17], plain))
    while engine.stats().generated_tokens < 3:
        engine.step()
    engine.add(Request("scored", BASE[:60], scored))
    found: list[Any] = []
    put_back = 0
    while engine.has_work():
        for output in engine.step():
            found += output.prompt_logprobs or ()
        put_back = put_back if found else engine.stats().preemptions
    assert put_back, "the case does what it is for"
    alone = fresh(40, 160, prefix_cache=False)
    alone.add(Request("scored", BASE[:60], scored))
    want = [x for output in alone.step() for x in output.prompt_logprobs or ()]
    assert [x and x.token_id for x in found] == [None, *BASE[1:60]]
    for one, other in zip(found[1:], want[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_cache_that_mixes_prefixes_up_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: blocks found by their tokens alone, whatever came before them."""
    from thalweg.infer.engine.scheduler import BlockPool

    honest = BlockPool.cache_block

    def careless(self: Any, block: int, before: Any, tokens: Any) -> Any:
        honest(self, block, "", tokens)
        return ""

    def match(self: Any, tokens: Any, root: Any, require_full: bool = False) -> Any:
        blocks = []
        for start in range(0, (len(tokens) - 1) // 16 * 16, 16):
            found = self._block_by_key.get(("", tuple(tokens[start : start + 16])))
            if found is None:
                break
            blocks.append(found[0])
        return blocks, sum(self._ref_counts[b] == 0 for b in blocks)

    monkeypatch.setattr(BlockPool, "cache_block", careless)
    monkeypatch.setattr(BlockPool, "find_prefix", match)
    engine = fresh(14, 160, prefix_cache=True)
    fields = (("logprobs", 0), ("max_tokens", 8), ("temperature", 0.0))
    prompts = [tuple([1] * 16 + BASE[:16] + [5]), tuple([2] * 16 + BASE[:16] + [5])]
    prompts.append((*[1] * 16, *BASE[:16], 5))
    mixed = tuple(BASE[:16] + [9] * 16 + [5])
    got: dict[str, list[Any]] = {}
    for number, prompt in enumerate([*prompts, mixed]):
        engine.add(Request(str(number), prompt, SamplingParams(**dict(fields))))
        while engine.has_work():
            drain(engine, got)
    assert got["3/0"] != alone(mixed, fields)["0"]
