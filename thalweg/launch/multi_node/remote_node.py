"""One host's side of a job that a launcher elsewhere started: ``bootstrap.py`` hands over to :func:`serve`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from thalweg.launch.multi_node.protocol import LauncherChannel, read_line
from thalweg.launch.spec import LaunchSpec, build_local_job

_LAUNCHER_TIMEOUT = 60.0  # seconds without a sign of life from the launcher
_CHUNK_BYTES = 1 << 16


def run_node(job_message: dict[str, Any], outbox: int, inbox: int) -> int:
    """Check the job on this host, report in, wait for the word, run; returns the exit code."""
    from thalweg.launch.local import run_local
    from thalweg.launch.multi_node.node_monitor import NodeSpec
    from thalweg.launch.rendezvous import StaticRendezvous, bind_listener

    channel = LauncherChannel(outbox)
    node_rank, num_nodes = job_message["index"], job_message["num_hosts"]
    try:
        job = build_local_job(LaunchSpec.from_json(job_message["request"]))
        addr = _choose_listen_address(job_message["listen"]) if node_rank == 0 else ""
        listener = bind_listener(addr, job.master_port or 0) if node_rank == 0 else None
    except (ValueError, OSError) as error:
        channel.send_json(error=str(error))
        return 2
    port = listener.getsockname()[1] if listener else 0
    channel.send_json(hello={"host": socket.gethostname(), "nproc": job.nproc, "addr": addr, "port": port})
    start_message = read_line(inbox)
    if not start_message:
        return 1
    finished = threading.Event()
    threading.Thread(target=_watch_launcher, args=(inbox, finished), daemon=True).start()
    with _forward_output(channel):
        try:
            addr, port = json.loads(start_message)["meet"]
            rendezvous = StaticRendezvous(addr, port, node_rank, num_nodes, listener)
            node = NodeSpec(node_rank, num_nodes, rendezvous, join_timeout=job_message["patience"])
            result = run_local(replace(job, node=node))
            exit_code, report = result.exit_code, result.report
        except ValueError as error:
            exit_code, report = 2, f"thalweg run: {error}\n"
        finished.set()
    channel.send_json(ended=exit_code, report=report)
    return exit_code


def _choose_listen_address(listen: str) -> str:
    """The address to listen on: the one that was asked for, unless that only leads back to this host."""
    if not _is_loopback(listen):
        return listen
    ssh_connection = os.environ.get("SSH_CONNECTION", "").split()  # client, port, server, port
    if len(ssh_connection) == 4 and not _is_loopback(ssh_connection[2]):
        return ssh_connection[2]
    raise ValueError(
        f"{socket.gethostname()}: {listen or 'no address'} cannot be reached from other hosts: give "
        "--master-addr an "
        "address of this host that they know"
    )


def _is_loopback(addr: str) -> bool:
    if not addr:
        return True
    with contextlib.suppress(OSError):
        return all(item[4][0].startswith(("127.", "::1")) for item in socket.getaddrinfo(addr, None))  # type: ignore[union-attr]
    return False


def _watch_launcher(inbox: int, finished: threading.Event) -> None:
    """Stop the ranks when the launcher says so, ends, or falls silent."""
    poll = select.poll()
    poll.register(inbox, select.POLLIN)
    stop_signal = signal.SIGTERM
    while not finished.is_set():
        if not poll.poll(_LAUNCHER_TIMEOUT * 1000):
            break
        line = read_line(inbox)
        if not line:
            break
        if line.strip():  # a blank is a sign of life
            stop_signal = signal.Signals(json.loads(line)["stop"])
            break
    if not finished.is_set():
        os.kill(os.getpid(), stop_signal)


@contextlib.contextmanager
def _forward_output(channel: LauncherChannel) -> Iterator[None]:
    """Send what this process and its children write to standard output and error up the line."""
    threads, saved_fds = [], [os.dup(1), os.dup(2)]
    for fd, kind in ((1, b"o"), (2, b"e")):
        reader, writer = os.pipe()
        os.dup2(writer, fd)
        os.close(writer)
        thread = threading.Thread(target=_copy_output, args=(reader, kind, channel), daemon=True)
        thread.start()
        threads.append(thread)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for fd, saved_fd in zip((1, 2), saved_fds, strict=True):
            os.dup2(saved_fd, fd)  # the last writer's end, unless something that was left behind holds it
            os.close(saved_fd)
        for thread in threads:
            thread.join(timeout=2.0)


def _copy_output(reader: int, kind: bytes, channel: LauncherChannel) -> None:
    while chunk := os.read(reader, _CHUNK_BYTES):
        try:
            channel.send_frame(kind, chunk)
        except OSError:  # the launcher is gone; keep reading, so that no rank blocks before it is ended
            continue
    os.close(reader)
