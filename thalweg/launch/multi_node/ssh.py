"""A job on several hosts from one command: an agent on each, over ssh or whatever reaches a host.

    start    for each host `ssh HOST exec PYTHON -u bootstrap.py`; the job itself goes down the line as JSON, so
             that command holds two paths and no word of the user's
    hello    every agent has checked the script, its devices and cores, and host 0 listens; the first
             complaint ends the job before a rank has started, with the host's name
    meet     all learn where host 0 listens, and run; what their ranks write comes up the line
    end      the agents agree among themselves on one verdict (``peers.py``); it is shown once

The launcher's end is the agents' end (their line breaks), and a host whose line breaks ends the job.  ssh
processes are this launcher's children, ended by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thalweg.launch.hostfile import Host, is_this_host
from thalweg.launch.job_result import JobResult
from thalweg.launch.multi_node.protocol import HEADER, MAGIC, MAX_FRAME_BYTES
from thalweg.launch.network import local_address_for
from thalweg.launch.spec import LaunchSpec

SSH_COMMAND = (
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=15",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_PACKAGE_PARENT = Path(__file__).parents[2]
_KEEPALIVE_INTERVAL = 5.0
_REPORT_TIMEOUT = 4.0  # seconds for the last reports, beyond the ranks' own grace


@dataclass(frozen=True)
class MultiNodeJob:
    """``hosts`` in the order of their ranks; ``ssh`` reaches a host that is not this one; ``python`` runs
    there (None: the path of this one); ``environ`` is set on all."""

    hosts: tuple[Host, ...]
    spec: LaunchSpec
    ssh: tuple[str, ...] = SSH_COMMAND
    python: str | None = None
    master_addr: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    connect_timeout: float = 120.0  # seconds until every agent must have reported in


def remote_command(python: str, bootstrap: Path = _BOOTSTRAP) -> str:
    """What the login shell of another host is given; any shell with single quotes reads it alike."""
    return f"exec {shlex.quote(python)} -u {shlex.quote(str(bootstrap))}"


class RemoteNode:
    """The line to one host's agent: a process, and threads that read from it into ``inbox``."""

    def __init__(self, node_rank: int, host: Host, command: Sequence[str], inbox: queue.Queue[Any]) -> None:
        self.node_rank, self.host, self._inbox = node_rank, host, inbox
        self.stderr_tail: list[str] = []
        self._marked = False
        pipe = subprocess.PIPE
        # a session of its own: a terminal's ^C reaches the launcher, which passes it on in order
        self.process = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        for read in (self._read_frames, self._read_stderr):
            threading.Thread(target=read, daemon=True).start()

    def send(self, message: Any) -> None:
        """Send one line; None is a mere sign of life."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a broken line is noticed by its reader
            self.process.stdin.write((b" " if message is None else json.dumps(message).encode()) + b"\n")
            self.process.stdin.flush()

    def _read_frames(self) -> None:
        source = self.process.stdout
        assert source is not None
        if self._skip_to_magic(source):
            while len(head := source.read(HEADER.size)) == HEADER.size:
                kind, length = HEADER.unpack(head)
                if length > MAX_FRAME_BYTES:
                    break
                payload = source.read(length)
                if kind == b"j":
                    self._inbox.put((self, json.loads(payload)))
                else:
                    stream = sys.stdout if kind == b"o" else sys.stderr
                    stream.buffer.write(payload)
                    stream.buffer.flush()
        self.process.wait()
        self._inbox.put((self, {"gone": self.process.returncode}))

    def _skip_to_magic(self, source: Any) -> bool:
        """What a login shell prints before the agent speaks is no output of the job."""
        received = b""
        while not received.endswith(MAGIC):
            byte = source.read(1)
            if not byte or len(received) > MAX_FRAME_BYTES:
                return False
            received += byte
        return True

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr_tail = [*self.stderr_tail[-9:], line.decode("utf-8", "replace").rstrip()]

    def failure_reason(self, code: int) -> str:
        """What is known about a line that broke."""
        time.sleep(0.1)  # the last words may still be on their way
        stderr = "; ".join(text for text in self.stderr_tail if text)
        return f"exit code {code}" + (f", {stderr}" if stderr else "")

    def close(self, timeout: float) -> None:
        """Hang up, wait, end the process if it stays."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run_multi_node(job: MultiNodeJob) -> JobResult:
    """Run the job; returns when nothing of it is left here.

    Raises:
        ValueError: a host cannot be reached or cannot run its part; the message names it and the cure.
    """
    inbox: queue.Queue[tuple[RemoteNode | None, dict[str, Any]]] = queue.Queue()
    nodes: list[RemoteNode] = []
    close_timeout = 1.0
    with _queue_signals(inbox):
        try:
            for node_rank, host in enumerate(job.hosts):
                node = RemoteNode(node_rank, host, _bootstrap_command(job, host), inbox)
                nodes.append(node)
                node.send(_job_message(job, node_rank, host))
            stop_signal, address = _wait_ready(job, nodes, inbox)
            if stop_signal:
                return JobResult(128 + stop_signal, f"thalweg run: stopped by {signal.Signals(stop_signal).name}\n")
            for node in nodes:
                node.send({"meet": address})
            result = _wait_finished(job, nodes, inbox)
            close_timeout = 0.5 if result.exit_code else 10.0
            return result
        finally:
            deadline = time.monotonic() + close_timeout
            for node in nodes:
                node.close(max(0.0, deadline - time.monotonic()))


def _bootstrap_command(job: MultiNodeJob, host: Host) -> list[str]:
    python = job.python or sys.executable
    if is_this_host(host.name):
        return [python, "-u", str(_BOOTSTRAP)]
    return [*job.ssh, host.name, remote_command(python)]


def _job_message(job: MultiNodeJob, node_rank: int, host: Host) -> dict[str, Any]:
    spec = replace(job.spec, slots=host.slots, chosen=host.chosen)
    listen_address = job.master_addr
    if listen_address is None and is_this_host(host.address):
        listen_address = (
            local_address_for(job.hosts[1 - node_rank].address) if len(job.hosts) > 1 and node_rank == 0 else None
        )
    return {
        "index": node_rank,
        "num_hosts": len(job.hosts),
        "request": asdict(spec),
        "listen": listen_address or host.address,
        "patience": job.connect_timeout,
        "environ": dict(job.environ),
        "cwd": os.getcwd(),
        "root": str(_PACKAGE_PARENT),
    }


def _wait_ready(job: MultiNodeJob, nodes: list[RemoteNode], inbox: queue.Queue[Any]) -> tuple[int, list[Any]]:
    """Wait until every agent has reported in; returns (signal or 0, where host 0 listens)."""
    pending = {node.node_rank: node for node in nodes}
    deadline, address = time.monotonic() + job.connect_timeout, [None, None]
    while pending:
        try:
            line, message = inbox.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            names = ", ".join(line.host.name for line in pending.values())
            raise ValueError(
                f"{names} did not report in within {job.connect_timeout:.0f} s: try `{shlex.join(job.ssh)} "
                f"{next(iter(pending.values())).host.name} true`"
            ) from None
        if line is None:
            return message["signal"], address
        if "error" in message:
            raise ValueError(f"host {line.host.name}: {message['error']}")
        if "gone" in message:
            raise ValueError(
                f"host {line.host.name}: no agent came up ({line.failure_reason(message['gone'])}): "
                f"`{shlex.join(job.ssh)} "
                f"{line.host.name} true` must work without a password, and {job.python or sys.executable} "
                "must be there with thalweg at the same path; --python and --ssh choose others"
            )
        hello = message["hello"]
        if line.node_rank == 0:
            address = [job.master_addr or hello["addr"], hello["port"]]
        del pending[line.node_rank]
    return 0, address


def _wait_finished(job: MultiNodeJob, nodes: list[RemoteNode], inbox: queue.Queue[Any]) -> JobResult:
    """Wait for the end of every agent, or until the first bad end is some time ago."""
    running = {node.node_rank for node in nodes}
    result: JobResult | None = None
    fallback_result: JobResult | None = None
    deadline: float | None = None
    last_keepalive = time.monotonic()
    while running and (deadline is None or time.monotonic() < deadline):
        try:
            line, message = inbox.get(timeout=0.2)
        except queue.Empty:
            line, message = None, {}
        if time.monotonic() - last_keepalive > _KEEPALIVE_INTERVAL:
            last_keepalive = time.monotonic()
            for running_node in nodes:
                running_node.send(None)
        if line is None and "signal" in message:
            number = message["signal"]
            result = result or JobResult(
                128 + number,
                f"thalweg run: stopped by {signal.Signals(number).name}, and the ranks with it\n",
            )
            is_failure = True
        elif line is None:
            continue
        elif "ended" in message:
            running.discard(line.node_rank)
            is_failure = message["ended"] != 0
            if is_failure:
                result = result or JobResult(message["ended"], message["report"])
        else:
            is_failure = "gone" in message and line.node_rank in running
            running.discard(line.node_rank)
            if is_failure:
                reason = line.failure_reason(message["gone"])
                text = f"thalweg run: host {line.host.name} is gone: its line broke ({reason})\n"
                fallback_result = fallback_result or JobResult(1, text)
        if is_failure and deadline is None:
            deadline = time.monotonic() + job.spec.grace + _REPORT_TIMEOUT
            for running_node in nodes:  # those that the agents' own word has not reached
                running_node.send({"stop": int(message.get("signal", signal.SIGTERM))})
    if result is None and fallback_result is None and running:
        names = ", ".join(line.host.name for line in nodes if line.node_rank in running)
        fallback_result = JobResult(1, f"thalweg run: {names} did not end\n")
    return result or fallback_result or JobResult(0, "")


@contextlib.contextmanager
def _queue_signals(inbox: queue.Queue[Any]) -> Iterator[None]:
    """Let signals to the launcher be messages like any other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous_handlers = {
        number: signal.signal(number, lambda got, _: inbox.put((None, {"signal": int(got)}))) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
