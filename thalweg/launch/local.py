"""This host's part of a job: torch's elastic agent with the ranks of ``worker.py``, and a report at the end."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from thalweg.launch.failure import JobResult, announce_restart, collect_failures, format_report
from thalweg.launch.network import interface_for
from thalweg.launch.spec import LocalJob
from thalweg.utils.processes import get_hostname, is_process_alive

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from thalweg.launch.elastic_agent import Agent
    from thalweg.launch.rendezvous import NodeSpec

_WORKER = Path(__file__).with_name("worker.py")
_DIR_PREFIX = f"thalweg-run-{get_hostname()}-"  # TMPDIR may be on a disk that hosts share
_LOCAL_ADDR = "127.0.0.1"


def run_local(job: LocalJob, node: NodeSpec | None = None) -> JobResult:
    """Start the ranks of this host, wait for them, and leave nothing behind; ``node``: which host of several this is.

    A job that failed is started anew, up to ``max_restarts`` times, unless a launcher elsewhere sees to that.
    Returns exit code 0 when all ranks succeeded, the first failed rank's code otherwise, and 128 + n when
    this process was told to stop by signal n.  On several hosts all return the same.

    Raises:
        ValueError: the port is taken, or the hosts contradict each other.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    from thalweg.launch.rendezvous import STORE_TIMEOUT
    from thalweg.utils.rendezvous import serve_store

    is_driven = node is not None and node.has_launcher
    max_restarts, restart, signals = 0 if is_driven else job.spec.max_restarts, job.spec.restart, list[int]()
    store = serve_store(node.listener, STORE_TIMEOUT) if node and node.listener else None
    with handle_signals(signals.append):  # those that come while no rank runs
        while True:
            try:
                result, restart = _run_once(job, node, store, restart, signals)
            except SignalException as error:
                return stopped_result(int(error.sigval), is_certain=not is_driven)
            if not result.can_restart or restart >= max_restarts:
                return result
            restart += 1
            is_crash = result.lost_node is None
            job = replace(job, spec=replace(job.spec, num_crashes=job.spec.num_crashes + is_crash))
            announce_restart(result, restart, max_restarts)
            gc.collect()  # torch's agent is part of a cycle, and its store holds the port


def stopped_result(number: int, where: str = "", is_certain: bool = True) -> JobResult:
    """The end of a job by a signal; not certain where a launcher elsewhere knows whether it sent that."""
    text = f"thalweg run: stopped by {signal.Signals(number).name}{where}, and the ranks with it\n"
    return JobResult(128 + number, text, is_certain, can_restart=not is_certain)


def _run_once(
    job: LocalJob, node: NodeSpec | None, store: Store | None, restart: int, signals: list[int]
) -> tuple[JobResult, int]:
    """One start of the job; returns how it ended and its number, which host 0 sets for all hosts.

    ``store`` is host 0's for all starts.  ``signals`` are those that came before; what comes at the end is added.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException

    from thalweg.launch.elastic_agent import mute_agent_log
    from thalweg.launch.rendezvous import JobEndedError, describe_host, join_nodes, open_local_rendezvous

    def stop(number: int) -> None:
        raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    agent = None

    def pass_on(number: int) -> None:
        # A scheduler's warning, which would end this process, and with it the ranks that save.
        for pid in agent.pids.values() if agent and "SLURM_STEP_ID" not in os.environ else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    _remove_stale_dirs(Path(tempfile.gettempdir()))
    with (
        tempfile.TemporaryDirectory(prefix=f"{_DIR_PREFIX}{os.getpid()}-") as name,
        _patched_environ(_worker_environ(job, node.addr if node else _LOCAL_ADDR)),
        handle_signals(stop),  # also before the agent installs its handlers
        handle_signals(pass_on, [signal.SIGUSR1, signal.SIGUSR2]),
        mute_agent_log(),
        contextlib.ExitStack() as stack,
    ):
        for number in signals:
            stop(number)
        nodes = join_nodes(node, describe_host(job), restart, store) if node else None
        if nodes:
            stack.callback(nodes.shutdown)
            restart = nodes.restart
        os.environ["THALWEG_JOB_ID"], os.environ["THALWEG_RESTART_COUNT"] = job.spec.job_id, str(restart)
        os.environ["THALWEG_CRASH_COUNT"] = str(job.spec.num_crashes)
        job = replace(job, spec=replace(job.spec, restart=restart))
        rendezvous = nodes or open_local_rendezvous(_LOCAL_ADDR, job.spec.master_port or 0)
        agent = _build_agent(job, rendezvous, Path(name))
        where = f" on {socket.gethostname()}" if nodes else ""
        result, tell_others = None, False
        try:
            run_result: Any = agent.run()
            if run_result.is_failed():
                returncodes = {rank: failure.exitcode for rank, failure in run_result.failures.items()}
                failures = collect_failures(Path(name), returncodes, agent.exited or returncodes)
                report = format_report(failures, nodes.num_ranks if nodes else job.nproc, where)
                first = failures[0]
                certain, again = not first.is_peer_loss, not first.ends_job
                result = JobResult(first.exit_code, report, is_certain=certain, can_restart=again)
                tell_others = True
        except SignalException as error:
            tell_others = not (node and node.has_launcher)
            result = stopped_result(int(error.sigval), where, is_certain=tell_others)
        except (JobEndedError, DistError) as error:
            if nodes is None:
                raise
            silent = error.silent_node if isinstance(error, JobEndedError) else None
            result = None if silent is None else nodes.lost_result(silent)
            tell_others = silent != 0  # whose store it is
        finally:
            stack.enter_context(handle_signals(signals.append))  # what is left takes seconds, and must be done
            _kill_sessions(set(agent.pids.values()))
        if nodes and tell_others:
            text = "thalweg run: another host stopped the job without saying why\n"
            unknown = JobResult(128 + signal.SIGTERM, text, is_certain=False, can_restart=True)
            result = nodes.finish(result, wait=job.spec.grace + 3.0) or unknown
        return result or JobResult(0, ""), restart


@contextlib.contextmanager
def handle_signals(handler: Callable[[int], None], numbers: Sequence[int] = ()) -> Iterator[None]:
    """Let ``handler`` hear ``numbers``, or the signals that end a job; at the end the caller's handlers are back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda got, _: handler(got)) for number in numbers or _ending_signals()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _ending_signals() -> list[signal.Signals]:
    """The signals that end a job; a SIGHUP that is ignored stays so, as `nohup` means it."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, *hangup]


def exit_process(exit_code: int) -> NoReturn:
    """Leave at once: a thread may wait in C++ for a host that is gone, and the interpreter's end would abort it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _build_agent(job: LocalJob, rendezvous: RendezvousHandler, folder: Path) -> Agent:
    """torch's agent for the ranks of this host; ``folder`` takes what ranks write about their errors."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from thalweg.launch.elastic_agent import Agent

    logs_specs = DefaultLogsSpecs(str(folder / "logs"))
    spec = WorkerSpec(
        role="default",
        local_world_size=job.nproc,
        entrypoint=sys.executable,
        args=("-u", str(_WORKER), *_worker_arguments(job, folder)),
        rdzv_handler=rendezvous,
        max_restarts=job.spec.max_restarts,
        monitor_interval=0.05,
        numa_options=LaunchConfig(1, 1, job.nproc, logs_specs).numa_options,  # torch's choice for ranks on GPUs
    )
    return Agent(spec, logs_specs, job.spec.grace, job.spec.restart)


def _kill_sessions(session_ids: set[int]) -> None:
    """SIGKILL what the ranks started and left: each rank leads a session of its own."""
    for _ in range(10):  # a process may fork while it is being ended
        members = list(_list_members(session_ids))
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            break
        time.sleep(0.02)


def _list_members(session_ids: set[int]) -> Iterator[int]:
    """The live processes of these sessions, by /proc; none where there is none."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(session) in session_ids:
                yield int(path.parent.name)


def _remove_stale_dirs(parent: Path) -> None:
    """Remove the folders of this user's launchers that were killed on this host: nobody else can."""
    for folder in parent.glob(f"{_DIR_PREFIX}*-*"):
        pid = folder.name.removeprefix(_DIR_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not is_process_alive(int(pid)) and folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder)


def _worker_arguments(job: LocalJob, folder: Path) -> list[str]:
    cpus, spec = ";".join(",".join(map(str, cpu_ids)) for cpu_ids in job.cpu_binding.cpus) or "-", job.spec
    arguments = [str(folder), str(os.getpid()), str(spec.grace), cpus, spec.kind, spec.target, *spec.arguments]
    # The agent runs each argument through string.Template; a doubled $ comes out as the one that went in.
    return [argument.replace("$", "$$") for argument in arguments]


def _worker_environ(job: LocalJob, addr: str) -> dict[str, str]:
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(job.cpu_binding.num_threads))}
    environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in _ending_signals())  # by the agent
    if sys.platform.startswith("linux"):
        # Tensors of 2 MiB and more in huge pages: a fault each 4 KiB costs a tenth of a step on a CPU.
        environ["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_for(addr)):
        # Without this gloo looks up the host's name, which may not resolve, and on one host listens outside.
        environ["GLOO_SOCKET_IFNAME"] = interface
        if interface != "lo" and "NCCL_SOCKET_IFNAME" not in os.environ:
            # NCCL meets on the first interface that it finds, which may be a container's bridge.
            environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
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
