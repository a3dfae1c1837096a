"""The plan against real ranks: traffic as the ledger counts it; jobs around a limit."""

from __future__ import annotations

import json
import mmap
import subprocess
from pathlib import Path
from typing import ClassVar
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench._plan_worker import glibc_heap_mib, proc_status_mib
from tests.e2e.launch_support import RUN_COMMAND, clean_environ
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.nn.transformer import GPT, GPTConfig

SHAPE = GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=64, block_size=32)


def config_of(stage, dtype="fp32", accumulation=1, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return config | ({dtype: {"enabled": True}} if dtype != "fp32" else {})


def train(engine, steps, accumulation, rank):
    for _ in range(steps * accumulation):
        tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(rank))
        engine.backward(engine(tokens, tokens))
        engine.step()


def _ledger(rank, world_size, cases, hosts):
    import os

    import thalweg

    if hosts > 1:
        os.environ["THALWEG_HOST"] = f"host{rank * hosts // world_size}"
    found = []
    for stage, dtype, accumulation in cases:
        torch.manual_seed(1)
        engine, *_ = thalweg.initialize(model=GPT(SHAPE), config=config_of(stage, dtype, accumulation))
        train(engine, 2, accumulation, rank)
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        before = {kind: engine.ledger.total(kind).sent_bytes for kind in kinds}
        train(engine, 1, accumulation, rank)
        after = {kind: engine.ledger.total(kind).sent_bytes for kind in kinds}
        found.append({kind: after[kind] - before[kind] for kind in kinds if after[kind] > before[kind]})
        engine.close()
    return found


CASES = [(stage, dtype, n) for stage in range(4) for dtype, n in (("fp32", 1), ("bf16", 2))]


@pytest.mark.parametrize(("world_size", "hosts"), [nightly(2, 1), nightly(2, 2)])
def test_traffic_is_what_the_ledger_counts(world_size, hosts):
    import thalweg
    from thalweg.plan.spec.cluster import Cluster

    cluster = Cluster(num_nodes=hosts, devices_per_node=world_size // hosts, device="cpu")
    for found in run_ranks(_ledger, world_size, CASES, hosts):
        for (stage, dtype, accumulation), counted in zip(CASES, found, strict=True):
            config = config_of(stage, dtype, accumulation)
            planned = thalweg.plan(SHAPE.to_dict(), config, cluster=cluster, sequence_length=32).traffic
            assert planned == counted, (stage, dtype, accumulation)


def _split(rank, world_size, degrees):
    import thalweg

    found = []
    for tensor, stage in degrees:
        torch.manual_seed(1)
        config = config_of(stage, tensor_parallel={"autotp_size": tensor})
        engine, *_ = thalweg.initialize(model=GPT(SHAPE), config=config)
        train(engine, 1, 1, rank // tensor)
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        before = {kind: engine.ledger.total(kind).sent_bytes for kind in kinds}
        train(engine, 1, 1, rank // tensor)
        found.append({kind: engine.ledger.total(kind).sent_bytes - before[kind] for kind in kinds})
        engine.close()
    return found


@pytest.mark.nightly
def test_traffic_of_tensor_ranks_is_what_the_ledger_counts():
    import thalweg
    from thalweg.plan.spec.cluster import Cluster

    degrees = [(2, 0), (2, 1), (2, 3)]
    cluster = Cluster(devices_per_node=4, device="cpu")
    for found in run_ranks(_split, 4, degrees):
        for (tensor, stage), counted in zip(degrees, found, strict=True):
            config = config_of(stage, tensor_parallel={"autotp_size": tensor})
            planned = thalweg.plan(SHAPE.to_dict(), config, cluster=cluster, sequence_length=32)
            assert planned.not_counted == []
            for kind, num_bytes in counted.items():
                said = planned.traffic.get(kind, 0)
                assert said == pytest.approx(num_bytes, rel=0.01, abs=64), (tensor, stage, kind)


ZEROPP = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
MEETINGS = {"sync_every": 1}  # at each step
POWERSGD = {"type": "powersgd", "matrix_approximation_rank": 3, "start_step": 0}
TOPK = {"type": "topk", "compress_ratio": 0.05, "start_step": 0}
CROSSINGS = [
    (1, {}, {}),
    (3, {}, {}),
    (2, {"zero_quantized_gradients": True}, {}),
    (3, ZEROPP, {}),
    (3, {"mics_shard_size": 2}, {}),
    (0, {}, {"outer_optimizer": MEETINGS}),
    (2, {}, {"outer_optimizer": MEETINGS | {"quantized_deltas": True}}),
    (0, {}, {"gradient_compression": POWERSGD}),
    (2, {}, {"gradient_compression": POWERSGD}),
    (0, {}, {"gradient_compression": TOPK}),
    (1, {}, {"gradient_compression": TOPK}),
]


def _between_hosts(rank, world_size, cases):
    import os

    import thalweg

    os.environ["THALWEG_HOST"] = f"host{rank // 2}"
    found = []
    for stage, zero, more in cases:
        torch.manual_seed(1)
        config = config_of(stage, "bf16") | more
        config["zero_optimization"] |= zero
        engine, *_ = thalweg.initialize(model=GPT(SHAPE), config=config)
        train(engine, 2, 1, rank)
        engine.ledger.reset()
        train(engine, 1, 1, rank)
        found.append((engine.ledger.total().inter_bytes, engine.ledger.total().sent_bytes))
        engine.close()
    return found


@pytest.mark.nightly
def test_what_crosses_between_hosts_is_what_the_ledger_counts():
    import thalweg
    from thalweg.plan.spec.cluster import Cluster

    cluster = Cluster(num_nodes=2, devices_per_node=2, device="cpu")
    ranks = run_ranks(_between_hosts, 4, CROSSINGS)
    for index, (stage, zero, more) in enumerate(CROSSINGS):
        config = config_of(stage, "bf16") | more
        config["zero_optimization"] |= zero
        planned = thalweg.plan(SHAPE.to_dict(), config, cluster=cluster, sequence_length=32)
        crossing, sent = (sum(counts) / 4 for counts in zip(*(found[index] for found in ranks), strict=True))
        assert planned.links.get("between nodes", 0) == pytest.approx(crossing, rel=0.05), (stage, zero, more)
        if "gradient_compression" in more:
            assert planned.not_counted == []
            assert sum(planned.traffic.values()) == pytest.approx(sent, rel=0.01), (stage, more)


BIG = GPTConfig(vocab_size=4096, n_layer=4, n_head=4, n_embd=448, block_size=64)


def tiers_of(folder):
    nvme = {"device": "nvme", "nvme_path": folder}
    # Buffers that are small beside the states, as they are in any job that is worth a disk.
    small = nvme | {"buffer_size": 2_000_000}
    return {
        "none": {"stage": 1},
        "early": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "states": {"stage": 1, "offload_optimizer": small},
        "all": {"stage": 3, "offload_optimizer": small, "offload_param": {**nvme, "max_in_cpu": 0}},
    }


def _around_the_limit(rank, world_size, widths, room, zero):
    """(width, refused, peak, planned total, seconds, message) of jobs of growing size, and their limit."""
    import gc
    import time

    import thalweg
    from thalweg.observe.flops import resident_mib
    from thalweg.plan import preflight
    from thalweg.plan.preflight import PredictedOutOfMemoryError

    preflight._SEARCH_SECONDS = 0.1  # what would fit instead is not asked here
    _ = thalweg.initialize
    limit = resident_mib() + room
    found = []
    for width in widths:
        shape = GPTConfig(vocab_size=2048, n_layer=2, n_head=2, n_embd=width, block_size=64)
        model = GPT(shape)
        config = config_of(1, memory={"host_limit": f"{limit:.0f}MiB"}) | {"zero_optimization": zero}
        start = time.process_time()
        try:
            engine, *_ = thalweg.initialize(model=model, config=config)
            tokens = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(rank))
            for _ in range(2):
                engine.backward(engine(tokens, tokens))
                engine.step()
            found.append((width, False, resident_mib(peak=True), None, 0.0, ""))
            engine.close()
            del engine
        except PredictedOutOfMemoryError as error:
            total = error.plan.per_rank.total / 2**20 if error.plan else None
            spent = time.process_time() - start
            found.append((width, True, resident_mib(peak=True), total, spent, str(error)))
        del model
        gc.collect()
    return limit, found


@pytest.mark.parametrize(
    ("tier", "num_sizes", "step"),
    [("none", 6, 192), nightly("all", 4, 504), nightly("none", 30, 32), nightly("all", 10, 192)],
)
def test_rows_21_22_sizes_around_a_limit_none_exceeds_it(tmp_path, tier, num_sizes, step):
    # Each size in a process of its own would be purer and thirty times the imports.
    widths = [64 + i * step for i in range(num_sizes)]
    zero = tiers_of(str(tmp_path))[tier]
    ((limit, found),) = run_ranks(_around_the_limit, 1, widths, 340, zero, timeout=280)
    ran = [entry for entry in found if not entry[1]]
    refused = [entry for entry in found if entry[1]]
    assert len(found) == num_sizes
    assert ran
    assert refused
    assert max(peak for _, _, peak, *_ in ran) <= 1.05 * limit
    # Sizes grow, so the refused ones are the last ones.
    assert max(width for width, *_ in ran) < min(width for width, *_ in refused)
    assert all(total is None or total > 0.9 * limit for _, _, _, total, *_ in refused)
    assert max(seconds for *_, seconds, _ in refused) < 10
    assert all("does not fit" in text for *_, text in refused)


class _Mapping(mmap.mmap):
    """Anonymous memory or a file's, known while it is mapped."""

    known: ClassVar[WeakSet[_Mapping]] = WeakSet()

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.known.add(self)


class _LiveMemory(TorchDispatchMode):
    """The most MiB that were in use after any operator: of malloc, and of the mappings made since it was built.

    It asks the allocators, not the kernel: holes, the end of a heap that no page backs yet, code that is read for the
    first time and stacks of threads that have ended differ between equal runs, and are no part of it.  Of a swap file's
    addresses only what is resident counts, which only the kernel knows: ``resident`` is that, without holes and code.
    """

    def __init__(self):
        super().__init__()
        self.peak = self.resident = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        heap, mapped = glibc_heap_mib(), sum(map(len, _Mapping.known)) / 2**20
        self.peak = max(self.peak, heap["uordblks"] + heap["hblkhd"] + mapped)
        pages = proc_status_mib()
        self.resident = max(self.resident, pages["RssAnon"] + pages["RssShmem"] - heap["fordblks"])
        return result


# Of what the plan has for a first step (FIRST_STEP_BYTES), the code that it reads, in MiB.  The kernel maps 41 to 87
# MiB of that same code, by how the page cache happens to hold torch's libraries: a peak is taken as if it were this.
CODE_MIB = 41


def peak_mib(code_before: float) -> float:
    """The most that this process has held, with the code that it has read since it held ``code_before`` as CODE_MIB."""
    from thalweg.observe.flops import resident_mib

    return resident_mib(peak=True) - (proc_status_mib()["RssFile"] - code_before) + CODE_MIB


@mock.patch("mmap.mmap", _Mapping)
def _offloaded(rank, world_size, zero):
    """(peak, planned peak, most that was alive in a later step, the same as the kernel has it) in MiB of one job."""
    import thalweg
    from thalweg.observe.flops import resident_mib
    from thalweg.plan.spec.cluster import Cluster

    cluster = Cluster(devices_per_node=world_size, device="cpu")
    _ = thalweg.initialize
    base, code = int(resident_mib() * 2**20), proc_status_mib()["RssFile"]
    torch.manual_seed(1)
    model = GPT(BIG)
    config = config_of(1) | {"zero_optimization": zero}
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    shape = {"tokens_BT": tokens, "labels_BT": tokens}
    planned = thalweg.plan(model, config, cluster=cluster, batch=shape, process_bytes=base, suggest=False)
    engine, *_ = thalweg.initialize(model=model, config=config)
    del model
    train(engine, 3, 1, rank)
    peak = peak_mib(code)
    with _LiveMemory() as live:
        train(engine, 1, 1, rank)
    engine.close()
    return peak, planned.per_rank.total / 2**20, live.peak, live.resident


def _many_tokens(rank, world_size, policy):
    """(peak, planned peak) in MiB of a job whose activations are most of what it has."""
    import thalweg
    from thalweg.observe.flops import resident_mib
    from thalweg.plan.spec.cluster import Cluster

    _ = thalweg.initialize
    base = int(resident_mib() * 2**20)
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=512, n_layer=6, n_head=4, n_embd=192, block_size=256))
    config = config_of(1) | {"train_micro_batch_size_per_gpu": 24, "activation_checkpointing": {"policy": policy}}
    tokens = torch.randint(0, 512, (24, 256), generator=torch.Generator().manual_seed(rank))
    shape = {"tokens_BT": tokens, "labels_BT": tokens}
    cluster = Cluster(devices_per_node=world_size, device="cpu")
    planned = thalweg.plan(model, config, cluster=cluster, batch=shape, process_bytes=base, suggest=False)
    engine, *_ = thalweg.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(tokens, tokens))
        engine.step()
    peak = resident_mib(peak=True)
    engine.close()
    return peak, planned.per_rank.total / 2**20


def _many_tokens_launched(policy, folder):
    """The same of a rank as `thalweg run` starts it, with large tensors in huge pages."""
    (script := folder / "job.py").write_text(
        "import json, torch\n"
        "from tests.dist.test_plan import _many_tokens\n"
        "torch.set_num_threads(1)\n"
        f"print('found', json.dumps(_many_tokens(0, 1, {policy!r})))\n"
    )
    environ = clean_environ(PYTHONPATH=str(Path(__file__).parents[2]), TMPDIR=str(folder))
    environ.pop("THP_MEM_ALLOC_ENABLE", None)
    done = subprocess.run(
        [*RUN_COMMAND, "--nproc", "1", str(script)], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("found")[2])


@pytest.mark.parametrize("policies", [("none",), nightly(("none", "full"))])
def test_row22_the_activations_of_many_tokens_are_in_the_plan(policies, tmp_path):
    """PAIN_POINTS 22: near the peak, where activations are most of it and where recomputation drops them.

    Equal runs differ by up to 12% in what glibc's heap becomes (578 to 646 MiB with recomputation), so that one run
    can show no more than 15%; a plan without activations would be off by 50%.  Recomputation is measured as
    `thalweg run` starts ranks: without huge pages its heap is full of holes (see the record of the heap).
    """
    found = {"none": run_ranks(_many_tokens, 1, "none")[0]}
    if "full" in policies:
        found["full"] = _many_tokens_launched("full", tmp_path)
    for policy, (peak, planned) in found.items():
        assert 0.85 * planned <= peak <= 1.15 * planned, (policy, found)
    assert "full" not in found or found["none"][0] > found["full"][0] + 120, (
        found
    )  # MiB: what a plan without them would miss


def test_row21_offload_stays_within_the_plan_and_saves_what_it_says(tmp_path):
    found = {name: run_ranks(_offloaded, 1, zero)[0] for name, zero in tiers_of(str(tmp_path)).items()}
    for name, (peak, planned, _, _) in found.items():
        assert peak <= 1.05 * planned, (name, found)
        assert peak >= 0.85 * planned, (name, found)  # a bound that is never reached would say nothing
    # On the host nothing but gradients that leave early is saved.  Peaks say that roughly, as a heap in which
    # gradients stay has 37 to 66 MiB of holes in equal runs; what is alive says it in each run alike: 35.4 MiB where
    # the plan says 34.7 (docs/decisions/2026-11-24-what-bf16-rounds.md).
    saved, said, alive = (found["none"][i] - found["early"][i] for i in range(3))
    if torch.version.cuda is None:  # a build with CUDA leaves more holes: 5 to 15 MiB are saved there
        assert saved >= 0.65 * said, found
    assert 0.9 * said <= alive <= 1.1 * said
    for name in ("states", "all"):
        # Equal runs of "all" differ by 48 MiB in their peaks (holes, and what waits for a busy disk), more than half of
        # what it saves.  What is resident and in use differs by 6.
        saved, said = (found["none"][i] - found[name][i] for i in (3, 1))
        assert 0.7 * said <= saved <= 1.3 * said, (name, saved, said, found)


class Odd(torch.nn.Module):
    """A model that tells nothing: no config, no hidden_size, inputs of its own."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1536, 1536) for _ in range(6))

    def forward(self, signal, wanted):
        for layer in self.layers:
            signal = torch.relu(layer(signal))
        return (signal - wanted).square().mean()


def _auto(rank, world_size, folder):
    import thalweg

    found = []
    for limit in ("4GiB", "8MiB"):
        config = config_of("auto", memory={"host_limit": limit, "nvme_path": folder, "preflight": "off"})
        config["zero_optimization"]["offload_optimizer"] = {"device": "auto"}
        engine, *_ = thalweg.initialize(model=Odd(), config=config)
        engine.backward(engine(torch.ones(2, 1536), torch.zeros(2, 1536)))
        engine.step()
        zero = engine.config.zero_optimization
        found.append((zero.stage, zero.offload_optimizer.device, engine.config.describe()))
        engine.close()
    return found


def test_row18_auto_is_the_same_on_all_ranks_also_for_a_model_that_tells_nothing(tmp_path):
    ranks = run_ranks(_auto, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    (roomy_stage, roomy_tier, text), (_, tight_tier, _) = ranks[0]
    assert roomy_stage in range(4)
    assert roomy_tier == "none"
    assert "the plan: the cheapest that fits" in text
    assert tight_tier == "nvme"  # nothing fits into 8 MiB: the smallest is taken


def _too_large(rank, world_size, zero, limit, folder):
    import time

    import thalweg
    from thalweg.plan.preflight import PredictedOutOfMemoryError

    config = config_of(1, memory={"host_limit": limit, "nvme_path": folder}) | {"zero_optimization": zero}
    model, start = GPT(BIG), time.process_time()
    try:
        engine, *_ = thalweg.initialize(model=model, config=config)
        train(engine, 1, 1, rank)
        engine.close()
    except PredictedOutOfMemoryError as error:
        return str(error), time.process_time() - start
    return "ran", time.process_time() - start


def test_row21_an_offloaded_job_that_cannot_fit_is_refused_with_a_table(tmp_path):
    base = run_ranks(_resident, 1)[0]
    zero = tiers_of(str(tmp_path))
    refused, seconds = run_ranks(_too_large, 1, zero["all"], f"{base + 60:.0f}MiB", str(tmp_path))[0]
    assert "does not fit" in refused
    assert "gathered" in refused
    assert seconds < 10
    assert run_ranks(_too_large, 1, zero["none"], "4GiB", str(tmp_path))[0][0] == "ran"


def _resident(rank, world_size):
    import thalweg
    from thalweg.observe.flops import resident_mib

    _ = thalweg.initialize
    return resident_mib()


def _regardless(rank, world_size, modes):
    import thalweg
    from thalweg.plan.preflight import PredictedOutOfMemoryError

    found = []
    for mode in modes:
        try:
            config = config_of(0, memory={"host_limit": "10MiB", "preflight": mode})
            engine, *_ = thalweg.initialize(model=GPT(SHAPE), config=config)
            train(engine, 1, 1, rank)
            engine.close()
            found.append("ran")
        except PredictedOutOfMemoryError as error:
            found.append(str(error))
    return found


def test_the_user_may_go_on_regardless():
    for refused, warned, off in run_ranks(_regardless, 2, ["refuse", "warn", "off"]):
        assert warned == off == "ran"
        assert "does not fit" in refused
        assert "optimizer" in refused
        assert '"preflight": "warn"' in refused
