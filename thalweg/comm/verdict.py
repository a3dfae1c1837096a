"""What every rank must be able to do, or none: an error of one rank is an error of all, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def all_or_none(make: Callable[[], T], what: str, group: dist.ProcessGroup | None) -> T:
    """``make()`` on every rank of ``group`` (None: this one alone); collective.

    Raises:
        ValueError: ``make`` has raised one, here or on another rank, whose words are then given.
    """
    error: ValueError | None = None
    made: Any = None
    try:
        made = make()
    except ValueError as caught:
        error = caught
    if group is not None:
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, None if error is None else str(error), group=group)
        for rank, words in enumerate(said):
            if error is None and words is not None:
                error = ValueError(f"rank {rank} cannot have {what}: {words}")
    if error is not None:
        raise error
    return made
