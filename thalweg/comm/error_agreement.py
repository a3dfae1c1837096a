"""What every rank must be able to do, or none: an error of one rank is an error of all, at once."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def all_ranks_or_raise(build: Callable[[], T], resource: str, group: dist.ProcessGroup | None) -> T:
    """``build()`` on every rank of ``group`` (None: this one alone); collective.

    Whatever ``build`` raises, a full disk or a defect of ours, the others must hear of it: they would wait for
    this rank in their next collective until its timeout.

    Raises:
        Exception: what ``build`` raised on this rank.
        ValueError: what ``build`` raised on another rank was one; its words are given.
        RuntimeError: ``build`` raised something else on another rank; its type and words are given.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = build()
    except Exception as caught:
        error = caught
    if group is not None:
        outcomes: list[tuple[bool, str] | None] = [None] * dist.get_world_size(group)
        is_value_error = isinstance(error, ValueError)
        text = str(error) if is_value_error else f"{type(error).__name__}: {error}"
        dist.all_gather_object(outcomes, None if error is None else (is_value_error, text), group=group)
        for rank, outcome in enumerate(outcomes):
            if error is None and outcome is not None:
                kind = ValueError if outcome[0] else RuntimeError
                error = kind(f"rank {rank} cannot have {resource}: {outcome[1]}")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
