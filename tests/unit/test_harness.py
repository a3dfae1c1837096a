"""The ranks of the distributed tests: fresh ones, and those that stay for the next test."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.dist import conftest as of_ranks
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


FOLDER = Path(models.__file__).parent


def _left_out(device: str, names: list[str]) -> dict[str, str]:
    """Of tests of these names, those that a run on ``device`` leaves out, and why."""
    found: dict[str, str] = {}

    def item(name: str) -> Any:
        file, _, function = name.partition("::")
        mark = lambda mark: found.update({name: mark.kwargs["reason"]})
        return SimpleNamespace(path=FOLDER / file, originalname=function, name=function, add_marker=mark)

    config: Any = SimpleNamespace(getoption=lambda option: device)
    of_ranks.pytest_collection_modifyitems(config, [item(name) for name in names])
    return found


def test_a_device_runs_all_but_what_one_list_leaves_out_with_its_reason():
    listed = list(itertools.chain(*of_ranks.OF_PROCESSORS.values()))
    for file, _, function in (name.partition("::") for name in listed):
        assert f"def {function or 'test_'}" in (FOLDER / file).read_text()
    tests = [name if "::" in name else f"{name}::test_any" for name in listed]
    others = ["test_new.py::test_any", "test_zero_init.py::test_any", "../unit/test_plan.py::test_any"]
    for device in ("sim", "cuda"):
        found = _left_out(device, [*tests, *others])
        assert list(found) == tests and all("processors" in reason for reason in found.values())
    assert _left_out("cpu", tests) == {}
    nightly = (FOLDER.parents[1] / "Makefile").read_text().partition("\nnightly:")[2].partition("\n\n")[0]
    assert "$(MAKE) --no-print-directory sim" in nightly.splitlines()[-1]
