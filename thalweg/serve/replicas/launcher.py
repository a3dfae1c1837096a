"""How a replica comes to life: as a process of its own.

It gets one end of a socket pair as a file descriptor and its EngineSpec as JSON in an argument; nothing is
listening anywhere and nothing lies on disk.  It starts in a session of its own, so Ctrl-C reaches the server
alone, which drains; SIGTERM, which systemd and SLURM send to all processes, it leaves to the server.  Run as a
module this file is the replica's program.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from thalweg.infer.config import MEMORY_SHARES_VARIABLE, EngineConfig
from thalweg.infer.types import EngineCore
from thalweg.serve.engine_process import EngineLoop

LOADER = "thalweg.infer:load_engine"
_QUIET_ENV = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}  # a server's log has no use for bars
_LAUNCHER_ENV_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_EXIT_GRACE = 1.0  # seconds that a replica whose server is gone may spend in its last step


@dataclass(frozen=True)
class EngineSpec:
    """Which engine to make: ``loader`` is ``module:function``, called with the model and the options."""

    model: str
    options: EngineConfig = field(default_factory=EngineConfig)
    loader: str = LOADER
    # Which of how many replicas of this host the engine is of.
    replica: tuple[int, int] = (0, 1)

    def load(self) -> EngineCore:
        """Make the engine; raises what the loader raises."""
        options = self.options
        if self.loader == LOADER and self.replica[1] > 1:
            device = _device_of_replica(options, *self.replica)
            if device in ("cpu", options.device):  # which the others have, too
                os.environ[MEMORY_SHARES_VARIABLE] = str(self.replica[1])
            options = replace(options, device=device)
        return pkgutil.resolve_name(self.loader)(self.model, options)


def _device_of_replica(options: EngineConfig, index: int, num_replicas: int) -> str:
    """Return the first device of a replica, made the current one; its ranks have the ones after it.  A device named by
    its number is all replicas'.  Raises ValueError where there are too few."""
    import torch

    from thalweg.device import pick_device, resolve_device

    device = resolve_device(options.device)
    if device.type == "cpu" or ":" in options.device:
        return str(pick_device(name=str(device)))
    count, num_needed = torch.accelerator.device_count(), num_replicas * options.num_ranks
    if num_needed > count:
        raise ValueError(
            f"{num_replicas} replicas of {options.num_ranks} ranks need {num_needed} {device.type} devices of their"
            f" own, and torch sees {count}: give --replicas {count // options.num_ranks}, --device {device.type}:0 for"
            " all to share that one, or --device cpu"
        )
    return str(pick_device(name=f"{device.type}:{index * options.num_ranks}"))


class ProcessLauncher:
    """Starts replicas as processes; ``cpu_shares`` has the cores of each (none named: all), ``environ`` what their
    environment has in addition."""

    def __init__(self, engine_spec: EngineSpec, cpu_shares: Sequence[Sequence[int]] = ((),), **environ: str) -> None:
        self._engine_spec, self._cpu_shares, self._environ = engine_spec, cpu_shares, environ

    def __call__(self, index: int) -> ReplicaProcess:
        """Start replica ``index``."""
        replica = index % len(self._cpu_shares), len(self._cpu_shares)
        return ReplicaProcess(replace(self._engine_spec, replica=replica), self._cpu_shares[replica[0]], self._environ)


class ReplicaProcess:
    """A replica in a process of its own, as the server sees it; ``sock`` is the server's end of the connection."""

    def __init__(self, engine_spec: EngineSpec, cpus: Sequence[int], environ: Mapping[str, str]) -> None:
        self.sock, child_sock = socket.socketpair()
        fields = {**asdict(engine_spec), "fd": child_sock.fileno(), "cpus": list(cpus)}
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, json.dumps(fields)]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(child_sock.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
                env={**_QUIET_ENV, **_without_launcher_env(os.environ), **environ},
                start_new_session=True,
            )
        except BaseException:
            self.sock.close()
            raise
        finally:
            child_sock.close()
        self.name = f"process {self._process.pid}"

    def exit_code(self) -> int | None:
        """Return the exit code (minus n for signal n), or None while it lives."""
        return self._process.poll()

    def terminate(self, grace: float) -> None:
        """Wait ``grace`` seconds for its end, then end it.  Blocks."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _without_launcher_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without a launcher's variables: a replica is no rank, whatever its server is."""
    return {k: v for k, v in environ.items() if not k.startswith(_LAUNCHER_ENV_PREFIXES)}


def _has_fileno(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def main(argument: str) -> int:
    """Be a replica: ``argument`` is the EngineSpec as JSON, with ``fd`` and ``cpus``."""
    # Either may be sent to all processes at once: the server drains, and its end is this one's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fields = json.loads(argument)
    sock = socket.socket(fileno=fields.pop("fd"))
    cpus = fields.pop("cpus")
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cpus))
    engine_spec = EngineSpec(**{**fields, "options": EngineConfig(**fields["options"])})

    def exit_soon() -> None:
        time.sleep(_EXIT_GRACE)
        os._exit(0)

    return EngineLoop(sock, engine_spec.load, exit_soon).run()


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # threads of torch must not hold the exit
