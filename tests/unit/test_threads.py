"""A thread that computes on one core leaves the others' teams alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from thalweg.optim.algorithms.elementwise import AdamW
from thalweg.optim.offload.nvme_step import NvmeStep, PiecewiseOptimizer
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapFile
from thalweg.utils.threads import set_own_threads


def test_one_core_for_one_thread() -> None:
    before, seen = torch.get_num_threads(), {}
    torch.set_num_threads(2)
    try:
        first, second = threading.Event(), threading.Event()

        def alone() -> None:
            set_own_threads(1)
            first.set()
            second.wait()
            seen["alone"] = torch.get_num_threads()

        def other() -> None:
            seen["other"] = torch.get_num_threads()

        thread = threading.Thread(target=alone)
        thread.start()
        first.wait()
        later = threading.Thread(target=other)
        later.start()
        later.join()
        second.set()
        thread.join()
        assert seen == {"alone": 1, "other": 2} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_streamed_update_leaves_the_cores_to_a_backward_pass(tmp_path: Path, monkeypatch) -> None:
    """And has all of them when that is over, in the midst of an update too; the values are the same."""
    step, seen = PiecewiseOptimizer.step, []
    busy: list[bool] = []

    def watched(self, jobs) -> None:
        seen.append((torch.get_num_threads(), threading.current_thread() is threading.main_thread()))
        step(self, jobs)

    def update(busy_chunks: int) -> torch.Tensor:
        param = nn.Parameter(torch.linspace(0, 1, 300_000))
        optimizer = AdamW([param], lr=0.1, fused=True)
        param.grad = torch.ones_like(param)
        with SwapFile(tmp_path, 1 << 23) as swap:
            nvme_step = NvmeStep(optimizer, swap, BufferRing(2, 1 << 18))
            nvme_step.io_pipeline.leaves_cores = lambda: bool(busy and busy.pop())
            monkeypatch.setattr(PiecewiseOptimizer, "step", watched)
            for _ in range(2):
                busy[:] = [True] * busy_chunks
                seen.clear()
                nvme_step.apply()
        return param.detach().clone()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        after_backward = update(0)
        assert set(seen) == {(2, False)} and len(seen) > 3
        within = update(1000)
        assert set(seen) == {(1, False)}
        partly = update(2)
        assert seen[:2] == [(1, False)] * 2 and set(seen[2:]) == {(2, False)}
        assert torch.equal(after_backward, within) and torch.equal(within, partly)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _threads_of_updates(rank: int, world: int, folder: str) -> list[list[tuple[bool, int]]]:
    """Of each piece that an engine updates on NVMe: whether the backward pass goes on, and the threads; without
    clipping and with it."""
    torch.set_num_threads(2)
    return [_train_on_disk(folder, clip) for clip in (0.0, 1.0)]


def _train_on_disk(folder: str, clip: float) -> list[tuple[bool, int]]:
    import thalweg
    from tests.dist.models import make_batch, tiny_gpt

    on_disk = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": on_disk, "offload_param": {**on_disk, "max_in_cpu": 0}},
    }
    engine = thalweg.initialize(model=tiny_gpt(), config=config)[0]
    step, seen = PiecewiseOptimizer.step, []

    def watched(self: Any, jobs: Any) -> None:
        seen.append((engine._window.in_backward, torch.get_num_threads()))
        step(self, jobs)

    for index in range(4):
        engine.backward(engine(*make_batch(index, 2)))
        engine.step()
        PiecewiseOptimizer.step = watched  # from the second on, when state is there
    engine.close()
    PiecewiseOptimizer.step = step
    return seen


def test_an_engine_updates_on_one_core_until_its_backward_pass_is_over(tmp_path: Path) -> None:
    ((within, after),) = run_ranks(_threads_of_updates, 1, str(tmp_path))
    assert (True, 1) in within and (True, 2) not in within, within
    assert set(after) == {(False, 2)}, after  # whose norm comes first


class Machine:
    """A clock on which a step takes what ``seconds`` says of its number of threads."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.now, self.used = seconds, 0.0, list[int]()

    def compute(self, num_threads: int) -> None:
        self.used.append(num_threads)
        self.now += self.seconds(num_threads)

    def steps(self, tuner: Any, duration: float, work: Hashable = 16) -> Counter[int]:
        """Seconds' worth of steps; how many of them ran on each number of threads."""
        self.used, end = [], self.now + duration
        while self.now < end:
            tuner.run(work, self.compute)
        return Counter(self.used)


def test_threads_are_given_up_while_another_process_has_their_core() -> None:
    cpu_kernels = pytest.importorskip("thalweg.ops.cpu_kernels.program", exc_type=ImportError)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        machine = Machine(lambda n: 0.06 / n)
        tuner = cpu_kernels.ThreadTuner(lambda: machine.now)
        calm = machine.steps(tuner, 120)
        assert calm[1] < 0.02 * calm[2] and tuner.num_threads == 2, "trials cost little"
        machine.seconds = lambda n: 0.06 if n == 1 else 0.5  # a core is taken
        taken = machine.steps(tuner, 60)
        assert tuner.num_threads == 1 and taken[2] <= 8 < 500 < taken[1], taken
        machine.seconds = lambda n: 0.06 / n  # it is free again
        machine.steps(tuner, 40)
        assert tuner.num_threads == 2
        assert machine.steps(tuner, 100, work=None)[1] == 0, "steps that are like no other say nothing"
        torch.set_num_threads(1)
        assert set(machine.steps(tuner, 20)) == {1}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("free", "lag", "best"), [(64, 0.0, 64), (63, 0.3, 63), (20, 0.3, 20)])
def test_as_many_threads_as_there_are_free_cores(free: int, lag: float, best: int) -> None:
    cpu_kernels = pytest.importorskip("thalweg.ops.cpu_kernels.program", exc_type=ImportError)
    before = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        machine = Machine(lambda n: 0.64 / n + lag * (n > free))
        tuner = cpu_kernels.ThreadTuner(lambda: machine.now)
        machine.steps(tuner, 300)
        assert 0.75 * best <= tuner.num_threads <= best
    finally:
        torch.set_num_threads(before)
