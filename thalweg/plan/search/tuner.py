"""Measuring the best few of a search: each in a child process, bounded in time and memory.

The plan orders the candidates first (:mod:`.search`), so that only runs that should fit and
should be fast are started.  A child trains a few steps on random tokens and reports its
seconds and its peak; one that dies, hangs or exceeds its limit is a candidate less, never
the end of the search.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.config import Config
from thalweg.plan.planner import Planner
from thalweg.plan.result import Plan
from thalweg.plan.search.search import PlanCache, tuning_space
from thalweg.utils.procfs import resident_bytes

# Room for what the plan does not know, before a child is stopped for its memory.
_MEMORY_SLACK = 1.3


@dataclass
class Trial:
    """One candidate: its changes to the config, what was planned, what was measured (None: nothing)."""

    changes: dict[str, Any]
    plan: Plan
    measured_seconds: float | None = None
    peak_bytes: int | None = None
    failure_reason: str = ""

    @property
    def seconds_per_token(self) -> float:
        """Measured where there is a measurement, planned elsewhere."""
        return (self.measured_seconds or self.plan.step_seconds) / max(1, self.plan.tokens_per_step)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "changes": self.changes,
            "planned_seconds": self.plan.step_seconds,
            "planned_bytes": self.plan.per_rank.total,
            "seconds": self.measured_seconds,
            "peak_bytes": self.peak_bytes,
            "note": self.failure_reason,
        }


@dataclass
class TuneResult:
    """The result: every trial, the best first, and how many candidates the plan ruled out."""

    trials: list[Trial] = field(default_factory=list)
    num_ruled_out: int = 0

    @property
    def best(self) -> Trial | None:
        """The fastest a token among the measured ones, else among the planned ones."""
        measured = [trial for trial in self.trials if trial.measured_seconds is not None]
        return min(measured or self.trials, key=lambda trial: trial.seconds_per_token, default=None)


def tune(
    planner: Planner,
    config: Config,
    model_path: str,
    *,
    num_measured: int = 3,
    timeout: float = 120.0,
    progress: Callable[[str], None],
) -> TuneResult:
    """Plan every candidate around ``config`` and measure the best ``num_measured``.

    ``model_path``: the model's config, which the children open; ``timeout`` in seconds
    for each of them; ``progress`` gets a line of text.  The batch of a step stays the same.
    """
    result, plans = TuneResult(), PlanCache(planner, config)
    for changes in tuning_space(config).iter_candidates():
        plan = plans.get_plan(changes)
        if plan is not None and plan.fits is not False:
            result.trials.append(Trial(changes, plan))
        else:
            result.num_ruled_out += plan is not None
    if not plans.tried and plans.last_error is not None:  # not one can be planned, and this is why
        raise plans.last_error
    result.trials.sort(key=lambda trial: trial.seconds_per_token)
    progress(f"{len(result.trials)} candidates fit by the plan, {result.num_ruled_out} do not")
    if planner.cluster.device == "cpu" and planner.cluster.num_nodes == 1:
        for index, trial in enumerate(result.trials[:num_measured]):
            progress(f"measuring {index + 1} of {min(num_measured, len(result.trials))}: {json.dumps(trial.changes)}")
            _measure_trial(trial, planner, model_path, timeout)
            progress(f"  {trial.failure_reason or f'{trial.measured_seconds:.3g} s a step'}")
    return result


def _measure_trial(trial: Trial, planner: Planner, model_path: str, timeout: float) -> None:
    assert trial.plan.config is not None
    world_size = planner.cluster.world_size
    limit = int(trial.plan.per_rank.total * _MEMORY_SLACK) + (1 << 28)
    if planner.cluster.host_memory is not None:
        limit = min(limit, planner.cluster.host_memory // world_size)
    job = {"model": model_path, "config": trial.plan.config.to_dict(), "sequence_length": planner.sequence_length}
    with tempfile.TemporaryDirectory(prefix="thalweg-tune-") as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        workers = [_start_worker(Path(folder), rank, world_size) for rank in range(world_size)]
        try:
            trial.failure_reason = _wait_for_workers(workers, limit, time.monotonic() + timeout)
            if trial.failure_reason.startswith("ended"):
                trial.failure_reason += _last_log_line(Path(folder), world_size)
        finally:
            for process in workers:
                process.kill()  # which does nothing to one that has ended
                process.wait()
        if trial.failure_reason:
            return
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]
    trial.measured_seconds = max(answer["seconds"] for answer in reports)
    trial.peak_bytes = max(answer["peak_bytes"] for answer in reports)


def _start_worker(folder: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    environment = {**os.environ, **{key: str(value) for key, value in names.items()}, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "thalweg.cli.tune_worker", str(folder)]
    with (folder / f"{rank}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _wait_for_workers(workers: list[subprocess.Popen[bytes]], limit: int, deadline: float) -> str:
    """Wait for all; returns what went wrong, or nothing."""
    while any(process.poll() is None for process in workers):
        if any(process.poll() not in (None, 0) for process in workers):
            break
        if time.monotonic() > deadline:
            return "took too long"
        if max(resident_bytes(process.pid) for process in workers) > limit:
            return "took more memory than planned"
        time.sleep(0.02)
    codes = [process.poll() for process in workers if process.poll() not in (None, 0)]
    return f"ended with code {codes[0]}" if codes else ""


def _last_log_line(folder: Path, world_size: int) -> str:
    """The last line that a rank wrote: the error, where Python ended it."""
    for rank in range(world_size):
        lines = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
        if lines:
            return f": {lines[-1][:300]}"
    return ""
