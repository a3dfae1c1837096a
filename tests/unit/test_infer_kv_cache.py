"""Keys and values in 8 bits, and logits that do not depend on a request's company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.marks import nightly
from tests.memory import resident_bytes
from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.config import MEMORY_SHARES_VARIABLE
from thalweg.infer.runners.base import ModelInput, QuerySpan
from thalweg.infer.runners.torch_runner import KVCacheTensor
from thalweg.ops import cpu_kernels
from thalweg.serve.replicas.launcher import EngineSpec
from thalweg.utils import procfs

kernels = pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def logits(model: Any, runner: str | None, cache: str, pieces: tuple[int, ...]) -> torch.Tensor:
    """Run one prompt in pieces; return the logits of all its tokens."""
    options = EngineConfig(dtype="fp32", max_num_seqs=2, max_model_len=96, kv_cache_dtype=cache)
    made = load_engine(model, options, runner=runner).runner
    tokens = [(7 * i) % 131 for i in range(sum(pieces))]
    blocks = list(range(96 // made.block_size))[::-1]
    found, at = [], 0
    for count in pieces:
        batch = ModelInput(tokens[at : at + count], [QuerySpan(0, at, count)], range(count), [blocks])
        found.append(made.run(batch).clone())
        at += count
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "runner", "cache", "error"),
    [
        pytest.param("llama", "cpu", "int8", 0.03, marks=kernels),
        pytest.param("gemma2", "cpu", "int8", 0.03, marks=[kernels, pytest.mark.nightly]),
        ("llama", "torch", "int8", 0.03),
        ("llama", "torch", "fp8", 0.15),
        nightly("mixtral", None, "int8", 0.03),
    ],
)
def test_a_cache_of_8_bits_is_near_and_not_the_same(kind: str, runner: str, cache: str, error: float) -> None:
    model = tiny_decoder(kind)
    exact = logits(model, runner, "fp32", (40, 1, 9))
    got = logits(model, runner, cache, (40, 1, 9))
    difference = (got - exact).norm() / exact.norm()
    assert 1e-5 < difference < error
    if runner == "cpu":  # cut anyhow, the same bits
        assert torch.equal(logits(model, runner, cache, (1, 17, 32)), got)


def test_the_pools_error_is_that_of_its_bits() -> None:
    rows, places = torch.randn(30, 3, 32) * torch.logspace(-3, 3, 30)[:, None, None], torch.arange(30) + 5
    for cache, error in (("int8", 0.01), ("bf16", 0.005), ("auto", 0.0)):
        pool = KVCacheTensor(64, 3, 32, dtype=torch.float32, kv_cache_dtype=cache, device=torch.device("cpu"))
        pool.write(places, rows)
        relative = (pool.gather(places) - rows).abs().amax(-1) / rows.abs().amax(-1)
        assert relative.max() <= error and (relative.max() > 0) == (error > 0)


def test_a_cache_of_8_bits_holds_more() -> None:
    blocks = {}
    for cache in ("fp32", "bf16", "int8"):
        options = EngineConfig(dtype="fp32", kv_cache_dtype=cache, kv_cache_bytes=2**20, max_model_len=64)
        blocks[cache] = load_engine(tiny_decoder("llama", head_dim=64), options).stats().kv_blocks
    assert blocks["bf16"] == 2 * blocks["fp32"] and blocks["int8"] > 1.8 * blocks["bf16"]
    with pytest.raises(ValueError, match="described"):
        load_engine(tiny_decoder("olmo2"), EngineConfig(kv_cache_dtype="int8"))
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        EngineConfig(kv_cache_dtype="int3")


def scores(model: Any, runner: str, invariant: bool, company: int) -> list[list[float]]:
    """Return the log-probabilities of one request among others that come and go."""
    options = EngineConfig(
        dtype="fp32", max_num_seqs=5, max_model_len=80, max_num_batched_tokens=23, batch_invariant=invariant
    )
    engine = load_engine(model, options, runner=runner)
    generator = random.Random(company)
    wanted = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    others = SamplingParams(temperature=0, max_tokens=5)
    found = []
    for number in range(company):
        prompt = [generator.randrange(131) for _ in range(generator.randrange(1, 40))]
        engine.add(Request(f"other{number}", prompt, others))
    engine.add(Request("mine", list(range(30)), wanted))
    while engine.has_work():
        for output in engine.step():
            if output.request_id == "mine":
                assert output.logprobs is not None
                found += [[x.logprob, *(value for _, value in x.top)] for x in output.logprobs]
    return found


@pytest.mark.parametrize(("kind", "runner"), [("llama", "torch"), ("gptj", "transformers"), ("mixtral", "torch")])
def test_batch_invariant_logits_have_the_same_bits_in_any_company(kind: str, runner: str) -> None:
    model = tiny_decoder(kind)
    alone = scores(model, runner, True, 0)
    assert len(alone) == 12
    for company in (3, 9):
        assert scores(model, runner, True, company) == alone
    if runner == "transformers":  # each sequence is computed alone, its prompt in one piece: always so
        assert all(scores(model, runner, False, company) == alone for company in (3, 9))
        return
    # Negative control: without the option torch's sums depend on the shapes.
    assert any(scores(model, runner, False, company) != alone for company in (3, 9))


@pytest.mark.parametrize("prompt", [16, 17, 28])
def test_a_cache_for_a_whole_batch_lets_the_whole_batch_run(prompt: int) -> None:
    """Sequences that need no more blocks must not keep one waiting (seen with blocks for just the batch)."""
    options = EngineConfig(dtype="fp32", max_num_seqs=4, max_model_len=32, enable_prefix_caching=False)
    engine = load_engine(tiny_decoder("llama"), options)
    assert engine.stats().kv_blocks == 8
    for number in range(4):
        params = SamplingParams(temperature=0, max_tokens=32 - prompt, ignore_eos=True)
        engine.add(Request(str(number), [1 + number] * prompt, params))
    engine.step()
    assert engine.stats().running == 4
    while engine.has_work():
        engine.step()
    assert engine.stats().kv_blocks_used == 0


@kernels
def test_memory_is_touched_as_blocks_are_used() -> None:
    """Not a page in each head of each layer with the first token."""
    config = LlamaConfig(
        hidden_size=128, num_hidden_layers=16, intermediate_size=64, num_attention_heads=8, vocab_size=64,
        max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    options = EngineConfig(dtype="fp32", max_num_seqs=2, max_model_len=4096, kv_cache_bytes=256 << 20)
    before = resident_bytes()
    runner = load_engine(model, options, runner="cpu").runner
    # Head by head over all blocks a megabyte each of 256 heads: half of a huge page.
    assert runner.num_blocks * cpu_kernels.BLOCK_SIZE * 2 * 128 * 16 * 4 > 240 << 20, "would show nothing"
    runner.run(ModelInput([1] * 20, [QuerySpan(0, 0, 20)], [19], [[0, 1]]))
    assert resident_bytes() - before < 160 << 20  # a quarter of it is there from the start


def test_the_default_cache_is_a_quarter_of_what_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a container leaves or the host can free, whatever lies in the page cache; replicas share it."""
    tiny_decoder("llama").save_pretrained(tmp_path)
    monkeypatch.setenv(MEMORY_SHARES_VARIABLE, "1")  # and take back what a replica of two sets
    options = EngineConfig(dtype="fp32", max_num_seqs=512, device="cpu")
    sized = replace(options, kv_cache_bytes=16 << 20)
    want = load_engine(tmp_path, sized).stats().kv_blocks
    read_fields = procfs.read_fields

    def num_blocks(available: int, limits: Sequence[tuple[int, int]] = (), **fields: Any) -> int:
        memory = {"MemAvailable": f"{available >> 10} kB", "MemFree": "0 kB"}
        monkeypatch.setattr(procfs, "read_fields", lambda at: memory if at.endswith("meminfo") else read_fields(at))
        monkeypatch.setattr(procfs, "_cgroup_limits", lambda: list(limits))
        return EngineSpec(str(tmp_path), **{"options": options, **fields}).load().stats().kv_blocks

    assert num_blocks(64 << 20) == num_blocks(1 << 40, [(100 << 20, 36 << 20)]) == want
    assert num_blocks(1 << 40) == 512 * 256 // 16 > want, "control: there is room for all"
    assert num_blocks(64 << 20, replica=(1, 2)) == want // 2
    assert num_blocks(64 << 20, replica=(1, 2), options=sized) == want, "what was asked for is of each"
