"""Logging: rank 0 speaks, the others only warn, and importing adds no handler.

``get_logger`` may be called at import: it returns a standard logger below ``thalweg`` whose filter asks for
the rank when a record is made, not before.  ``enable_console`` gives ``thalweg`` a handler on standard error;
the command line calls it, and a program that has set up ``logging`` itself keeps its own handlers.
"""

import logging
import sys

from thalweg.utils.env import read_rank_info

ROOT = "thalweg"


def current_rank() -> int:
    """The rank of this process: torch's when a process group exists, else the launcher's, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    try:
        return read_rank_info().rank
    except ValueError:  # reported by whoever needs the ranks; a log line must not fail for it
        return 0


def _filter_by_rank(record: logging.LogRecord) -> bool:
    """Let INFO and below through on rank 0 only, and mark the record with its rank."""
    rank = current_rank()
    record.rank = rank
    return rank == 0 or record.levelno >= logging.WARNING


def get_logger(name: str) -> logging.Logger:
    """A logger named below ``thalweg``: INFO and above on rank 0, WARNING and above elsewhere."""
    root = logging.getLogger(ROOT)
    if root.level == logging.NOTSET:
        root.setLevel(logging.INFO)
    qualified = name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}"
    logger = logging.getLogger(qualified)
    logger.addFilter(_filter_by_rank)  # once, however often it is asked for
    return logger


class _RankFormatter(logging.Formatter):
    """``thalweg: message`` on rank 0, ``thalweg [rank 3] WARNING: message`` elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        rank = getattr(record, "rank", 0)
        where = f" [rank {rank}]" if rank else ""
        level = f" {record.levelname}" if record.levelno >= logging.WARNING else ""
        return f"{ROOT}{where}{level}: {super().format(record)}"


def enable_console(level: int | str | None = None) -> None:
    """Send ``thalweg``'s records to standard error, once, unless the program configured logging itself.

    ``level`` is a ``logging`` level or its name in either case (``"info"``); an unknown one raises
    ``ValueError``.
    """
    root = get_logger(ROOT)
    if level is not None:
        number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
        if number is None:
            raise ValueError(f"log level {level!r} is unknown: use debug, info, warning, error or critical")
        root.setLevel(number)
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_RankFormatter())
        root.addHandler(handler)
