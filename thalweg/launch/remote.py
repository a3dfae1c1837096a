"""One host's side of a job that a launcher elsewhere started: ``agent.py`` hands over to :func:`serve`."""

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

from thalweg.launch.line import Channel, read_line
from thalweg.launch.request import Request, make_job

_SILENCE = 60.0  # seconds without a sign of life from the launcher
_CHUNK = 1 << 16


def serve(order: dict[str, Any], outbox: int, inbox: int) -> int:
    """Check the job on this host, report in, wait for the word, run; returns the exit code."""
    from thalweg.launch.local import run_local
    from thalweg.launch.meeting import Meeting, bind
    from thalweg.launch.peers import Place

    channel = Channel(outbox)
    index, num_hosts = order["index"], order["num_hosts"]
    try:
        job = make_job(Request.from_json(order["request"]))
        addr = _own_address(order["listen"]) if index == 0 else ""
        listener = bind(addr, job.master_port or 0) if index == 0 else None
    except (ValueError, OSError) as error:
        channel.say(error=str(error))
        return 2
    port = listener.getsockname()[1] if listener else 0
    channel.say(hello={"host": socket.gethostname(), "nproc": job.nproc, "addr": addr, "port": port})
    word = read_line(inbox)
    if not word:
        return 1
    ended = threading.Event()
    threading.Thread(target=_listen, args=(inbox, ended), daemon=True).start()
    with _forwarded(channel):
        try:
            addr, port = json.loads(word)["meet"]
            meeting = Meeting(addr, port, index, num_hosts, listener)
            place = Place(index, num_hosts, meeting, patience=order["patience"])
            outcome = run_local(replace(job, place=place))
            code, report = outcome.code, outcome.report
        except ValueError as error:
            code, report = 2, f"thalweg run: {error}\n"
        ended.set()
    channel.say(ended=code, report=report)
    return code


def _own_address(listen: str) -> str:
    """The address to listen on: the one that was asked for, unless that only leads back to this host."""
    if not _is_loopback(listen):
        return listen
    parts = os.environ.get("SSH_CONNECTION", "").split()  # client, port, server, port
    if len(parts) == 4 and not _is_loopback(parts[2]):
        return parts[2]
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


def _listen(inbox: int, ended: threading.Event) -> None:
    """Stop the ranks when the launcher says so, ends, or falls silent."""
    poll = select.poll()
    poll.register(inbox, select.POLLIN)
    number = signal.SIGTERM
    while not ended.is_set():
        if not poll.poll(_SILENCE * 1000):
            break
        line = read_line(inbox)
        if not line:
            break
        if line.strip():  # a blank is a sign of life
            number = signal.Signals(json.loads(line)["stop"])
            break
    if not ended.is_set():
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def _forwarded(channel: Channel) -> Iterator[None]:
    """Send what this process and its children write to standard output and error up the line."""
    threads, before = [], [os.dup(1), os.dup(2)]
    for fd, kind in ((1, b"o"), (2, b"e")):
        reader, writer = os.pipe()
        os.dup2(writer, fd)
        os.close(writer)
        thread = threading.Thread(target=_pump, args=(reader, kind, channel), daemon=True)
        thread.start()
        threads.append(thread)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for fd, saved in zip((1, 2), before, strict=True):
            os.dup2(saved, fd)  # the last writer's end, unless something that was left behind holds it
            os.close(saved)
        for thread in threads:
            thread.join(timeout=2.0)


def _pump(reader: int, kind: bytes, channel: Channel) -> None:
    while chunk := os.read(reader, _CHUNK):
        try:
            channel.send(kind, chunk)
        except OSError:  # the launcher is gone; keep reading, so that no rank blocks before it is ended
            continue
    os.close(reader)
