"""The public surface is frozen: a change of it is a change of public_surface.txt, seen in review.

After an intended change: ``python -m tests.repo.surface > tests/repo/public_surface.txt``.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from tests.repo.surface import member_lines, surface_lines

FROZEN = Path(__file__).with_name("public_surface.txt")


def test_surface_is_frozen() -> None:
    frozen, now = FROZEN.read_text().splitlines(), list(surface_lines())
    difference = "\n".join(difflib.unified_diff(frozen, now, "frozen", "now", lineterm="", n=0))
    assert not difference, f"run `python -m tests.repo.surface > tests/repo/{FROZEN.name}`\n{difference}"


def test_a_new_option_is_noticed() -> None:
    class Before:
        def step(self, closure: None = None) -> None: ...

    class After:
        def step(self, closure: None = None, fast: bool = False) -> None: ...

    for cls in (Before, After):
        cls.__module__ = "thalweg.example"
    assert list(member_lines("E", Before)) != list(member_lines("E", After))
    assert len(list(member_lines("E", Before))) == 1
