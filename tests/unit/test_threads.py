"""A thread that computes on one core leaves the others' teams alone."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from thalweg.optim.algorithms.elementwise import AdamW
from thalweg.optim.offload.nvme_step import NvmeStep, PiecewiseOptimizer
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapFile
from thalweg.utils.threads import set_single_threaded


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
        with SwapFile(tmp_path, 1 << 20) as swap:
            update = NvmeStep(optimizer, swap, BufferRing(2, 1 << 18))
            monkeypatch.setattr(PiecewiseOptimizer, "step", watched)
            update.apply()
            update.apply()
        assert set(seen[1:]) == {(1, False)}  # the first call is the probe for the state's form
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
