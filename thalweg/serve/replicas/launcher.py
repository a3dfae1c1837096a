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

from thalweg.infer.config import EngineConfig
from thalweg.infer.types import EngineCore
from thalweg.serve.engine_process import EngineLoop

LOADER = "thalweg.infer:load_engine"
_QUIET_ENV = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}  # a server's log has no use for bars
_LAUNCHER_ENV_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_EXIT_GRACE = 1.0  # seconds that a replica whose front is gone may spend in its last step


@dataclass(frozen=True)
class EngineSpec:
    """Which engine to make: ``loader`` is ``module:function``, called with the model and the options."""

    model: str
    options: EngineConfig = field(default_factory=EngineConfig)
    loader: str = LOADER

    def load(self) -> EngineCore:
        """Make the engine; raises what the loader raises."""
        module, _, name = self.loader.partition(":")
        return getattr(importlib.import_module(module), name)(self.model, self.options)


class ReplicaHandle(Protocol):
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


class ProcessLauncher:
    """Starts replicas as processes; ``places`` gives replica i its variables and its cores."""

    def __init__(self, engine_spec: EngineSpec, resources: tuple[ReplicaResources, ...] = ()) -> None:
        self._engine_spec, self._resources = engine_spec, resources

    def __call__(self, index: int) -> ReplicaHandle:
        """Start replica ``index``."""
        parent_sock, child_sock = socket.socketpair()
        return self.start_on(index, child_sock, parent_sock)

    def start_on(
        self, index: int, child_sock: socket.socket, parent_sock: socket.socket | None = None
    ) -> ReplicaProcess:
        """Start it at the end ``theirs`` of a connection; ``mine``: the other one, where it is here."""
        resources = self._resources[index % len(self._resources)] if self._resources else ReplicaResources()
        return ReplicaProcess(self._engine_spec, resources, child_sock, parent_sock)


@dataclass(frozen=True)
class ReplicaResources:
    """Where a replica runs: its cores (none named: all) and what its environment has in addition."""

    cpus: tuple[int, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class ReplicaProcess:
    """A replica in a process of its own."""

    def __init__(
        self,
        engine_spec: EngineSpec,
        resources: ReplicaResources,
        child_sock: socket.socket,
        parent_sock: socket.socket | None,
    ) -> None:
        # With its other end on another host, the socket does not tell that this process is gone.
        parent = os.getpid() if parent_sock is None else 0
        fields = {**asdict(engine_spec), "fd": child_sock.fileno(), "cpus": resources.cpus, "parent": parent}
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, json.dumps(fields)]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(child_sock.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
                env={**_QUIET_ENV, **_without_launcher_env(os.environ), **resources.environ},
                start_new_session=True,
            )
        except BaseException:
            if parent_sock is not None:
                parent_sock.close()
            raise
        finally:
            child_sock.close()
        self._sock = parent_sock
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


class ThreadLauncher:
    """Starts replicas as threads of this process, each with an engine that ``load`` makes."""

    def __init__(self, load: Callable[[], EngineCore]) -> None:
        self._load = load

    def __call__(self, index: int) -> ReplicaHandle:
        """Start replica ``index``."""
        return _ReplicaThread(self._load, index)


class _ReplicaThread:
    def __init__(self, load: Callable[[], EngineCore], index: int) -> None:
        self.sock, child_sock = socket.socketpair()
        self.name = f"thread {index}"
        self._exit_code: int | None = None
        self._engine_loop = EngineLoop(child_sock, load)
        self._thread = threading.Thread(target=self._run, name=f"thalweg-engine-{index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._exit_code = self._engine_loop.run()

    def exit_code(self) -> int | None:
        return self._exit_code

    def terminate(self, grace: float) -> None:
        self._thread.join(grace)  # a thread cannot be killed; as a daemon it does not hold the exit


def _without_launcher_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without a launcher's variables: a replica is no rank, whatever its server is."""
    return {k: v for k, v in environ.items() if not k.startswith(_LAUNCHER_ENV_PREFIXES)}


def _has_fileno(stream: Any) -> bool:
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
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cpus))
    engine_spec = EngineSpec(**{**fields, "options": EngineConfig(**fields["options"])})

    def exit_soon() -> None:
        time.sleep(_EXIT_GRACE)
        os._exit(0)

    return EngineLoop(sock, engine_spec.load, exit_soon).run()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # threads of torch must not hold the exit
