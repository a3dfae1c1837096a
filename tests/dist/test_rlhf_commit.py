"""R26: actor and critic commit as one, whichever rank is killed at whichever operation on the disk."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import thalweg
import thalweg.checkpoint.save
from tests.dist.models import make_batch, tiny_gpt
from tests.dist.test_checkpoint_faults import fork_pair
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.checkpoint_support import NoFsyncFileSystem, digest, kill_at, list_names
from thalweg.checkpoint import Checkpoint, CheckpointError, FileSystem
from thalweg.rlhf import checkpoint

Commit = Callable[[Path, int, Mapping[str, thalweg.Engine], Mapping[str, Any]], None]

STAGES = {"actor": 3, "critic": 1}


def _build_engines(rank: int) -> dict[str, thalweg.Engine]:
    engines = {}
    random.seed(rank)  # a fork draws a new one, which the checkpoint holds
    for seed, (name, stage) in enumerate(STAGES.items()):
        config = {
            "train_batch_size": 4, "zero_optimization": {"stage": stage}, "cpu_kernels": "torch",
            "log_level": "critical", "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }  # fmt: skip
        engines[name] = thalweg.initialize(model=tiny_gpt(seed), config=config)[0]
    return engines


def _train(rank: int, engines: Mapping[str, thalweg.Engine], step: int) -> None:
    for engine in engines.values():
        tokens, labels = make_batch(step, 4)
        engine.backward(engine(tokens[rank::2], labels[rank::2]))
        engine.step()


def _use_disk(io: FileSystem) -> None:
    """Let all that a commit does go through one counter."""
    thalweg.checkpoint.save.FileSystem = lambda: io  # type: ignore[misc]
    checkpoint.FileSystem = lambda: io  # type: ignore[attr-defined]


def commit_too_early(
    directory: Path, step: int, engines: Mapping[str, thalweg.Engine], state: Mapping[str, Any]
) -> None:
    """The control: as ``checkpoint.commit``, but the manifest is there when the first engine is."""
    first = dict(list(engines.items())[:1])
    checkpoint.commit(directory, step, first, state)
    if dist.get_rank() == 0:
        manifest = directory / "manifest.json"
        names = ", ".join(f'"{name}": "step{step}"' for name in engines)
        text = manifest.read_text().replace(f'"actor": "step{step}"', names)
        manifest.write_text(text)
    for name in list(engines)[1:]:
        engines[name].save_checkpoint(directory / name, tag=f"step{step}", save_latest=False)


def commit_one_by_one(
    directory: Path, step: int, engines: Mapping[str, thalweg.Engine], state: Mapping[str, Any]
) -> None:
    """Another control: each engine overwrites its own checkpoint, which a manifest has named once and for all."""
    for name, engine in engines.items():
        engine.save_checkpoint(directory / name, tag="step1", save_latest=False)


COMMITS: dict[str, Commit] = {
    "ours": checkpoint.commit,
    "too early": commit_too_early,
    "one by one": commit_one_by_one,
}


def _next_commit(rank: int, folder: Path, commit: Commit, io: FileSystem) -> None:
    """What a run does that goes on from step 1: train both engines a step, and commit them on ``io``."""
    engines = _build_engines(rank)
    step, _ = checkpoint.resume(folder, engines)
    _train(rank, engines, step)
    _use_disk(io)
    commit(folder, step + 1, engines, {"iteration": step + 1})
    (folder / f"rank{rank}.operations").write_text(str(len(getattr(io, "calls", ()))))


def _resume_and_commit(rank: int, folder: Path) -> None:
    """What the run after a death does: resume, say of which step each engine is, train, and commit again."""
    engines = _build_engines(rank)
    step, state = checkpoint.resume(folder, engines)
    steps = [engine.global_steps for engine in engines.values()]
    assert state == {"iteration": step} and steps == [step, step], (step, state, steps)
    _train(rank, engines, step)
    _use_disk(NoFsyncFileSystem())
    checkpoint.commit(folder, step + 1, engines, {"iteration": step + 1})


def _digests(folder: Path, step: int) -> list[str]:
    found = []
    for name in STAGES:
        with Checkpoint.open(folder / name, f"step{step}") as saved:
            found.append(digest(saved))
    return found


def _first_commit(rank: int, folder: Path) -> None:
    engines = _build_engines(rank)
    _use_disk(NoFsyncFileSystem())
    _train(rank, engines, 0)
    checkpoint.commit(folder, 1, engines, {"iteration": 1})


def _prepare(rank: int, world: int, out: str) -> tuple[dict[int, list[str]], list[int]]:
    """A run of three commits that nobody kills: what each step's checkpoints hold, and how many operations each rank's
    second commit has.  Leaves the first commit's files in ``first``."""
    root, expected = Path(out), {}
    folder = root / "whole"
    actions: list[Callable[[int], None]] = [
        lambda r: _first_commit(r, folder),
        lambda r: _next_commit(r, folder, COMMITS["ours"], NoFsyncFileSystem()),
        lambda r: _resume_and_commit(r, folder),
    ]
    for step, action in enumerate(actions, 1):
        assert fork_pair(root / f"whole{step}.store", action) == [0, 0]
        expected[step] = _digests(folder, step)
        if step == 1:
            shutil.copytree(folder, root / "first")
    assert len({each for pair in expected.values() for each in pair}) == 6
    return expected, [int((folder / f"rank{r}.operations").read_text()) for r in range(2)]


def _killed(
    rank: int, world: int, first: str, out: str, kind: str, victim: int, points: list[int], expected: dict
) -> list[tuple[int, int, str]]:
    """(operation, step that a resuming run takes, "" or what is wrong) of a death at each of ``points``.

    Runs, as ``_prepare``, in one fresh process without threads, so that forking from it is cheap and safe.
    """
    root, found = Path(out), []
    for k in points:
        base = root / f"{k}"
        shutil.copytree(first, base)
        disks = [kill_at(k) if r == victim else NoFsyncFileSystem() for r in range(2)]
        action = partial(_next_commit, folder=base, commit=COMMITS[kind])
        exit_codes = fork_pair(root / f"{k}.store", lambda r, d=disks, a=action: a(r, io=d[r]))
        if k == points[-1] and exit_codes == [0, 0]:
            continue  # the run that counted operations had one more: a file that its other rank had or had not made
        assert exit_codes[victim] == 9, k
        step = int(json.loads((base / "manifest.json").read_text())["step"])
        found.append((k, step, _find_fault(base, step, expected)))
        shutil.rmtree(base)
    return found


def _find_fault(base: Path, step: int, expected: dict[int, list[str]]) -> str:
    """What is wrong with what a death has left, and with the run that goes on from it."""
    try:
        if _digests(base, step) != expected[step]:
            return "the checkpoints that the manifest names are not those of its step"
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    if fork_pair(base.with_suffix(".after.store"), lambda r: _resume_and_commit(r, base)) != [0, 0]:
        return "the run does not go on"
    left = {name: sorted(list_names(base / name)) for name in STAGES}
    hidden = [path.name for path in base.iterdir() if path.name.startswith(".")]
    if hidden or any(names != [f"step{step + 1}"] for names in left.values()):
        return f"left over: {left}, {hidden}"
    return "" if _digests(base, step + 1) == expected[step + 1] else "the run that went on is another"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, list[str]], list[int]]:
    """The folder of a first commit, and what ``_prepare`` found."""
    root = tmp_path_factory.mktemp("commits")
    return (str(root / "first"), *run_ranks(_prepare, 1, str(root), init=False, timeout=300)[0])


@pytest.mark.parametrize(
    ("victim", "parts"),
    [(0, [0.45, 0.8, 1.0]), nightly(1, [0.6]), nightly(0, None), nightly(1, None)],
)
def test_r26_a_rank_killed_in_a_commit_leaves_both_engines_at_one_step(
    tmp_path: Path, whole: Any, victim: int, parts: list[float] | None
) -> None:
    """What a run takes up is, to the bit, both engines' step 1 or both engines' step 2; it commits again, nothing of
    the death is left, and its next step is that of a run that nobody killed."""
    first, expected, totals = whole
    last = totals[victim] - 1
    points = list(range(last + 1)) if parts is None else [round(part * last) for part in parts]
    args = (first, str(tmp_path), "ours", victim, points, expected)
    found = run_ranks(_killed, 1, *args, init=False, timeout=2400)[0]
    print(f"R26, rank {victim}: {len(found)} deaths, {sum(step == 2 for _, step, _ in found)} after the commit")
    assert [row for row in found if row[2]] == []
    steps = [step for _, step, _ in found]
    assert steps == sorted(steps) and steps[0] == 1
    assert victim or steps[-1] == 2  # rank 0 publishes, and tidies up after that


@pytest.mark.parametrize(("kind", "part"), [("too early", 0.75), nightly("one by one", 0.75)])
def test_the_control_of_it_commits_that_are_not_one_are_found(
    tmp_path: Path, whole: Any, kind: str, part: float
) -> None:
    first, expected, totals = whole
    args = (first, str(tmp_path), kind, 0, [round(part * (totals[0] - 1))], expected)
    found = run_ranks(_killed, 1, *args, init=False, timeout=300)[0]
    assert all(wrong for _, _, wrong in found), found


def _commit_in_a_job(rank: int, world: int, folder: str) -> dict[str, set[str]]:
    os.environ["THALWEG_JOB_ID"] = "one"
    engines = _build_engines(rank)
    for step in (1, 2):
        checkpoint.commit(Path(folder), step, engines, {})
        for name in engines:  # `thalweg ckpt export` writes to hf
            Path(folder, name, "hf").mkdir(exist_ok=True)
            Path(folder, name, "hf", "config.json").touch()
            Path(folder, name, "notes.txt").touch()
    assert checkpoint.resume(folder, engines)[0] == 2
    del os.environ["THALWEG_JOB_ID"]
    return {name: list_names(Path(folder, name)) for name in engines}


def test_a_job_of_the_launcher_keeps_its_claim_and_the_users_files(tmp_path: Path) -> None:
    """What is left beside the last commit says which start of the job has the folder, or is the user's."""
    (left,) = run_ranks(_commit_in_a_job, 1, str(tmp_path))
    assert left == {name: {"step2", ".starts.json", "hf", "notes.txt"} for name in STAGES}
    assert all(Path(tmp_path, name, "hf", "config.json").exists() for name in STAGES)
