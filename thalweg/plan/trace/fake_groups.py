"""Tensor and sequence parallel ranks of a traced step: the model is split as a job splits it, for a fake group.

The split layers allocate what they would, and their collectives are counted and move nothing.
"""

from typing import Any

from torch import Tensor, nn

from thalweg.comm import CommsLog
from thalweg.config.schema.parallel import TPPartition
from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.sequence.sequence_parallel import SequenceGroups, apply_sequence_parallel
from thalweg.parallel.tensor.tensor_parallel import apply_tp_offline
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


class _NoComm:
    """Collectives that move nothing: their results have the right shape."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class FakeParallelGroup(ParallelGroup):
    """Rank 0 of ``size``; no collective waits for anyone, and ``ledger`` counts them."""

    comm, process_group = _NoComm(), None  # type: ignore[assignment]

    def __init__(self, size: int, ledger: CommsLog, axis: str = "tensor") -> None:
        self.size, self.rank, self.axis = size, 0, axis
        self.ledger, self.has_dropout, self.num_batches_to_check = ledger, False, 0
        self._cached_inputs, self._saved_rng = {}, None

    def group_for(self, tensor: Tensor) -> Any:
        """None: there is nobody to talk to."""


def apply_fake_tp(model: nn.Module, tp_size: int, ledger: CommsLog, partition: TPPartition | None) -> None:
    """Split ``model`` (on meta) in place over ``tp_size`` tensor ranks.

    Raises:
        ValueError: nothing is known of how to.
    """
    if tp_size > 1:
        apply_tp_offline(model, FakeParallelGroup(tp_size, ledger), partition)


def apply_fake_sp(model: nn.Module, sp_size: int, blocks: list[nn.Module], ledger: CommsLog) -> None:
    """Let ``model`` work on parts of sequences over ``sp_size`` ranks that exchange heads.

    Raises:
        ValueError: it cannot.
    """
    if sp_size > 1:
        group = FakeParallelGroup(sp_size, ledger, "sequence")
        apply_sequence_parallel(model, SequenceGroups(group, ulysses_group=group), blocks)


def supports_tp(model: nn.Module, tp_size: int, partition: TPPartition | None) -> bool:
    """Whether :func:`apply_fake_tp` works; changes ``model``."""
    try:
        apply_fake_tp(model, tp_size, CommsLog(), partition)
    except (ValueError, RuntimeError) as error:  # a layout that needs values, or none: the job will say so itself
        _log.info("%s is not split over %d tensor ranks: %s", type(model).__name__, tp_size, error)
        return False
    return True
