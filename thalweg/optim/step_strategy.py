"""How an update is carried out, once its norm and its factor are known.

``EngineOptimizer`` decides *whether* and *by what factor*; a ``StepStrategy`` does it.  ``InMemoryStep`` steps the
optimiser over tensors in memory.  ``NvmeStep`` (offload/nvme_step.py) moves state, masters and gradients through
buffers from and to a swap file; ``MmapStep`` (offload/mmap_step.py) is its slow, general sibling.  All three
give the same bits in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.optim import foreach
from thalweg.optim.clip import global_grad_norm
from thalweg.optim.dtensor_local import to_local
from thalweg.optim.norms import PartialNorm


class StepStrategy(Protocol):
    """One optimiser's way to step."""

    def grad_norm(
        self,
        params: Sequence[Tensor],
        replicate_group: dist.ProcessGroup | None,
        partial_norms: Mapping[Tensor, PartialNorm] | None = None,
    ) -> float:
        """The global 2-norm of the gradients of ``params``, some known as ``partial_norms``; collective."""
        ...

    def apply(self, factor: float, subset: Collection[Tensor] | None = None) -> None:
        """Multiply the gradients (only of ``subset``) by ``factor`` and step."""
        ...

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """Uninitialised state of ``param``'s layout, where this strategy wants it (used to load into)."""
        ...

    def offload_state(self) -> None:
        """The optimiser's state was exchanged (loaded): bring it to where it belongs."""
        ...

    def release(self, tensor: Tensor) -> None:
        """Nobody reads or writes ``tensor`` for a while: memory that only mirrors a disk may go."""
        ...


class InMemoryStep:
    """Everything is in memory: scale, then step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def grad_norm(
        self,
        params: Sequence[Tensor],
        replicate_group: dist.ProcessGroup | None,
        partial_norms: Mapping[Tensor, PartialNorm] | None = None,
    ) -> float:
        """The global 2-norm; collective."""
        return float(global_grad_norm(params, replicate_group=replicate_group, partial_norms=partial_norms))

    def apply(self, factor: float, subset: Collection[Tensor] | None = None) -> None:
        """Scale the gradients in place and step."""
        with restrict_params(self.optimizer, subset):
            if factor != 1.0:
                scale_grads(self.optimizer, factor)
            self.optimizer.step()

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """Memory of the parameter's layout."""
        return torch.empty_like(param.detach(), dtype=dtype)

    def offload_state(self) -> None:
        """Nothing to do."""

    def release(self, tensor: Tensor) -> None:
        """Nothing to do."""


@contextmanager
def restrict_params(optimizer: torch.optim.Optimizer, subset: Collection[Tensor] | None) -> Iterator[None]:
    """Let the optimizer see only ``subset`` (None: all) for a while."""
    if subset is None:
        yield
        return
    groups = optimizer.param_groups
    restricted = [{**group, "params": [p for p in group["params"] if p in subset]} for group in groups]
    optimizer.param_groups = [restricted_group for restricted_group in restricted if restricted_group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def scale_grads(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply all gradients by ``factor``, in place."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    pieces = [to_local(p.grad) for p in params if p.grad is not None]
    if pieces:
        foreach.mul_(pieces, factor)
