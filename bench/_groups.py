"""Groups of rank processes that take turns.

A `Group` is one contestant: its ranks are started once (`_piecewise.py`), build, warm up, and then sleep
on a pipe until `run(steps)` gives them a turn.  Contestants that are alive together can thus be timed in
alternation, so that whatever else the machine does falls on all of them alike.

Each group has a folder of its own under the system's temporary one for the rendezvous file and the logs.
Every process is stopped through its own handle; a driver that is killed outright closes its pipes by that,
which ends the ranks, and the next driver sweeps away what it left.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from _contestants import Job
from _peers import ROOT, deepspeed_env, python_for, remove_deepspeed_shm

WORKER = Path(__file__).resolve().parent / "_worker.py"


_FOLDER_PREFIX = "thalweg-bench-"


def exit_on_terminate() -> None:
    """Let SIGTERM end the driver as an exception does, so that it cleans up; call it in the main thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def remove_stale() -> list[Path]:
    """Remove what drivers that are no longer alive have left, and return their folders."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            if (folder / "port").exists():
                remove_deepspeed_shm((folder / "port").read_text())
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


class RankGroupError(RuntimeError):
    """A contestant's rank failed or did not answer in time; the message has the end of its log."""


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs: a command prefix (a network namespace, say) and extra environment variables."""

    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class TurnResult:
    """What one turn of a group measured; outer index rank, inner index step."""

    seconds: list[list[float]]
    cpu: list[list[float]]
    losses: list[list[float]]

    def clock(self) -> list[float]:
        """Return each step's seconds, the slowest rank's."""
        return [max(step) for step in zip(*self.seconds, strict=True)]

    def cpu_seconds(self) -> list[float]:
        """Return each step's process CPU seconds, the mean over ranks."""
        return [sum(step) / len(step) for step in zip(*self.cpu, strict=True)]

    def loss(self) -> list[float]:
        """Return each step's loss, the mean over ranks."""
        return [sum(step) / len(step) for step in zip(*self.losses, strict=True)]


class RankGroup:
    """The ranks of one contestant."""

    def __init__(
        self,
        name: str,
        job: Job,
        world: int,
        *,
        threads: int = 1,
        placements: list[RankPlacement] | None = None,
    ) -> None:
        self.name, self.job, self.world = name, job, world
        remove_stale()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-"))
        self._port = str(20000 + secrets.randbelow(40000))
        (self._folder / "port").write_text(self._port)
        self._logs = [self._folder / f"rank{rank}.log" for rank in range(world)]
        self._ranks: list[subprocess.Popen[str]] = []
        rank_placements = placements or [RankPlacement()] * world
        try:
            for rank, placement in enumerate(rank_placements):
                self._ranks.append(self._start_rank(rank, placement, threads))
        except BaseException:
            self.stop(orderly=False)
            raise

    def _start_rank(self, rank: int, placement: RankPlacement, threads: int) -> subprocess.Popen[str]:
        command = [*placement.prefix, python_for(self.name), str(WORKER), "--contestant", self.name]
        command += ["--job", json.dumps(self.job.to_dict()), "--store", str(self._folder / "store")]
        command += ["--rank", str(rank), "--world", str(self.world), "--threads", str(threads)]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),
        }
        if self.name.startswith("deepspeed"):
            environment.update(deepspeed_env(self.world))
        environment.update(placement.environment)
        with self._logs[rank].open("w") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )

    def _send(self, command: dict[str, Any]) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._make_error("a rank has gone") from None

    def _read_replies(self, timeout: float) -> list[dict[str, Any]]:
        """Wait for one line from every rank; raise RankGroupError when one fails, dies or takes too long."""
        deadline = time.monotonic() + timeout
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < self.world:
            waiting = {p.stdout: r for r, p in enumerate(self._ranks) if r not in replies}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._make_error(f"no answer within {timeout:.0f} s")
            for stream in ready:
                line = stream.readline()
                answer = json.loads(line) if line else {"error": "the process ended"}
                if "error" in answer:
                    raise self._make_error(f"rank {waiting[stream]}: {answer['error']}")
                replies[waiting[stream]] = answer
        return [replies[rank] for rank in range(self.world)]

    def _make_error(self, reason: str) -> RankGroupError:
        tails = [f"  {log.name}: {line}" for log in self._logs for line in log.read_text().splitlines()[-6:]]
        return RankGroupError("\n".join([f"{self.name}: {reason}", *tails]))

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Return when every rank has built its model; RankGroupError otherwise."""
        self._read_replies(timeout)

    def run(self, steps: int, timeout: float = 600.0) -> TurnResult:
        """Give the group a turn of `steps` optimiser steps and return what it measured."""
        self._send({"do": "run", "steps": steps})
        answers = self._read_replies(timeout)
        return TurnResult(*([answer[key] for answer in answers] for key in ("seconds", "cpu", "losses")))

    def report(self) -> list[dict[str, Any]]:
        """Return each rank's memory (MiB) and imports."""
        self._send({"do": "report"})
        return self._read_replies(60.0)

    def stop(self, orderly: bool = True) -> None:
        """End the ranks through their own handles, and remove what they may have left."""
        for process in self._ranks:
            if process.stdin is not None and process.poll() is None:
                try:
                    if orderly:
                        process.stdin.write('{"do": "stop"}\n')
                    process.stdin.close()
                except BrokenPipeError:
                    pass
        deadline = time.monotonic() + (15.0 if orderly else 1.0)
        for process in self._ranks:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._ranks = []
        if self.name.startswith("deepspeed"):
            remove_deepspeed_shm(self._port)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop(orderly=kind is None)
