"""Few exchanges over a slow link: sites that train by themselves, and an outer optimizer that joins what they learn.

A *site* trains with the inner optimizer of the config.  Every ``sync_every`` steps the sites meet, which is all that
crosses between them (DiLoCo, Douillard et al. 2023, arXiv 2311.08105, algorithm 1)::

    inner    p = start;  H steps of the inner optimizer at each site, on its own data
    meet     d = mean over sites of (start - p);  m = momentum m + d;  start = start - lr (d + momentum m)    (Nesterov)

Invariants.  Where sites meet their parameters have the same bits, and so has ``m`` at all times; the state of the inner
optimizer is each site's own.  A meeting is due by the number of windows alone, so that a site whose step was skipped
comes to it, too.

Checkpoints.  A save makes sites meet that were apart.  Until the next step each tensor of inner state that is shaped as
its parameter, ``exp_avg`` say, is then shown as ``sites.exp_avg`` of (sites, *shape), a row for each site over the very
memory; beside it ``outer_momentum``.  A job of as many sites takes its rows, any other job the mean of them.
"""

from typing import Any

import torch
from torch import Tensor

from thalweg.config.schema.training import OuterOptimizerConfig
from thalweg.optim.accumulation import AccumulationWindow, StepResult
from thalweg.optim.dtensor_local import as_dtensor_like, as_rows_of_workers, to_local, upcast_half
from thalweg.optim.site_sync import GRAD_ERROR, OUTER_MOMENTUM, ROWS, SiteSync
from thalweg.zero.shard import ShardedModel


class OuterOptimizer(SiteSync):
    """Joins the sites of ``sharded``, whose parameters ``inner`` steps; ``window`` counts the steps."""

    def __init__(
        self,
        options: OuterOptimizerConfig,
        inner: torch.optim.Optimizer,
        sharded: ShardedModel,
        window: AccumulationWindow,
    ) -> None:
        super().__init__(inner, sharded, in_few_bits=options.quantized_deltas)
        self._options, self._window = options, window
        self._start: dict[Tensor, Tensor] = {}  # pieces as the sites left them, from the first update after on
        self._momentum: dict[Tensor, Tensor] = {}
        self._own_state: dict[Tensor, dict[str, Any]] = {}  # what rows stand for after a save
        self._num_steps_apart = 0
        inner.register_step_pre_hook(lambda *_: self._before_update())

    # A listener of training steps

    def after_step(self, result: StepResult) -> None:
        """Meet, if it is time; collective."""
        self._num_steps_apart += 1
        if self._window.num_steps % self._options.sync_every == 0:
            self._meet()

    # What an EngineOptimizer asks of it

    def owns(self, key: str) -> bool:
        """All state is a site's own."""
        return key != GRAD_ERROR

    def consolidate_state_dict(self) -> bool:
        """Meet and show the state of all sites; collective.  Whether parameters have changed."""
        is_apart = self._num_steps_apart > 0
        if is_apart:
            self._meet()
        for param in [] if self._own_state else self._params():
            state = self._inner.state[param]
            self._own_state[param] = dict(state)
            shaped = [key for key, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape]
            for key in shaped if self.num_sites > 1 else ():
                state[ROWS + key] = as_rows_of_workers(to_local(state.pop(key)), param)
            if param in self._momentum:
                state[OUTER_MOMENTUM] = as_dtensor_like(self._momentum[param], param)
        return is_apart

    def adopt_state(self) -> None:
        """State or parameters were loaded: this is where the sites start, with the momentum that came along."""
        self._start, self._num_steps_apart = {}, 0
        self._own_state = {}
        for param in self._params():
            if (loaded := self._inner.state.get(param, {}).pop(OUTER_MOMENTUM, None)) is not None:
                self._momentum[param] = to_local(loaded).to(to_local(param).device)

    # Between meetings, and at one

    @torch.no_grad()
    def _before_update(self) -> None:
        for param, state in self._own_state.items():
            self._inner.state[param] = state
        self._own_state = {}
        self._remember_start()
        for param in self._params():
            if param.grad is None and self.num_sites > 1:  # another site's may have one, and state with it
                param.grad = torch.zeros_like(param)

    def _remember_start(self) -> None:
        for param in self._params():
            if param not in self._start:
                self._start[param] = to_local(param).detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def _meet(self) -> None:
        """All sites go on from one start."""
        self._remember_start()
        lr, momentum = self._options.lr, self._options.momentum
        transport = "quantized" if self._options.quantized_deltas else "wire"
        for params in self._iter_buckets(self._params()):
            deltas = [self._start[p] - upcast_half(to_local(p)) for p in params]
            if self.num_sites > 1:
                self._exchange.mean_(deltas, "outer step", transport)
            for param, delta in zip(params, deltas, strict=True):
                m = self._momentum.setdefault(param, torch.zeros_like(delta)).mul_(momentum).add_(delta)
                to_local(param).copy_(self._start[param].sub_(delta.add_(m, alpha=momentum), alpha=lr))
        self._start, self._num_steps_apart = {}, 0
