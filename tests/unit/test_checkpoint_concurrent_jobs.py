"""Jobs that save to one directory at the same time do each other no harm."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint_support import NoFsyncFileSystem, list_names, run_in_fork, tiny_snapshot
from thalweg.checkpoint import Checkpoint, save_snapshot

torch.set_num_threads(1)


def hesitant(seed: int) -> NoFsyncFileSystem:
    """A disk that answers at random moments, so that two jobs meet at every pair of operations."""
    draw = random.Random(seed)

    def before(k: int, operation: str, target: Any) -> None:
        time.sleep(draw.choice((0.0, 0.0, 0.0, 0.0005, 0.002)))

    return NoFsyncFileSystem(before)


def job(folder: Path, mine: int, tags: int, saves: int) -> None:
    """Save again and again under few tags, and read what was saved."""
    io = hesitant(mine)
    for step in range(saves):
        tag = f"job{mine}-{step % tags}"
        save_snapshot(folder, tag, tiny_snapshot(100 * mine + step), step=step, io=io)
        with Checkpoint.open(folder, tag) as checkpoint:
            assert checkpoint.step == step, (checkpoint.step, step)


@pytest.mark.parametrize("tags", [1, 2])
def test_jobs_with_tags_of_their_own(tmp_path, tags):
    jobs, saves = 3, 12
    children = []
    for mine in range(jobs):
        pid = os.fork()
        if pid == 0:
            os._exit(1 if run_in_fork(lambda mine=mine: job(tmp_path, mine, tags, saves)) else 0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * jobs
    assert list_names(tmp_path) == {"latest", *(f"job{j}-{t}" for j in range(jobs) for t in range(tags))}
    for mine in range(jobs):
        newest = Checkpoint.open(tmp_path, f"job{mine}-{(saves - 1) % tags}")
        assert newest.step == saves - 1
        assert torch.equal(newest.read("model/weight"), tiny_snapshot(100 * mine + saves - 1).tensors["model/weight"])


def test_a_replacement_that_was_cut_off_is_finished_once(tmp_path):
    """Several savers find the same two generations of a tag of nobody: the newer one stays."""
    for trial in range(8):
        folder = tmp_path / str(trial)
        save_snapshot(folder, "a", tiny_snapshot(1), step=1, io=NoFsyncFileSystem())
        save_snapshot(folder / "new", "a", tiny_snapshot(2), step=2, io=NoFsyncFileSystem())
        save_snapshot(folder / "new", "a", tiny_snapshot(3), step=3, io=NoFsyncFileSystem())
        (folder / "new" / "a").rename(folder / "a~2")
        children = []
        for mine in range(3):
            pid = os.fork()
            if pid == 0:
                os._exit(1 if run_in_fork(lambda folder=folder, mine=mine: job(folder, mine, 1, 1)) else 0)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 3
        assert Checkpoint.open(folder, "a").step == 3
        assert list_names(folder) == {"latest", "new", "a", "job0-0", "job1-0", "job2-0"}


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """A DataLoader forks its workers while a save in the background holds the lock: they live for an epoch."""
    io = NoFsyncFileSystem()
    io.lock_timeout = 0.2
    with io.lock(tmp_path):
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        with pytest.raises(TimeoutError), io.lock(tmp_path):  # it is a lock
            pass
    try:
        with io.lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
