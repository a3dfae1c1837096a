"""Gradients that leave as soon as they are reduced: updates within the backward pass.

The picture, for one unit of the model (a transformer block)::

    backward of unit n+1 | reduction n+1 | update n+1, gradient gone | backward of unit n | ...

so that the gradients of all units never exist at once.  The norm is summed as they leave, from the same
numbers and in the same order as if they had stayed, and equals that of an ordinary step in every bit.

Where they cannot be used up at once, and the state is on NVMe, they rest there (:mod:`.spill`).

An update cannot be taken back, so it runs here only where nothing later in the step can change it.  The
rule: the optimiser's state is offloaded, it works element by element and nobody has hung a hook on it; there
is no gradient clipping and no fp16 loss scale; the backward pass is ``engine.backward``'s, not one that
retains its graph, and belongs to the last micro-batch of a full window.  In any other backward pass (a plain
``loss.backward()`` among them, whose user may read ``.grad``) gradients stay for ``step()``, which takes
whatever is left.

What differs from an ordinary step: ``.grad`` is None after the backward pass; a step of two backward passes
is an error (add the losses up); and a gradient that is not finite leaves out its own unit on this rank, with
a warning, where an ordinary step leaves out all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.optim.local import local_grad
from thalweg.optim.norms import Measured, measure
from thalweg.optim.spill import GradSpill
from thalweg.optim.update import Update
from thalweg.optim.window import Window
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
# Units whose updates may wait for the disk while the backward pass goes on: each holds its gradients.
PENDING = 2


class Leaving:
    """An :class:`.update.Update` around ``inner`` that takes units as :meth:`reduced` reports them.

    ``changed(units)`` is told which have new values.  ``early``: updates may run within the backward pass;
    ``spill``: where gradients rest that cannot be used up at once.  ``background``: update on a thread of
    its own, for an update that waits for a disk.
    """

    def __init__(
        self,
        inner: Update,
        optimizer: torch.optim.Optimizer,
        window: Window,
        changed: Callable[[list[str]], None],
        *,
        early: bool = True,
        spill: GradSpill | None = None,
        background: bool = False,
    ) -> None:
        self.inner, self.optimizer, self.window = inner, optimizer, window
        self.measured: dict[Tensor, Measured] = {}
        self.left_out: list[str] = []
        self._changed, self._early, self._spill = changed, early, spill
        self._waiting: dict[str, list[Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thalweg-update") if background else None
        self._pending: list[Future[None]] = []
        window.before_backward.append(self._check)
        window.after_backward.append(self._sweep)

    # The face of an Update

    def grad_norm(
        self,
        params: Sequence[Tensor],
        replicate_group: dist.ProcessGroup | None,
        measured: Mapping[Tensor, Measured] | None = None,
    ) -> float:
        """The global 2-norm, gradients that have left included; collective."""
        self.settle()
        resting = self._spill.measured() if self._spill is not None else {}
        return self.inner.grad_norm(params, replicate_group, {**resting, **self.measured, **(measured or {})})

    def apply(self, factor: float, only: Collection[Tensor] | None = None) -> None:
        """Update what is left."""
        self.inner.apply(factor, only)

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """Uninitialised state of ``param``'s layout, where the inner update wants it."""
        return self.inner.state_like(param, key, dtype)

    def place_state(self) -> None:
        """Bring exchanged state to where it belongs."""
        self.inner.place_state()

    def release(self, tensor: Tensor) -> None:
        """Nobody reads or writes ``tensor`` for a while."""
        self.inner.release(tensor)

    # The backward pass

    def reducing(self, params: Sequence[Tensor]) -> None:
        """The gradients of ``params`` are about to be reduced."""
        if self._spill is not None:
            self._spill.set_aside(params)

    def reduced(self, unit: str, params: Sequence[Tensor], complete: bool) -> None:
        """The gradients of ``unit`` have been reduced; ``complete`` if this backward adds no more to them."""
        if self._spill is not None:
            self._spill.bring(params)
        mine = [param for param in params if param.grad is not None]
        if not mine:
            return
        if not self._may_update():
            if self._spill is not None:
                self._spill.put(mine)
        elif complete:
            self._leave(unit, mine)
        else:
            self._waiting[unit] = mine

    def settle(self) -> None:
        """Wait for the updates under way; raises what one of them has raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close_step(self) -> None:
        """The step that these gradients belong to is over."""
        if self.left_out:
            _log.warning(
                "a gradient was not finite: %s kept their values, units that came before in the backward "
                "pass are updated; with gradient_clipping a step is left out as a whole",
                ", ".join(self.left_out),
            )
        self._forget()

    def drop(self) -> None:
        """The user forgets this step's gradients."""
        self.settle()
        if self.measured:
            _log.warning(
                "zero_grad() after a backward pass that has updated %d parameters already: "
                "offload_optimizer updates within the backward pass",
                len(self.measured),
            )
        self._forget()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _forget(self) -> None:
        self.measured.clear()
        self.left_out.clear()
        self._waiting.clear()
        if self._spill is not None:
            self._spill.forget()

    def _may_update(self) -> bool:
        window = self.window
        full = window.in_backward and window.is_last and not window.retained and window.mean_factor == 1.0
        return self._early and full and not self.optimizer._optimizer_step_pre_hooks

    def _check(self) -> None:
        if self.measured:
            self._forget()
            raise ValueError(
                "a second backward pass in one step: offload_optimizer has updated parameters within the "
                "first. Add the losses and call engine.backward() once, or pass retain_graph=True to all "
                "but the last"
            )

    def _sweep(self) -> None:
        """What the backward pass has left: units that were used more often than they were reduced."""
        if self._may_update():
            for unit, params in list(self._waiting.items()):
                self._leave(unit, [param for param in params if param.grad is not None])
        self._waiting.clear()

    @torch.no_grad()
    def _leave(self, unit: str, params: list[Tensor]) -> None:
        self._waiting.pop(unit, None)
        finite = True
        for param in params:
            self.measured[param] = found = measure(local_grad(param))
            finite = finite and found.is_finite
        if not finite:
            self.left_out.append(unit or "the root")
            for param in params:
                param.grad = None
            return
        # What is in memory of it is outdated; what may be read meanwhile goes when the step ends.
        self._changed([unit])
        if self._thread is None:
            self._step(params)
        else:
            while len(self._pending) >= PENDING:
                self._pending.pop(0).result()
            self._pending.append(self._thread.submit(self._step, params))

    @torch.no_grad()
    def _step(self, params: list[Tensor]) -> None:
        self.inner.apply(1.0, set(params))
        for param in params:
            param.grad = None
