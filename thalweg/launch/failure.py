"""Which rank failed first, and what to say about it.

When one rank dies the others follow within milliseconds, with errors of their own about a peer that went
away.  So the order is not by time alone: a death that left no record (a signal, ``os._exit``) or an
exception that does not speak of a lost peer comes before one that does; time decides within each kind.
Ranks that the launcher itself ended are left out.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thalweg.launch.process_monitor import RankExit

_PEER_LOSS = re.compile(r"peer|connection|socket|gloo|nccl|broken pipe|store", re.IGNORECASE)
_HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: `dmesg` tells, and a smaller micro-batch helps",
    signal.SIGSEGV: "a crash in compiled code: the Python stack above shows where",
    signal.SIGBUS: "often a full /dev/shm: `df /dev/shm` tells",
    signal.SIGABRT: "compiled code gave up; its message is above",
}


@dataclass(frozen=True)
class Failure:
    """How one rank failed; ``record`` is what rank.py wrote about an uncaught exception, if it did."""

    rank: int
    returncode: int
    time_ns: int
    record: Mapping[str, str | int | bool] | None

    @property
    def is_peer_loss(self) -> bool:
        """Whether the exception is about another rank that went away."""
        return self.record is not None and (
            str(self.record["type"]).startswith("torch.distributed")
            or (
                str(self.record["type"]) in ("builtins.RuntimeError", "builtins.ConnectionResetError")
                and _PEER_LOSS.search(str(self.record["summary"])) is not None
            )
        )

    @property
    def exit_code(self) -> int:
        """The code a shell would see: the rank's own, or 128 + n for signal n."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    @property
    def summary(self) -> str:
        """One line: the exception's, or how the process ended."""
        if self.record is not None:
            return str(self.record["summary"]).splitlines()[0][:300]
        if self.returncode < 0:
            number = -self.returncode
            name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
            hint = _HINTS.get(signal.Signals(number)) if name != "unknown" else None
            return f"killed by signal {number} ({name})" + (f", {hint}" if hint else "")
        return "no traceback: it called sys.exit or os._exit"


def collect_failures(folder: Path, returncodes: Mapping[int, int], exits: Mapping[int, RankExit]) -> list[Failure]:
    """The failures of a job, the first one first.

    ``codes`` are the agent's, by rank, minus n for signal n, in the order in which it saw them.
    """
    records = {}
    for path in folder.glob("*.error"):
        record = json.loads(path.read_text())
        records[int(record["rank"])] = record
    failures = []
    for position, (rank, returncode) in enumerate(returncodes.items()):
        rank_exit, record = exits.get(rank), records.get(rank)
        if record:
            time_ns = int(record["time_ns"])
        elif rank_exit is not None and rank_exit.returncode is not None:
            time_ns, returncode = rank_exit.time_ns, rank_exit.returncode
        else:  # the agent was faster; the first it names died before it ended any other
            time_ns = 0 if position == 0 else 2**63
        if record and returncode <= 0:  # it had raised, and was ended while it was still leaving
            returncode = 1
        failures.append(Failure(rank, returncode or 1, time_ns, record))
    failures.sort(key=lambda failure: (failure.is_peer_loss, failure.time_ns))
    stop_codes = {-signal.SIGTERM, -signal.SIGKILL}
    return failures[:1] + [f for f in failures[1:] if f.record is not None or f.returncode not in stop_codes]


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
