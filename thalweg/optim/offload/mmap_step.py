"""The step of an optimiser that is not elementwise, with its state in the swap file.

LAMB, Muon and Adafactor take norms, products and means over whole tensors, so their parameters cannot pass
through buffers piece by piece; state in 8 bits has scales of another shape.  They go through the mapping
instead, one parameter after the other::

    hide all gradients but one parameter's  ->  optimizer.step()  ->  new state to the swap file  ->  trim

so that at most two parameters' tensors are in memory: those of the next are read ahead.  Every rank steps
the parameters in the same order; collectives within a step therefore match.  It is right for any optimiser
whose update of one parameter does not depend on another's, and slow: each byte is a page fault, and what
ranks share in one collective for all parameters becomes one for each.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.optim import foreach
from thalweg.optim.dtensor_local import to_local
from thalweg.optim.norms import PartialNorms
from thalweg.optim.offload.nvme_step import StateInSwapFile
from thalweg.storage_io.swap_file import SwapFile


class MmapStep(StateInSwapFile):
    """Steps any ``optimizer`` over state in ``swap``, parameter by parameter.

    ``step_together``: for an optimiser whose update of one parameter depends on others, step all of them together
    (their pages are then in memory together); ``where``: options of the base."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, swap: SwapFile, *, step_together: bool = False, **where: Any
    ) -> None:
        self._step_together = step_together
        super().__init__(optimizer, swap, **where)

    def grad_norm(
        self, params: Sequence[Tensor], replicate_group: dist.ProcessGroup | None, partial_norms: PartialNorms = None
    ) -> Tensor:
        """The global 2-norm; collective."""
        norm = super().grad_norm(params, replicate_group, partial_norms)
        for param in params:
            if param.grad is not None:
                self.release(to_local(param.grad))
        return norm

    @torch.no_grad()
    def apply(self, factor: float = 1.0, subset: Collection[Tensor] | None = None) -> None:
        """Scale the gradients by ``factor`` and step, one parameter at a time."""
        assert subset is None, "which parameters go together is the optimiser's affair"
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [(param, param.grad) for param in params if param.grad is not None]
        try:
            for param, _ in grads:
                param.grad = None
            size = len(grads) if self._step_together else 1
            for first in range(0, len(grads), size):
                self._readahead(grads[first + size : first + size + 1])
                self._step(grads[first : first + size], factor)
        finally:
            for param, grad in grads:
                param.grad = grad

    def _step(self, grads: Sequence[tuple[Tensor, Tensor]], factor: float) -> None:
        for param, grad in grads:
            if factor != 1.0:
                foreach.mul_([to_local(grad)], factor)
            param.grad = grad
        self.optimizer.step()
        for param, grad in grads:
            self._offload_param_state(param)
            if param in self.compute_copies:
                self.compute_copies[param].copy_(to_local(param))
                self.release(self.compute_copies[param])
            for tensor in (to_local(param), to_local(grad)):
                self.release(tensor)
            param.grad = None

    def _readahead(self, upcoming: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let the disk read what the next parameter needs while this one is computed."""
        for param, grad in upcoming:
            state = (value for value in self.optimizer.state.get(param, {}).values() if torch.is_tensor(value))
            for tensor in (param, grad, *state):
                piece = to_local(tensor)
                if (offset := self.swap.locate(piece)) is not None:
                    self.swap.readahead(offset, piece.nbytes)
