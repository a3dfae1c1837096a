"""Gradients that leave as soon as they are reduced: updates within the backward pass.

The picture, for one unit of the model (a transformer block)::

    backward of unit n+1 | reduction n+1 | update n+1, gradient gone | backward of unit n | ...

so that the gradients of all units never exist at once.  The norm is summed as they leave, from the same
numbers and in the same order as if they had stayed, and equals that of an ordinary step in every bit.

Two ways, by where the update writes:

*On NVMe* updates are tentative (:mod:`.double_buffered_step`): new values lie beside the old ones until ``step()`` has
found the norm over all ranks finite.  A step is all or nothing, in every dtype, with a loss scale too.  What
is written to memory (masters that stay there) cannot be taken back: such gradients rest in the swap file
(:mod:`.grad_offload`) until ``step()``, and so do all of them where the disk has no room for second places.

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

from thalweg.optim.accumulation import AccumulationWindow, StepListener, StepResult
from thalweg.optim.dtensor_local import local_grad
from thalweg.optim.norms import PartialNorm, compute_partial_norm
from thalweg.optim.offload.double_buffered_step import DoubleBufferedStep
from thalweg.optim.offload.grad_offload import GradOffload
from thalweg.optim.step import StepStrategy
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
# Units whose updates may wait for the disk while the backward pass goes on: each holds its gradients.
MAX_PENDING_UPDATES = 2


class StepInBackward(StepListener):
    """A :class:`~thalweg.optim.step.StepStrategy` around ``inner`` that updates units as they are reduced.

    ``in_place``: updates may be made in place within the backward pass, and ``on_params_updated(units)`` is called;
    ``double_buffered``: they may be made there as far as it takes them; ``grad_offload``: where gradients rest that
    cannot be used up at once.  ``use_thread``: update on a thread of its own, for an update that waits for a disk.
    ``group``: the ranks that make one step.
    """

    def __init__(
        self,
        inner: StepStrategy,
        optimizer: torch.optim.Optimizer,
        window: AccumulationWindow,
        on_params_updated: Callable[[list[str]], None],
        *,
        in_place: bool = True,
        double_buffered: DoubleBufferedStep | None = None,
        grad_offload: GradOffload | None = None,
        use_thread: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert not (in_place and double_buffered is not None), "in place or tentative, not both"
        self.inner, self.optimizer, self.window = inner, optimizer, window
        self.partial_norms: dict[Tensor, PartialNorm] = {}
        self.skipped_units: list[str] = []
        self._on_params_updated, self._in_place, self._grad_offload = (
            on_params_updated,
            in_place,
            grad_offload,
        )
        self._double_buffered, self._group = double_buffered, group
        self._loss_is_finite_everywhere = True
        self._incomplete_units: dict[str, list[Tensor]] = {}
        # By unit: the parameters that left after it the last time, whose state is read ahead.
        self._next_params: dict[str, frozenset[Tensor]] = {}
        self._last_unit = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thalweg-update") if use_thread else None
        self._pending_updates: list[Future[None]] = []

    # The face of an Update

    def grad_norm(
        self,
        params: Sequence[Tensor],
        replicate_group: dist.ProcessGroup | None,
        partial_norms: Mapping[Tensor, PartialNorm] | None = None,
    ) -> float:
        """The global 2-norm, gradients that have left included; collective."""
        self.wait_for_updates()
        offloaded_norms = self._grad_offload.partial_norms() if self._grad_offload is not None else {}
        return self.inner.grad_norm(
            params, replicate_group, {**offloaded_norms, **self.partial_norms, **(partial_norms or {})}
        )

    def apply(self, factor: float, subset: Collection[Tensor] | None = None) -> None:
        """Let tentative updates stand, and update what is left."""
        if self._double_buffered is not None:
            self._double_buffered.commit()
        self.inner.apply(factor, subset)

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """Uninitialised state of ``param``'s layout, where the inner update wants it."""
        return self.inner.state_like(param, key, dtype)

    def offload_state(self) -> None:
        """Bring exchanged state to where it belongs."""
        self.inner.offload_state()

    def release(self, tensor: Tensor) -> None:
        """Nobody reads or writes ``tensor`` for a while."""
        self.inner.release(tensor)

    # The backward pass

    def before_reduce(self, params: Sequence[Tensor]) -> None:
        """The gradients of ``params`` are about to be reduced."""
        if self._grad_offload is not None:
            self._grad_offload.detach(params)

    def after_reduce(self, unit: str, params: Sequence[Tensor], complete: bool) -> None:
        """The gradients of ``unit`` have been reduced; ``complete`` if this backward adds no more to them."""
        if self._grad_offload is not None:
            self._grad_offload.accumulate(params)
        with_grad = [param for param in params if param.grad is not None]
        if not with_grad:
            return
        if not self._can_step():
            if self._grad_offload is not None:
                self._grad_offload.offload(with_grad)
        elif complete:
            self._step_unit(unit, with_grad)
        else:
            self._incomplete_units[unit] = with_grad

    def wait_for_updates(self) -> None:
        """Wait for the updates under way; raises what one of them has raised."""
        if (error := self._wait_for_updates()) is not None:
            raise error

    def _wait_for_updates(self) -> BaseException | None:
        """Return when no update is under way, with the first error of one."""
        pending, self._pending_updates = self._pending_updates, []
        return next((error for error in [future.exception() for future in pending] if error), None)

    def after_step(self, result: StepResult) -> None:
        """The step that these gradients belong to is over."""
        if self.skipped_units and self._in_place:
            _log.warning(
                "a gradient was not finite: %s kept their values, units that came before in the backward "
                "pass are updated; with gradient_clipping a step is left out as a whole",
                ", ".join(self.skipped_units),
            )
        self._reset()

    def discard(self) -> None:
        """The user forgets this step's gradients, and with them what became of their updates."""
        if (error := self._wait_for_updates()) is not None:
            _log.warning("an update that is dropped had failed: %s", error)
        if self.partial_norms and self._in_place:
            _log.warning(
                "zero_grad() after a backward pass that has updated %d parameters already: "
                "offload_optimizer updates within the backward pass",
                len(self.partial_norms),
            )
        self._reset()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _reset(self) -> None:
        self.partial_norms.clear()
        self.skipped_units.clear()
        self._incomplete_units.clear()
        self._last_unit = ""
        if self._double_buffered is not None:
            self._double_buffered.discard()
        if self._grad_offload is not None:
            self._grad_offload.reset()

    def _can_step(self) -> bool:
        window, optimizer = self.window, self.optimizer
        is_full_window = window.in_backward and window.is_last and not window.retain_graph and window.needs_no_rescale
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        possible = self._double_buffered is not None or (self._in_place and self._loss_is_finite_everywhere)
        return possible and is_full_window and not hooked

    def before_backward(self) -> None:
        """Before a backward pass."""
        if self.partial_norms:
            self._wait_for_updates()
            self._reset()
            raise ValueError(
                "a second backward pass in one step: offload_optimizer has used the gradients of the first "
                "up. Add the losses and call engine.backward() once, or pass retain_graph=True to all but "
                "the last"
            )
        self._loss_is_finite_everywhere = (
            not (self._in_place and self.window.is_last) or self._all_reduce_loss_is_finite()
        )

    def _all_reduce_loss_is_finite(self) -> bool:
        """Whether every rank's loss is; collective."""
        loss = self.window.loss
        broken = torch.tensor(0.0 if loss is None or bool(loss.isfinite().all()) else 1.0)
        if self._group is not None:
            dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=self._group)
        return not bool(broken)

    def after_backward(self) -> None:
        """What the backward pass has left: units that were used more often than they were reduced."""
        if self._can_step():
            for unit, params in list(self._incomplete_units.items()):
                self._step_unit(unit, [param for param in params if param.grad is not None])
        self._incomplete_units.clear()

    @torch.no_grad()
    def _step_unit(self, unit: str, params: list[Tensor]) -> None:
        self._incomplete_units.pop(unit, None)
        if self._double_buffered is not None:
            can_step = self._double_buffered.can_step
            if self._grad_offload is not None:
                self._grad_offload.offload([param for param in params if not can_step(param)])
            params = [param for param in params if can_step(param)]
        if not params:
            return
        finite = True
        for param in params:
            self.partial_norms[param] = partial_norm = compute_partial_norm(local_grad(param))
            finite = finite and partial_norm.is_finite
        if not finite or self.skipped_units:  # the step is lost: nothing more of it is worth doing
            self.skipped_units.append(unit or "the root")
            for param in params:
                param.grad = None
            return
        if self._double_buffered is None:
            # What is in memory of it is outdated; what may be read meanwhile goes when the step ends.
            self._on_params_updated([unit])
        if self._thread is None:
            self._run_step(params, None)
        else:
            while len(self._pending_updates) >= MAX_PENDING_UPDATES:
                self._pending_updates.pop(0).result()
            previous_unit, self._last_unit = self._last_unit, unit or "the root"
            self._next_params[previous_unit] = frozenset(params)
            self._pending_updates.append(
                self._thread.submit(self._run_step, params, self._next_params.get(self._last_unit))
            )

    @torch.no_grad()
    def _run_step(self, params: list[Tensor], next_params: Collection[Tensor] | None) -> None:
        if self._double_buffered is not None:
            self._double_buffered.apply(set(params))
            if next_params:
                self._double_buffered.readahead(next_params)
        else:
            self.inner.apply(1.0, set(params))
        for param in params:
            param.grad = None
