"""A job on several hosts from one command: an agent on each, over ssh or whatever reaches a host.

    start    for each host `ssh HOST exec PYTHON -u bootstrap.py`; the job itself goes down the line as JSON, so
             that command holds two paths and no word of the user's
    hello    every agent has checked the script, its devices and cores, and host 0 listens; the first
             complaint ends the job before a rank has started, with the host's name
    meet     all learn where host 0 listens, and run; what their ranks write comes up the line, and goes on by
             whole lines
    end      the agents agree among themselves on one report (``launch/rendezvous.py``); it is shown once

A job that failed starts anew with new agents, and an elastic one without the hosts that were lost.
The launcher's end is the agents' end (their line breaks), and a host whose line breaks ends the job.  ssh
processes are this launcher's children, ended by pid.
"""

import contextlib
import json
import math
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import thalweg
from thalweg.launch.failure import JobResult, announce_restart
from thalweg.launch.hostfile import Host, is_this_host
from thalweg.launch.local import handle_signals, stopped_result
from thalweg.launch.multi_node.remote_node import MARK
from thalweg.launch.network import local_address_for
from thalweg.launch.spec import LaunchSpec

SSH_COMMAND = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_PACKAGE_PARENT = Path(str(thalweg.__file__)).parents[1]  # on the path of other hosts, and nothing below it
_KEEPALIVE_INTERVAL = 5.0
_LINE_TIMEOUT = 0.2  # seconds for the rest of a line: a question and a progress bar have none
_CHUNK_BYTES = 1 << 16
_REPORT_TIMEOUT = 4.0  # seconds for the last reports, beyond the ranks' own grace


@dataclass(frozen=True)
class MultiNodeJob:
    """``hosts`` in the order of their ranks; ``ssh`` reaches a host that is not this one; ``python`` runs
    there (None: the path of this one); ``environ`` is set on all.

    ``min_hosts`` 0: each start of the job has all hosts.  Else it has up to ``max_hosts``, the first of those that
    are there, and there is none with fewer than ``min_hosts``.
    """

    hosts: tuple[Host, ...]
    spec: LaunchSpec
    ssh: tuple[str, ...] = SSH_COMMAND
    python: str | None = None
    master_addr: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    connect_timeout: float = 120.0  # seconds until every agent must have reported in
    min_hosts: int = 0
    max_hosts: int | None = None


Inbox = queue.Queue[tuple["RemoteNode | None", dict[str, Any]]]


class MissingHostError(ValueError):
    """No agent came up on ``hosts``."""

    def __init__(self, text: str, hosts: set[Host]) -> None:
        super().__init__(text)
        self.hosts = hosts


def remote_command(python: str, bootstrap: Path = _BOOTSTRAP) -> str:
    """What the login shell of another host is given; any shell with single quotes reads it alike."""
    return f"exec {shlex.quote(python)} -u {shlex.quote(str(bootstrap))}"


class _LineRelay:
    """Passes on what one host writes to ``stream``, by whole lines: other hosts' come between them."""

    def __init__(self, pipe: Any, stream: TextIO, lock: threading.Lock) -> None:
        self._pipe, self._stream, self._lock, self._held = pipe, stream, lock, b""

    def read_chunks(self) -> Iterator[bytes]:
        """Yield what comes; the beginning of a line is passed on when its end does not come."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while True:
            if self._held and not poll.poll(_LINE_TIMEOUT * 1000):
                self._write(len(self._held))
            if not (chunk := self._pipe.read(_CHUNK_BYTES)):
                return
            yield chunk

    def pass_on(self, output: bytes, is_end: bool = False) -> None:
        """Write the lines that are whole; with ``is_end`` what is left too."""
        self._held += output
        self._write(len(self._held) if is_end else max(self._held.rfind(b"\n"), self._held.rfind(b"\r")) + 1)

    def _write(self, length: int) -> None:
        if length:
            with self._lock:
                self._stream.buffer.write(self._held[:length])
                self._stream.buffer.flush()
            self._held = self._held[length:]


class RemoteNode:
    """The line to one host's agent: a process, and threads that read from it into ``inbox``.

    ``output_lock`` is held while one of the hosts' lines is written here.
    """

    def __init__(self, host: Host, command: Sequence[str], inbox: Inbox, output_lock: threading.Lock) -> None:
        self.host, self._inbox = host, inbox
        self._is_up = False  # the agent has spoken: what comes now is its ranks'
        self._stderr_tail = b""
        # a session of its own: a terminal's ^C reaches the launcher, which passes it on in order
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process: Any = subprocess.Popen(list(command), bufsize=0, start_new_session=True, **pipes)
        out, err = (self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)
        for read, streams in ((self._read_stdout, out), (self._read_stderr, err)):
            threading.Thread(target=read, args=(_LineRelay(*streams, output_lock),), daemon=True).start()

    def send(self, message: Any) -> None:
        """Send one line; None is a mere sign of life."""
        text = b" \n" if message is None else json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):  # a broken line is noticed by its reader
            while text:
                text = text[self.process.stdin.write(text) :]

    def _read_stdout(self, relay: _LineRelay) -> None:
        """Take the agent's messages out, pass on what lies between them."""
        pending = b""
        for chunk in relay.read_chunks():
            pending += chunk
            while (start := pending.find(MARK)) >= 0 and (end := pending.find(b"\n", start)) >= 0:
                if self._is_up:
                    relay.pass_on(pending[:start], is_end=True)
                self._is_up = True
                self._inbox.put((self, json.loads(pending[start + len(MARK) : end])))
                pending = pending[end + 1 :]
            if start < 0:  # the chunk may end within a mark
                start = pending.rfind(b"\0")
                start = start if start >= 0 and MARK.startswith(pending[start:]) else len(pending)
            if self._is_up:
                relay.pass_on(pending[:start])
            pending = pending[start:]
        if self._is_up:
            relay.pass_on(pending, is_end=True)
        self.process.wait()
        self._inbox.put((self, {"gone": self.process.returncode}))

    def _read_stderr(self, relay: _LineRelay) -> None:
        for chunk in relay.read_chunks():
            if self._is_up:
                relay.pass_on(chunk)
            else:
                self._stderr_tail = (self._stderr_tail + chunk)[-2000:]
        relay.pass_on(b"", is_end=True)

    def failure_reason(self, code: int) -> str:
        """What is known about a line that broke."""
        time.sleep(0.1)  # the last words may still be on their way
        lines = self._stderr_tail.decode("utf-8", "replace").splitlines()[-10:]
        return "; ".join([f"exit code {code}", *filter(None, map(str.strip, lines))])

    def close(self, timeout: float) -> None:
        """Hang up, wait, end the process if it stays."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run_multi_node(job: MultiNodeJob) -> JobResult:
    """Run the job, anew up to ``max_restarts`` times where it failed; returns when nothing of it is left here.

    Raises:
        ValueError: a host cannot be reached or cannot run its part; the message names it and the cure.
    """
    inbox: Inbox = queue.Queue()
    restart, num_hosts, left_out = 0, len(job.hosts[: job.max_hosts]), set[Host]()
    with handle_signals(lambda number: inbox.put((None, {"signal": number}))):
        while True:
            hosts = tuple(host for host in job.hosts if host not in left_out)[:num_hosts]
            addr = job.master_addr if hosts[0] == job.hosts[0] else None
            start = replace(job, hosts=hosts, spec=replace(job.spec, restart=restart), master_addr=addr)
            try:
                result, lost = _run_once(start, inbox)
                if not result.can_restart or restart == job.spec.max_restarts:
                    return result
                restart, left_out = restart + 1, lost if job.min_hosts else set()
                job = replace(job, spec=replace(job.spec, num_crashes=job.spec.num_crashes + (not lost)))
            except MissingHostError as error:
                if not job.min_hosts or restart == 0:
                    raise
                result, left_out = JobResult(2, f"thalweg run: {error}\n"), left_out | error.hosts
            num_left, without = len(job.hosts) - len(left_out), ""
            if num_left < job.min_hosts:
                text = f"thalweg run: no restart: {job.min_hosts} hosts are needed, and {num_left} are left\n"
                return replace(result, report=result.report + text)
            if left_out:
                names = ", ".join(host.name for host in job.hosts if host in left_out)
                without = f", without host {names}: {min(num_left, num_hosts)} of {num_hosts} hosts"
            announce_restart(result, restart, job.spec.max_restarts, without)


def _run_once(job: MultiNodeJob, inbox: Inbox) -> tuple[JobResult, set[Host]]:
    """One start of the job; returns how it ended and the hosts that were lost."""
    nodes: list[RemoteNode] = []
    output_lock, close_timeout, python = threading.Lock(), 1.0, job.python or sys.executable
    try:
        for node_rank, host in enumerate(job.hosts):
            command = [python, "-u", str(_BOOTSTRAP)]
            if not is_this_host(host.name):
                command = [*job.ssh, host.name, remote_command(python)]
            node = RemoteNode(host, command, inbox, output_lock)
            nodes.append(node)
            node.send(_job_message(job, node_rank, host))
        stop_signal, address = _wait_ready(job, nodes, inbox)
        if stop_signal:
            return stopped_result(stop_signal), set()
        for node in nodes:
            node.send({"meet": address})
        result, lost = _wait_finished(job, nodes, inbox)
        close_timeout = 0.5 if result.exit_code else 10.0
        return result, lost
    finally:
        deadline = time.monotonic() + close_timeout
        for node in nodes:
            node.close(max(0.0, deadline - time.monotonic()))


def _job_message(job: MultiNodeJob, node_rank: int, host: Host) -> dict[str, Any]:
    listen = job.master_addr
    if listen is None and node_rank == 0 and len(job.hosts) > 1 and is_this_host(host.address):
        listen = local_address_for(job.hosts[1].address)
    return {
        "node_rank": node_rank,
        "num_nodes": len(job.hosts),
        "spec": asdict(replace(job.spec, slots=host.slots, chosen=host.chosen)),
        "listen": listen or host.address,
        "join_timeout": job.connect_timeout,
        "environ": dict(job.environ),
        "cwd": os.getcwd(),
        "root": str(_PACKAGE_PARENT),
    }


def _wait_ready(job: MultiNodeJob, nodes: list[RemoteNode], inbox: Inbox) -> tuple[int, list[Any]]:
    """Wait until every agent has reported in; returns (signal or 0, where host 0 listens)."""
    pending = list(nodes)
    deadline, address = time.monotonic() + job.connect_timeout, [None, None]
    while pending:
        try:
            node, message = inbox.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            names = [node.host.name for node in pending]
            raise MissingHostError(
                f"{', '.join(names)} did not report in within {job.connect_timeout:.0f} s: try "
                f"`{shlex.join(job.ssh)} {names[0]} true`",
                {node.host for node in pending},
            ) from None
        if node is None:
            return message["signal"], address
        if node not in nodes:  # of the last start
            continue
        if "error" in message:
            raise ValueError(f"host {node.host.name}: {message['error']}")
        if "gone" in message:
            raise MissingHostError(
                f"host {node.host.name}: no agent came up ({node.failure_reason(message['gone'])}): "
                f"`{shlex.join(job.ssh)} {node.host.name} true` must work without a password, and "
                f"{job.python or sys.executable} must be there with thalweg at the same path; --python and --ssh "
                "choose others",
                {node.host},
            )
        pending.remove(node)
        if node is nodes[0]:
            address = [job.master_addr or message["hello"]["addr"], message["hello"]["port"]]
    return 0, address


def _wait_finished(job: MultiNodeJob, nodes: list[RemoteNode], inbox: Inbox) -> tuple[JobResult, set[Host]]:
    """Wait for the end of every agent, or until the first failure is some time ago; returns the result and lost hosts.

    A certain result is the job's: the launcher then stops the hosts that the agents' own word has not reached.
    Of others, such as that of a host that was cut off and takes all others for lost, only the last resort is made.
    """
    running, failed, lost = list(nodes), list[JobResult](), set[Host]()
    deadline, next_keepalive = math.inf, 0.0
    while running and (now := time.monotonic()) < deadline:
        if now > next_keepalive:
            next_keepalive = now + _KEEPALIVE_INTERVAL
            for node in nodes:
                node.send(None)
        try:
            node, message = inbox.get(timeout=0.2)
        except queue.Empty:
            continue
        if node is None:
            ended = stopped_result(message["signal"])
        elif node not in running:
            continue
        else:
            running.remove(node)
            if "gone" in message:
                reason = node.failure_reason(message["gone"])
                text = f"thalweg run: host {node.host.name} is gone: SSH connection lost ({reason})\n"
                ended = JobResult(1, text, is_certain=False, can_restart=True, lost_node=nodes.index(node))
            else:
                ended = JobResult(*message["ended"])
        if ended.lost_node is not None and (ended.is_certain or "gone" in message):
            lost.add(nodes[ended.lost_node].host)
        if ended.exit_code:
            failed.append(ended)
            deadline = min(deadline, now + job.spec.grace + _REPORT_TIMEOUT)
        if ended.exit_code and ended.is_certain:
            for node in nodes:
                node.send({"stop": message.get("signal", signal.SIGTERM)})
    result = min(failed, key=lambda ended: not ended.is_certain, default=JobResult(0, ""))
    can_restart = result.can_restart and all(ended.can_restart for ended in failed if ended.is_certain)
    return replace(result, can_restart=can_restart), lost | {node.host for node in running}  # these fell silent
