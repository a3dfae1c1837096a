"""Row 23: the time of a streamed step against a model of the disk.

The disk is simulated: one transfer at a time, at rates so low that the machine's own speed and load matter
little.  The arithmetic is made to take a known time as well, so that what overlaps can be told.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from thalweg.optim.algorithms.elementwise import AdamW
from thalweg.optim.offload.nvme_step import NvmeStep, PiecewiseOptimizer, optimizer_state_bytes
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapFile

pytestmark = pytest.mark.alone

READ, WRITE = 60e6, 120e6  # bytes a second
SIZES = (1_100_000, 300_000, 7, 600_001)


class _Modelled(Disk):
    """Serves one transfer after another, at ``READ`` and ``WRITE``."""

    def __init__(self) -> None:
        self._free, self._lock = 0.0, threading.Lock()

    def _serve(self, seconds: float) -> None:
        with self._lock:
            self._free = end = max(self._free, time.perf_counter()) + seconds
        time.sleep(max(0.0, end - time.perf_counter()))

    def preadv(self, handle, buffers, offset) -> int:
        done = super().preadv(handle, buffers, offset)
        self._serve(done / READ)
        return done

    def pwritev(self, handle, buffers, offset) -> int:
        done = super().pwritev(handle, buffers, offset)
        self._serve(done / WRITE)
        return done


def _step(folder: Path) -> tuple[float, float, float]:
    """Seconds of a step, of its transfers by the model, and of its arithmetic."""
    arithmetic = 0.0
    step = PiecewiseOptimizer.step

    def slow(self, jobs) -> None:
        nonlocal arithmetic
        start = time.perf_counter()
        step(self, jobs)
        time.sleep(sum(job.master.numel() for job in jobs) * 20 / READ * 0.8)
        arithmetic += time.perf_counter() - start

    masters = sum(round_up(n * 4) for n in SIZES)
    params = [nn.Parameter(torch.empty(n, device="meta")) for n in SIZES]
    room = masters + optimizer_state_bytes(AdamW(params, fused=False))
    with closing(SwapFile(folder, room, disk=_Modelled())) as swap, pytest.MonkeyPatch.context() as patch:
        params = [nn.Parameter(swap.view(swap.allocate(n * 4), (n,), torch.float32)) for n in SIZES]
        update = NvmeStep(AdamW(params, fused=True), swap, BufferRing(4, 1 << 20))
        for param in params:
            param.grad = torch.ones_like(param)
        update.apply()
        patch.setattr(PiecewiseOptimizer, "step", slow)
        read, written, start = swap.reads.nbytes, swap.writes.nbytes, time.perf_counter()
        update.apply()
        seconds = time.perf_counter() - start
        model = (swap.reads.nbytes - read) / READ + (swap.writes.nbytes - written) / WRITE
        return seconds, model, arithmetic


def test_row23_a_step_takes_what_its_bytes_take(tmp_path: Path) -> None:
    """Arithmetic that takes nearly as long as the disk is hidden behind it."""
    for _ in range(6):  # a busy machine can only make it slower
        seconds, model, arithmetic = _step(tmp_path)
        assert model == pytest.approx(sum(SIZES) * 12 * (1 / READ + 1 / WRITE), rel=0.02)  # no byte more
        assert arithmetic > 0.5 * model
        if seconds < 1.25 * max(model, arithmetic):
            return
    raise AssertionError(f"{seconds:.2f} s; the disk needs {model:.2f}, the arithmetic {arithmetic:.2f}")


def test_blocking_transfers_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each transfer is waited for as it is begun."""
    for verb in ("read", "write"):
        begin = getattr(SwapFile, verb)

        def blocking(self, offset, tensor, begin=begin):
            ticket = begin(self, offset, tensor)
            ticket.wait()
            return ticket

        monkeypatch.setattr(SwapFile, verb, blocking)
    seconds, model, arithmetic = _step(tmp_path)
    assert seconds > 1.4 * max(model, arithmetic)
