"""The optimizer that users hold: any torch optimizer, stepped the one right way.

An update is, in this order and the same on every rank: reduce what is still unreduced;
take the global norm; skip if it is not finite; scale by the clip factor; step; move the
loss scale.  ``engine.step()`` and a plain ``optimizer.step()`` both come here, so a
training loop that knows nothing of the engine gets the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.optim.accumulation import AccumulationWindow
from thalweg.optim.clip import clip_factor
from thalweg.optim.loss_scaler import LossScaler
from thalweg.optim.step_strategy import InMemoryStep, StepStrategy


@dataclass(frozen=True)
class ShardedModelHooks:
    """What an update asks of the sharded model.

    ``finalize_grads``: reduce and reshard whatever is left; ``set_loss_scale``: divide
    later gradients by it; ``drop_gradients``: forget unreduced ones.
    """

    finalize_grads: Callable[[], None]
    set_loss_scale: Callable[[float], None]
    drop_gradients: Callable[[], None]


class PipelinePeers(Protocol):
    """Ranks that update other parameters of the same model, and copies of some of ours."""

    def sum_grad(self) -> None:
        """Bring the gradients of copies together, once they are reduced."""
        ...

    def owned_for_norm(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those that this rank counts in the norm."""
        ...

    def norm(self, local_norm: float) -> float:
        """The norm over all of them, the same everywhere; ``local_norm`` is that of what this rank counts."""
        ...


class EngineOptimizer(torch.optim.Optimizer):
    """A façade over ``inner``; ``param_groups`` and ``state`` are its own.

    ``strategy`` says how ``inner`` steps where its tensors are not simply in memory (see ``step_strategy.py``).
    Attributes: ``overflow`` (whether the last update was skipped), ``skipped_steps`` and
    ``num_updates`` (calls that updated), ``grad_norm`` (of the last update, before clipping;
    nan if not finite).
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        hooks: ShardedModelHooks,
        window: AccumulationWindow,
        scaler: LossScaler,
        *,
        max_norm: float = 0.0,
        replicate_group: dist.ProcessGroup | None = None,
        strategy: StepStrategy | None = None,
    ) -> None:
        # Not Optimizer.__init__: this is a view of an optimizer, not a second one.
        self.inner, self.scaler, self.window = inner, scaler, window
        self.max_norm = max_norm
        self.overflow = False
        self.skipped_steps = 0
        self.num_updates = 0
        self.grad_norm: float | None = None
        self._hooks, self._replicate_group = hooks, replicate_group
        self._strategy = strategy or InMemoryStep(inner)
        # Set where parts of the model are updated elsewhere.
        self.pipeline_peers: PipelinePeers | None = None
        self._step_callbacks: list[Callable[[], None]] = []
        hooks.set_loss_scale(scaler.scale)

    # The face of torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state dict."""
        self.inner.load_state_dict(state_dict)
        self._strategy.offload_state()

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """Uninitialised state of ``param``'s layout, where this optimizer keeps ``key``."""
        return self._strategy.state_like(param, key, dtype)

    def release(self, tensor: Tensor) -> None:
        """Give back the memory of (a part of) a parameter or of state that rests on a disk, for now."""
        self._strategy.release(tensor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the sharded model's parameters."""
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, reduced or not."""
        self._hooks.drop_gradients()
        self.inner.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Schedule-free optimizers have this mode; others ignore it."""
        getattr(self.inner, "train", _noop)()

    def eval(self) -> None:
        """See :meth:`train`."""
        getattr(self.inner, "eval", _noop)()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an engine's optimizer cannot be pickled; use engine.save_checkpoint")

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.inner!r})"

    # The update

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied with (1 except in fp16)."""
        return self.scaler.scale

    def add_step_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end of each :meth:`step`, skipped or not."""
        self._step_callbacks.append(callback)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Close the window and update, or skip if a gradient anywhere is not finite; collective."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._hooks.finalize_grads()
        factor = self.window.final_factor()
        norm = self._norm() * factor
        self.overflow = not math.isfinite(norm)
        self.grad_norm = math.nan if self.overflow else norm
        if self.overflow:
            self.skipped_steps += 1
        else:
            if self.max_norm > 0:
                factor *= clip_factor(norm, self.max_norm)
            self._strategy.apply(factor)
            self.num_updates += 1
        self.scaler.update(self.overflow)
        self._hooks.set_loss_scale(self.scaler.scale)
        self.window.close()
        for callback in self._step_callbacks:
            callback()
        return result

    def _norm(self) -> float:
        params = [p for group in self.param_groups for p in group["params"]]
        if self.pipeline_peers is None:
            return self._strategy.grad_norm(params, self._replicate_group)
        self.pipeline_peers.sum_grad()
        return self.pipeline_peers.norm(
            self._strategy.grad_norm(self.pipeline_peers.owned_for_norm(params), self._replicate_group)
        )


def _noop() -> None:
    return None
