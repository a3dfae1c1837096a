"""Watching the ranks' lives from the launcher, beside torch's agent.

The agent polls, keeps times in whole seconds, and waits 30 s for a rank that ignores SIGTERM.  The watch is
a thread that sleeps on the ranks' pidfds: it notes when each rank ended and how, to the microsecond,
without reaping it (the agent does that), and once the job is lost gives the others ``grace`` seconds before
SIGKILL.  Where there are no pidfds (macOS) it notes nothing and the agent's own times are used.

``kill_sessions`` afterwards ends what the ranks started and left: each rank is the leader of a session of
its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_POLL_INTERVAL = 0.05


@dataclass(frozen=True)
class RankExit:
    """``code`` is the exit code, minus n for signal n, None when the agent was faster to collect it."""

    rank: int
    time_ns: int
    returncode: int | None


class ProcessMonitor(threading.Thread):
    """Notes the ranks' exits; ``lost`` may be set from outside when the job is known to have failed."""

    def __init__(self, folder: Path, nproc: int, grace: float) -> None:
        super().__init__(name="thalweg-watch", daemon=True)
        self.exits: dict[int, RankExit] = {}
        self.failed = threading.Event()
        self._folder, self._nproc, self._grace = folder, nproc, grace
        self._done = threading.Event()
        self._pids: dict[int, int] = {}

    def succeeded(self) -> bool:
        """Whether all ranks have ended, each with success."""
        return len(self.exits) == self._nproc and not any(item.returncode for item in self.exits.values())

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self.join()

    def run(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        open_fds: dict[int, int] = {}
        poll = select.poll()
        deadline: float | None = None
        try:
            while not self._done.is_set():
                self._open_new_pidfds(poll, open_fds)
                for fd, _ in poll.poll(_POLL_INTERVAL * 1000) if open_fds else ():
                    self._record_exit(fd, open_fds.pop(fd))
                    poll.unregister(fd)
                    os.close(fd)
                if not open_fds:
                    self._done.wait(_POLL_INTERVAL)
                if deadline is None and (self.failed.is_set() or self._any_rank_raised()):
                    deadline = time.monotonic() + self._grace
                if deadline is not None and time.monotonic() > deadline:
                    for fd in open_fds:
                        with contextlib.suppress(ProcessLookupError):
                            signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            for fd in open_fds:
                os.close(fd)

    def _open_new_pidfds(self, poll: select.poll, open_fds: dict[int, int]) -> None:
        if len(self._pids) == self._nproc:
            return
        for rank, pid in read_pids(self._folder).items():
            if rank not in self._pids:
                self._pids[rank] = pid
                try:
                    fd = os.pidfd_open(pid)
                except OSError:  # already collected by the agent
                    self.exits[rank] = RankExit(rank, time.time_ns(), None)
                    continue
                open_fds[fd] = rank
                poll.register(fd, select.POLLIN)

    def _record_exit(self, fd: int, rank: int) -> None:
        now, returncode = time.time_ns(), None
        with contextlib.suppress(ChildProcessError):
            state = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if state is not None:
                returncode = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
        self.exits[rank] = RankExit(rank, now, returncode)
        if returncode:
            self.failed.set()

    def _any_rank_raised(self) -> bool:
        """A rank that wrote its error but hangs while it exits also loses the job."""
        return any(self._folder.glob("*.error"))


def read_pids(folder: Path) -> dict[int, int]:
    """The pids by rank of the ranks that have started."""
    pids = {}
    for path in folder.glob("*.pid"):
        text = path.read_text()
        if text:  # it may be between creation and writing
            pids[int(path.stem)] = int(text)
    return pids


def kill_sessions(session_ids: set[int]) -> int:
    """SIGKILL what still runs in the sessions of ``session_ids``; returns how many processes that were."""
    killed = 0
    for _ in range(10):  # a process may fork while it is being ended
        members = [pid for pid, session in _list_sessions() if session in session_ids]
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        if not members:
            break
        time.sleep(0.02)
    return killed


def _list_sessions() -> list[tuple[int, int]]:
    """(pid, session) of each live process of the machine, by /proc; empty where there is none."""
    sessions = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                sessions.append((int(path.parent.name), int(session)))
    return sessions
