"""How long each test file takes: the budget in durations.json, and what exceeds it.

``make durations`` writes the file from a run of ``make test``.  It is read to order the files of a run (the longest
first, so that no worker is left with one at the end), to fail a gate in which a file has become much slower, and by
tests/repo, which holds the whole to its limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

PATH = Path(__file__).with_name("durations.json")
FACTOR, MARGIN_SECONDS = 3.0, 20.0  # what a busy machine and a new test may cost
LIMIT_MINUTES = 12.0

Seconds = dict[str, float]


def load() -> dict[str, Seconds]:
    """Seconds by test file: of what runs beside others ("shared"), beside lint ("waits"), or has the machine ("alone");
    "before" has the steps before the tests, "lint" among them."""
    kinds: dict[str, Seconds] = {"before": {}, "waits": {}, "shared": {}, "alone": {}}
    return kinds | json.loads(PATH.read_text()) if PATH.exists() else kinds


def save(kind: str, seconds: Mapping[str, float]) -> None:
    """Replace one kind."""
    kinds = load() | {kind: {name: round(value, 1) for name, value in sorted(seconds.items())}}
    PATH.write_text(json.dumps(kinds, indent=1) + "\n")


def slowness(measured: Mapping[str, float], budget: Mapping[str, float]) -> float:
    """How many times their seconds most files took (at least 1): a slow machine is slow for all alike."""
    known = [measured[name] / seconds for name, seconds in budget.items() if seconds >= 5 and measured.get(name)]
    return max(1.0, median(known)) if len(known) >= 5 else 1.0


def find_exceeded(measured: Mapping[str, float], budget: Mapping[str, float]) -> list[str]:
    """A line for each file that took more than ``FACTOR`` times its budget and ``MARGIN_SECONDS`` on top, where most
    files took theirs."""
    times = slowness(measured, budget)
    return [
        f"{name}: {seconds:.0f} s of a budget of {budget.get(name, 0.0):.0f} s"
        for name, seconds in sorted(measured.items())
        if seconds > times * (FACTOR * budget.get(name, 0.0) + MARGIN_SECONDS)
    ]


def total_minutes(kinds: Mapping[str, Mapping[str, float]], workers: int = 2) -> float:
    """The whole gate: what is before the tests, lint and what waits beside it, what runs alone, what workers share."""
    before, waits, shared, alone = (sum(kinds[kind].values()) for kind in ("before", "waits", "shared", "alone"))
    beside_lint = max(0.0, waits - kinds["before"].get("lint", 0.0))
    return (before + beside_lint + alone + max(shared / workers, max(kinds["shared"].values(), default=0.0))) / 60
