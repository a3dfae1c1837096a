"""Guessed tokens change the number of steps, never a token, a text or a log-probability."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.infer_models import greedy_generate, tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.engine import engine as loop
from thalweg.infer.spec_decode.draft_model import DraftModelProposer
from thalweg.infer.spec_decode.ngram import NgramIndex
from thalweg.ops import cpu_kernels


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Two models: one whose greedy output soon repeats itself, one that is drawn from."""
    torch.set_num_threads(1)
    return [tiny_decoder("llama"), tiny_decoder("gpt2")]


def work(
    model: Any, speculate: int, seed: int, runner: str | None = None, draft: Any = None, num_requests: int = 7
) -> tuple[dict[Any, Any], Any]:
    """Serve a random load; return what every sequence got, and the engine's counters."""
    cache_bytes = None if runner == "transformers" else 160 * 1024 if draft is None else 320 * 1024
    options = EngineConfig(
        dtype="fp32", max_num_seqs=5, max_model_len=100, max_num_batched_tokens=40, num_speculative_tokens=speculate,
        kv_cache_bytes=cache_bytes, batch_invariant=runner is not None,
    )  # fmt: skip
    engine = load_engine(model, options, runner=runner, draft_model=draft)
    generator = random.Random(seed)
    for number in range(num_requests):
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


@pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.sampled_from((1, 3, 7)), st.integers(0, 1))
def test_the_output_is_the_same_in_fewer_steps(models: Any, seed: int, speculate: int, which: int) -> None:
    want, plain = work(models[which], 0, seed)
    got, stats = work(models[which], speculate, seed)
    assert got == want
    assert stats.generated_tokens == plain.generated_tokens and plain.draft_tokens == 0
    assert stats.accepted_tokens <= stats.draft_tokens
    assert stats.kv_blocks_used == 0
    # Of several requests a long one may come to its turn later, as others ended in another order: one alone never.
    want, plain = work(models[which], 0, seed, num_requests=1)
    got, stats = work(models[which], speculate, seed, num_requests=1)
    assert got == want and stats.steps <= plain.steps


def test_other_runners_and_a_text_that_repeats_itself(models: Any) -> None:
    want, _ = work(models[0], 0, 3, "torch")
    got, stats = work(models[0], 4, 3, "torch")
    assert got == want and stats.draft_tokens > 0
    _, foreign = work(models[0], 4, 3, "transformers")
    assert foreign.draft_tokens == 0
    # A model that always says the same: nearly every guess is right.
    model = tiny_decoder("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    steps = {}
    for speculate in (0, 6):
        options = EngineConfig(dtype="fp32", max_num_seqs=1, max_model_len=100, num_speculative_tokens=speculate)
        engine = load_engine(model, options)
        engine.add(Request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=60)))
        while engine.has_work():
            engine.step()
        steps[speculate] = engine.stats().steps
    assert steps[0] == 60 and steps[6] <= 16


def test_the_lookup_finds_what_followed() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    assert NgramIndex().propose(tokens, 3) == [4, 9, 1]
    assert NgramIndex().propose([1, 2, 5, 2, 1, 2], 2) == [5, 2]
    assert NgramIndex().propose([7, 7, 7], 5) == [7] * 5
    assert NgramIndex().propose([1, 2, 3], 4) == [] and NgramIndex().propose([1], 4) == []
    lookup, grown = NgramIndex(), [1, 2]
    for token in (3, 1, 2):  # grows as the text does, and the latest place counts
        lookup.propose(grown, 1)
        grown.append(token)
    assert lookup.propose(grown, 2) == [3, 1]


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 1000), st.sampled_from((1, 4)), st.sampled_from(("itself", "near", "other")))
def test_a_draft_model_changes_no_token(models: Any, seed: int, guesses: int, which: str) -> None:
    model = models[1]
    draft = copy.deepcopy(model) if which != "other" else tiny_decoder("llama", seed=5)
    if which == "near":
        with torch.no_grad():
            draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight), alpha=0.02)
    # Where the native kernels do not run, torch's products differ in the last bit by the number of rows, unless the
    # engine is told to keep them the same.
    runner = "torch" if cpu_kernels.unsupported_reason() else None
    want, plain = work(model, 0, seed, runner)
    got, stats = work(model, guesses, seed, runner, draft=draft)
    assert got == want
    assert stats.steps <= plain.steps and stats.kv_blocks_used == 0
    if which == "itself" and stats.preemptions == 0 and guesses > 1:
        assert stats.accepted_tokens > 0


def test_a_draft_that_is_the_model_is_nearly_always_right() -> None:
    """Drawn tokens too: the draft draws with the numbers that the model will draw with."""
    model = tiny_decoder("gpt2")
    options = EngineConfig(dtype="fp32", max_num_seqs=4, max_model_len=100, num_speculative_tokens=4)
    engine = load_engine(model, options, draft_model=copy.deepcopy(model))
    for number, heat in enumerate((0.0, 1.0)):
        params = SamplingParams(temperature=heat, seed=1, max_tokens=60, ignore_eos=True, top_p=0.95)
        engine.add(Request(str(number), [5, 6, 7], params))
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens and stats.steps < 30


def frequencies(engine: Any, count: int) -> torch.Tensor:
    """How often each token comes second: the one that is guessed."""
    found = torch.zeros(131)
    for number in range(count):
        params = SamplingParams(temperature=1.5, seed=number, max_tokens=3, top_k=6)
        engine.add(Request(str(number), [5, 6, 7], params))
    second: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            second.setdefault(output.request_id, []).extend(output.token_ids)
    for tokens in second.values():
        found[tokens[1]] += 1
    return found / count


@pytest.mark.nightly
def test_drawn_tokens_keep_their_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the model's own chances; taking every guess for true, the control, would be noticed."""
    model, other = tiny_decoder("gpt2"), tiny_decoder("gpt2", seed=9)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 1.5
        first = torch.zeros_like(logits)
        kept = logits.topk(6)
        first[kept.indices] = kept.values.softmax(0)
        want = torch.zeros_like(logits)
        for token in kept.indices.tolist():
            after = (model(torch.tensor([[5, 6, 7, token]])).logits[0, -1] / 1.5).topk(6)
            want[after.indices] += first[token] * after.values.softmax(0)
    options = EngineConfig(dtype="fp32", max_num_seqs=4, max_model_len=16, num_speculative_tokens=2)

    def distance(engine: Any) -> float:
        return 0.5 * (frequencies(engine, 1500) - want).abs().sum().item()

    assert distance(load_engine(model, options, draft_model=other)) < 0.06

    taken: dict[tuple[int, int], int] = {}
    guess, choose = DraftModelProposer.propose, loop.sample_token

    def noted(self: DraftModelProposer, asked: Any) -> Any:
        found = guess(self, asked)
        for (sequence, _), guesses in zip(asked, found, strict=True):
            taken.update({(id(sequence), sequence.num_generated_tokens + i): token for i, token in enumerate(guesses)})
        return found

    def gullible(output: Any, row: int, sequence: Any) -> Any:
        guessed = taken.pop((id(sequence), sequence.num_generated_tokens), None)
        return choose(output, row, sequence) if guessed is None else (guessed, None)

    monkeypatch.setattr(DraftModelProposer, "propose", noted)
    monkeypatch.setattr(loop, "sample_token", gullible)
    assert distance(load_engine(model, options, draft_model=other)) > 0.2


@pytest.mark.parametrize("vocab", [40, 200])
def test_a_draft_may_know_fewer_tokens_or_more(vocab: int) -> None:
    """Tables of one tokenizer's models are padded to different sizes."""
    model = tiny_decoder("llama")
    options = EngineConfig(dtype="fp32", max_num_seqs=4, max_model_len=96, num_speculative_tokens=3)
    prompts = [[(7 * i + 31 * n) % 131 for i in range(n)] for n in (3, 17, 40)]
    want = greedy_generate(load_engine(model, options), prompts, 10)
    engine = load_engine(model, options, draft_model=tiny_decoder("llama", seed=9, vocab_size=vocab))
    assert greedy_generate(engine, prompts, 10) == want and engine.stats().draft_tokens > 0


def test_what_cannot_be_a_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="set max_model_len"):
        load_engine(tiny_decoder("llama"), draft_model=tiny_decoder("llama", max_position_embeddings=64))
    with pytest.raises(ValueError, match="through its own code"):
        load_engine(tiny_decoder("olmo2"), EngineConfig(max_model_len=64), draft_model=tiny_decoder("llama"))
