"""How a replica comes to life: as a process of its own, or as a thread of this one.

A process gets one end of a socket pair as a file descriptor and its task as JSON in an argument; nothing is
listening anywhere and nothing lies on disk.  It starts in a session of its own, so Ctrl-C reaches the front
alone, which drains.  Run as a module this file is the replica's program.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from thalweg.infer.api import EngineCore, EngineOptions
from thalweg.serve.host import Host

LOADER = "thalweg.infer:load_engine"
_QUIET = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}  # a server's log has no use for bars
_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_LINGER = 1.0  # seconds that a replica whose front is gone may spend in its last step


@dataclass(frozen=True)
class EngineTask:
    """Which engine to make: ``loader`` is ``module:function``, called with the model and the options."""

    model: str
    options: EngineOptions = field(default_factory=EngineOptions)
    loader: str = LOADER

    def load(self) -> EngineCore:
        """Make the engine; raises what the loader raises."""
        module, _, name = self.loader.partition(":")
        return getattr(importlib.import_module(module), name)(self.model, self.options)


class Running(Protocol):
    """A replica's life as the front sees it."""

    name: str

    @property
    def sock(self) -> socket.socket:
        """The front's end of the connection."""
        ...

    def exit_code(self) -> int | None:
        """Return the exit code (minus n for signal n), or None while it lives."""
        ...

    def terminate(self, grace: float) -> None:
        """End it: politely, and after ``grace`` seconds for certain.  Blocks."""
        ...


class InProcess:
    """Starts replicas as processes; ``places`` gives replica i its variables and its cores."""

    def __init__(self, task: EngineTask, places: tuple[Place, ...] = ()) -> None:
        self._task, self._places = task, places

    def __call__(self, index: int) -> Running:
        """Start replica ``index``."""
        mine, theirs = socket.socketpair()
        return self.at(index, theirs, mine)

    def at(self, index: int, theirs: socket.socket, mine: socket.socket | None = None) -> Process:
        """Start it at the end ``theirs`` of a connection; ``mine``: the other one, where it is here."""
        place = self._places[index % len(self._places)] if self._places else Place()
        return Process(self._task, place, theirs, mine)


@dataclass(frozen=True)
class Place:
    """Where a replica runs: its cores (none named: all) and what its environment has in addition."""

    cpus: tuple[int, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class Process:
    """A replica in a process of its own."""

    def __init__(
        self, task: EngineTask, place: Place, theirs: socket.socket, mine: socket.socket | None
    ) -> None:
        # With its other end on another host, the socket does not tell that this process is gone.
        parent = os.getpid() if mine is None else 0
        fields = {**asdict(task), "fd": theirs.fileno(), "cpus": place.cpus, "parent": parent}
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, json.dumps(fields)]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                env={**_QUIET, **_outside_of_jobs(os.environ), **place.environ},
                start_new_session=True,
            )
        except BaseException:
            if mine is not None:
                mine.close()
            raise
        finally:
            theirs.close()
        self._sock = mine
        self.name = f"process {self._process.pid}"
        self.pid = self._process.pid

    @property
    def sock(self) -> socket.socket:
        """This end of the connection."""
        assert self._sock is not None, "the connection leads to another host"
        return self._sock

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it lives."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def terminate(self, grace: float) -> None:
        """Wait ``grace`` seconds for its end, then end it."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class InThread:
    """Starts replicas as threads of this process, each with an engine that ``load`` makes."""

    def __init__(self, load: Callable[[], EngineCore]) -> None:
        self._load = load

    def __call__(self, index: int) -> Running:
        """Start replica ``index``."""
        return _Thread(self._load, index)


class _Thread:
    def __init__(self, load: Callable[[], EngineCore], index: int) -> None:
        self.sock, theirs = socket.socketpair()
        self.name = f"thread {index}"
        self._code: int | None = None
        self._host = Host(theirs, load)
        self._thread = threading.Thread(target=self._run, name=f"thalweg-engine-{index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._code = self._host.run()

    def exit_code(self) -> int | None:
        return self._code

    def terminate(self, grace: float) -> None:
        self._thread.join(grace)  # a thread cannot be killed; as a daemon it does not hold the exit


def _outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without a launcher's variables: a replica is no rank, whatever its server is."""
    return {k: v for k, v in environ.items() if not k.startswith(_JOB)}


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def main(argument: str) -> int:
    """Be a replica: ``argument`` is the task as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fields = json.loads(argument)
    sock = socket.socket(fileno=fields.pop("fd"))
    cpus, parent = fields.pop("cpus"), fields.pop("parent")
    if parent:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cpus))
    task = EngineTask(**{**fields, "options": EngineOptions(**fields["options"])})

    def leave() -> None:
        time.sleep(_LINGER)
        os._exit(0)

    return Host(sock, task.load, leave).run()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # threads of torch must not hold the exit
