"""This host's part of a job: torch's elastic agent with the ranks of ``worker.py``, and a report at the end."""

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
from thalweg.launch.cpu_affinity import CpuBinding
from thalweg.launch.job_result import JobResult
from thalweg.launch.network import interface_for
from thalweg.launch.process_monitor import ProcessMonitor, kill_sessions, read_pids

if TYPE_CHECKING:
    from thalweg.launch.multi_node.node_monitor import NodeMonitor, NodeSpec
    from thalweg.launch.rendezvous import StaticRendezvous

_WORKER = Path(__file__).with_name("worker.py")
_DIR_PREFIX = "thalweg-run-"
_ELASTIC_LOGGER = "torch.distributed.elastic"


@dataclass(frozen=True)
class LocalJob:
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
    cpu_binding: CpuBinding = field(default_factory=lambda: CpuBinding((), 1))
    master_port: int | None = None
    grace: float = 4.0
    environ: Mapping[str, str] = field(default_factory=dict)
    node: NodeSpec | None = None


def run_local(job: LocalJob) -> JobResult:
    """Start the ranks of this host, wait for them, and leave nothing behind.

    Returns exit code 0 when all ranks succeeded, the first failed rank's code otherwise, and 128 + n when
    this process was told to stop by signal n.  On several hosts all return the same.

    Raises:
        ValueError: the port is taken, or the hosts contradict each other.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from thalweg.launch.multi_node.node_monitor import NodeMonitor
    from thalweg.launch.rendezvous import StaticRendezvous, bind_listener

    _remove_stale_dirs(Path(tempfile.gettempdir()))
    node = job.node
    rendezvous = (
        node.rendezvous
        if node
        else StaticRendezvous("127.0.0.1", 0, 0, 1, bind_listener("127.0.0.1", job.master_port or 0))
    )
    with (
        tempfile.TemporaryDirectory(prefix=f"{_DIR_PREFIX}{os.getpid()}-") as name,
        _patched_environ(_worker_environ(job, rendezvous.addr)),
        _stop_on_signals(),
    ):
        folder = Path(name)
        monitor = ProcessMonitor(folder, job.nproc, job.grace)
        node_monitor = NodeMonitor(node, monitor.failed, monitor.succeeded) if node else None
        world_size = _join_nodes(job, node_monitor) if node_monitor else job.nproc
        returncodes: dict[int, int] = {}
        stop_signal: int | None = None
        monitor.start()
        try:
            if node_monitor:
                node_monitor.start()
            with _capture_agent_log(monitor.failed):
                _run_agent(job, rendezvous, folder)
        except ChildFailedError as error:
            returncodes = {rank: item.exitcode for rank, item in error.failures.items()}
        except SignalException as error:
            stop_signal = int(error.sigval)
        except RuntimeError:  # the store on another host went away under the agent
            if node_monitor is None or node_monitor.result is None:
                raise
            stop_signal = int(signal.SIGTERM)
        finally:
            _ignore_signals()  # what is left takes seconds, and must be done
            monitor.stop()
            kill_sessions(set(read_pids(folder).values()))
        failures = failure.collect_failures(folder, returncodes, monitor.exits) if returncodes else []
        return _build_result(job, failures, stop_signal, world_size, node_monitor)


def _join_nodes(job: LocalJob, node_monitor: NodeMonitor) -> int:
    """Meet the other hosts; returns the number of ranks on all of them."""
    import torch

    from thalweg import __version__

    node_info = {
        "host": socket.gethostname(),
        "nproc": job.nproc,
        "target": job.target,
        "torch": torch.__version__,
        "thalweg": __version__,
    }
    node_infos = node_monitor.join_job(node_info, lambda text: sys.stderr.write(f"thalweg run: {text}\n"))
    return sum(info["nproc"] for info in node_infos)


def _build_result(
    job: LocalJob,
    failures: list[failure.Failure],
    stop_signal: int | None,
    world_size: int,
    node_monitor: NodeMonitor | None,
) -> JobResult:
    """The outcome of this host's ranks, or that of the job where it has several hosts."""
    result = None
    if failures:
        where = f" on {socket.gethostname()}" if node_monitor else ""
        result = JobResult(failures[0].exit_code, failure.format_report(failures, world_size, where))
    elif stop_signal is not None and not (node_monitor and node_monitor.stopping):
        where = f" on {socket.gethostname()}" if node_monitor else ""
        name = signal.Signals(stop_signal).name
        result = JobResult(128 + stop_signal, f"thalweg run: stopped by {name}{where}, and the ranks with it\n")
    if node_monitor is not None and (failures or stop_signal is not None):
        lost_peer = bool(failures) and failures[0].is_peer_loss
        result = node_monitor.agree_result(result, lost_peer, timeout=job.grace + 3.0) or JobResult(
            128 + signal.SIGTERM, "thalweg run: another host stopped the job without saying why\n"
        )
    elif node_monitor is not None:
        node_monitor.stop()
    return result or JobResult(0, "")


def _run_agent(job: LocalJob, rendezvous: StaticRendezvous, folder: Path) -> None:
    """Run torch's agent to the end of the job; raises its ``ChildFailedError`` or ``SignalException``."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from thalweg.launch.rendezvous import BACKEND_NAME, register_rendezvous

    register_rendezvous()
    num_nodes = job.node.num_nodes if job.node else 1
    settings: dict[str, Any] = {
        "min_nodes": num_nodes,
        "max_nodes": num_nodes,
        "nproc_per_node": job.nproc,
        "run_id": BACKEND_NAME,
        "rdzv_backend": BACKEND_NAME,
        "rdzv_endpoint": f"{rendezvous.addr}:{rendezvous.port}",
        "rdzv_configs": {"rendezvous": rendezvous},
        "local_addr": rendezvous.addr,
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "logs")),
        "shutdown_timeout": math.ceil(job.grace),
    }
    known_settings = {item.name for item in dataclasses.fields(LaunchConfig)}  # torch 2.11 has fewer
    config = LaunchConfig(**{key: value for key, value in settings.items() if key in known_settings})
    elastic_launch(config, sys.executable)("-u", str(_WORKER), *_worker_arguments(job, folder))


def _remove_stale_dirs(parent: Path) -> None:
    """Remove the folders of this user's launchers that were killed: nobody else can."""
    for folder in parent.glob(f"{_DIR_PREFIX}*-*"):
        pid = folder.name.removeprefix(_DIR_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and folder.lstat().st_uid == os.getuid() and not _pid_exists(int(pid)):
                shutil.rmtree(folder)


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _worker_arguments(job: LocalJob, folder: Path) -> list[str]:
    cpus = ";".join(",".join(map(str, cpu_ids)) for cpu_ids in job.cpu_binding.cpus) or "-"
    arguments = [str(folder), str(os.getpid()), cpus, job.kind, job.target, *job.arguments]
    # The agent runs each argument through string.Template; a doubled $ comes out as the one that went in.
    return [argument.replace("$", "$$") for argument in arguments]


def _worker_environ(job: LocalJob, addr: str) -> dict[str, str]:
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(job.cpu_binding.num_threads))}
    if sys.platform.startswith("linux"):
        # Tensors of 2 MiB and more in huge pages: a fault each 4 KiB costs a tenth of a step on a CPU.
        environ["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_for(addr)):
        # Without this gloo looks up the host's name, which may not resolve, and on one host listens outside.
        environ["GLOO_SOCKET_IFNAME"] = interface
    environ.update(job.environ)
    return environ


@contextlib.contextmanager
def _patched_environ(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the agent's children inherit, and put the old ones back."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
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
    """Signals were heard; :func:`_stop_on_signals` gives them back."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda *_: None)


class _AgentWarningHandler(logging.Handler):
    """Swallows the agent's log; a warning from its process keeper means that it has begun to end the
    ranks."""

    def __init__(self, failed: threading.Event) -> None:
        super().__init__(logging.WARNING)
        self._failed = failed

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(f"{_ELASTIC_LOGGER}.multiprocessing"):
            self._failed.set()


@contextlib.contextmanager
def _capture_agent_log(failed: threading.Event) -> Iterator[None]:
    """Keep the agent's pages of warnings to ourselves; our report says what they say."""
    logger = logging.getLogger(_ELASTIC_LOGGER)
    handler, before = _AgentWarningHandler(failed), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
