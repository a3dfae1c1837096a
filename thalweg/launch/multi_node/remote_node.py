"""One host's side of a job that a launcher elsewhere started: ``bootstrap.py`` hands over to :func:`run_node`.

Its messages to the launcher are lines of JSON behind a mark on standard output, before and after the ranks
write there.  What a login shell prints before the first mark is no output of the job.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import astuple
from io import FileIO
from typing import Any

from thalweg.launch.failure import JobResult
from thalweg.launch.local import run_local
from thalweg.launch.spec import LaunchSpec, build_local_job
from thalweg.utils.env import is_loopback

MARK = b"\x00thalweg-node-1 "
_LAUNCHER_TIMEOUT = 60.0  # seconds without a sign of life from the launcher


def run_node(job_message: dict[str, Any], inbox: FileIO) -> int:
    """Check the job on this host, report in, wait for the word, run; returns the exit code."""
    from thalweg.launch.rendezvous import NodeSpec, bind_master

    node_rank, num_nodes = job_message["node_rank"], job_message["num_nodes"]
    addr, port, listener = "", 0, None
    try:
        job = build_local_job(LaunchSpec.from_json(job_message["spec"]))
        if node_rank == 0:
            addr = job_message["listen"] if num_nodes == 1 else _choose_listen_address(job_message["listen"])
            listener = bind_master(addr, job.spec.master_port or 0)
            port = listener.getsockname()[1]
    except (ValueError, OSError) as error:
        _send(error=str(error))
        return 2
    _send(hello={"addr": addr, "port": port})
    start_message = inbox.readline()
    if not start_message:
        return 1
    finished = threading.Event()
    threading.Thread(target=_watch_launcher, args=(inbox, finished), daemon=True).start()
    try:
        addr, port = json.loads(start_message)["meet"]
        node = NodeSpec(node_rank, num_nodes, addr, port, listener, job_message["join_timeout"], has_launcher=True)
        result = run_local(job, node)
    except ValueError as error:
        result = JobResult(2, f"thalweg run: {error}\n")
    finished.set()
    _send(ended=astuple(result))
    return result.exit_code


def _choose_listen_address(listen: str) -> str:
    """The address to listen on: the one that was asked for, unless that only leads back to this host."""
    if not _is_local_only(listen):
        return listen
    ssh_connection = os.environ.get("SSH_CONNECTION", "").split()  # client, port, server, port
    if len(ssh_connection) == 4 and not _is_local_only(ssh_connection[2]):
        return ssh_connection[2]
    raise ValueError(
        f"{socket.gethostname()}: {listen or 'no address'} cannot be reached from other hosts: give --master-addr an "
        "address of this host that they know"
    )


def _is_local_only(addr: str) -> bool:
    with contextlib.suppress(OSError):
        return not addr or all(is_loopback(str(item[4][0])) for item in socket.getaddrinfo(addr, None))
    return False


def _watch_launcher(inbox: FileIO, finished: threading.Event) -> None:
    """Stop the ranks when the launcher says so, ends, or falls silent."""
    poll = select.poll()
    poll.register(inbox, select.POLLIN)
    stop_signal = signal.SIGTERM
    while poll.poll(_LAUNCHER_TIMEOUT * 1000) and (line := inbox.readline()).endswith(b"\n"):
        if line.strip():  # a blank is a sign of life
            stop_signal = signal.Signals(json.loads(line)["stop"])
            break
    if not finished.is_set():
        os.kill(os.getpid(), stop_signal)


def _send(**message: Any) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone, which ends this process
        sys.stdout.buffer.write(MARK + json.dumps(message).encode() + b"\n")
        sys.stdout.flush()
