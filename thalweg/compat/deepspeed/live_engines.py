"""The engines of this process: DeepSpeed's functions of groups and parameters name none."""

import weakref
from typing import Any

_engines: list[weakref.ref[Any]] = []  # the newest last


def add_engine(engine: Any) -> None:
    """Remember an engine for as long as it lives."""
    _engines[:] = [*(ref for ref in _engines if ref() is not None), weakref.ref(engine)]


def live_engines() -> list[Any]:
    """Those that there are, the newest first."""
    return [engine for ref in reversed(_engines) if (engine := ref()) is not None]
