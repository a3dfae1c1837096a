"""Tensor and sequence ranks in a rehearsal: the model is cut as a job cuts it, for a team of one.

The cut layers allocate what they would, and their collectives are counted and move nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.comm import Ledger
from thalweg.parallel.sequence import SequenceTeams, sequence_parallel
from thalweg.parallel.team import Team, pad
from thalweg.parallel.tensor import cut_layers
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


class AloneTeam(Team):
    """Rank 0 of ``size``; no collective waits for anyone, and ``ledger`` counts them."""

    def __init__(self, size: int, ledger: Ledger, carrier: str = "tensor") -> None:
        self.size, self.rank, self.carrier = size, 0, carrier
        self.ledger, self.draws = ledger, False
        self._entered = self._outside = None

    def all_reduce(self, tensor: Tensor, name: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Count it."""
        self._count("all_reduce", name, tensor.nbytes)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, sizes: list[int], name: str) -> Tensor:
        """A tensor of the whole's shape."""
        sent = pad(tensor, dim, max(sizes)).contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._count("all_gather", name, sent.nbytes * self.size)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(received, sizes, strict=True)], dim)

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: list[int], name: str) -> Tensor:
        """A tensor of the part's shape."""
        parts = torch.stack([pad(part, dim, max(sizes)).contiguous() for part in tensor.split(sizes, dim)])
        received = torch.empty_like(parts)
        self._count("reduce_scatter", name, received.nbytes)
        return received.sum(0).narrow(dim, 0, sizes[self.rank])

    def all_to_all(self, sent: Tensor, send_counts: list[int], counts: list[int], name: str) -> Tensor:
        """A tensor of what would come."""
        self._count("all_to_all", name, sent.nbytes)
        return sent.new_empty(sum(counts))

    def _count(self, kind: str, name: str, full_bytes: int) -> None:
        self.ledger.record(kind, name, self.carrier, full_bytes=full_bytes, world_size=self.size)


def split_layers(model: nn.Module, size: int, ledger: Ledger) -> None:
    """Cut ``model`` (on meta) in place over ``size`` tensor ranks.

    Raises:
        ValueError: nothing is known of how to.
    """
    if size > 1:
        cut_layers(model, AloneTeam(size, ledger))


def split_sequences(model: nn.Module, size: int, blocks: list[nn.Module], ledger: Ledger) -> None:
    """Let ``model`` work on parts of sequences over ``size`` ranks that exchange heads.

    Raises:
        ValueError: it cannot.
    """
    if size > 1:
        team = AloneTeam(size, ledger, "sequence")
        sequence_parallel(model, SequenceTeams(team, heads=team), blocks).trust_rows()


def can_split(model: nn.Module, size: int) -> bool:
    """Whether :func:`split_layers` works; changes ``model``."""
    try:
        split_layers(model, size, Ledger())
    except Exception as error:  # a layout that needs values, or none at all: the job will say so itself
        _log.debug("%s is not cut over %d tensor ranks: %s", type(model).__name__, size, error)
        return False
    return True
