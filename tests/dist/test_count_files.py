"""How many files of the package a training step enters: what a reader must open to follow it."""

from __future__ import annotations

import pytest

from tests.count_files import count_files

MEMORY_FILES = {"engine.py", "optim/step.py", "zero/shard.py", "zero/storage/base.py"}
DISK_FILES = MEMORY_FILES | {"zero/storage/nvme.py", "optim/offload/nvme_step.py", "storage_io/swap_file.py"}


@pytest.mark.parametrize(("nvme", "limit", "expected"), [(False, 16, MEMORY_FILES), (True, 24, DISK_FILES)])
def test_a_stage_3_step_on_two_ranks_enters_few_files(nvme: bool, limit: int, expected: set[str]) -> None:
    files = count_files(stage=3, num_ranks=2, nvme=nvme)
    assert expected <= files.keys(), "the count does not see the step's own files"
    assert len(files) <= limit, sorted(files)
