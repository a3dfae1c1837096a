"""This host's part of a job: torch's elastic agent with the ranks of ``rank.py``, and a report at the end."""

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thalweg.launch import failure
from thalweg.launch.cores import CorePlan
from thalweg.launch.network import interface_towards
from thalweg.launch.outcome import Outcome
from thalweg.launch.watch import Watch, kill_sessions, read_pids

if TYPE_CHECKING:
    from thalweg.launch.meeting import Meeting
    from thalweg.launch.peers import Peers, Place

_RANK = Path(__file__).with_name("rank.py")
_PREFIX = "thalweg-run-"
_ELASTIC = "torch.distributed.elastic"


@dataclass(frozen=True)
class Job:
    """What to start: ``nproc`` ranks of ``target`` with ``arguments``, delivered as they are.

    ``kind`` says how: a script file, a module as `python -m` would, or a program that is not Python.
    ``environ`` is added to the ranks' environment.  ``master_port`` None takes a free one.  ``grace`` is the
    time in seconds that ranks which must end have between SIGTERM and SIGKILL.  ``place`` says which host of
    several this is; None where there is only this one.
    """

    nproc: int
    target: str
    arguments: tuple[str, ...]
    kind: Literal["script", "module", "program"] = "script"
    cores: CorePlan = field(default_factory=lambda: CorePlan((), 1))
    master_port: int | None = None
    grace: float = 4.0
    environ: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None


def run_local(job: Job) -> Outcome:
    """Start the ranks of this host, wait for them, and leave nothing behind.

    Returns exit code 0 when all ranks succeeded, the first failed rank's code otherwise, and 128 + n when
    this process was told to stop by signal n.  On several hosts all return the same.

    Raises:
        ValueError: the port is taken, or the hosts contradict each other.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from thalweg.launch.meeting import Meeting, bind
    from thalweg.launch.peers import Peers

    _sweep(Path(tempfile.gettempdir()))
    place = job.place
    meeting = (
        place.meeting if place else Meeting("127.0.0.1", 0, 0, 1, bind("127.0.0.1", job.master_port or 0))
    )
    with (
        tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as name,
        _environment(_rank_environ(job, meeting.addr)),
        _signal_handlers_kept(),
    ):
        folder = Path(name)
        watch = Watch(folder, job.nproc, job.grace)
        peers = Peers(place, watch.lost, watch.all_well) if place else None
        world = _meet(job, peers) if peers else job.nproc
        codes: dict[int, int] = {}
        stopped: int | None = None
        watch.start()
        try:
            if peers:
                peers.start()
            with _agent_log(watch.lost):
                _run_agent(job, meeting, folder)
        except ChildFailedError as error:
            codes = {rank: item.exitcode for rank, item in error.failures.items()}
        except SignalException as error:
            stopped = int(error.sigval)
        except RuntimeError:  # the store on another host went away under the agent
            if peers is None or peers.verdict is None:
                raise
            stopped = int(signal.SIGTERM)
        finally:
            _ignore_signals()  # what is left takes seconds, and must be done
            watch.stop()
            kill_sessions(set(read_pids(folder).values()))
        failures = failure.collect(folder, codes, watch.exits) if codes else []
        return _conclude(job, failures, stopped, world, peers)


def _meet(job: Job, peers: Peers) -> int:
    """Meet the other hosts; returns the number of ranks on all of them."""
    import torch

    from thalweg import __version__

    card = {
        "host": socket.gethostname(),
        "nproc": job.nproc,
        "target": job.target,
        "torch": torch.__version__,
        "thalweg": __version__,
    }
    cards = peers.arrive(card, lambda text: sys.stderr.write(f"thalweg run: {text}\n"))
    return sum(one["nproc"] for one in cards)


def _conclude(
    job: Job, failures: list[failure.Failure], stopped: int | None, world: int, peers: Peers | None
) -> Outcome:
    """The outcome of this host's ranks, or that of the job where it has several hosts."""
    own = None
    if failures:
        where = f" on {socket.gethostname()}" if peers else ""
        own = Outcome(failures[0].exit_code, failure.report(failures, world, where))
    elif stopped is not None and not (peers and peers.stopping):
        where = f" on {socket.gethostname()}" if peers else ""
        name = signal.Signals(stopped).name
        own = Outcome(128 + stopped, f"thalweg run: stopped by {name}{where}, and the ranks with it\n")
    if peers is not None and (failures or stopped is not None):
        lost_peer = bool(failures) and failures[0].is_peer_loss
        own = peers.settle(own, lost_peer, patience=job.grace + 3.0) or Outcome(
            128 + signal.SIGTERM, "thalweg run: another host stopped the job without saying why\n"
        )
    elif peers is not None:
        peers.stop()
    return own or Outcome(0, "")


def _run_agent(job: Job, meeting: Meeting, folder: Path) -> None:
    """Run torch's agent to the end of the job; raises its ``ChildFailedError`` or ``SignalException``."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from thalweg.launch.meeting import BACKEND, register

    register()
    num_hosts = job.place.num_hosts if job.place else 1
    settings: dict[str, Any] = {
        "min_nodes": num_hosts,
        "max_nodes": num_hosts,
        "nproc_per_node": job.nproc,
        "run_id": BACKEND,
        "rdzv_backend": BACKEND,
        "rdzv_endpoint": f"{meeting.addr}:{meeting.port}",
        "rdzv_configs": {"meeting": meeting},
        "local_addr": meeting.addr,
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "logs")),
        "shutdown_timeout": math.ceil(job.grace),
    }
    known = {item.name for item in dataclasses.fields(LaunchConfig)}  # torch 2.11 has fewer
    config = LaunchConfig(**{key: value for key, value in settings.items() if key in known})
    elastic_launch(config, sys.executable)("-u", str(_RANK), *_rank_arguments(job, folder))


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


def _rank_environ(job: Job, addr: str) -> dict[str, str]:
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(job.cores.threads))}
    if sys.platform.startswith("linux"):
        # Tensors of 2 MiB and more in huge pages: a fault each 4 KiB costs a tenth of a step on a CPU.
        environ["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_towards(addr)):
        # Without this gloo looks up the host's name, which may not resolve, and on one host listens outside.
        environ["GLOO_SOCKET_IFNAME"] = interface
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
    """A signal stops the job also before the agent installs its handlers; at the end the caller's are
    back."""
    from torch.distributed.elastic.multiprocessing import SignalException

    def stop(number: int, frame: Any) -> None:
        raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Signals were heard; :func:`_signal_handlers_kept` gives them back."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda *_: None)


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
