"""One host's side of a job that a launcher elsewhere started: ``bootstrap.py`` hands over to :func:`run_node`.

Its messages to the launcher are lines of JSON behind a mark on standard output, before and after the ranks
write there.  What a login shell prints before the first mark is no output of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import replace
from typing import Any

from thalweg.launch.failure import JobResult
from thalweg.launch.spec import LaunchSpec, build_local_job
from thalweg.utils.env import is_loopback

MARK = b"\x00thalweg-node-1 "
_LAUNCHER_TIMEOUT = 60.0  # seconds without a sign of life from the launcher


def run_node(job_message: dict[str, Any], inbox: int) -> int:
    """Check the job on this host, report in, wait for the word, run; returns the exit code."""
    from thalweg.launch.local import run_local
    from thalweg.launch.rendezvous import NodeSpec, bind_master

    node_rank, num_nodes = job_message["node_rank"], job_message["num_nodes"]
    addr, port, listener = "", 0, None
    try:
        job = build_local_job(LaunchSpec.from_json(job_message["spec"]))
        if node_rank == 0:
            addr = _choose_listen_address(job_message["listen"])
            listener = bind_master(addr, job.master_port or 0)
            port = listener.getsockname()[1]
    except (ValueError, OSError) as error:
        _send(error=str(error))
        return 2
    _send(hello={"addr": addr, "port": port})
    start_message = _read_line(inbox)
    if not start_message:
        return 1
    finished = threading.Event()
    threading.Thread(target=_watch_launcher, args=(inbox, finished), daemon=True).start()
    try:
        addr, port = json.loads(start_message)["meet"]
        node = NodeSpec(node_rank, num_nodes, addr, port, listener, job_message["join_timeout"], has_launcher=True)
        result = run_local(replace(job, node=node))
    except ValueError as error:
        result = JobResult(2, f"thalweg run: {error}\n")
    finished.set()
    _send(ended=result.exit_code, report=result.report, is_certain=result.is_certain)
    return result.exit_code


def _choose_listen_address(listen: str) -> str:
    """The address to listen on: the one that was asked for, unless that only leads back to this host."""
    if not _is_loopback(listen):
        return listen
    ssh_connection = os.environ.get("SSH_CONNECTION", "").split()  # client, port, server, port
    if len(ssh_connection) == 4 and not _is_loopback(ssh_connection[2]):
        return ssh_connection[2]
    raise ValueError(
        f"{socket.gethostname()}: {listen or 'no address'} cannot be reached from other hosts: give --master-addr an "
        "address of this host that they know"
    )


def _is_loopback(addr: str) -> bool:
    if not addr:
        return True
    with contextlib.suppress(OSError):
        return all(is_loopback(str(item[4][0])) for item in socket.getaddrinfo(addr, None))
    return False


def _watch_launcher(inbox: int, finished: threading.Event) -> None:
    """Stop the ranks when the launcher says so, ends, or falls silent."""
    poll = select.poll()
    poll.register(inbox, select.POLLIN)
    stop_signal = signal.SIGTERM
    while poll.poll(_LAUNCHER_TIMEOUT * 1000) and (line := _read_line(inbox)):
        if line.strip():  # a blank is a sign of life
            stop_signal = signal.Signals(json.loads(line)["stop"])
            break
    if not finished.is_set():
        os.kill(os.getpid(), stop_signal)


def _send(**message: Any) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone, which ends this process
        sys.stdout.buffer.write(MARK + json.dumps(message).encode() + b"\n")
        sys.stdout.flush()


def _read_line(fd: int) -> bytes:
    """One line, without its end; shorter where the stream ended.  Nothing beyond it is read."""
    line = bytearray()
    while (byte := os.read(fd, 1)) and byte != b"\n":
        line += byte
    return bytes(line)
