"""The ledger: every collective, by kind and module, with its bytes and seconds.

``sent`` is what leaves this rank in the textbook's ring form of the collective
(all-gather and reduce-scatter ``(n-1)/n`` of the full buffer, all-reduce twice that),
whatever carries it, so that a configuration's traffic can be compared with theory;
``seconds`` is the time spent inside the call, waiting for peers included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from thalweg.observe.table import format_table

RING_FACTOR = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "barrier": 0}


@dataclass
class Entry:
    """Totals of one collective kind on one module (``carrier`` says what moved it)."""

    kind: str
    module: str
    carrier: str
    num_calls: int = 0
    full_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts collectives; cheap enough to be always on."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], Entry] = {}

    def record(
        self, kind: str, module: str, carrier: str, *, full_bytes: int, world_size: int, seconds: float = 0.0
    ) -> None:
        """Add one call that moved a buffer of ``full_bytes`` (unsharded size) among ``world_size`` ranks."""
        key = (kind, module, carrier)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(kind, module, carrier)
        entry.num_calls += 1
        entry.full_bytes += full_bytes
        entry.sent_bytes += RING_FACTOR[kind] * full_bytes * (world_size - 1) // world_size
        entry.seconds += seconds

    @contextmanager
    def timed(
        self, kind: str, module: str, carrier: str, *, full_bytes: int, world_size: int
    ) -> Iterator[None]:
        """Time the body and record it as one call."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.record(kind, module, carrier, full_bytes=full_bytes, world_size=world_size, seconds=seconds)

    def entries(self) -> list[Entry]:
        """All entries, the slowest first."""
        return sorted(self._entries.values(), key=lambda entry: -entry.seconds)

    def total(self, kind: str | None = None) -> Entry:
        """The sum over modules and carriers, of one kind or of all."""
        total = Entry(kind or "all", "", "")
        for entry in self._entries.values():
            if kind in (None, entry.kind):
                total.num_calls += entry.num_calls
                total.full_bytes += entry.full_bytes
                total.sent_bytes += entry.sent_bytes
                total.seconds += entry.seconds
        return total

    def table(self, by_module: bool = False) -> str:
        """The entries as text, one line a kind and carrier, or also a module; MiB are full buffers."""
        rows: dict[tuple[str, ...], list[float]] = {}
        for entry in self.entries():
            key = (entry.kind, entry.carrier, entry.module) if by_module else (entry.kind, entry.carrier)
            row = rows.setdefault(key, [0, 0.0, 0.0, 0.0])
            row[0] += entry.num_calls
            row[1] += entry.full_bytes / 2**20
            row[2] += entry.sent_bytes / 2**20
            row[3] += entry.seconds * 1e3
        head = ["collective", "by", *(["module"] if by_module else []), "calls", "MiB", "MiB sent", "ms"]
        return format_table(head, [[*key, *totals] for key, totals in rows.items()])

    def reset(self) -> None:
        """Forget everything counted so far."""
        self._entries.clear()
