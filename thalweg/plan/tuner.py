"""Measuring the best few of a search: each in a child process, bounded in time and memory.

The plan orders the candidates first (``search.py``), so that only runs that should fit and
should be fast are started.  A child trains a few steps on random tokens and reports its
seconds and its peak; one that dies, hangs or exceeds its limit is a candidate less, never
the end of the search.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.config import Config
from thalweg.config.problems import ConfigError
from thalweg.plan.changes import changed
from thalweg.plan.core import Plan, Question

Say = Callable[[str], None]
# Room for what the plan does not know, before a child is stopped for its memory.
_SLACK = 1.3


@dataclass
class Trial:
    """One candidate: its changes to the config, what was planned, what was measured (None: nothing)."""

    changes: dict[str, Any]
    planned: Plan
    seconds: float | None = None
    peak_bytes: int | None = None
    note: str = ""

    @property
    def seconds_a_token(self) -> float:
        """Measured where there is a measurement, planned elsewhere."""
        return (self.seconds or self.planned.seconds) / max(1, self.planned.tokens)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "changes": self.changes,
            "planned_seconds": self.planned.seconds,
            "planned_bytes": self.planned.per_rank.total,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "note": self.note,
        }


@dataclass
class Tuned:
    """The result: every trial, the best first, and how many candidates the plan ruled out."""

    trials: list[Trial] = field(default_factory=list)
    ruled_out: int = 0

    @property
    def best(self) -> Trial | None:
        """The fastest a token among the measured ones, else among the planned ones."""
        measured = [trial for trial in self.trials if trial.seconds is not None]
        return min(measured or self.trials, key=lambda trial: trial.seconds_a_token, default=None)


def tune(
    question: Question, config: Config, spec: str, *, best: int = 3, timeout: float = 120.0, say: Say
) -> Tuned:
    """Plan every candidate around ``config`` and measure the ``best`` few.

    ``spec``: the path of the model's config, which the children open; ``timeout`` in seconds
    for each of them; ``say`` gets a line of progress.  The batch of a step stays the same.
    """
    result = Tuned()
    for changes in _candidates(config):
        try:
            planned = question.answer(changed(config, changes, question.cluster.world_size))
        except ConfigError:
            continue
        if planned.fits is False:
            result.ruled_out += 1
        else:
            result.trials.append(Trial(changes, planned))
    result.trials.sort(key=lambda trial: trial.seconds_a_token)
    say(f"{len(result.trials)} candidates fit by the plan, {result.ruled_out} do not")
    if question.cluster.device == "cpu" and question.cluster.num_nodes == 1:
        for index, trial in enumerate(result.trials[:best]):
            say(f"measuring {index + 1} of {min(best, len(result.trials))}: {json.dumps(trial.changes)}")
            _measure(trial, question, spec, timeout)
            say(f"  {trial.note or f'{trial.seconds:.3g} s a step'}")
    return result


def _candidates(config: Config) -> Iterator[dict[str, Any]]:
    """Stages x recomputation x ways to split the same batch into micro-batches."""
    total = int(config.train_micro_batch_size_per_gpu) * int(config.gradient_accumulation_steps)
    many = int(config.data_parallel_size) > 1
    sizes = [size for size in range(1, total + 1) if total % size == 0][-4:]
    for stage in (1, 2, 3, 0) if many else (config.zero_optimization.stage,):
        for policy in ("none", "selective", "full"):
            for size in sizes:
                yield {
                    "zero_optimization.stage": stage,
                    "activation_checkpointing.policy": policy,
                    "train_micro_batch_size_per_gpu": size,
                    "gradient_accumulation_steps": total // size,
                }


def _measure(trial: Trial, question: Question, spec: str, timeout: float) -> None:
    assert trial.planned.config is not None
    world = question.cluster.world_size
    limit = int(trial.planned.per_rank.total * _SLACK) + (1 << 28)
    if question.cluster.host_memory is not None:
        limit = min(limit, question.cluster.host_memory // world)
    job = {
        "model": spec,
        "config": trial.planned.config.to_dict(),
        "sequence_length": question.sequence_length,
    }
    with tempfile.TemporaryDirectory(prefix="thalweg-tune-") as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        ranks = [_start(Path(folder), rank, world) for rank in range(world)]
        try:
            trial.note = _watch(ranks, limit, time.monotonic() + timeout)
            if trial.note.startswith("ended"):
                trial.note += _last_words(Path(folder), world)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if trial.note:
            return
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    trial.seconds = max(answer["seconds"] for answer in answers)
    trial.peak_bytes = max(answer["peak_bytes"] for answer in answers)


def _start(folder: Path, rank: int, world: int) -> subprocess.Popen[bytes]:
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    environment = {**os.environ, **{key: str(value) for key, value in names.items()}, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "thalweg.cli.tune_rank", str(folder)]
    with (folder / f"{rank}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _watch(ranks: list[subprocess.Popen[bytes]], limit: int, deadline: float) -> str:
    """Wait for all; returns what went wrong, or nothing."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            break
        if time.monotonic() > deadline:
            return "took too long"
        if max(_resident(process.pid) for process in ranks) > limit:
            return "took more memory than planned"
        time.sleep(0.02)
    codes = [process.poll() for process in ranks if process.poll() not in (None, 0)]
    return f"ended with code {codes[0]}" if codes else ""


def _last_words(folder: Path, world: int) -> str:
    """The last line that a rank wrote: the error, where Python ended it."""
    for rank in range(world):
        lines = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
        if lines:
            return f": {lines[-1][:300]}"
    return ""


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
