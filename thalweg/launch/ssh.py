"""A job on several hosts from one command: an agent on each, over ssh or whatever reaches a host.

    start    for each host `ssh HOST exec PYTHON -u agent.py`; the job itself goes down the line as JSON, so
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

from thalweg.launch.hosts import Host, is_this_host
from thalweg.launch.line import HEAD, MARK, MAX_FRAME
from thalweg.launch.network import address_towards
from thalweg.launch.outcome import Outcome
from thalweg.launch.request import Request

SSH = (
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
_AGENT = Path(__file__).with_name("agent.py")
_ROOT = Path(__file__).parents[2]
_SIGN_OF_LIFE = 5.0
_AFTERWARDS = 4.0  # seconds for the last reports, beyond the ranks' own grace


@dataclass(frozen=True)
class HostJob:
    """``hosts`` in the order of their ranks; ``ssh`` reaches a host that is not this one; ``python`` runs
    there (None: the path of this one); ``environ`` is set on all."""

    hosts: tuple[Host, ...]
    request: Request
    ssh: tuple[str, ...] = SSH
    python: str | None = None
    master_addr: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    patience: float = 120.0  # seconds until every agent must have reported in


def remote_command(python: str, agent: Path = _AGENT) -> str:
    """What the login shell of another host is given; any shell with single quotes reads it alike."""
    return f"exec {shlex.quote(python)} -u {shlex.quote(str(agent))}"


class Line:
    """The line to one host's agent: a process, and threads that read from it into ``inbox``."""

    def __init__(self, index: int, host: Host, command: Sequence[str], inbox: queue.Queue[Any]) -> None:
        self.index, self.host, self._inbox = index, host, inbox
        self.noise: list[str] = []
        self._marked = False
        pipe = subprocess.PIPE
        # a session of its own: a terminal's ^C reaches the launcher, which passes it on in order
        self.process = subprocess.Popen(
            list(command), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        for read in (self._read_frames, self._read_noise):
            threading.Thread(target=read, daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send one line; None is a mere sign of life."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a broken line is noticed by its reader
            self.process.stdin.write((b" " if message is None else json.dumps(message).encode()) + b"\n")
            self.process.stdin.flush()

    def _read_frames(self) -> None:
        source = self.process.stdout
        assert source is not None
        if self._skip_to_mark(source):
            while len(head := source.read(HEAD.size)) == HEAD.size:
                kind, length = HEAD.unpack(head)
                if length > MAX_FRAME:
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

    def _skip_to_mark(self, source: Any) -> bool:
        """What a login shell prints before the agent speaks is no output of the job."""
        seen = b""
        while not seen.endswith(MARK):
            byte = source.read(1)
            if not byte or len(seen) > MAX_FRAME:
                return False
            seen += byte
        return True

    def _read_noise(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.noise = [*self.noise[-9:], line.decode("utf-8", "replace").rstrip()]

    def why(self, code: int) -> str:
        """What is known about a line that broke."""
        time.sleep(0.1)  # the last words may still be on their way
        said = "; ".join(text for text in self.noise if text)
        return f"exit code {code}" + (f", {said}" if said else "")

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


def run_hosts(job: HostJob) -> Outcome:
    """Run the job; returns when nothing of it is left here.

    Raises:
        ValueError: a host cannot be reached or cannot run its part; the message names it and the cure.
    """
    inbox: queue.Queue[tuple[Line | None, dict[str, Any]]] = queue.Queue()
    lines: list[Line] = []
    patience = 1.0
    with _signals_into(inbox):
        try:
            for index, host in enumerate(job.hosts):
                line = Line(index, host, _command(job, host), inbox)
                lines.append(line)
                line.tell(_order(job, index, host))
            stopped, meet = _hellos(job, lines, inbox)
            if stopped:
                return Outcome(128 + stopped, f"thalweg run: stopped by {signal.Signals(stopped).name}\n")
            for line in lines:
                line.tell({"meet": meet})
            outcome = _follow(job, lines, inbox)
            patience = 0.5 if outcome.code else 10.0
            return outcome
        finally:
            deadline = time.monotonic() + patience
            for line in lines:
                line.close(max(0.0, deadline - time.monotonic()))


def _command(job: HostJob, host: Host) -> list[str]:
    python = job.python or sys.executable
    if is_this_host(host.name):
        return [python, "-u", str(_AGENT)]
    return [*job.ssh, host.name, remote_command(python)]


def _order(job: HostJob, index: int, host: Host) -> dict[str, Any]:
    request = replace(job.request, slots=host.slots, chosen=host.chosen)
    listen = job.master_addr
    if listen is None and is_this_host(host.address):
        listen = address_towards(job.hosts[1 - index].address) if len(job.hosts) > 1 and index == 0 else None
    return {
        "index": index,
        "num_hosts": len(job.hosts),
        "request": asdict(request),
        "listen": listen or host.address,
        "patience": job.patience,
        "environ": dict(job.environ),
        "cwd": os.getcwd(),
        "root": str(_ROOT),
    }


def _hellos(job: HostJob, lines: list[Line], inbox: queue.Queue[Any]) -> tuple[int, list[Any]]:
    """Wait until every agent has reported in; returns (signal or 0, where host 0 listens)."""
    waiting = {line.index: line for line in lines}
    deadline, meet = time.monotonic() + job.patience, [None, None]
    while waiting:
        try:
            line, message = inbox.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            names = ", ".join(line.host.name for line in waiting.values())
            raise ValueError(
                f"{names} did not report in within {job.patience:.0f} s: try `{shlex.join(job.ssh)} "
                f"{next(iter(waiting.values())).host.name} true`"
            ) from None
        if line is None:
            return message["signal"], meet
        if "error" in message:
            raise ValueError(f"host {line.host.name}: {message['error']}")
        if "gone" in message:
            raise ValueError(
                f"host {line.host.name}: no agent came up ({line.why(message['gone'])}): "
                f"`{shlex.join(job.ssh)} "
                f"{line.host.name} true` must work without a password, and {job.python or sys.executable} "
                "must be there with thalweg at the same path; --python and --ssh choose others"
            )
        hello = message["hello"]
        if line.index == 0:
            meet = [job.master_addr or hello["addr"], hello["port"]]
        del waiting[line.index]
    return 0, meet


def _follow(job: HostJob, lines: list[Line], inbox: queue.Queue[Any]) -> Outcome:
    """Wait for the end of every agent, or until the first bad end is some time ago."""
    running = {line.index for line in lines}
    outcome: Outcome | None = None
    guess: Outcome | None = None
    deadline: float | None = None
    alive = time.monotonic()
    while running and (deadline is None or time.monotonic() < deadline):
        try:
            line, message = inbox.get(timeout=0.2)
        except queue.Empty:
            line, message = None, {}
        if time.monotonic() - alive > _SIGN_OF_LIFE:
            alive = time.monotonic()
            for one in lines:
                one.tell(None)
        if line is None and "signal" in message:
            number = message["signal"]
            outcome = outcome or Outcome(
                128 + number,
                f"thalweg run: stopped by {signal.Signals(number).name}, and the ranks with it\n",
            )
            bad = True
        elif line is None:
            continue
        elif "ended" in message:
            running.discard(line.index)
            bad = message["ended"] != 0
            if bad:
                outcome = outcome or Outcome(message["ended"], message["report"])
        else:
            bad = "gone" in message and line.index in running
            running.discard(line.index)
            if bad:
                why = line.why(message["gone"])
                text = f"thalweg run: host {line.host.name} is gone: its line broke ({why})\n"
                guess = guess or Outcome(1, text)
        if bad and deadline is None:
            deadline = time.monotonic() + job.request.grace + _AFTERWARDS
            for one in lines:  # those that the agents' own word has not reached
                one.tell({"stop": int(message.get("signal", signal.SIGTERM))})
    if outcome is None and guess is None and running:
        names = ", ".join(line.host.name for line in lines if line.index in running)
        guess = Outcome(1, f"thalweg run: {names} did not end\n")
    return outcome or guess or Outcome(0, "")


@contextlib.contextmanager
def _signals_into(inbox: queue.Queue[Any]) -> Iterator[None]:
    """Let signals to the launcher be messages like any other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda got, _: inbox.put((None, {"signal": int(got)})))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
