"""The runner of DeepSpeed's own unit tests, on a small checkout of this test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.compat.deepspeed_unit.lists import FILES, read_left_out, read_passing, read_real_passing, reason_of
from tests.compat.deepspeed_unit.page import RESULT, count_lists, make_page
from tests.repo.source import ROOT

COMMON = """
import os
import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

class DistributedExec:
    is_dist_test, world_size = True, 2
    def __call__(self, request):
        self._name = request.function.__name__
        self._launch_with_file_store(request, self.world_size)
    def _dist_run(self, rank, world, port, init_method, skip_msg=""):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
        deepspeed.init_distributed(init_method=init_method, rank=rank, world_size=world)
        getattr(self, self._name)()
        return skip_msg
    def _dist_destroy(self):
        dist.destroy_process_group()
"""
CONFTEST = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True
"""
TESTS = """
import deepspeed, torch
from unit.common import DistributedExec, dist

class TestRanks(DistributedExec):
    def test_sum(self):
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.sum() == 4 and deepspeed.__version__ == "0.19.8"
    def test_one_rank_fails(self):
        assert dist.get_rank() == 0
        dist.barrier()
    def test_a_rank_dies(self):
        import os
        if dist.get_rank():
            os._exit(3)
        dist.barrier()

def test_plain():
    assert deepspeed.comm.is_initialized() is False
"""


def _make_checkout(folder: Path) -> Path:
    unit = folder / "tests" / "unit"
    unit.mkdir(parents=True)
    (folder / "tests" / "pytest.ini").write_text("[pytest]\n")
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    for name, text in (("__init__", ""), ("common", COMMON), ("test_small", TESTS)):
        (unit / f"{name}.py").write_text(text)
    return folder


@pytest.mark.nightly
def test_outcomes_of_a_checkout(tmp_path: Path) -> None:
    """A rank that fails ends the test at once, though another waits for it."""
    command = [sys.executable, "-m", "tests.compat.deepspeed_unit", str(_make_checkout(tmp_path)), "--files"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "test_small.py", "--results", str(tmp_path / "lines")],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = (tmp_path / "lines").read_text()
    assert "test_small.py {" in done.stdout, done.stdout + done.stderr
    assert lines.count('"passed"') == 2 and lines.count('"failed"') == 2, lines
    assert "died with exit code 3" in lines and "no reason is known" in done.stdout


@pytest.mark.nightly
def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """Outcomes are written test by test; --resume runs the others alone, and --passed has those of both runs."""
    results, passed = tmp_path / "lines", tmp_path / "passed"
    results.write_text("".join(json.dumps(_outcome(f"TestRanks::test_{name}", word)) + "\n" for name, word in BEFORE))
    command = [sys.executable, "-m", "tests.compat.deepspeed_unit", str(_make_checkout(tmp_path)), "--files"]
    command += ["test_small.py", "--results", str(results), "--passed", str(passed), "--resume"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for new in ("{'passed': 1}", "{}"):
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
        assert done.stdout.startswith(f"test_small.py {new}"), done.stdout + done.stderr
        names = [json.loads(line)["test"].rpartition("::")[2] for line in results.read_text().splitlines()]
        assert names == ["test_sum", "test_one_rank_fails", "test_a_rank_dies", "test_plain"]
        assert passed.read_text().split() == [
            f"unit/test_small.py::{name}" for name in ("TestRanks::test_sum", "test_plain")
        ]


BEFORE = [("sum", "passed"), ("one_rank_fails", "failed"), ("a_rank_dies", "failed")]


def _outcome(test: str, outcome: str) -> dict[str, object]:
    return {"test": f"unit/test_small.py::{test}", "outcome": outcome, "text": "", "seconds": 0}


def _wrongly_listed(real: set[str], passing: set[str]) -> list[str]:
    """The tests that pass here without being of DeepSpeed's list, or do not and have no reason."""
    return sorted((passing - real) | {test for test in real - passing if not reason_of(test)})


def test_each_test_that_deepspeed_passes_passes_or_has_its_reason() -> None:
    real, passing = read_real_passing(), read_passing()
    assert _wrongly_listed(real, passing) == []
    first = min(test for test in passing if not reason_of(test))
    assert _wrongly_listed(real, passing - {first}) == [first]
    assert _wrongly_listed(real - {first}, passing) == [first]


def test_the_page_has_the_figures_of_the_lists() -> None:
    """results/deepspeed_unit.md is of its JSON, whose counts are those of the lists, file by file."""
    data, page = json.loads(RESULT.with_suffix(".json").read_text()), RESULT.with_suffix(".md").read_text()
    assert page == make_page(data), "stale: run with --page"
    real, passing = read_real_passing(), read_passing()
    counts = count_lists(real, passing)
    assert counts == {key: data[key] for key in counts}, "stale: run with --page"
    assert count_lists(real, passing - {min(passing)}) != counts != count_lists(real - {min(real)}, passing)
    assert all(no_reason == 0 for _, _, _, no_reason in counts["files"].values())
    row = data["rows"][0]
    assert (row["ours"], row["theirs"]) == (
        len(passing),
        len(real),
    ) and f"{len(passing)} of the {len(real)} tests" in page
    docs = " ".join((ROOT / "docs" / "deepspeed.md").read_text().split())
    assert f"Of the {len(real)} that DeepSpeed 0.19.8 passes" in docs and f" {len(passing)} pass" in docs


def test_the_lists_are_of_one_mind() -> None:
    passing, left_out = read_passing(), read_left_out()
    assert passing and all(len(reason) > 20 for _, reason in left_out)
    assert reason_of("unit/runtime/test_no_sync_ctxt.py::TestNoSyncCtxt::test_zero_stage[3]") and not reason_of(
        "unit/no_such_test.py::test"
    )
    tests = [*passing, *(pattern for pattern, _ in left_out)]
    files = {test.removeprefix("unit/").partition("::")[0] for test in tests}
    assert files <= set(FILES)
    assert fnmatchcase("unit/a.py::test(x]", "unit/a.py::*")
