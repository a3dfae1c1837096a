"""What an asynchronous save copies from a device is what a synchronous one writes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import thalweg
from tests.dist.models import tiny_gpt
from tests.dist.test_checkpoint_async import HeldFileSystem, contents, train_gpt, use_disk
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.checkpoint_support import NoFsyncFileSystem
from thalweg.checkpoint.background_save import BackgroundSave

REUSE_RANKS = True


def saves(rank: int, world: int, folder: str, stage: int, copies: bool = True) -> list[tuple[str, str]]:
    """What the synchronous and the asynchronous save of step 2 hold, two steps after the latter was called."""
    if not copies:
        BackgroundSave.copy_to_host = lambda self, shards: None  # type: ignore[method-assign]
    for kind in ("sync", "async"):
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "checkpoint": {"asynchronous": kind == "async"},
            "log_level": "error",
        }
        engine = thalweg.initialize(model=tiny_gpt(dropout=0.1), config=config)[0]
        assert engine.device.type != "cpu"
        for step in range(2):
            train_gpt(engine, rank, step)
        held = HeldFileSystem()
        use_disk(held if kind == "async" else NoFsyncFileSystem())
        engine.save_checkpoint(f"{folder}/{kind}")
        for step in range(2, 4):
            train_gpt(engine, rank, step)
        held.release.set()
        engine.close()
    dist.barrier()
    return [contents(f"{folder}/{kind}") for kind in ("sync", "async")]


@pytest.mark.parametrize("stage", [3, nightly(0), nightly(1), nightly(2)])
def test_a_save_from_a_device_holds_what_was_true_at_the_call(tmp_path, stage):
    for synchronous, asynchronous in run_ranks(saves, 2, str(tmp_path), stage, device="sim"):
        assert asynchronous == synchronous


def test_without_the_copy_later_steps_show_in_it(tmp_path):
    """The control of the test above."""
    for synchronous, asynchronous in run_ranks(saves, 2, str(tmp_path), 3, False, device="sim"):
        assert asynchronous != synchronous
