"""Tensor parallelism in the engine: the tokens of one process, from the parts of several."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import thalweg
from tests.marks import nightly
from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import LinearSpec
from thalweg.infer.parallel import process_group
from thalweg.infer.parallel.executor import start_worker
from thalweg.infer.parallel.process_group import InferenceGroup, WorkerDiedError, connect_by_store
from thalweg.infer.parallel.shard import shard_for_rank, shard_stage, vocab_range
from thalweg.infer.parallel.shm_comm import ShmCommunicator
from thalweg.ops import cpu_kernels

with_llvm = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="llvmlite is not installed")
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], list(range(20, 60))]
kernels = pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def options(**fields: Any) -> EngineConfig:
    return EngineConfig(**({"max_batch": 4, "max_length": 96, "max_step_tokens": 16, "dtype": "fp32"} | fields))


def test_nobody_watches_for_a_group_that_was_dropped() -> None:
    class Dropped:
        _closed = threading.Event()

    with subprocess.Popen(["sleep", "60"]) as process:
        group: Any = Dropped()
        process_group._watch_processes(weakref.ref(group), {1: process.pid})
        (watch,) = [thread for thread in threading.enumerate() if thread.name == "thalweg-infer-watch"]
        time.sleep(0.5)
        assert watch.is_alive()
        del group
        watch.join(5.0)
        process.kill()
    assert not watch.is_alive()


def tokens(engine: Any, new: int = 8) -> dict[str, list[int]]:
    """Decode all prompts greedily, in steps that cut the longest in pieces."""
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=new)))
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def _work(model: Any, group: InferenceGroup) -> None:
    worker_loop = start_worker(build_decoder_spec(model), group, "cpu")
    with pytest.raises(WorkerDiedError):  # rank 0 has left
        worker_loop.run()
    worker_loop.close()


def ranks(model: Any, tensor: int = 1, runner: str | None = None, other: Any = None, **fields: Any) -> Any:
    """Return an engine whose other ranks are threads of this process, with shards of ``other``."""
    asked, store = options(tensor_parallel=tensor, **fields), HashStore()
    groups = [
        InferenceGroup(connect_by_store(store), r, asked.num_ranks, num_threads=1) for r in range(asked.num_ranks)
    ]
    threads = [threading.Thread(target=_work, args=(other or model, group), daemon=True) for group in groups[1:]]
    for thread in threads:
        thread.start()
    engine = load_engine(model, asked, runner=runner, workers=groups[0])
    engine.threads = threads  # type: ignore[attr-defined]
    return engine


def finish(engine: Any) -> None:
    engine.close()
    for thread in engine.threads:
        thread.join(10)
        assert not thread.is_alive(), "a rank ends with rank 0"


@kernels
@pytest.mark.parametrize(
    ("kind", "size"),
    [("llama", 2), nightly("llama_bias_tied", 4), ("gemma2", 2), ("gpt2", 3), nightly("phi", 2), nightly("bloom", 4),
     ("falcon40", 2), nightly("falcon7", 2), nightly("gpt_neox", 2), nightly("qwen3", 2)],
)  # fmt: skip
def test_the_kernels_give_one_process_s_tokens(kind: str, size: int) -> None:
    model = tiny_decoder(kind)
    plain = load_engine(model, options(), runner="cpu")
    want = tokens(plain)
    plain.close()
    engine = ranks(model, size, "cpu")
    assert tokens(engine) == want and tokens(engine) == want
    finish(engine)


@pytest.mark.parametrize(("kind", "size"), [("mixtral", 2), ("qwen2_moe", 2), ("qwen3_moe", 3), ("llama", 2)])
def test_operators_and_mixtures_too(kind: str, size: int) -> None:
    changes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16} if size == 3 else {}
    model = tiny_decoder(kind, **changes)
    plain = load_engine(model, options(), runner="torch")
    want = tokens(plain)
    plain.close()
    engine = ranks(model, size, "torch")
    assert tokens(engine) == want
    finish(engine)


STAGES = [
    ("llama", 1, 2, 1), nightly("gemma2", 1, 3, 1), ("gpt2", 2, 3, 1), nightly("bloom", 2, 2, 1),
    nightly("phi", 1, 3, 1), nightly("opt", 1, 2, 1), ("odd_sizes", 1, 2, 1), ("mixtral", 1, 1, 2),
    nightly("qwen3_moe", 1, 2, 3), nightly("qwen2_moe", 2, 1, 2), ("qwen2_moe", 2, 2, 4), nightly("mixtral", 2, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensor", "stages", "experts"), STAGES)
def test_stages_and_experts_give_one_process_s_tokens(kind: str, tensor: int, stages: int, experts: int) -> None:
    model = tiny_decoder(kind)
    plain = load_engine(model, options())
    want, states = tokens(plain), plain.embed(PROMPTS)
    engine = ranks(model, tensor, pipeline_parallel=stages, expert_parallel=experts)
    assert type(engine.runner.inner) is type(plain.runner)
    assert tokens(engine) == want and tokens(engine) == want
    torch.testing.assert_close(engine.embed(PROMPTS), states, rtol=1e-4, atol=1e-4)
    plain.close()
    finish(engine)


def test_every_expert_and_layer_is_somewhere_once() -> None:
    whole = build_decoder_spec(tiny_decoder("qwen2_moe"))
    degrees = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3, expert_parallel_size=4)
    parts = [shard_for_rank(whole, rank, degrees) for rank in range(degrees.num_ranks)]
    assert [len(p.layers) for p in parts[::4]] == [1, 1, 1]
    layers: list[Any] = list(whole.layers)
    for number, layer in enumerate(layers):
        held: list[Any] = [p.layers[0] for p in parts[4 * number : 4 * number + 4]]
        assert [x.attention.num_heads for x in held] == [2, 0, 2, 0]
        assert torch.equal(torch.cat([x.mlp.up for x in held]), layer.mlp.up)
        assert [x.mlp.first_expert for x in held] == [0, 1, 2, 3]
    assert [p.lm_head.out_features > 0 for p in parts[::4]] == [False, False, True]
    assert [len(p.embed) > 0 for p in parts[::4]] == [True, False, False]


@kernels
def test_heads_of_sixteen_in_all() -> None:
    """Attention writes rows of 64 bytes one after the other: where they are read from, ranks or not."""
    model = tiny_decoder("llama", num_attention_heads=3, num_key_value_heads=3, head_dim=16, hidden_size=48)
    native_, eager = (load_engine(model, options(), runner=name) for name in ("cpu", "torch"))
    assert tokens(native_) == tokens(eager)


@kernels
@pytest.mark.parametrize("form", [nightly("bf16"), nightly("int8"), "int4"])
def test_other_forms_stay_close(form: str) -> None:
    """Sums in parts round differently, so that what is compared is the first logits."""
    model = tiny_decoder("llama")
    fields: dict[str, Any] = {"quantize": form} if form.startswith("int") else {"dtype": form}
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def scores(engine: Any) -> torch.Tensor:
        engine.add(Request("a", PROMPTS[2], ask))
        while engine.has_work():
            for output in engine.step():
                return torch.tensor([x.logprob for x in output.prompt_logprobs[1:]])
        raise AssertionError

    whole = load_engine(model, options(max_step_tokens=64, **fields))
    parts = ranks(model, 2, max_step_tokens=64, **fields)
    exact = load_engine(model, options(max_step_tokens=64))
    a, b, truth = scores(whole), scores(parts), scores(exact)
    assert (b - truth).abs().mean() < 2 * (a - truth).abs().mean() + 1e-3
    finish(parts)


@kernels
def test_control_a_rank_of_another_model_is_seen() -> None:
    model = tiny_decoder("llama")
    plain = load_engine(model, options())
    engine = ranks(model, 2, other=tiny_decoder("llama", seed=1))
    assert tokens(engine) != tokens(plain)
    finish(engine)


def _run_in_ranks(size: int, body: Callable[[InferenceGroup], Any]) -> list[Any]:
    """Run a function on the ranks of a group, which are threads; return their results."""
    store, results = HashStore(), [None] * size

    def run(rank: int) -> None:
        group = InferenceGroup(connect_by_store(store), rank, size)
        group.connect()
        results[rank] = body(group)
        group.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


_SHAPE = {"num_stages": 1, "max_num_batched_tokens": 3, "hidden_size": 48, "vocab_size": 100}


@with_llvm
@pytest.mark.parametrize("size", [2, 3])
def test_the_all_reduce_in_shared_memory_adds_up_in_the_order_of_ranks(size: int) -> None:
    """Its kernels need no AVX-512; three sums in a row use each set of buffers again."""
    values = torch.randn(3, size, 3, 48, generator=torch.Generator().manual_seed(0))

    def body(group: InferenceGroup) -> list[torch.Tensor]:
        comm, kernels, count = ShmCommunicator(group, **_SHAPE), cpu_kernels.KernelSet(), torch.tensor([3])
        names = kernels.barrier(), kernels.reduce_sum()
        compiled, found = kernels.compile(), []
        for partial in values[:, group.rank]:
            buffers, out = comm.next_reduce_buffers(), torch.zeros(3, 48)
            buffers[comm.rank, :, :48] = partial
            strides = buffers.stride(1) * 4, buffers.stride(0) * 4
            calls = [
                cpu_kernels.Instruction(names[0], comm.barrier_args),
                cpu_kernels.Instruction(names[1], (out, 48 * 4, buffers, *strides, size, count.data_ptr(), 48)),
            ]
            cpu_kernels.build_program(calls, compiled, [comm, count], 1).run()
            found.append(out)
        return found

    results = _run_in_ranks(size, body)
    for number, partials in enumerate(values):
        total = partials[0].clone()
        for partial in partials[1:]:
            total += partial
        assert all(torch.equal(found[number], total) for found in results)


@with_llvm
def test_a_rank_that_leaves_ends_the_waiting_at_a_barrier() -> None:
    def body(group: InferenceGroup) -> int | None:
        comm, kernels = ShmCommunicator(group, **_SHAPE), cpu_kernels.KernelSet()
        if group.rank == 1:
            time.sleep(0.2)
            comm.close()
            return None
        call = cpu_kernels.Instruction(kernels.barrier(), comm.barrier_args)
        cpu_kernels.build_program([call], kernels.compile(), [comm], 1).run()
        return comm.failed_rank

    assert _run_in_ranks(2, body) == [1, None]


def test_messages_of_any_length_arrive_in_order() -> None:
    messages = [{"x": "a" * length, "n": [1, 2]} for length in (0, 1, 4060, 4077, 4078, 4079, 4100, 100_000)]

    def body(group: InferenceGroup) -> list[dict[str, Any]]:
        if group.rank == 0:
            for message in messages:
                group.broadcast(message)
            return messages
        return [group.receive() for _ in messages]

    assert _run_in_ranks(3, body) == [messages] * 3


@given(vocab=st.integers(1, 5000), size=st.integers(1, 9))
def test_the_vocabulary_is_dealt_out_once(vocab: int, size: int) -> None:
    parts = [vocab_range(vocab, rank, size) for rank in range(size)]
    assert parts[0][0] == 0 and parts[-1][1] == vocab
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(start % 32 == 0 for start, stop in parts if stop > start)


def test_parts_of_a_layer_are_copied_row_by_row_as_they_are_read() -> None:
    whole = LinearSpec(torch.randn(12, 8), torch.randn(12))
    for part in (whole.slice_outputs((8, 11), (1, 4)), whole.slice_inputs(2, 7, keep_bias=True)):
        part = part.slice_outputs((1, part.out_features))
        rows = torch.empty(3, part.in_features, dtype=torch.bfloat16)
        part.copy_rows(1, 4, rows)
        assert torch.equal(rows, part.weight[1:4].bfloat16()) and part.weight.shape[0] == len(part.bias)


def test_a_degree_that_heads_do_not_allow_names_those_they_do() -> None:
    with pytest.raises(ValueError, match="divided by 1, 2, 4"):
        shard_stage(build_decoder_spec(tiny_decoder("llama")), 0, 3)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="choose one"):
        options(tensor_parallel=2, stream="cpu")
    with pytest.raises(ValueError, match="at least 1"):
        options(tensor_parallel=0)
    with pytest.raises(ValueError, match="divide"):
        options(tensor_parallel=2, expert_parallel=3)
    for degrees, said in (
        (EngineConfig(expert_parallel_size=2), "has no experts"),
        (EngineConfig(pipeline_parallel_size=4), "has 3 layers"),
        (EngineConfig(tensor_parallel_size=3), "1, 2, 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            shard_for_rank(build_decoder_spec(tiny_decoder("llama")), 0, degrees)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_decoder("llama").save_pretrained(path)
    return path


@pytest.mark.parametrize("degree", ["tensor_parallel", nightly("pipeline_parallel")])
def test_processes_give_the_same_tokens_and_a_dead_one_is_named(folder: Path, degree: str) -> None:
    plain = load_engine(folder, options())
    want = tokens(plain)
    plain.close()
    engine = load_engine(folder, options(**{degree: 2}))
    assert tokens(engine) == want
    runner: Any = engine.runner
    process = runner.group.processes[0]
    process.terminate()  # as systemd and SLURM end all processes at once: rank 0 finishes what it has
    assert tokens(engine) == want
    engine.add(Request("last", PROMPTS[0], SamplingParams(temperature=0, max_tokens=80)))
    engine.step()
    os.kill(process.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"rank 1 of 2 \(process {process.pid}\) was killed by SIGKILL"):
        tokens(engine)
    assert time.monotonic() - begun < 10
    engine.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_step_that_rank_0_leaves_ends_the_engine_on_all_ranks(begun: bool) -> None:
    """However long the error's traceback lives, which holds what the step was waiting for."""
    engine = ranks(tiny_decoder("llama"), 2, runner="torch")
    group, in_step = engine.runner.group, []

    def wait(work: Any, peer: int) -> None:
        work.wait()
        in_step.append(peer)
        if len(in_step) == (5 if begun else 1):  # the message that begins the step is the first
            raise KeyboardInterrupt

    group._wait = wait
    engine.add(Request("first", PROMPTS[0], SamplingParams(temperature=0, max_tokens=4)))
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.step()
    (thread,) = engine.threads
    thread.join(10)
    assert not thread.is_alive() and caught.tb
    with pytest.raises(WorkerDiedError, match="Load the engine again"):
        engine.step()
    engine.close()


def test_a_rank_that_rank_0_leaves_before_they_have_met_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where rank 0 refuses the model: its error is the one to read."""
    stores = list[Any]()
    monkeypatch.setattr(
        process_group, "connect_by_store", lambda store, *rest: stores.append(store) or connect_by_store(store, *rest)
    )
    tiny_decoder("llama").save_pretrained(tmp_path)
    group = process_group.spawn_workers(tmp_path, options(tensor_parallel=2))
    stores.pop().wait(["ready/1"], timedelta(seconds=60))
    group.close()
    said = capfd.readouterr().err
    assert group.processes[0].returncode == 0 and "Traceback" not in said and "frame #" not in said


def test_a_dropped_engine_leaves_no_process() -> None:
    engine = thalweg.init_inference(tiny_decoder("llama"), mp_size=2, dtype="fp32", max_length=96)
    core: Any = engine.core
    process = core.runner.group.processes[0]
    tokens = torch.tensor([PROMPTS[0]])
    want = engine.module.generate(tokens, max_new_tokens=6, do_sample=False)
    assert torch.equal(engine.generate(tokens, max_new_tokens=6, do_sample=False), want)
    engine.close()
    assert process.poll() == 0
