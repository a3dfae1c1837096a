"""One job on this host: torch's elastic agent with the ranks of ``rank.py``, and a report at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from thalweg.launch import failure
from thalweg.launch.cores import CorePlan
from thalweg.launch.watch import Watch, kill_sessions, read_pids

_RANK = Path(__file__).with_name("rank.py")
_PORT_TRIES = 5
_PREFIX = "thalweg-run-"
_ELASTIC = "torch.distributed.elastic"


@dataclass(frozen=True)
class Job:
    """What to start: ``nproc`` ranks of ``target`` with ``arguments``, delivered as they are.

    ``kind`` says how: a script file, a module as `python -m` would, or a program that is not Python.
    ``environ`` is added to the ranks' environment.  ``master_port`` None takes a free one.  ``grace`` is the
    time in seconds that ranks which must end have between SIGTERM and SIGKILL.
    """

    nproc: int
    target: str
    arguments: tuple[str, ...]
    kind: Literal["script", "module", "program"] = "script"
    cores: CorePlan = field(default_factory=lambda: CorePlan((), 1))
    master_port: int | None = None
    grace: float = 4.0
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The exit code of the job and what to tell the user on standard error (empty on success)."""

    code: int
    report: str


def run_local(job: Job) -> Outcome:
    """Start the ranks, wait for them, and leave nothing behind.

    Returns exit code 0 when all ranks succeeded, the first failed rank's code otherwise, and 128 + n when
    this process was told to stop by signal n.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _sweep(Path(tempfile.gettempdir()))
    with (
        tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as name,
        _environment(_rank_environ(job)),
    ):
        folder = Path(name)
        watch = Watch(folder, job.nproc, job.grace)
        watch.start()
        codes: dict[int, int] = {}
        try:
            with _signal_handlers_kept(), _agent_log(watch.lost):
                _run_agent(job, folder)
        except ChildFailedError as error:
            codes = {rank: item.exitcode for rank, item in error.failures.items()}
        except SignalException as error:
            return Outcome(
                128 + error.sigval, f"thalweg run: stopped by {error.sigval.name}, and the ranks with it\n"
            )
        finally:
            watch.stop()
            kill_sessions(set(read_pids(folder).values()))
        if not codes:
            return Outcome(0, "")
        failures = failure.collect(folder, codes, watch.exits)
        return Outcome(failures[0].exit_code, failure.report(failures, job.nproc))


def _run_agent(job: Job, folder: Path) -> None:
    """Run torch's agent to the end of the job; raises its ``ChildFailedError`` or ``SignalException``.

    The static rendezvous has one server and neither the heartbeats nor the random delay of the elastic one,
    but wants its port named: if somebody takes the free port before the server does, another one is tried.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": job.nproc,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "static",
        "rdzv_configs": {"rank": 0},
        "local_addr": "127.0.0.1",
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "logs")),
        "shutdown_timeout": math.ceil(job.grace),
    }
    known = {item.name for item in dataclasses.fields(LaunchConfig)}  # torch 2.11 has fewer
    settings = {key: value for key, value in settings.items() if key in known}
    for tries_left in reversed(range(1 if job.master_port else _PORT_TRIES)):
        config = LaunchConfig(**settings, rdzv_endpoint=f"127.0.0.1:{job.master_port or free_port()}")
        try:
            elastic_launch(config, sys.executable)("-u", str(_RANK), *_rank_arguments(job, folder))
            return
        except DistNetworkError:
            if not tries_left:
                raise


def free_port() -> int:
    """A port of this host that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of this host now."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's launchers that were killed: nobody else can."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and folder.lstat().st_uid == os.getuid() and not _exists(int(pid)):
                shutil.rmtree(folder)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _rank_arguments(job: Job, folder: Path) -> list[str]:
    cpus = ";".join(",".join(map(str, share)) for share in job.cores.cpus) or "-"
    arguments = [str(folder), str(os.getpid()), cpus, job.kind, job.target, *job.arguments]
    # The agent runs each argument through string.Template; a doubled $ comes out as the one that went in.
    return [argument.replace("$", "$$") for argument in arguments]


def _rank_environ(job: Job) -> dict[str, str]:
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(job.cores.threads))}
    if sys.platform.startswith("linux"):
        # Tensors of 2 MiB and more in huge pages: a fault each 4 KiB costs a tenth of a step on a CPU.
        environ["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    if "GLOO_SOCKET_IFNAME" not in os.environ and sys.platform.startswith("linux"):
        # One host: without this gloo looks up the host's name, which may not resolve, and listens outside.
        if any(name == "lo" for _, name in socket.if_nameindex()):
            environ["GLOO_SOCKET_IFNAME"] = "lo"
    environ.update(job.environ)
    return environ


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the agent's children inherit, and put the old ones back."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them; a program that called us wants its own back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _LostHandler(logging.Handler):
    """Swallows the agent's log; a warning from its process keeper means that it has begun to end the
    ranks."""

    def __init__(self, lost: threading.Event) -> None:
        super().__init__(logging.WARNING)
        self._lost = lost

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(f"{_ELASTIC}.multiprocessing"):
            self._lost.set()


@contextlib.contextmanager
def _agent_log(lost: threading.Event) -> Iterator[None]:
    """Keep the agent's pages of warnings to ourselves; our report says what they say."""
    logger = logging.getLogger(_ELASTIC)
    handler, before = _LostHandler(lost), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
