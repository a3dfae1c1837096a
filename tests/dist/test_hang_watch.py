"""`health.hang_seconds`: a hang names the rank that is waited for, and where it is."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.comm.collectives import shared_memory

HANG = 1.2


def read_a_slow_file(seconds: float) -> None:
    time.sleep(seconds)


def read_a_loss(seconds: float) -> None:
    time.sleep(seconds)


class QueuedMark:
    """An event of a device that goes on ``seconds`` later."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def query(self) -> bool:
        return time.monotonic() > self.end


def ask_slowly(pid: int) -> bool:
    time.sleep(HANG / 3)
    return True


class SlowThirdTime(nn.Linear):
    """A layer that takes long once."""

    seconds, calls = 0.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            time.sleep(self.seconds)
        return super().forward(x)


class Lines(logging.Handler):
    """Keeps what the watch says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("thalweg.comm.hang_watch").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _train(rank: int, world: int, stage: int, case: str, seconds: float) -> list[str]:
    import thalweg

    heard = Lines()
    if case == "one is late, asked slowly":
        shared_memory.is_process_alive, case = ask_slowly, "one is late"
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "log_level": "warning",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "health": {"hang_seconds": HANG},
    }  # fmt: skip
    layer: nn.Module = SlowThirdTime(4, 4)
    if case == "a wrapped layer is slow":
        layer.seconds = seconds * (rank == 1)
        layer = checkpoint_wrapper(layer)
    engine = thalweg.initialize(model=layer, config=config)[0]
    for step in range(4):
        if step == 2 and case == "one is late" and rank == 1:
            read_a_slow_file(seconds)
        if step == 2 and case == "one is queued" and rank == 0:
            ledger = engine.ledger
            assert isinstance(ledger._mark, torch.Event) and not ledger.pending(), "the device has done the step"
            ledger._mark = QueuedMark(seconds)
        if step == 2 and case == "one is queued":
            (read_a_loss if rank == 0 else read_a_slow_file)(seconds + rank / 2)
        if step == 2 and case == "all pause":
            read_a_slow_file(seconds)
        if step == 2 and case == "one skips" and rank == 0:
            dist.barrier()  # the others come here after their step, and wait within it until then
        if step == 2 and case == "one is stopped" and rank == 1:
            if os.fork() == 0:
                time.sleep(seconds)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    dist.barrier()
    time.sleep(0.3)
    engine.close()
    return heard.lines


@pytest.mark.parametrize("stage", [nightly(0), 3])
def test_the_rank_that_is_waited_for_is_named_with_its_place(stage: int) -> None:
    lines = run_ranks(_train, 3, stage, "one is late", 2.3 * HANG)
    (report,) = [line for line in lines[0] if "have waited" in line]
    assert re.search(r"rank 1 on \S+, after 2 steps: NOT THERE, at .*in read_a_slow_file", report), report
    for rank in (0, 2):
        assert re.search(rf"rank {rank} on \S+, after 2 steps: waits in [\w <>]+ since \d+ s, from .*in _train", report)
    assert any("goes on" in line for line in lines[0])
    assert not any("have waited" in line for line in lines[2]), "one rank speaks for all"


def test_a_rank_that_looks_whether_others_live_waits_where_it_was() -> None:
    """Samples of the stack that find it looking are of the same wait: its seconds count on, its place is the user's."""
    lines = run_ranks(_train, 2, 3, "one is late, asked slowly", 2.3 * HANG, reuse=False)
    (report,) = [line for line in lines[0] if "have waited" in line]
    waits = r"rank 0 on \S+, after 2 steps: waits in [\w <>]+ since [1-9]\d* s, from .*in _train"
    assert re.search(waits, report), report


def test_a_layer_that_torch_distributed_calls_computes() -> None:
    """A checkpoint wrapper's frame is below the layer's on the stack, and waits for nobody."""
    lines = run_ranks(_train, 2, 2, "a wrapped layer is slow", 2.3 * HANG)
    (report,) = [line for line in lines[0] if "have waited" in line]
    assert re.search(r"rank 1 on \S+, after \d steps: NOT THERE, at .*in forward", report), report


def test_a_rank_whose_device_has_not_done_a_collective_waits() -> None:
    """The host is past it, and waits where it reads a number, which no frame tells from a pause."""
    lines = run_ranks(_train, 2, 2, "one is queued", 2.3 * HANG, device="sim")
    (report,) = [line for line in lines[0] if "have waited" in line]
    assert re.search(
        r"rank 0 on \S+, after 2 steps: waits in all_gather of <root> since \d+ s, from .*in read_a_loss", report
    )
    assert re.search(r"rank 1 on \S+, after 2 steps: NOT THERE, at .*in read_a_slow_file", report), report


def test_a_stopped_process_gives_no_sign_of_life() -> None:
    lines = run_ranks(_train, 2, 2, "one is stopped", 3 * HANG)
    (report,) = [line for line in lines[0] if "have waited" in line]
    assert "NO SIGN OF LIFE" in report and re.search(r"rank 1 on \S+, after \d steps: NO SIGN", report), report


@pytest.mark.parametrize("device", [None, nightly("sim")])
def test_a_pause_of_all_is_no_hang(device: str | None) -> None:
    """The control: nobody waits for anybody."""
    assert run_ranks(_train, 2, 2, "all pause", 2.3 * HANG, device=device) == [[], []]


def _without(rank: int, world: int) -> Any:
    import threading

    import thalweg

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = thalweg.initialize(model=nn.Linear(4, 4), config=config)[0]
    names = [thread.name for thread in threading.enumerate()]
    engine.close()
    return names


def test_nobody_watches_unless_asked() -> None:
    for names in run_ranks(_without, 2):
        assert "thalweg-hang-watch" not in names
