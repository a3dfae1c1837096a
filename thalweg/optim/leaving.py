"""Gradients that leave as soon as they are reduced: updates within the backward pass.

The picture, for one unit of the model (a transformer block)::

    backward of unit n+1 | reduction n+1 | update n+1, gradient gone | backward of unit n | ...

so that the gradients of all units never exist at once.  The norm is summed as they leave, from the same
numbers and in the same order as if they had stayed, and equals that of an ordinary step in every bit.

Two ways, by where the update writes:

*On NVMe* updates are tentative (:mod:`.tentative`): new values lie beside the old ones until ``step()`` has
found the norm over all ranks finite.  A step is all or nothing, in every dtype, with a loss scale too.  What
is written to memory (masters that stay there) cannot be taken back: such gradients rest in the swap file
(:mod:`.spill`) until ``step()``, and so do all of them where the disk has no room for second places.

*On the host* updates are made in place, for what would take them back is as large as the gradients that
were to go.  Ranks first agree that the loss is finite everywhere; else they wait, and ``step()`` skips.  What
is left is a gradient that overflows although the loss does not: the units that came before it in the
backward pass keep their updates, all others of that rank theirs not, ``skipped_steps`` counts the step, and
a warning names them.  With gradient clipping nothing is updated early.

The rule: the optimiser's state is offloaded, it works element by element and nobody has hung a hook on it;
there is no gradient clipping (nor, on the host, an fp16 loss scale); the backward pass is
``engine.backward``'s, not one that retains its graph, and belongs to the last micro-batch of a full window.
In any other backward pass (a plain ``loss.backward()`` among them, whose user may read ``.grad``) gradients
stay for ``step()``, which takes whatever is left.

What differs from an ordinary step to the eye: ``.grad`` is None after the backward pass, and a step of two
backward passes is an error (add the losses up).
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
from thalweg.optim.tentative import Tentative
from thalweg.optim.update import Update
from thalweg.optim.window import Window
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
# Units whose updates may wait for the disk while the backward pass goes on: each holds its gradients.
PENDING = 2


class Leaving:
    """An :class:`.update.Update` around ``inner`` that takes units as :meth:`reduced` reports them.

    ``early``: updates may be made in place within the backward pass, ``changed(units)`` being told which;
    ``tentative``: they may be made there as far as it takes them; ``spill``: where gradients rest that cannot
    be used up at once.  ``background``: update on a thread of its own, for an update that waits for a disk.
    ``group``: the ranks that make one step.
    """

    def __init__(
        self,
        inner: Update,
        optimizer: torch.optim.Optimizer,
        window: Window,
        changed: Callable[[list[str]], None],
        *,
        early: bool = True,
        tentative: Tentative | None = None,
        spill: GradSpill | None = None,
        background: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert not (early and tentative is not None), "in place or tentative, not both"
        self.inner, self.optimizer, self.window = inner, optimizer, window
        self.measured: dict[Tensor, Measured] = {}
        self.left_out: list[str] = []
        self._changed, self._early, self._spill = changed, early, spill
        self._tentative, self._group = tentative, group
        self._sound = True
        self._waiting: dict[str, list[Tensor]] = {}
        # By unit: the parameters that left after it the last time, whose state is read ahead.
        self._next: dict[str, frozenset[Tensor]] = {}
        self._last = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thalweg-update") if background else None
        self._pending: list[Future[None]] = []
        window.before_backward.append(self._begin)
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
        """Let tentative updates stand, and update what is left."""
        if self._tentative is not None:
            self._tentative.commit()
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
        if (error := self._wait()) is not None:
            raise error

    def _wait(self) -> BaseException | None:
        """Return when no update is under way, with the first error of one."""
        pending, self._pending = self._pending, []
        return next((error for error in [future.exception() for future in pending] if error), None)

    def close_step(self) -> None:
        """The step that these gradients belong to is over."""
        if self.left_out and self._early:
            _log.warning(
                "a gradient was not finite: %s kept their values, units that came before in the backward "
                "pass are updated; with gradient_clipping a step is left out as a whole",
                ", ".join(self.left_out),
            )
        self._forget()

    def drop(self) -> None:
        """The user forgets this step's gradients, and with them what became of their updates."""
        if (error := self._wait()) is not None:
            _log.warning("an update that is dropped had failed: %s", error)
        if self.measured and self._early:
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
        self._last = ""
        if self._tentative is not None:
            self._tentative.discard()
        if self._spill is not None:
            self._spill.forget()

    def _may_update(self) -> bool:
        window, optimizer = self.window, self.optimizer
        full = window.in_backward and window.is_last and not window.retained and window.is_even
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        possible = self._tentative is not None or (self._early and self._sound)
        return possible and full and not hooked

    def _begin(self) -> None:
        """Before a backward pass."""
        if self.measured:
            self._wait()
            self._forget()
            raise ValueError(
                "a second backward pass in one step: offload_optimizer has used the gradients of the first "
                "up. Add the losses and call engine.backward() once, or pass retain_graph=True to all but "
                "the last"
            )
        self._sound = not (self._early and self.window.is_last) or self._loss_is_finite()

    def _loss_is_finite(self) -> bool:
        """Whether every rank's loss is; collective."""
        loss = self.window.loss
        broken = torch.tensor(0.0 if loss is None or bool(loss.isfinite().all()) else 1.0)
        if self._group is not None:
            dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=self._group)
        return not bool(broken)

    def _sweep(self) -> None:
        """What the backward pass has left: units that were used more often than they were reduced."""
        if self._may_update():
            for unit, params in list(self._waiting.items()):
                self._leave(unit, [param for param in params if param.grad is not None])
        self._waiting.clear()

    @torch.no_grad()
    def _leave(self, unit: str, params: list[Tensor]) -> None:
        self._waiting.pop(unit, None)
        if self._tentative is not None:
            takes = self._tentative.takes
            if self._spill is not None:
                self._spill.put([param for param in params if not takes(param)])
            params = [param for param in params if takes(param)]
        if not params:
            return
        finite = True
        for param in params:
            self.measured[param] = found = measure(local_grad(param))
            finite = finite and found.is_finite
        if not finite or self.left_out:  # the step is lost: nothing more of it is worth doing
            self.left_out.append(unit or "the root")
            for param in params:
                param.grad = None
            return
        if self._tentative is None:
            # What is in memory of it is outdated; what may be read meanwhile goes when the step ends.
            self._changed([unit])
        if self._thread is None:
            self._step(params, None)
        else:
            while len(self._pending) >= PENDING:
                self._pending.pop(0).result()
            before, self._last = self._last, unit or "the root"
            self._next[before] = frozenset(params)
            self._pending.append(self._thread.submit(self._step, params, self._next.get(self._last)))

    @torch.no_grad()
    def _step(self, params: list[Tensor], following: Collection[Tensor] | None) -> None:
        if self._tentative is not None:
            self._tentative.apply(set(params))
            if following:
                self._tentative.expect(following)
        else:
            self.inner.apply(1.0, set(params))
        for param in params:
            param.grad = None
