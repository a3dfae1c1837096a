"""A thread that computes on one core leaves the others' teams alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thalweg.optim.algorithms.elementwise import AdamW
from thalweg.optim.offload.io_pipeline import set_single_threaded
from thalweg.optim.offload.nvme_step import NvmeStep, PiecewiseOptimizer
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapFile


def test_one_core_for_one_thread() -> None:
    before, seen = torch.get_num_threads(), {}
    torch.set_num_threads(2)
    try:
        first, second = threading.Event(), threading.Event()

        def alone() -> None:
            set_single_threaded()
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


def test_the_streamed_update_computes_on_one_core(tmp_path: Path, monkeypatch) -> None:
    step, seen = PiecewiseOptimizer.step, []

    def watched(self, jobs) -> None:
        seen.append((torch.get_num_threads(), threading.current_thread() is threading.main_thread()))
        step(self, jobs)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        param = nn.Parameter(torch.ones(50_000))
        optimizer = AdamW([param], lr=0.1, fused=True)
        param.grad = torch.ones_like(param)
        with closing(SwapFile(tmp_path, 1 << 20)) as swap:
            update = NvmeStep(optimizer, swap, BufferRing(2, 1 << 18))
            monkeypatch.setattr(PiecewiseOptimizer, "step", watched)
            update.apply()
            update.apply()
        assert set(seen[1:]) == {(1, False)}  # the first call is the probe for the state's form
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


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
