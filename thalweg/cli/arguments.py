"""What subcommands share: types of their options, and lines for whoever watches."""

import argparse
import contextlib
import sys
from collections.abc import Callable


def int_at_least(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A type of argparse: whole numbers from ``minimum`` on, up to ``maximum`` if there is one."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} must be at least {minimum}")
        if maximum is not None and value > maximum:
            raise argparse.ArgumentTypeError(f"{value} must be at most {maximum}")
        return value

    return parse


def log_stderr(text: str) -> None:
    """Tell whoever watches; that nobody can be told (a full disk behind standard error) ends no server."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
