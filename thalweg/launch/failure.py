"""Which rank failed first, and what to say about it.

When one rank dies the others follow within milliseconds, with errors of their own about a peer that went
away.  So the order is not by time alone: a death that left no record (a signal, ``os._exit``) or an
exception that does not speak of a lost peer comes before one that does; time decides within each kind.
Ranks that the launcher itself stopped are left out.
"""

import json
import re
import signal
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

# What torch, gloo and NCCL say when another rank has gone.  Whole words: "restore", "igloo" are no such thing.
_PEER_LOSS = re.compile(
    r"\bpeers?\b|\bconnections?\b|\bsocket|\bgloo\b|\bnccl|\bbroken pipe\b|\bTCPStore\b|\bc10d\b|\bstore->",
    re.IGNORECASE,
)
_HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: `dmesg` tells, and a smaller micro-batch helps",
    signal.SIGSEGV: "a crash in compiled code: the Python stack above shows where",
    signal.SIGBUS: "often a full /dev/shm: `df /dev/shm` tells",
    signal.SIGABRT: "compiled code gave up; its message is above",
}


@dataclass(frozen=True)
class JobResult:
    """How a job ended: its exit code and what to tell the user on standard error (empty on success).

    Not ``is_certain``: as seen from a host that only lost its peers; what another host says counts more.
    ``can_restart``: a rank or a host failed; not where somebody stopped the job or its options are wrong.
    ``lost_node``: the number of the host that is gone.
    """

    exit_code: int
    report: str
    is_certain: bool = True
    can_restart: bool = False
    lost_node: int | None = None

    def show(self) -> int:
        """Write the report; returns the exit code."""
        sys.stderr.write(self.report)
        return self.exit_code


def announce_restart(failed: JobResult, restart: int, max_restarts: int, hosts: str = "") -> None:
    """Write why the job ended and that it starts anew; ``hosts`` says which are left out."""
    sys.stderr.write(f"{failed.report}thalweg run: restart {restart} of {max_restarts}{hosts}\n")


@dataclass(frozen=True)
class Failure:
    """How one rank failed; ``record`` is what worker.py wrote about an uncaught exception, if it did."""

    rank: int
    returncode: int
    time_ns: int
    record: Mapping[str, str | int | bool] | None

    @property
    def is_peer_loss(self) -> bool:
        """Whether the exception is about another rank that went away."""
        if self.record is None:
            return False
        kind, names_peer = str(self.record["type"]), _PEER_LOSS.search(str(self.record["summary"])) is not None
        if kind in ("builtins.RuntimeError", "builtins.ConnectionResetError"):
            return names_peer
        return kind.startswith(("torch.distributed", "thalweg.infer.parallel.process_group."))

    @property
    def ends_job(self) -> bool:
        """Whether starting anew has been tried often enough."""
        return self.record is not None and self.record["type"] == "thalweg.checkpoint.errors.RestartLoopError"

    @property
    def exit_code(self) -> int:
        """The code a shell would see: the rank's own, or 128 + n for signal n."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    @property
    def summary(self) -> str:
        """One line: the exception's, with the next where it announces it, or how the process ended."""
        if self.record is not None:
            return "".join(re.sub(r":\n\s*", ": ", str(self.record["summary"]), count=1).splitlines()[:1])[:300]
        if self.returncode < 0:
            number = -self.returncode
            name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
            hint = _HINTS.get(signal.Signals(number)) if name != "unknown" else None
            return f"killed by signal {number} ({name})" + (f", {hint}" if hint else "")
        return "no traceback: it called sys.exit or os._exit"


def collect_failures(folder: Path, returncodes: Mapping[int, int], exited: Container[int]) -> list[Failure]:
    """The failures of a job, the first one first.

    ``returncodes`` are the agent's, by rank, minus n for signal n.  ``exited`` are the ranks that had ended
    before the agent stopped any: of the others only those count that had raised.
    """
    failures = []
    for rank, returncode in returncodes.items():
        path = folder / f"{rank}.error"
        record = json.loads(path.read_text()) if path.exists() else None
        if record and returncode <= 0:  # it had raised, and was stopped while it was still leaving
            returncode = 1
        if record or rank in exited:
            failures.append(Failure(rank, returncode or 1, int(record["time_ns"]) if record else 0, record))
    return sorted(failures, key=lambda failure: (failure.is_peer_loss, failure.time_ns))


def format_report(failures: list[Failure], nproc: int, where: str = "") -> str:
    """The paragraph and the traceback that the user reads; ``where`` names the host, if there are several."""
    first, *others = failures
    label = f"rank {first.rank} of {nproc}{where}" + (" failed first" if nproc > 1 else " failed")
    head = f"{label}, exit code {first.exit_code}: {first.summary}"
    if nproc > 1:
        head += "; the other ranks were stopped"
    other_failures = [f"rank {f.rank}: {f.summary}" for f in others if not f.is_peer_loss][:3]
    if other_failures:
        head += f" (also {'; '.join(other_failures)})"
    if first.record is None or first.record["shown"]:
        return f"thalweg run: {head}\n"
    text = f"thalweg run: traceback of rank {first.rank}{where}\n{first.record['traceback']}"
    return f"{text}thalweg run: {head}\n"
