"""How a command that runs for long tells whoever watches."""

from __future__ import annotations

import contextlib
import sys


def log_stderr(text: str) -> None:
    """Tell whoever watches; that nobody can be told (a full disk behind standard error) ends no server."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
