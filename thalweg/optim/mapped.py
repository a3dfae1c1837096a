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

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.optim import foreach
from thalweg.optim.clip import global_grad_norm
from thalweg.optim.local import like_param, local
from thalweg.optim.norms import Measured
from thalweg.store import SwapFile


class MappedUpdate:
    """Steps any ``optimizer`` over state in ``swap``, parameter by parameter; ``copies`` as for
    :class:`.streamed.StreamedUpdate`; with ``state_in_memory`` only masters and gradients lie in ``swap``;
    ``resident``: parameters whose state stays in memory; ``at_once``: for an optimiser whose update of one
    parameter depends on others, step all of them together (their pages are then in memory together)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        swap: SwapFile,
        *,
        copies: dict[Tensor, Tensor] | None = None,
        state_in_memory: bool = False,
        resident: Collection[Tensor] = (),
        at_once: bool = False,
    ) -> None:
        self._at_once = at_once
        self.optimizer, self.swap, self.copies = optimizer, swap, dict(copies or {})
        self._keeps_state, self._resident = state_in_memory, frozenset(resident)
        self.place_state()

    def grad_norm(
        self,
        params: Sequence[Tensor],
        replicate_group: dist.ProcessGroup | None,
        measured: Mapping[Tensor, Measured] | None = None,
    ) -> float:
        """The global 2-norm; collective."""
        norm = float(global_grad_norm(params, replicate_group=replicate_group, measured=measured))
        for param in params:
            if param.grad is not None:
                self._trim(local(param.grad))
        return norm

    @torch.no_grad()
    def apply(self, factor: float = 1.0, only: Collection[Tensor] | None = None) -> None:
        """Scale the gradients by ``factor`` and step, one parameter at a time."""
        assert only is None, "which parameters go together is the optimiser's affair"
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [(param, param.grad) for param in params if param.grad is not None]
        try:
            for param, _ in grads:
                param.grad = None
            size = len(grads) if self._at_once else 1
            for first in range(0, len(grads), size):
                self._expect(grads[first + size : first + size + 1])
                self._step(grads[first : first + size], factor)
        finally:
            for param, grad in grads:
                param.grad = grad

    def _step(self, grads: Sequence[tuple[Tensor, Tensor]], factor: float) -> None:
        for param, grad in grads:
            if factor != 1.0:
                foreach.mul_([local(grad)], factor)
            param.grad = grad
        self.optimizer.step()
        for param, grad in grads:
            self._place(param)
            if param in self.copies:
                self.copies[param].copy_(local(param))
                self._trim(self.copies[param])
            for tensor in (local(param), local(grad)):
                self._trim(tensor)
            param.grad = None

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """State of ``param``'s layout in the swap file, of undefined value."""
        piece = local(param)
        return like_param(
            torch.empty_like(piece, dtype=dtype) if self._keeps(param) else self._room(piece, dtype), param
        )

    def release(self, tensor: Tensor) -> None:
        """Give back the pages of the mapping that ``tensor`` lies in, if it does."""
        self._trim(tensor)

    def place_state(self) -> None:
        """Move state that lies in memory to the swap file."""
        for param in self.optimizer.state:
            if isinstance(param, Tensor):
                self._place(param)

    def _place(self, param: Tensor) -> None:
        """Move the tensors of ``param``'s state that are as large as it, and trim those that are there."""
        state = self.optimizer.state[param]
        for key, value in state.items():
            if not isinstance(value, Tensor) or local(value).shape != local(param).shape or not value.ndim:
                continue
            piece = local(value)
            if self.swap.locate(piece) is None and piece.numel() and not self._keeps(param):
                placed = self._room(piece, piece.dtype)
                placed.copy_(piece)
                state[key] = like_param(placed, value)
                piece = placed
            self._trim(piece)

    def _expect(self, coming: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let the disk read what the next parameter needs while this one is computed."""
        for param, grad in coming:
            state = (
                value for value in self.optimizer.state.get(param, {}).values() if torch.is_tensor(value)
            )
            for tensor in (param, grad, *state):
                piece = local(tensor)
                offset = self.swap.locate(piece)
                if offset is not None:
                    self.swap.expect(offset, piece.nbytes)

    def _keeps(self, param: Tensor) -> bool:
        """Whether the state of ``param`` stays in memory."""
        return self._keeps_state or param in self._resident

    def _room(self, piece: Tensor, dtype: torch.dtype) -> Tensor:
        if piece.numel() == 0:
            return torch.empty_like(piece, dtype=dtype)
        return self.swap.view(self.swap.region(piece.numel() * dtype.itemsize), piece.shape, dtype)

    def _trim(self, tensor: Tensor) -> None:
        offset = self.swap.locate(tensor)
        if offset is not None:
            self.swap.trim(offset, tensor.nbytes)
