"""The log of collectives: every one, by kind and module, with its bytes and seconds.

``sent`` is what leaves this rank in the textbook's ring form of the collective
(all-gather and reduce-scatter ``(n-1)/n`` of the full buffer, all-reduce twice that, all-to-all
``(n-1)/n`` of what this rank sends, a message and its header all of it), whatever carries it, so that a
configuration's traffic can be compared with theory.
``intra_bytes`` and ``inter_bytes`` are the bytes that this form of it really moves: to ranks of this
host (read by them from shared memory, or sent) and to other hosts.  ``seconds`` is the
time spent inside the call, waiting for peers included.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from thalweg.comm.topology import HostTopology
from thalweg.observe.table import format_table

RING_FACTOR = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 1, "barrier": 0}
_POINT_TO_POINT_KINDS = ("send", "header")


@dataclass
class CommsLogEntry:
    """Totals of one collective kind on one module (``transport`` says what moved it)."""

    kind: str
    module: str
    transport: str
    num_calls: int = 0
    full_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    intra_bytes: int = 0
    inter_bytes: int = 0


@dataclass
class CollectiveCall:
    """One collective while it runs: what it has moved so far."""

    intra_bytes: int = 0
    inter_bytes: int = 0

    def add_bytes(self, intra_bytes: int, inter_bytes: int = 0) -> None:
        """Add bytes that left this rank for its own host, and for others."""
        self.intra_bytes += intra_bytes
        self.inter_bytes += inter_bytes


class CommsLog:
    """Counts collectives; cheap enough to be always on.

    ``topology``, where known, tells on which hosts the ranks are that the states are sharded over.  ``marks_device``:
    :meth:`pending` shall tell of collectives on an accelerator too, for an event more each.
    """

    def __init__(self) -> None:
        self.topology: HostTopology | None = None
        self.marks_device = False
        self._running = self._last = ""
        self._mark: Any = None
        self._entries: dict[tuple[str, str, str], CommsLogEntry] = {}

    def record(
        self,
        kind: str,
        module: str,
        transport: str,
        *,
        full_bytes: int,
        world_size: int,
        seconds: float = 0.0,
        call: CollectiveCall | None = None,
    ) -> None:
        """Add one call that moved a buffer of ``full_bytes`` (unsharded size) among ``world_size`` ranks."""
        entry = self._entries.setdefault((kind, module, transport), CommsLogEntry(kind, module, transport))
        entry.num_calls += 1
        entry.full_bytes += full_bytes
        is_message = kind in _POINT_TO_POINT_KINDS
        ring_bytes = full_bytes if is_message else RING_FACTOR[kind] * full_bytes * (world_size - 1) // world_size
        entry.sent_bytes += ring_bytes
        entry.seconds += seconds
        if call is not None:
            entry.intra_bytes += call.intra_bytes
            entry.inter_bytes += call.inter_bytes

    @contextmanager
    def timed(
        self, kind: str, module: str, transport: str, full_bytes: int, world_size: int
    ) -> Iterator[CollectiveCall]:
        """Time the body and record it as one call; the body says what it moved."""
        start, call = time.perf_counter(), CollectiveCall()
        self._running = self._last = f"{kind} of {module}"
        try:
            yield call
        finally:
            self._running = ""
        if self.marks_device:
            self._mark = torch.accelerator.current_stream().record_event()
        seconds = time.perf_counter() - start
        self.record(kind, module, transport, full_bytes=full_bytes, world_size=world_size, seconds=seconds, call=call)

    def pending(self) -> str:
        """The collective that runs in any thread, or that the device has not done yet; else ""."""
        mark = self._mark
        return self._running or (self._last if mark is not None and not mark.query() else "")

    def entries(self) -> list[CommsLogEntry]:
        """All entries, the slowest first."""
        return sorted(self._entries.values(), key=lambda entry: -entry.seconds)

    def total(self, kind: str | None = None) -> CommsLogEntry:
        """The sum over modules and transports, of one kind or of all."""
        total = CommsLogEntry(kind or "all", "", "")
        for entry in list(self._entries.values()):  # another thread may ask
            if kind in (None, entry.kind):
                for column in ("num_calls", "full_bytes", "sent_bytes", "seconds", "intra_bytes", "inter_bytes"):
                    setattr(total, column, getattr(total, column) + getattr(entry, column))
        return total

    def table(self, by_module: bool = False) -> str:
        """The entries as text, one line a kind and transport, or also a module; MiB are full buffers."""
        rows: dict[tuple[str, ...], list[float]] = {}
        for entry in self.entries():
            key = (entry.kind, entry.transport, entry.module) if by_module else (entry.kind, entry.transport)
            row = rows.setdefault(key, [0, 0.0, 0.0, 0.0, 0.0, 0.0])
            row[0] += entry.num_calls
            sizes = (entry.full_bytes, entry.sent_bytes, entry.intra_bytes, entry.inter_bytes)
            for column, num_bytes in enumerate(sizes, start=1):
                row[column] += num_bytes / 2**20
            row[5] += entry.seconds * 1e3
        head = ["collective", "by", *(["module"] if by_module else []), "calls", "MiB", "MiB sent"]
        head += ["in host", "to hosts", "ms"]
        return format_table(head, [[*key, *totals] for key, totals in rows.items()])

    def reset(self) -> None:
        """Forget everything counted so far."""
        self._entries.clear()
