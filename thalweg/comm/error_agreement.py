"""An error of one rank is raised on all of them, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def all_ranks_or_raise(build: Callable[[], T], resource: str, group: dist.ProcessGroup | None) -> T:
    """``build()`` on every rank of ``group`` (None: this one alone); collective.

    Raises:
        ValueError: ``build`` has raised one, here or on another rank, whose message is then given.
    """
    error: ValueError | None = None
    result: Any = None
    try:
        result = build()
    except ValueError as caught:
        error = caught
    if group is not None:
        messages: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(messages, None if error is None else str(error), group=group)
        for rank, message in enumerate(messages):
            if error is None and message is not None:
                error = ValueError(f"rank {rank} cannot have {resource}: {message}")
    if error is not None:
        raise error
    return result
