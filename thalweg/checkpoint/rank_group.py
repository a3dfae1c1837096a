"""Ranks that act together: one primitive, ``RankGroup.all_or_raise``.

Each rank runs its part; the outcomes meet; if one failed, all raise the same error.
So a collective save or load has no branch in which some ranks go on and others wait.
What travels is JSON in a uint8 tensor: nothing is unpickled, from a peer no more than
from a disk.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from thalweg.checkpoint.errors import ERRORS_BY_NAME, CheckpointError
from thalweg.parallel_dims import control_group


@dataclass(frozen=True)
class RankGroup:
    """The processes of one save or load: ``rank`` of ``world_size`` in ``group``, which takes tensors of the host
    (None: this process alone)."""

    rank: int
    world_size: int
    group: Any = None

    @classmethod
    def from_group(cls, group: Any = None) -> Self:
        """The ranks of ``group``, of the default group when None, or one rank when nothing is initialised."""
        if not dist.is_initialized():
            return cls(0, 1)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group of this checkpoint; pass its own group"
            )
        return cls(rank, world_size, control_group(group) if world_size > 1 else group)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (JSON-able), by rank."""
        if self.world_size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([payload.numel()], dtype=torch.int64)
        lengths = [torch.empty_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length, group=self.group)
        sizes = [int(n) for n in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [json.loads(g[:n].numpy().tobytes()) for g, n in zip(gathered, sizes, strict=True)]

    def all_or_raise(self, operation: str, fn: Callable[[], Any]) -> list[Any]:
        """Run ``fn`` on each rank and return all results (JSON-able) by rank.

        If it raised on any rank, every rank raises one error of the same class and text,
        which says ``operation`` failed and on which ranks.
        """
        cause: Exception | None = None
        try:
            outcome = {"value": fn()}
        except Exception as error:  # whatever it was, the peers must hear of it before it spreads here
            cause, kind, text = error, type(error).__name__, str(error) or repr(error)
            text = text if kind in ERRORS_BY_NAME else f"{kind}: {text}"
            outcome = {"kind": kind, "text": text, "what": operation}
        if self.world_size == 1 and isinstance(cause, CheckpointError):
            raise cause
        outcomes = self.all_gather_json(outcome)
        failed = {rank: o for rank, o in enumerate(outcomes) if "kind" in o}
        if not failed:
            return [o["value"] for o in outcomes]
        first = next(iter(failed.values()))
        raise ERRORS_BY_NAME.get(first["kind"], CheckpointError)(_format_failures(failed, self.world_size)) from cause

    def first_or_raise(self, operation: str, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` on the first rank alone; its result (JSON-able), or its error, on every rank."""
        return self.all_or_raise(operation, lambda: fn() if self.rank == 0 else None)[0]


def _format_failures(failed: dict[int, dict[str, str]], world_size: int) -> str:
    operation = next(iter(failed.values()))["what"]  # a rank's own words may differ, in a path or a tag
    texts: dict[str, list[int]] = {}
    for rank, outcome in failed.items():
        texts.setdefault(outcome["text"], []).append(rank)
    if world_size == 1:
        return f"{operation} failed: {next(iter(texts))}"
    if len(texts) == 1 and len(failed) == world_size:
        return f"{operation} failed on all {world_size} ranks: {next(iter(texts))}"
    shown = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in list(texts.items())[:4]]
    more = f" (and {len(texts) - 4} more)" if len(texts) > 4 else ""
    return f"{operation} failed on {len(failed)} of {world_size} ranks: " + "; ".join(shown) + more
