"""One engine, many requests: what fails in one of them ends that one, and nobody's outputs are lost."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.marks import nightly
from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.engine import engine as engine_module
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.engine.scheduler import BlockPool, Scheduler, Sequence
from thalweg.infer.hf_generate import generate
from thalweg.ops import cpu_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = EngineConfig(dtype="fp32", max_num_seqs=6, max_model_len=96, max_num_batched_tokens=24)


class Panic(BaseException):
    """Compiled code's panics are no Exceptions."""


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(chr(65 + token % 26) for token in tokens)


def add(engine: LLMEngine, requests: dict[str, SamplingParams]) -> None:
    for name, params in requests.items():
        engine.add(Request(name, [3, 5, 7, 11], params))


def run(engine: LLMEngine, requests: dict[str, SamplingParams]) -> dict[str, list[Any]]:
    add(engine, requests)
    return collect(engine)


def collect(engine: LLMEngine) -> dict[str, list[Any]]:
    got: dict[str, list[Any]] = {}
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).append(output)
    assert engine.stats().running == engine.stats().waiting == engine.stats().kv_blocks_used == 0
    return got


def tokens(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def requests() -> dict[str, SamplingParams]:
    shared = {"max_tokens": 8, "ignore_eos": True, "prompt_logprobs": 0}
    return {
        "greedy": SamplingParams(temperature=0, **shared),
        "bad": SamplingParams(seed=1, **shared),
        "drawn": SamplingParams(seed=2, n=2, **shared),
    }


@pytest.mark.parametrize("error", [nightly(RuntimeError("a defect")), Panic("a panic")])
@pytest.mark.parametrize("place", ["sample_token", "token_logprobs", "after a token", "detokenizer"])
@pytest.mark.parametrize("num_speculative_tokens", [nightly(0), 3])
def test_a_failure_in_one_request_ends_that_one_alone(
    place: str, error: BaseException, num_speculative_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineConfig(
        dtype="fp32", max_num_seqs=6, max_model_len=96, num_speculative_tokens=num_speculative_tokens
    )
    model = tiny_decoder("llama")
    want = run(load_engine(model, options), requests())
    engine = load_engine(model, options, Letters() if place == "detokenizer" else None)
    assert isinstance(engine, LLMEngine)
    add(engine, requests())
    calls: list[int] = []

    def fail_at(count: int, honest: Any) -> Any:
        def call(*arguments: Any, **fields: Any) -> Any:
            calls.append(0)
            if len(calls) == count:
                raise error
            return honest(*arguments, **fields)

        return call

    if place == "detokenizer":
        detokenizer: Any = engine._requests["bad"][0].detokenizer
        detokenizer.append = fail_at(3, detokenizer.append)
    elif place == "token_logprobs":  # of the second prompt
        monkeypatch.setattr(engine_module, "token_logprobs", fail_at(2, engine_module.token_logprobs))
    else:
        sample = engine_module.sample_token

        def draw(output: Any, row: int, sequence: Sequence) -> Any:
            at = 0 if place == "sample_token" else 3
            if sequence.request.request_id == "bad" and sequence.num_generated_tokens == at:
                raise error
            return sample(output, row, sequence)

        monkeypatch.setattr(engine_module, "sample_token", draw)
    got = collect(engine)
    num_left = {"sample_token": 0, "token_logprobs": 0, "after a token": 3, "detokenizer": 2}[place]
    for name, outputs in want.items():
        last = got[name][-1]
        if name == "bad":
            assert last.finish_reason == "error" and str(error) in last.error
            assert sum(output.finished for output in got[name]) == 1
            assert tokens(got[name]) == tokens(outputs)[:num_left]
        else:
            assert tokens(got[name]) == tokens(outputs) and last.finish_reason == "length"
    assert engine.stats().finished == {"error": 1, "length": 3}
    monkeypatch.undo()
    assert tokens(run(engine, {"next": requests()["greedy"]})["next"]) == tokens(want["greedy"])


def test_ctrl_c_while_sampling_is_no_failure_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(tiny_decoder("llama"), OPTIONS)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "sample_token", interrupted)
    engine.add(Request("a", [1, 2], SamplingParams(temperature=0, max_tokens=2)))
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_generate_keeps_the_outputs_of_other_requests() -> None:
    """What runs beside a call of ``generate`` is there afterwards, all of it."""
    model = tiny_decoder("llama")
    engine = load_engine(model, OPTIONS)
    assert isinstance(engine, LLMEngine)
    want = run(engine, requests())
    add(engine, requests())
    first = engine.step()
    ids = torch.tensor([[2, 4, 6]])
    made = generate(engine, model, ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(made, model.generate(ids, max_new_tokens=20, do_sample=False))
    assert engine.has_work(), "the others ended meanwhile, and nobody has heard of it"
    engine.abort("bad")
    got = collect(engine)
    assert set(got) == {"greedy", "drawn"}
    for name in got:
        assert [*(x for x in first if x.request_id == name), *got[name]] == want[name]


def test_the_error_of_another_request_does_not_end_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder("llama")
    engine = load_engine(model, OPTIONS)
    assert isinstance(engine, LLMEngine)
    sample = engine_module.sample_token

    def draw(output: Any, row: int, sequence: Sequence) -> Any:
        if sequence.request.request_id == "bad":
            raise RuntimeError("a defect")
        return sample(output, row, sequence)

    monkeypatch.setattr(engine_module, "sample_token", draw)
    engine.add(Request("bad", [1, 2], SamplingParams(temperature=0, max_tokens=2)))
    ids = torch.tensor([[2, 4, 6]])
    made = generate(engine, model, ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(made, model.generate(ids, max_new_tokens=5, do_sample=False))
    (last,) = collect(engine)["bad"]
    assert last.finish_reason == "error" and "a defect" in last.error


def test_the_schedulers_output_says_all_that_a_runner_needs() -> None:
    """No runner stands behind this scheduler: blocks, encoder prompts and adapters come with its output."""
    freed: list[int] = []
    pool = BlockPool(9, 16)
    scheduler = Scheduler(pool, freed.append, max_num_seqs=2, max_num_batched_tokens=40, adapter_names=("a", "b"))
    params = SamplingParams(max_tokens=20)
    first = Sequence(Request("0", list(range(30)), params, adapter="b"), 0, 0, 90, frozenset(), decoder_start_ids=(1,))
    second = Sequence(Request("1", list(range(33)), params), 0, 1, 90, frozenset())
    scheduler.add(first)
    scheduler.add(second)
    output = scheduler.schedule()
    assert output is not None and [s.num_tokens for s in output.model_input.spans] == [1, 33]
    (encoder_input,) = output.encoder_inputs
    assert encoder_input.tokens == list(range(30)) and len(encoder_input.blocks) == 2 and encoder_input.lora_id == 1
    assert output.model_input.lora_ids == [1, -1]
    tables = output.model_input.block_tables
    assert [len(blocks) for blocks in tables] == [1, 3]
    held = [*tables[0], *tables[1], *encoder_input.blocks]
    assert len(set(held)) == 6 == pool.num_used
    assert output.model_input.encoder_block_tables == [encoder_input.blocks]
    assert output.model_input.encoder_seq_lens == [30]
    before = copy.deepcopy(tables)
    scheduler.commit(output)
    first.tokens += range(16)
    first.num_computed_tokens = 16
    scheduler.remove(second)
    assert freed == [output.model_input.spans[1].slot]
    output = scheduler.schedule()
    assert output is not None and len(output.model_input.block_tables[0]) == 2
    assert output.model_input.block_tables[0][:1] == before[0] and not output.encoder_inputs
    assert output.model_input.encoder_block_tables == [encoder_input.blocks]


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(7, 9, 6), (6, 7, 9), (5, 5, 8)])
def test_the_most_urgent_sequence_is_never_preempted(turn: int, lengths: tuple[int, ...]) -> None:
    """Whenever it came: the others make room for it, one after another."""
    scheduler = Scheduler(BlockPool(9, 4), lambda _: None, max_num_seqs=3, max_num_batched_tokens=40)
    priorities = [0, 1]
    priorities.insert(turn, -10)
    params = SamplingParams(max_tokens=30)
    waiting = [
        Sequence(Request(str(i), list(range(length)), params, priority=priority), 0, i, 90, frozenset())
        for i, (length, priority) in enumerate(zip(lengths, priorities, strict=True))
    ]
    urgent, preempted, admitted = waiting[turn], set(), set()
    while len(urgent.tokens) < 34:
        if waiting:  # one arrives with each step, into what the ones before have left
            scheduler.add(waiting.pop(0))
        output = scheduler.schedule()
        assert output is not None
        running = {sequence.request.priority for sequence, _ in output.scheduled}
        admitted |= running
        assert -10 in running or -10 not in admitted
        for sequence, count in output.scheduled:
            sequence.num_computed_tokens += count
            if sequence.num_computed_tokens == len(sequence.tokens):
                sequence.tokens.append(0)
        preempted |= {sequence.request.priority for sequence in scheduler.waiting} & admitted
    assert preempted


@pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())
def test_no_more_threads_run_a_program_than_have_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's scratch has a row for each thread; a thread more would write behind it."""
    engine = load_engine(tiny_decoder("llama"), OPTIONS, runner="cpu")
    assert isinstance(engine, LLMEngine)
    runner: Any = engine.runner
    used: list[int] = []
    for program in (*runner._body, *runner._head):
        shapes = [x.shape for x in program._keep_alive if isinstance(x, torch.Tensor)]
        assert (cpu_kernels.MAX_THREADS, OPTIONS.max_model_len) in shapes
        launch = program._launch

        def record(address: int, threads: int, launch: Any = launch) -> None:
            used.append(threads)
            launch(address, 1)

        monkeypatch.setattr(program, "_launch", record)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    run(engine, {"a": SamplingParams(temperature=0, max_tokens=2)})
    assert used and max(used) <= cpu_kernels.MAX_THREADS


@pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())
@pytest.mark.parametrize("weight_format", [nightly("fp32"), "int8"])
def test_the_number_of_threads_changes_no_bit(weight_format: str) -> None:
    """It may change from step to step, as ThreadTuner does."""
    outputs = []
    for numbers in ([2], [1], [1, 2]):
        options = replace(OPTIONS, quantization="int8") if weight_format == "int8" else OPTIONS
        runner: Any = load_engine(tiny_decoder("llama"), options, runner="cpu")
        turns, used = itertools.cycle(numbers), []

        def compute(_: object, compute: Callable[[int], None], turns: Any = turns, used: list[int] = used) -> None:
            used.append(next(turns))
            compute(used[-1])

        runner.runner._thread_tuner = SimpleNamespace(run=compute)
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
        outputs.append(run(runner, {"a": params, "b": params}))
        assert set(used) == set(numbers)
    assert outputs[0] == outputs[1] == outputs[2]
