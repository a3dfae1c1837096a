"""The command line, the start of the process group, and a loader without an end."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from thalweg import parallel_dims


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "read by deepspeed.initialize(args=...)")
    group.add_argument("--deepspeed", action="store_true", help="let the script use its engine")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="the config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, help=argparse.SUPPRESS)
    return parser


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """``thalweg.init_distributed`` without its answer."""
    parallel_dims.init_distributed(dist_backend, *args, **kwargs)


class RepeatingLoader:
    """Begins anew when its loader ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
