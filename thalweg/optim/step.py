"""The optimizer that users hold: any torch optimizer, stepped the one right way.

An update is, in this order and the same on every rank: reduce what is still unreduced;
take the global norm; skip if it is not finite; scale by the clip factor; step; move the
loss scale; close the window.  ``engine.step()`` and a plain ``optimizer.step()`` both come
here, so a training loop that knows nothing of the engine gets the same result.

:class:`EngineOptimizer` decides *whether* to update and *by what factor*; a strategy does it.
:class:`InMemoryStep`, the base of all, steps the optimiser over tensors in memory.  ``NvmeStep``
(offload/nvme_step.py) moves state,
masters and gradients through buffers from and to a swap file; ``MmapStep`` (offload/mmap_step.py) is its slow,
general sibling.  All three give the same bits in fp32.

*On an accelerator the host does not wait for the verdict.*  Where the optimiser's kernel takes it (torch's fused Adam:
``found_inf``, as of a GradScaler), norm, clip factor and verdict stay on the device, and the host
goes on to the next forward pass.  What hangs on the verdict here (counters, loss scale, schedule) is settled when
somebody asks, or when the next update or scaled backward pass begins; the norm has then long been copied.
"""

import copy
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.config.schema.training import Health
from thalweg.optim import foreach
from thalweg.optim.accumulation import AccumulationWindow, StepResult
from thalweg.optim.algorithms.muon_params import group_members
from thalweg.optim.dtensor_local import tells_schedulers, to_local
from thalweg.optim.loss_scaler import LossScaler
from thalweg.optim.norms import PartialNorms, RowNorms, clip_factor, compute_row_norms, global_grad_norm
from thalweg.optim.site_sync import SiteSync, adopt_site_rows
from thalweg.parallel.pipeline.tied_weights import TiedWeights
from thalweg.utils.log import get_logger
from thalweg.zero.shard import ShardedModel
from thalweg.zero.whole_parameter import StateByParam, get_shard, named_shards

_log = get_logger(__name__)
_WINDOW, _MIN_NORMS, _FACTOR = 100, 20, 10.0


class InMemoryStep:
    """One optimiser's way to step, and this one's: everything is in memory, so scale, then step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def grad_norm(
        self, params: Sequence[Tensor], replicate_group: dist.ProcessGroup | None, partial_norms: PartialNorms = None
    ) -> Tensor:
        """The global 2-norm of the gradients of ``params``, some known as ``partial_norms``; 0-dim fp64; collective."""
        norms = {"replicate_group": replicate_group, "partial_norms": partial_norms}
        with_grad = [p for p in params if p.grad is not None and p not in (partial_norms or {})]
        return global_grad_norm(params, row_norms_fn=self.row_norms_fn(with_grad), **norms)

    def row_norms_fn(self, params: Sequence[Tensor]) -> Callable[[Tensor], RowNorms]:
        """What gives the row norms of the gradients of ``params``."""
        return compute_row_norms

    @torch.no_grad()
    def apply(self, factor: float = 1.0, subset: Collection[Tensor] | None = None) -> None:
        """Multiply the gradients (only of ``subset``) by ``factor``, in place, and step."""
        with restrict_params(self.optimizer, subset):
            if factor != 1.0:
                self._scale_grads(factor)
            self.optimizer.step()

    @torch.no_grad()
    def apply_on_device(self, norm: Tensor, factor: float | Tensor) -> None:
        """Multiply the gradients by ``factor`` and step, if ``norm`` (0-dim) is finite: without a look at either."""
        optimizer: Any = self.optimizer
        if isinstance(factor, Tensor):
            self._scale_grads(factor.float())
        elif factor != 1.0:
            self._scale_grads(factor)
        optimizer.found_inf = norm.isfinite().logical_not().float()
        try:
            optimizer.step()
        finally:
            optimizer.found_inf = None

    def _scale_grads(self, factor: float | Tensor) -> None:
        # Not by the kernel's grad_scale, which divides: every tier is to give the same bits.
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        if pieces := [to_local(p.grad) for p in params if p.grad is not None]:
            foreach.mul_(pieces, factor)

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """Uninitialised state of ``param``'s layout, where this strategy wants it (used to load into)."""
        return torch.empty_like(param.detach(), dtype=dtype)

    def offload_state(self) -> None:
        """The optimiser's state was exchanged (loaded): bring it to where it belongs."""

    def release(self, tensor: Tensor) -> None:
        """Nobody reads or writes ``tensor`` for a while: memory that only mirrors a disk may go."""


@contextmanager
def restrict_params(optimizer: torch.optim.Optimizer, subset: Collection[Tensor] | None) -> Iterator[None]:
    """Let the optimizer see only ``subset`` (None: all) for a while."""
    if subset is None:
        yield
        return
    groups = optimizer.param_groups
    restricted = [{**group, "params": [p for p in group["params"] if p in subset]} for group in groups]
    optimizer.param_groups = [group for group in restricted if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups


class TrainingDivergedError(RuntimeError):
    """A step's gradients are not finite or a spike, and the config says to stop; the same on all ranks."""


class StepGuard:
    """What a run does about a step whose gradients are not finite, or far larger than those before it (``health``).

    The verdict hangs on the global norm of the gradients, which is the same on every rank, and so is what follows:

        the norm is                        and the config says      then
        not finite                         non_finite: skip         nothing is updated; the step counts as skipped
                                           rewind                   the same, and the run goes back to a checkpoint
                                           stop                     the same, and TrainingDivergedError
        over 10 times the median of        spike: ignore, warn      the update is made
        the last 100 steps (from the 20th) skip, rewind, stop       as above

    A run that goes back takes the data that come next, not those again (Chowdhery et al., PaLM, 2022, section 5.1:
    spikes did not come back when the batches around them were passed over).  Without a new checkpoint it goes back
    three times to the last one and three times to the one before, and then stops.

    A gradient that overflows under a dynamic loss scale is none of this: the scale falls, until it is at its least.

    ``scales_loss``: overflows move a loss scale.  ``explains``: whether somebody will want to know which gradients were
    not finite.
    """

    def __init__(self, health: Health, *, scales_loss: bool = False) -> None:
        self._non_finite = "skip" if scales_loss else health.non_finite
        self.explains = self._non_finite != "skip"
        self._spike, self.rejects_spikes = health.spike, health.rejects_spikes
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        # Set by ``settle``: why the run is to end, and why it is to go back to a checkpoint.
        self.stop_reason = self.rewind_reason = ""

    def rejects(self, result: StepResult) -> bool:
        """Whether the update of this step is not to be made although its gradient is finite."""
        return self.rejects_spikes and not result.overflowed and self._ratio(result.grad_norm) > _FACTOR

    def settle(self, result: StepResult) -> None:
        """Take what became of a step."""
        if result.overflowed:
            policy, what = self._non_finite, "health.non_finite: the gradients are not finite"
        elif self._spike != "ignore":
            ratio = self._ratio(result.grad_norm)
            policy = self._spike if ratio > _FACTOR else "ignore"
            what = f"health.spike: the gradient's norm, {result.grad_norm:.3g}, is {ratio:.0f} times the median before"
            self._norms.append(result.grad_norm)
        else:
            return
        message = f"step {result.step}: {what}"
        if policy == "stop":
            self.stop_reason = (
                f"{message}. Nothing was updated: the parameters are those from before the step and can be saved. "
                "Look at the batch and the loss of each rank, lower the learning rate or set gradient_clipping"
            )
        elif policy == "rewind":
            self.rewind_reason = message
        elif policy == "warn" or (policy == "skip" and not result.overflowed):
            _log.warning("%s%s", message, "; it was skipped" if policy == "skip" else "")

    def raise_if_stopped(self) -> None:
        """Raise what the last step ended with.

        Raises:
            TrainingDivergedError: see above.
        """
        reason, self.stop_reason = self.stop_reason, ""
        if reason:
            raise TrainingDivergedError(reason)

    def _ratio(self, norm: float) -> float:
        """``norm`` over the median of those before; 0 where those are too few."""
        if len(self._norms) < _MIN_NORMS:
            return 0.0
        median = statistics.median(self._norms)
        return norm / median if median > 0 else 0.0

    def state_dict(self) -> list[float]:
        """The norms that the next one is held against."""
        return list(self._norms)

    def load_state_dict(self, norms: Iterable[float]) -> None:
        """Go on from :meth:`state_dict`."""
        self._norms = deque(norms, _WINDOW)
        self.stop_reason = self.rewind_reason = ""


class EngineOptimizer(torch.optim.Optimizer):
    """A façade over ``inner``; ``param_groups`` and ``state`` are its own.

    ``strategy`` says how ``inner`` steps where its tensors are not simply in memory; ``pipeline_peers``: the
    ranks that update other layers; ``site_sync``: what crosses between sites that reduce by themselves; ``guard``:
    what happens to a step whose gradients are not finite or a spike.
    Attributes: ``overflow`` (whether the last update was skipped), ``skipped_steps`` and
    ``num_updates`` (calls that updated), ``grad_norm`` (of the last update, before clipping;
    nan if not finite).  To read them waits for an update that an accelerator has not finished.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        sharded: ShardedModel,
        window: AccumulationWindow,
        scaler: LossScaler,
        *,
        max_norm: float = 0.0,
        replicate_group: dist.ProcessGroup | None = None,
        strategy: InMemoryStep | None = None,
        pipeline_peers: TiedWeights | None = None,
        site_sync: SiteSync | None = None,
        guard: StepGuard | None = None,
    ) -> None:
        # Not Optimizer.__init__: this is a view of an optimizer, not a second one.
        self.inner, self.scaler, self.window = inner, scaler, window
        self.max_norm, self._site_sync = max_norm, site_sync
        self.guard = guard or StepGuard(Health())
        self._result: StepResult | None = None
        self._num_skipped = self._num_updates = 0
        # What became of the last step is not known here yet; and what to take back if it was skipped.
        self._unsettled: StepResult | None = None
        self._if_skipped: Callable[[], None] | None = None
        self._sharded, self._replicate_group, self._pipeline_peers = sharded, replicate_group, pipeline_peers
        self._strategy = strategy or InMemoryStep(inner)
        # Of a parameter's layout, where this optimizer keeps state; and what rests on a disk gives its memory back.
        self.state_like, self.release = self._strategy.state_like, self._strategy.release
        sharded.set_loss_scale(scaler.scale)

    # The face of torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return StateByParam(self.inner.state)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state dict."""
        self.settle()
        self.inner.load_state_dict(state_dict)
        self.adopt_state()
        self._strategy.offload_state()

    def consolidate_state_dict(self) -> None:
        """Make parameters and ``state`` the same on all that hold them, and all that another job needs; collective."""
        self.settle()
        changed = getattr(self.inner, "consolidate_state_dict", lambda: False)()
        if self._site_sync is not None:
            changed |= self._site_sync.consolidate_state_dict()
        if changed:
            self._sharded.publish_params()

    def adopt_state(self) -> None:
        """``state`` or parameters were loaded; collective."""
        params = [p for group in self.param_groups for p in group["params"]]
        adopt_site_rows(params, self.inner.state, self._site_sync)
        getattr(self.inner, "adopt_state", lambda: None)()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters."""
        self.settle()
        members = [
            (member[0], get_shard(member[1])) if isinstance(member, tuple) else get_shard(member)
            for member in group_members(param_group)
        ]
        self.inner.add_param_group({**param_group, "params": members})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, reduced or not."""
        self.window.discard()
        self.inner.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Schedule-free optimizers have this mode; others ignore it."""
        self._switch_mode("train")

    def eval(self) -> None:
        """See :meth:`train`."""
        self._switch_mode("eval")

    def _switch_mode(self, mode: str) -> None:
        if hasattr(self.inner, mode):
            self._sharded.sync_params()
            getattr(self.inner, mode)()
            self._sharded.publish_params()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an engine's optimizer cannot be pickled; use engine.save_checkpoint")

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.inner!r})"

    # The update

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer within."""
        return self.inner

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied with (1 except in fp16)."""
        if self.scaler.dynamic:
            self.settle()
        return self.scaler.scale

    cur_scale = loss_scale

    @property
    def grad_norm(self) -> float | None:
        """Of the last update, before clipping; nan if not finite, None before the first."""
        return None if self._result is None else self._result.grad_norm

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped, as a gradient was not finite."""
        self.settle()
        return self._result is not None and self._result.skipped

    @property
    def num_updates(self) -> int:
        """Steps that updated."""
        self.settle()
        return self._num_updates

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped."""
        self.settle()
        return self._num_skipped

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self.settle()
        self._num_skipped = value

    def needs_scaler(self) -> bool:
        """Whether the loss is scaled by a factor that overflows move."""
        return self.scaler.dynamic

    @tells_schedulers
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Close the window and update, or skip if a gradient anywhere is not finite; collective.

        Raises:
            TrainingDivergedError: the gradients of this step (on an accelerator perhaps of the one before) are not
                finite or a spike, and the config's ``health`` says to stop.
        """
        loss = None
        # A schedule may hang on either; a step that skips, or updates from a disk, never calls the inner one's.
        self._opt_called = vars(self.inner)["_opt_called"] = True
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        self.guard.raise_if_stopped()
        self._sharded.finalize_grads()
        factor = self.window.final_factor()
        if self._site_sync is not None:
            factor = self._site_sync.reduce_grads(factor)
        norm = self._global_norm() * factor
        self._result = self._unsettled = result = StepResult(norm, self.window.num_steps + 1)
        if self._updates_unseen(norm.device):
            clipped = clip_factor(norm, self.max_norm) if self.max_norm > 0 else 1.0
            self._strategy.apply_on_device(norm, factor * clipped)
        else:
            result.rejected = self.guard.rejects(result)
            if result.overflowed and self.guard.explains:
                self._log_non_finite()
            if not result.skipped:
                clipped = clip_factor(result.grad_norm, self.max_norm) if self.max_norm > 0 else 1.0
                self._strategy.apply(float(factor) * clipped)
            self.settle()
        self.window.end_step(result)
        self.guard.raise_if_stopped()
        return loss

    def _log_non_finite(self) -> None:
        """Name this rank's parameters whose gradients are not finite."""
        grads = {name: p.grad for name, p in named_shards(self._sharded.module) if p.grad is not None}
        names = [name for name, grad in grads.items() if not to_local(grad).isfinite().all()]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            _log.error("not finite on this rank: the gradients of %s%s", ", ".join(names[:4]), more)

    def _updates_unseen(self, device: torch.device) -> bool:
        """Whether the update goes by a verdict that the host has not read: all of it is on one accelerator."""
        if device.type == "cpu" or self.guard.rejects_spikes or not getattr(self.inner, "takes_found_inf", False):
            return False
        return all(p.device == device for group in self.inner.param_groups for p in group["params"])

    def settle(self) -> None:
        """Learn what became of the last step, and act on it; waits for the device if need be."""
        result, self._unsettled = self._unsettled, None
        if result is None:
            return
        take_back, self._if_skipped = self._if_skipped, None
        if result.skipped:
            self._num_skipped += 1
            if take_back is not None:
                take_back()
        else:
            self._num_updates += 1
        self.guard.settle(result)
        if self.scaler.dynamic:
            self.scaler.update(result.overflowed)
            self._sharded.set_loss_scale(self.scaler.scale)

    def advances(self, scheduler: Any) -> bool:
        """Whether a schedule goes on after the last step: unless that was skipped.  Where this is not known yet it
        does, and is put back if the step turns out to have been."""
        if self._unsettled is None or not hasattr(scheduler, "load_state_dict"):
            return not self.overflow
        state = copy.deepcopy(scheduler.state_dict())
        values = [
            {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items() if key != "params"}
            for group in self.param_groups
        ]

        def take_back() -> None:
            scheduler.load_state_dict(state)
            for group, old in zip(self.param_groups, values, strict=True):
                group.update(old)

        self._if_skipped = take_back
        return True

    def _global_norm(self) -> Tensor:
        params = [p for group in self.inner.param_groups for p in group["params"]]
        peers = self._pipeline_peers
        if getattr(self.inner, "is_compressing", False):  # gradients are means over this worker's ranks alone
            return self.inner.combine_norms(self._strategy.grad_norm(params, None))  # type: ignore[attr-defined]
        if peers is None:
            return self._strategy.grad_norm(params, self._replicate_group)
        peers.sum_grad()
        return peers.norm(self._strategy.grad_norm(peers.owned_for_norm(params), self._replicate_group))
