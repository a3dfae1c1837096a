"""R14, R15: a start that was given up commits nothing, and a checkpoint that crashes a job is not tried for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.checkpoint_support import FaultInjectingFileSystem, list_names, tiny_snapshot
from thalweg.checkpoint import CheckpointError, FileSystem, job_starts, open_verified, save_snapshot
from thalweg.checkpoint.errors import RestartLoopError

Start = Callable[..., None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """The process is a rank of such a start."""

    def be(restart: int, crashes: int | None = None, job: str = "one") -> None:
        monkeypatch.setenv("THALWEG_JOB_ID", job)
        monkeypatch.setenv("THALWEG_RESTART_COUNT", str(restart))
        monkeypatch.setenv("THALWEG_CRASH_COUNT", str(restart if crashes is None else crashes))

    return be


def save(folder: Path, step: int, io: FileSystem | None = None) -> None:
    save_snapshot(folder, f"step{step}", tiny_snapshot(step), step=step, io=io)


def resume(folder: Path) -> int:
    """The step that a job goes on from."""
    checkpoint = open_verified(folder, resume="must")
    assert checkpoint is not None
    with checkpoint:
        return checkpoint.head.step


@pytest.mark.parametrize("takes", [lambda folder: resume(folder), lambda folder: save(folder, 3)], ids=["load", "save"])
def test_a_start_that_was_given_up_commits_nothing(tmp_path, start, takes):
    start(0)
    save(tmp_path, 1)
    start(1)
    takes(tmp_path)
    held = list_names(tmp_path)
    start(0)
    with pytest.raises(CheckpointError, match="start 0 of this job was given up: start 1"):
        save(tmp_path, 2)
    assert list_names(tmp_path) == held
    start(0, job="another")  # the control: who has nothing to do with that job
    save(tmp_path, 2)


def test_it_may_be_given_up_while_it_saves(tmp_path, start):
    start(0)
    save(tmp_path, 1)
    seen: list[str] = []

    def before(index: int, operation: str, target: object) -> None:
        if operation == "rename" and "manifest" in str(target):
            seen.append(operation)
            start(1)
            resume(tmp_path)
            start(0)

    with pytest.raises(CheckpointError, match="was given up"):
        save(tmp_path, 2, FaultInjectingFileSystem(before))
    assert seen and list_names(tmp_path) == {"latest", "step1", ".starts.json"}
    assert (tmp_path / "latest").read_text().strip() == "step1"


def test_two_starts_do_not_take_a_folder_at_the_same_time(tmp_path, start):
    """Else the older one, which has looked before and writes after, would have the last word."""
    start(0)
    save(tmp_path, 1)
    start(0, job="another")
    tried: list[str] = []

    def before(index: int, operation: str, target: object) -> None:
        if operation == "open_write" and ".latest-" in str(target) and not tried:
            tried.append(operation)
            later = FileSystem()
            later.lock_timeout = 0.05
            start(1, job="another")
            with pytest.raises(TimeoutError, match="has held the lock"):
                job_starts.claim_for_load(later, tmp_path, 1)
            start(0, job="another")

    save(tmp_path, 2, FaultInjectingFileSystem(before))
    assert tried


def test_three_tries_with_the_newest_and_three_with_the_one_before(tmp_path, start):
    start(0)
    for step in (1, 2, 3):
        save(tmp_path, step)
    taken = []
    for restart in range(1, 7):
        start(restart)
        taken.append(resume(tmp_path))
        assert resume(tmp_path) == taken[-1], "who loads twice in one start has not tried twice"
    assert taken == [3, 3, 3, 2, 2, 2]
    start(7)
    with pytest.raises(RestartLoopError, match="3 starts each from step3 and from step2 have crashed"):
        resume(tmp_path)
    start(0, job="after it")
    assert resume(tmp_path) == 3, "another job is not told"


def test_another_checkpoint_is_progress(tmp_path, start):
    start(0)
    for step in (1, 2):
        save(tmp_path, step)
    for restart in range(1, 5):
        start(restart)
        taken = resume(tmp_path)
    assert taken == 1
    save(tmp_path, 2)  # as the job came there, from the older one
    start(5)
    assert resume(tmp_path) == 1
    save(tmp_path, 3)
    for restart, expected in zip(range(6, 10), (3, 3, 3, 2), strict=True):
        start(restart)
        assert resume(tmp_path) == expected


def test_a_lost_host_is_no_crash(tmp_path, start):
    start(0)
    for step in (1, 2):
        save(tmp_path, step)
    for restart in range(1, 9):
        start(restart, crashes=0)
        assert resume(tmp_path) == 2


def test_only_checkpoints_of_the_job_count(tmp_path, start):
    """Who begins each start from a folder of somebody else's takes the newest there each time."""
    for step in (1, 2):
        save(tmp_path, step)
    for restart in range(9):
        start(restart)
        assert resume(tmp_path) == 2


def test_one_checkpoint_is_tried_three_times(tmp_path, start):
    start(0)
    save(tmp_path, 1)
    for restart in range(1, 4):
        start(restart)
        assert resume(tmp_path) == 1
    start(4)
    with pytest.raises(RestartLoopError, match="from step1 have"):
        resume(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_loaded_from(tmp_path, start):
    save(tmp_path, 1)
    start(1)

    def before(index: int, operation: str, target: object) -> None:
        if operation == "open_write":
            raise PermissionError(13, "Permission denied", str(target))

    assert job_starts.claim_for_load(FaultInjectingFileSystem(before), tmp_path, 1) == 0
    assert list_names(tmp_path) == {"latest", "step1"}


def test_without_a_job_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("THALWEG_JOB_ID", raising=False)
    save(tmp_path, 1)
    assert resume(tmp_path) == 1
    assert list_names(tmp_path) == {"latest", "step1"} and "THALWEG_JOB_ID" not in os.environ
