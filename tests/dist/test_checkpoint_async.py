"""R9 to R11 of ``checkpoint.asynchronous``: a thread writes what was true at the call, while training goes on."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import thalweg
import thalweg.checkpoint.save
from tests.dist.models import make_batch, tiny_gpt
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.checkpoint_support import NoFsyncFileSystem, digest, fail_at, list_names
from thalweg.checkpoint import Checkpoint, CheckpointError, FileSystem
from thalweg.checkpoint.background_save import BackgroundSave, join_saves
from thalweg.rlhf.checkpoint import commit

REUSE_RANKS = True

ROWS = 16
DATA = [
    {"x": torch.randn(6, generator=torch.Generator().manual_seed(i)), "y": torch.tensor([float(i)])} for i in range(96)
]


class HeldFileSystem(NoFsyncFileSystem):
    """A disk that opens no file for writing before ``release`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def open_write(self, path: Path, *, direct: bool = False) -> int:
        assert self.release.wait(60)
        return super().open_write(path, direct=direct)


class SlowFileSystem(FileSystem):
    """A disk that takes 0.3 s to make its first file durable."""

    delay = 0.3

    def fsync(self, handle: int) -> None:
        time.sleep(self.delay)
        self.delay = 0.0
        super().fsync(handle)


def use_disk(io: FileSystem) -> None:
    thalweg.checkpoint.save.FileSystem = lambda: io  # type: ignore[misc]


class Noisy(nn.Module):
    """A model with dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Dropout(0.5), nn.Linear(33, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - y).square().mean() / 100


def noisy_engine(rank: int, seed: int, stage: int, **checkpoint: Any) -> thalweg.Engine:
    """An engine over a shuffling loader; the same seed gives the same run."""
    for seeds in (random.seed, numpy.random.seed, torch.manual_seed):
        seeds(seed)
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
        "zero_optimization": {"stage": stage},
        "cpu_kernels": "torch",
        "log_level": "error",
        "checkpoint": checkpoint,
    }
    engine = thalweg.initialize(model=Noisy(), training_data=DATA, config=config)[0]  # type: ignore[arg-type]
    torch.manual_seed(100 + rank)  # each rank has its own dropout
    return engine


def train(engine: thalweg.Engine, steps: int) -> list[float]:
    return [engine.train_batch().item() for _ in range(steps)]


def contents(folder: str) -> tuple[str, str]:
    """What a checkpoint holds: one hash of all tensors and the state, and each rank's own tree."""
    with Checkpoint.open(folder) as checkpoint:
        return digest(checkpoint), repr([checkpoint.per_rank(rank) for rank in range(checkpoint.world_size)])


def saves_of_one_run(rank: int, world: int, folder: str, stages: list[int], copies: bool) -> dict[int, Any]:
    """At each stage: what the synchronous and the asynchronous save of step 3 hold, two steps after the latter was
    called; the losses of these steps, and those of a new engine that loads the latter."""
    found = {}
    if not copies:
        BackgroundSave.copy_to_host = lambda self, shards: None  # type: ignore[method-assign]
    for stage in stages:
        held, folders = HeldFileSystem(), [f"{folder}/{stage}-{kind}" for kind in ("sync", "async")]
        engine = noisy_engine(rank, 0, stage)
        train(engine, 3)
        use_disk(NoFsyncFileSystem())
        engine.save_checkpoint(folders[0], client_state={"epoch": 1})
        engine.close()

        engine = noisy_engine(rank, 0, stage, asynchronous=True)
        train(engine, 3)
        use_disk(held)
        client_state = {"epoch": 1}
        path = engine.save_checkpoint(folders[1], client_state=client_state)
        client_state["epoch"] = 2
        losses = [train(engine, 2)]
        assert path == Path(folders[1], "global_step3") and not path.exists()
        held.release.set()
        engine.wait_for_checkpoint()
        assert path.is_dir()
        engine.close()
        dist.barrier()
        again = noisy_engine(rank, 7, stage)
        assert again.load_checkpoint(folders[1])[1] == {"epoch": 1}
        losses.append(train(again, 2))
        again.close()
        found[stage] = [contents(each) for each in folders], losses
    return found


def test_an_asynchronous_save_holds_what_was_true_at_the_call(tmp_path):
    """Bit-equal to the synchronous one at stages 0 to 3: weights, moments, schedule, statistics, generators, loader."""
    for found in run_ranks(saves_of_one_run, 2, str(tmp_path), [0, 1, 2, 3], True):
        for stage, ((synchronous, asynchronous), losses) in found.items():
            assert asynchronous == synchronous, stage
            assert losses[0] == losses[1], stage


def test_without_the_copy_later_steps_show_in_it(tmp_path):
    """The control of the test above."""
    for found in run_ranks(saves_of_one_run, 2, str(tmp_path), [2], False):
        ((synchronous, asynchronous), losses) = found[2]
        assert asynchronous != synchronous and losses[0] != losses[1]


def gpt_engine(stage: int = 2, **more: Any) -> thalweg.Engine:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"asynchronous": True},
        "cpu_kernels": "torch",
        "log_level": "error",
        **more,
    }
    return thalweg.initialize(model=tiny_gpt(), config=config)[0]


def train_gpt(engine: Any, rank: int, step: int) -> None:
    tokens, labels = (batch[rank::2].to(engine.device) for batch in make_batch(step, 4))
    engine.backward(engine(tokens, labels))
    engine.step()


def steps_meanwhile(rank: int, world: int, folder: str, shared: str, stage: int) -> tuple[bool, float]:
    """Whether the save was under way still after five steps, and the seconds that its call took."""
    os.environ["THALWEG_SHARED_MEMORY"] = shared
    use_disk(NoFsyncFileSystem())
    engine = gpt_engine(stage)
    train_gpt(engine, rank, 0)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    use_disk(held := HeldFileSystem())
    started = time.monotonic()
    path = engine.save_checkpoint(folder, tag="slow")
    seconds = time.monotonic() - started
    for step in range(1, 6):
        train_gpt(engine, rank, step)
    under_way = not path.exists()
    threading.Timer(max(0.0, 2 - (time.monotonic() - started)), held.release.set).start()
    engine.wait_for_checkpoint()
    assert path.exists()
    engine.close()
    return under_way, seconds


@pytest.mark.waits
@pytest.mark.parametrize(("shared", "stage"), [("1", 3), ("0", 0), nightly("0", 3), nightly("1", 0)])
def test_steps_go_on_while_a_disk_is_slow(tmp_path, shared, stage):
    """A disk that writes nothing for 2 s, nor before five steps are made: the call takes less than half of that."""
    for under_way, seconds in run_ranks(steps_meanwhile, 2, str(tmp_path), shared, stage):
        assert under_way and seconds < 1


def many_saves(rank: int, world: int, folder: str, shared: str, saves: int) -> int:
    os.environ["THALWEG_SHARED_MEMORY"] = shared
    use_disk(NoFsyncFileSystem())
    engine = gpt_engine(3, checkpoint={"asynchronous": True, "keep": 2})
    for step in range(saves):
        train_gpt(engine, rank, step)
        engine.save_checkpoint(folder)
        engine.state_dict()  # collectives of the host's memory, and of whole tensors, at the same time
        for extra in range(step % 3):
            dist.barrier()
            train_gpt(engine, rank, extra)
    engine.close()
    assert list_names(Path(folder)) == {"latest", *(f"global_step{n}" for n in kept_steps(saves))}
    return len([thread for thread in threading.enumerate() if thread.name == "thalweg-checkpoint"])


def kept_steps(saves: int) -> list[int]:
    steps, found = 0, []
    for step in range(saves):
        found.append(steps + 1)
        steps += 1 + step % 3
    return found[-2:]


@pytest.mark.parametrize(("shared", "saves"), [("1", 8), nightly("0", 8), nightly("1", 250), nightly("0", 250)])
def test_saves_one_after_another_never_wait_for_a_step_that_waits_for_them(tmp_path, shared, saves):
    """R9: no deadlock; ``keep`` holds; no thread is left."""
    assert run_ranks(many_saves, 2, str(tmp_path), shared, saves, timeout=300) == [0, 0]


def failing_saves(rank: int, world: int, folder: str, victim: int) -> list[str]:
    """Each way to be told of a failure: the error's text, and that only the failed save is gone."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("thalweg.checkpoint.background_save").addHandler(handler)
    texts = []
    use_disk(NoFsyncFileSystem())
    engine = gpt_engine()
    train_gpt(engine, rank, 0)
    engine.save_checkpoint(folder, tag="good")
    engine.wait_for_checkpoint()
    tellers = (engine.wait_for_checkpoint, lambda: engine.save_checkpoint(folder, tag="next"), engine.close)
    for number, teller in enumerate(tellers, 1):
        for operation in (0, 6):
            use_disk(fail_at(operation if rank == victim else -1, errno.ENOSPC, forever=False))
            try:
                engine.save_checkpoint(folder, tag="bad")
            except CheckpointError as error:  # the folder itself, which is looked at before the copy
                assert operation == 0 and victim == 0
                texts.append(str(error))
                continue
            use_disk(NoFsyncFileSystem())
            train_gpt(engine, rank, number)
            join_saves()
            logged = [record.getMessage() for record in records]
            assert len(logged) == 1 and "No space left" in logged[0], logged
            with pytest.raises(CheckpointError) as caught:
                teller()
            texts.append(str(caught.value))
            engine.wait_for_checkpoint()  # it is said once
            dist.barrier()
            assert list_names(Path(folder)) == {"good", "latest"}
            assert Path(folder, "latest").read_text().strip() == "good"
            dist.barrier()
            records.clear()
    train_gpt(engine, rank, 9)
    engine.save_checkpoint(folder, tag="after")
    engine.close()
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.tag == "after"
        checkpoint.verify()
    return texts


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_one_rank_is_every_ranks_error_at_the_next_call(tmp_path, victim):
    """R11: the next save, ``wait_for_checkpoint`` or ``close`` raises it, and no step; what was committed is intact."""
    first, second = run_ranks(failing_saves, 2, str(tmp_path), victim)
    assert first == second and len(first) == 6
    assert all(f"rank {victim}" in text and "No space left" in text for text in first)


def load_meanwhile(rank: int, world: int, folder: str) -> tuple[int, str]:
    held = HeldFileSystem()
    use_disk(held)
    engine = gpt_engine()
    train_gpt(engine, rank, 0)
    engine.save_checkpoint(folder)
    train_gpt(engine, rank, 1)
    threading.Timer(0.2, held.release.set).start()
    path, _ = engine.load_checkpoint(folder)
    steps = engine.global_steps
    engine.close()
    return steps, Path(str(path)).name


def test_a_load_waits_for_the_save_that_is_under_way(tmp_path):
    assert run_ranks(load_meanwhile, 2, str(tmp_path), reuse=False) == [(1, "global_step1")] * 2


def save_on_nvme(rank: int, world: int, folder: str) -> tuple[bool, list[str]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("thalweg.checkpoint.training_state").addHandler(handler)
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/swap"}}
    Path(folder, "swap").mkdir(exist_ok=True)
    use_disk(NoFsyncFileSystem())
    engine = gpt_engine(zero_optimization={"stage": 2, **offload}, log_level="warning")
    train_gpt(engine, rank, 0)
    path = engine.save_checkpoint(f"{folder}/saved")
    engine.save_checkpoint(f"{folder}/saved", tag="again")
    is_there = path.is_dir()
    engine.close()
    return is_there, [record.getMessage() for record in records]


def test_what_lies_on_nvme_is_not_copied_and_says_so_once(tmp_path):
    for is_there, messages in run_ranks(save_on_nvme, 2, str(tmp_path)):
        assert is_there and len(messages) == 1 and "NVMe" in messages[0]


def save_as_deepspeed(rank: int, world: int, folder: str) -> list[bool]:
    """Whether a checkpoint is there when ``save_checkpoint`` returns: the first in a folder, the next ones there."""
    from thalweg.compat.deepspeed.fp32_weights import get_fp32_state_dict_from_zero_checkpoint
    from thalweg.compat.deepspeed.initialization import initialize

    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"writer": {"type": "fast", "decoupled": True}},
    }
    engine = initialize(model=tiny_gpt(), config=config)[0]
    found = []
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-2"):
        held = HeldFileSystem()
        use_disk(held)
        timer = threading.Timer(0.3, held.release.set)
        timer.start()
        train_gpt(engine, rank, len(found))
        path = engine.save_checkpoint(f"{folder}/{name}")
        found.append(path.exists())
        timer.join()
    state = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/checkpoint-2", "global_step3")
    assert all(torch.equal(value.cpu(), state[name]) for name, value in engine.state_dict().items() if name in state)
    engine.close()
    return found


def test_a_folder_for_each_checkpoint_is_complete_before_an_older_one_may_go(tmp_path):
    """Trainer and accelerate delete older folders when ``save_checkpoint`` returns; DeepSpeed's readers wait."""
    assert run_ranks(save_as_deepspeed, 2, str(tmp_path)) == [[True, True, False]] * 2


def two_engines(rank: int, world: int, folder: str) -> list[str]:
    """Saves of two engines into one folder, and of an RLHF run, on a slow disk."""
    engines = {"actor": gpt_engine(3), "critic": gpt_engine(1)}
    for name, engine in engines.items():
        use_disk(SlowFileSystem())
        train_gpt(engine, rank, 0)
        engine.save_checkpoint(f"{folder}/both", tag=name)
    use_disk(SlowFileSystem())
    commit(f"{folder}/run", 1, engines, {})
    committed = sorted(name for name in engines if Path(folder, "run", name, "step1").is_dir())
    for name, engine in engines.items():
        engine.close()
        with Checkpoint.open(f"{folder}/both", name) as checkpoint:
            checkpoint.verify()
    return committed


def test_two_engines_of_a_process_do_not_take_each_others_save_for_left_over(tmp_path):
    """And a manifest of RLHF names what is committed."""
    assert run_ranks(two_engines, 2, str(tmp_path)) == [["actor", "critic"]] * 2
    assert list_names(tmp_path / "both") == {"actor", "critic", "latest"}


PROGRAM = """
import sys, time
import torch
import thalweg
import thalweg.checkpoint.save

class SlowFileSystem(thalweg.checkpoint.FileSystem):
    def fsync(self, handle):
        time.sleep(0.5)

thalweg.checkpoint.save.FileSystem = SlowFileSystem
ASYNC = {"asynchronous": True}
config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "checkpoint": ASYNC}
engine = thalweg.initialize(model=torch.nn.Linear(1024, 1024), config=config)[0]
path = engine.save_checkpoint(sys.argv[1])
assert not path.exists()
torch.distributed.destroy_process_group()
raise SystemExit("a program that fails")
"""


@pytest.mark.waits
def test_an_interpreter_that_ends_waits_for_the_save(tmp_path):
    """Also one that fails, without a process group by then, whose engine is open; the file is written directly."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "saved")], capture_output=True, text=True)
    assert ended.returncode == 1 and "a program that fails" in ended.stderr, ended.stderr
    with Checkpoint.open(tmp_path / "saved") as checkpoint:
        checkpoint.verify()
        assert checkpoint.read("model/weight").shape == (1024, 1024)
