"""Groups of rank processes that take turns.

A `Group` is one contestant: its ranks are started once (`_worker.py`), build, warm up, and then sleep
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
from _peers import ROOT, deepspeed_environment, deepspeed_residue, python_for

WORKER = Path(__file__).resolve().parent / "_worker.py"


_FOLDER = "thalweg-bench-"


def exit_on_terminate() -> None:
    """Let SIGTERM end the driver as an exception does, so that it cleans up; call it in the main thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def sweep() -> list[Path]:
    """Remove what drivers that are no longer alive have left, and return their folders."""
    gone = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            if (folder / "port").exists():
                deepspeed_residue((folder / "port").read_text())
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder)
    return gone


class GroupError(RuntimeError):
    """A contestant's rank failed or did not answer in time; the message has the end of its log."""


@dataclass(frozen=True)
class Placement:
    """Where a rank runs: a command prefix (a network namespace, say) and extra environment variables."""

    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Turn:
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


class Group:
    """The ranks of one contestant."""

    def __init__(
        self, name: str, job: Job, world: int, *, threads: int = 1, placements: list[Placement] | None = None
    ) -> None:
        self.name, self.job, self.world = name, job, world
        sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        self._port = str(20000 + secrets.randbelow(40000))
        (self._folder / "port").write_text(self._port)
        self._logs = [self._folder / f"rank{rank}.log" for rank in range(world)]
        self._ranks: list[subprocess.Popen[str]] = []
        places = placements or [Placement()] * world
        try:
            for rank, place in enumerate(places):
                self._ranks.append(self._start(rank, place, threads))
        except BaseException:
            self.stop(orderly=False)
            raise

    def _start(self, rank: int, place: Placement, threads: int) -> subprocess.Popen[str]:
        command = [*place.prefix, python_for(self.name), str(WORKER), "--contestant", self.name]
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
            environment.update(deepspeed_environment(self.world))
        environment.update(place.environment)
        with self._logs[rank].open("w") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )

    def _send(self, order: dict[str, Any]) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure("a rank has gone") from None

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        """Wait for one line from every rank; raise GroupError when one fails, dies or takes too long."""
        deadline = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.world:
            waiting = {p.stdout: r for r, p in enumerate(self._ranks) if r not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(f"no answer within {timeout:.0f} s")
            for stream in ready:
                line = stream.readline()
                answer = json.loads(line) if line else {"error": "the process ended"}
                if "error" in answer:
                    raise self._failure(f"rank {waiting[stream]}: {answer['error']}")
                answers[waiting[stream]] = answer
        return [answers[rank] for rank in range(self.world)]

    def _failure(self, reason: str) -> GroupError:
        tails = [f"  {log.name}: {line}" for log in self._logs for line in log.read_text().splitlines()[-6:]]
        return GroupError("\n".join([f"{self.name}: {reason}", *tails]))

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Return when every rank has built its model; GroupError otherwise."""
        self._answers(timeout)

    def run(self, steps: int, timeout: float = 600.0) -> Turn:
        """Give the group a turn of `steps` optimiser steps and return what it measured."""
        self._send({"do": "run", "steps": steps})
        answers = self._answers(timeout)
        return Turn(*([answer[key] for answer in answers] for key in ("seconds", "cpu", "losses")))

    def report(self) -> list[dict[str, Any]]:
        """Return each rank's memory (MiB) and imports."""
        self._send({"do": "report"})
        return self._answers(60.0)

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
            deepspeed_residue(self._port)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop(orderly=kind is None)
