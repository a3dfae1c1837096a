"""Few exchanges over a slow link: sites that train by themselves, and an outer optimizer that joins what they learn.

A *site* is a run of ranks (those of a host, say) that average gradients and shard states among themselves, with the
inner optimizer of the config.  Every ``sync_every`` steps the sites meet, which is all that crosses between them
(DiLoCo, Douillard et al. 2023, arXiv 2311.08105, algorithm 1)::

    inner    p = start;  H steps of the inner optimizer at each site, on its own data
    meet     d = mean over sites of (start - p);  m = momentum m + d;  start = start - lr (d + momentum m)    (Nesterov)

Invariants.  Where sites meet their parameters have the same bits, and so has ``m`` at all times; the state of the inner
optimizer is each site's own.  A meeting is due by the number of windows alone, so that a site whose step was skipped
comes to it, too.

Checkpoints.  A save makes sites meet that were apart.  Until the next step each tensor of inner state that is shaped as
its parameter, ``exp_avg`` say, is then shown as ``sites.exp_avg`` of (sites, *shape), a row for each site over the very
memory; beside it ``outer_momentum``.  A job of as many sites takes its rows, any other job the mean of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thalweg.comm.collectives.wire import all_gather_flat
from thalweg.config.schema.training import OuterOptimizerConfig
from thalweg.optim.accumulation import AccumulationWindow, StepListener, StepResult
from thalweg.optim.dtensor_local import (
    as_dtensor_like,
    as_rows_of_workers,
    get_worker_rows,
    to_local,
    upcast_half,
)
from thalweg.zero.collectives import build_replica_sum
from thalweg.zero.shard import ShardedModel

_MOMENTUM, _ROWS = "outer_momentum", "sites."
# Elements that are exchanged at once: 32 MiB of fp32, beside as much for what arrives.
_BUCKET_NUMEL = 8 << 20


class OuterOptimizer(StepListener):
    """Joins the sites of ``sharded``, whose parameters ``inner`` steps; ``window`` counts the steps."""

    def __init__(
        self,
        options: OuterOptimizerConfig,
        inner: torch.optim.Optimizer,
        sharded: ShardedModel,
        window: AccumulationWindow,
    ) -> None:
        assert sharded.sites is not None
        self._options, self._inner, self._sharded, self._window = options, inner, sharded, window
        self._sites, self._ledger = sharded.sites, sharded.ledger
        self._num_sites = sharded.sites.size(0)
        self._sum = build_replica_sum(sharded.sites, sharded.device, options.quantized_deltas)
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

    # What an EngineOptimizer asks of an optimizer

    def consolidate_state_dict(self) -> bool:
        """Meet and show the state of all sites; collective.  Whether parameters have changed."""
        is_apart = self._num_steps_apart > 0
        if is_apart:
            self._meet()
        for param in [] if self._own_state else self._params():
            state = self._inner.state[param]
            self._own_state[param] = dict(state)
            shaped = [key for key, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape]
            for key in shaped if self._num_sites > 1 else ():
                state[_ROWS + key] = as_rows_of_workers(to_local(state.pop(key)), param)
            if param in self._momentum:
                state[_MOMENTUM] = as_dtensor_like(self._momentum[param], param)
        return is_apart

    def adopt_state(self) -> None:
        """State or parameters were loaded: this is where the sites start, with the momentum that came along."""
        self._start, self._num_steps_apart = {}, 0
        self._own_state = {}
        for param in self._params():
            if (loaded := self._inner.state.get(param, {}).pop(_MOMENTUM, None)) is not None:
                self._momentum[param] = to_local(loaded).to(to_local(param).device)

    # Between meetings, and at one

    def _params(self) -> list[Tensor]:
        """What trains; a 0-dim parameter follows the gradients of all ranks at each step and needs no meeting."""
        return [p for group in self._inner.param_groups for p in group["params"] if p.requires_grad and p.dim() > 0]

    @torch.no_grad()
    def _before_update(self) -> None:
        for param, state in self._own_state.items():
            self._inner.state[param] = state
        self._own_state = {}
        self._remember_start()
        for param in self._params():
            if param.grad is None and self._num_sites > 1:  # another site's may have one, and state with it
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
        for params in self._iter_buckets():
            deltas = [self._start[p] - upcast_half(to_local(p)) for p in params]
            self._average(deltas)
            for param, delta in zip(params, deltas, strict=True):
                m = self._momentum.setdefault(param, torch.zeros_like(delta)).mul_(momentum).add_(delta)
                to_local(param).copy_(self._start[param].sub_(delta.add_(m, alpha=momentum), alpha=lr))
        self._start, self._num_steps_apart = {}, 0

    def _iter_buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        numel = 0
        for param in self._params():
            numel += to_local(param).numel()
            if bucket and numel > _BUCKET_NUMEL:
                yield bucket
                bucket, numel = [], to_local(param).numel()
            bucket.append(param)
        yield bucket

    def _average(self, deltas: Sequence[Tensor]) -> None:
        """Replace ``deltas`` by their means over sites.  Ranks that hold the same numbers send a part of them each."""
        if self._num_sites == 1:
            return
        flat = torch.cat([delta.reshape(-1) for delta in deltas]).to(self._sharded.device)
        numel, num_parts = flat.numel(), self._sites.size(1) if self._replicates else 1
        flat = torch.nn.functional.pad(flat, (0, -numel % num_parts))
        part = flat.view(num_parts, -1)[self._sites.get_local_rank(1) if num_parts > 1 else 0].clone()
        sizes = {"full_bytes": part.nbytes, "world_size": self._num_sites}
        transport = "quantized" if self._options.quantized_deltas else "wire"
        with self._ledger.timed("all_reduce", "outer step", transport, **sizes) as call:
            self._sum(part, call)
            part.div_(self._num_sites)
        if num_parts > 1:
            with self._ledger.timed(
                "all_gather", "outer step", "wire", full_bytes=flat.nbytes, world_size=num_parts
            ) as call:
                call.add_bytes((num_parts - 1) * part.nbytes)
                all_gather_flat(flat, part, self._sites.get_group(1))
        else:
            flat = part
        for delta, mean in zip(deltas, flat[:numel].split([d.numel() for d in deltas]), strict=True):
            delta.copy_(mean.view_as(delta))

    @property
    def _replicates(self) -> bool:
        """Whether the ranks of a site hold the same pieces."""
        return all(placement.is_replicate() for p in self._params() for placement in p.placements)  # type: ignore[attr-defined]


@torch.no_grad()
def adopt_site_rows(params: Sequence[Tensor], state: Any, sites: DeviceMesh | None) -> None:
    """Make of the rows of sites in a loaded ``state`` what this rank goes on with: its site's, or the mean of all where
    there were other ``sites``; collective."""
    num_sites, site = (1, 0) if sites is None else (sites.size(0), sites.get_local_rank(0))
    for param in params:
        entries = state.get(param, {})
        if sites is None:
            entries.pop(_MOMENTUM, None)
        for name in [name for name in entries if name.startswith(_ROWS)]:
            rows = get_worker_rows(entries.pop(name), param)
            own = rows[site].clone() if len(rows) == num_sites else rows.mean(0)
            entries[name.removeprefix(_ROWS)] = as_dtensor_like(own.to(to_local(param).device), param)
