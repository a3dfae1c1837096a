"""A disk that fails in mid-training: a clear error, and training that can go on once it works (row 24)."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import Any

import pytest
import torch

from tests.dist.models import tiny_gpt
from tests.dist.parity import bitwise_equal
from tests.dist.test_offload_use import mine, start, values
from tests.harness import run_ranks
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.swap_file import SwapError

STEPS = 3
# Tiers, and whether a step that failed is as if it had not been: where masters and state lie on the disk.
PLACES: list[tuple[tuple[str, str], dict[str, Any], bool]] = [
    (("nvme", "nvme"), {}, True),
    (("nvme", "nvme"), {"bf16": {"enabled": True}}, True),
    (("nvme", "none"), {}, False),
    (("none", "nvme"), {}, False),
    (("nvme", "nvme"), {"gradient_clipping": 0.05}, False),
]
FAULTS = [("pwritev", errno.ENOSPC), ("preadv", errno.EIO)]


def _break(patch: pytest.MonkeyPatch, verb: str, code: int, nth: int) -> list[int]:
    """Let every call from the ``nth`` on fail; counts them."""
    plain, calls = getattr(Disk, verb), []

    def call(self: Disk, *args: Any) -> int:
        calls.append(1)
        if len(calls) >= nth:
            raise OSError(code, os.strerror(code))
        return plain(self, *args)

    patch.setattr(Disk, verb, call)
    return calls


def _train(
    rank: int, world: int, folder: str, tiers: tuple[str, str], more: dict[str, Any], fault: Any
) -> tuple[list[torch.Tensor], str]:
    """Parameters after some steps, one of which is repeated if the disk fails in it, and the error."""
    engine, told, step = start(tiny_gpt(), folder, *tiers, **more), "", 0
    with pytest.MonkeyPatch.context() as patch:
        while step < STEPS:
            if step == 1 and fault is not None and not told:
                _break(patch, *fault)
            try:
                engine.backward(engine(*mine(step, rank, world)))
                engine.step()
                step += 1
            except SwapError as error:
                told = str(error)
                patch.undo()
    assert os.listdir(folder) == []
    return values(engine), told


def _goes_on(rank: int, world: int) -> list[str]:
    torch.set_num_threads(1)
    wrong, failed = [], 0
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for tiers, more, whole in PLACES:
            known = _train(rank, world, folder, tiers, more, None)[0]
            for verb, code in FAULTS:
                for nth in (1, 9):
                    found, told = _train(rank, world, folder, tiers, more, (verb, code, nth))
                    failed += bool(told)
                    if told and not (os.strerror(code) in told and os.path.basename(folder) in told):
                        wrong.append(f"{tiers} {more} {verb} {nth}: {told}")
                    if (whole or not told) and not bitwise_equal(found, known):
                        wrong.append(f"{tiers} {more} {verb} {nth}: other parameters")
    return wrong if failed >= 12 else [f"only {failed} of {len(PLACES) * 4} runs met the fault"]


@pytest.mark.nightly
def test_row24_training_goes_on_when_the_disk_works_again():
    (wrong,) = run_ranks(_goes_on, 1)
    assert not wrong, "\n".join(wrong)


def _one_rank(rank: int, world: int, folder: str, verb: str, code: int) -> None:
    engine = start(tiny_gpt(), folder)
    engine.backward(engine(*mine(0, rank, world)))
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            _break(patch, verb, code, 3)
        for step in (1, 2):
            engine.backward(engine(*mine(step, rank, world)))
            engine.step()


@pytest.mark.parametrize(("verb", "code"), FAULTS)
def test_row24_a_disk_that_fails_on_one_rank_ends_all(tmp_path, verb, code):
    with pytest.raises(AssertionError, match="2 of 2 ranks failed") as caught:
        run_ranks(_one_rank, 2, str(tmp_path), verb, code, timeout=60)
    assert os.strerror(code) in str(caught.value)
    assert os.listdir(tmp_path) == []
