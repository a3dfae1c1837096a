"""Options of other launchers that `thalweg run` does not take, and what to do instead."""

from __future__ import annotations

import tomllib
from pathlib import Path


def hint_for_option(option: str) -> str | None:
    """Return what to do instead of ``option``, or None where nobody knows it."""
    name = option.partition("=")[0].lstrip("-").replace("_", "-")
    hints = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return next((hint for hint, names in hints.items() if name in names), None)
