"""The gate stays within its minutes, and notices a file that became slow."""

from __future__ import annotations

import pytest

from tests import durations
from tests.repo.source import ROOT


@pytest.mark.skipif(not durations.PATH.exists(), reason="tests/durations.json is not measured yet: make durations")
def test_the_gate_fits_its_limit() -> None:
    kinds = durations.load()
    present = {
        kind: {name: s for name, s in seconds.items() if kind == "before" or (ROOT / name).exists()}
        for kind, seconds in kinds.items()
    }
    assert durations.total_minutes(present) <= durations.LIMIT_MINUTES


def test_what_exceeds_its_budget_is_named() -> None:
    budget = {"a.py": 10.0, "b.py": 10.0}
    measured = {"a.py": 49.0, "b.py": 51.0, "new.py": 19.0, "slow and new.py": 21.0}
    assert durations.find_exceeded(measured, budget) == [
        "b.py: 51 s of a budget of 10 s",
        "slow and new.py: 21 s of a budget of 0 s",
    ]


def test_a_slow_machine_is_no_slow_file() -> None:
    """It is slow for most files alike; what it is much slower for than for those is named there too."""
    budget = {f"{name}.py": 10.0 for name in "abcde"} | {"short.py": 0.1}
    measured = {name: 4 * seconds for name, seconds in budget.items()}
    assert durations.slowness(measured, budget) == 4.0
    assert not durations.find_exceeded(measured | {"short.py": 80.0, "new.py": 79.0, "a.py": 199.0}, budget)
    found = durations.find_exceeded(measured | {"short.py": 82.0, "new.py": 81.0, "a.py": 201.0}, budget)
    assert [line.split(":")[0] for line in found] == ["a.py", "new.py", "short.py"]


def test_a_fast_machine_or_few_files_change_no_budget() -> None:
    budget = {f"{name}.py": 10.0 for name in "abcde"}
    assert durations.slowness(dict.fromkeys(budget, 2.0), budget) == 1.0
    assert durations.slowness({"a.py": 90.0, "b.py": 90.0, "c.py": 90.0, "d.py": 90.0}, budget) == 1.0


def test_workers_share_all_but_the_longest_file() -> None:
    kinds = {"before": {"environment": 60.0}, "alone": {"a.py": 60.0}, "waits": {}}
    assert durations.total_minutes(kinds | {"shared": {"a.py": 120.0, "b.py": 120.0}}) == 4.0
    assert durations.total_minutes(kinds | {"shared": {"a.py": 230.0, "b.py": 10.0}}) > 5.8
    kinds |= {"before": {"environment": 30.0, "lint": 30.0}, "shared": {}}
    assert durations.total_minutes(kinds | {"waits": {"c.py": 30.0}}) == 2.0  # beside lint
    assert durations.total_minutes(kinds | {"waits": {"c.py": 90.0}}) == 3.0
