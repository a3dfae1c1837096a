"""The ranks of the distributed tests: fresh ones, and those that stay for the next test."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.dist import models
from tests.harness import run_ranks


def _total(rank: int, world: int, value: float) -> tuple[int, float]:
    total = torch.tensor([value * (rank + 1)])
    dist.all_reduce(total)
    return os.getpid(), float(total)


def _disturb(rank: int, world: int, folder: str) -> int:
    os.environ["LEFT_BY_A_TEST"] = "1"
    os.chdir(folder)
    torch.manual_seed(5 + rank)
    torch.set_default_dtype(torch.float64)
    models.SEQ_LEN = -1
    models.OddShapesModel.forward = None  # type: ignore[method-assign]
    return os.getpid()


def _look(rank: int, world: int) -> tuple[int, object]:
    found = "LEFT_BY_A_TEST" in os.environ, os.getcwd(), torch.rand(1).item(), torch.get_default_dtype(), models.SEQ_LEN
    return os.getpid(), (*found, callable(models.OddShapesModel.forward))


def _leave_a_thread(rank: int, world: int) -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def _fail(rank: int, world: int) -> None:
    if rank:
        raise RuntimeError("as planned")
    dist.barrier()


@pytest.fixture(autouse=True)
def _no_ranks_stay():
    yield
    harness.enter_module(False)


def test_ranks_stay_where_they_may():
    first, again = (run_ranks(_total, 2, value, reuse=True) for value in (1.0, 2.0))
    assert [total for _, total in first + again] == [3.0, 3.0, 6.0, 6.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in again]
    fresh = run_ranks(_total, 2, 1.0, reuse=False)
    assert not {pid for pid, _ in fresh} & {pid for pid, _ in first}
    harness.enter_module(False)
    assert not any(os.path.exists(f"/proc/{pid}") for pid, _ in first)


def test_the_next_test_finds_nothing_of_the_last(tmp_path):
    clean = run_ranks(_look, 2, reuse=True)
    disturbed = run_ranks(_disturb, 2, str(tmp_path), reuse=True)
    assert disturbed == [pid for pid, _ in clean]
    assert run_ranks(_look, 2, reuse=True) == clean


def test_ranks_with_a_thread_or_an_error_go():
    left = run_ranks(_leave_a_thread, 2, reuse=True)
    others = run_ranks(_total, 2, 1.0, reuse=True)
    assert not set(left) & {pid for pid, _ in others}
    with pytest.raises(AssertionError, match="as planned"):
        run_ranks(_fail, 2, reuse=True)
    assert not any(os.path.exists(f"/proc/{pid}") for pid, _ in others)
    assert [total for _, total in run_ranks(_total, 2, 1.0, reuse=True)] == [3.0, 3.0]
