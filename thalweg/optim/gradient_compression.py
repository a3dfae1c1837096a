"""Gradients that are exact within a host and compressed between hosts, for any optimizer.

A *site* is the ranks of a host.  They reduce gradients as ever, in full, and shard states among themselves at stages 1
and 2; so parameters and states are whole at each site.  Once a window sites exchange what they have::

    1  agree     which parameters have a gradient anywhere, and whether all numbers are finite everywhere
    2  exchange  the first ``start_step`` steps in full, then by PowerSGD or top-k (comm/collectives/error_feedback.py)

and go on with the same gradient: its norm, clipping, loss scale and update are those of any job.  If a number is not
finite nothing is exchanged, all ranks skip, and no error takes part of a step that nobody makes.

Errors (``grad_error``, a row for each site) and PowerSGD's factors (``powersgd_q``, a row for each shard) are shown in
the optimizer's state from a save to the next step.  A job of other sites goes on with the mean of the errors, which
is what was left out in all; one of a single site adds them to its first gradient.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from thalweg.comm.collectives.error_feedback import PowerSGDAllReduce, TopKAllReduce
from thalweg.config.schema.training import GradientCompressionConfig
from thalweg.optim import dtensor_local, foreach
from thalweg.optim.accumulation import AccumulationWindow
from thalweg.optim.dtensor_local import to_local
from thalweg.optim.site_sync import GRAD_ERROR, POWERSGD_Q, ROWS, SiteSync
from thalweg.parallel_dims import control_group
from thalweg.zero.shard import ShardedModel


class GradientCompression(SiteSync):
    """Between the sites of ``sharded``; ``window`` counts the steps, ``group`` has all ranks (None: one rank)."""

    def __init__(
        self,
        options: GradientCompressionConfig,
        inner: torch.optim.Optimizer,
        sharded: ShardedModel,
        window: AccumulationWindow,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(inner, sharded)
        self._start_step, self._window = options.start_step, window
        self._group = None if group is None else control_group(group)
        self._num_shards, self._shard = 1, 0
        if sharded.sites is not None and sharded.options.policy.shards_optimizer_states:
            self._num_shards, self._shard = sharded.sites.size(1), sharded.sites.get_local_rank(1)
        if options.type == "powersgd":
            self._all_reduce = PowerSGDAllReduce(self._exchange, options.matrix_approximation_rank)
        else:
            self._all_reduce = TopKAllReduce(self._exchange, options.compress_ratio)
        self._state: dict[Tensor, dict[str, Tensor]] = {}  # of each parameter: error, and q

    @torch.no_grad()
    def reduce_grads(self, factor: float | Tensor) -> float | Tensor:
        """See the base: gradients, times ``factor``, become their means over sites."""
        if self.num_sites == 1 and not self._state:
            return factor
        for param in self._params():
            for key in (ROWS + GRAD_ERROR, GRAD_ERROR, POWERSGD_Q):  # shown by a save
                self._inner.state.get(param, {}).pop(key, None)
        params, are_finite = self._agree()
        grads = [dtensor_local.local_grad(param) for param in params]
        if not are_finite:
            for grad in grads:
                grad.fill_(math.nan)
            return 1.0
        work = [dtensor_local.upcast_half(grad) for grad in grads]
        if work and (scale := float(factor)) != 1.0:
            foreach.mul_(work, scale)
        by_param = dict(zip(params, work, strict=True))
        starts = self._window.num_steps >= self._start_step
        chosen = [param for param in params if starts and self._compresses(param)]
        for param in set(self._state) & set(params) - set(chosen):  # of a job that compressed it
            if (error := self._state.pop(param).get("error")) is not None:
                by_param[param].add_(error)
        rest = [param for param in params if param not in set(chosen)]
        if chosen:
            states = [self._state.setdefault(param, {}) for param in chosen]
            self._all_reduce([by_param[p] for p in chosen], states, [by_param[p] for p in rest])
        elif self.num_sites > 1:
            for bucket in self._iter_buckets(params):
                self._exchange.mean_([by_param[param] for param in bucket], "gradients")
        dtensor_local.write_back([(grad, w) for grad, w in zip(grads, work, strict=True) if grad is not w])
        return 1.0

    def _agree(self) -> tuple[list[Tensor], bool]:
        """The parameters that have a gradient on any rank, here zero if need be, and whether all numbers are finite."""
        params = self._params()
        every = [p for group in self._inner.param_groups for p in group["params"] if p.grad is not None]
        pieces = [grad for grad in map(dtensor_local.local_grad, every) if grad.numel()]
        is_finite = True
        for device in {grad.device for grad in pieces}:  # of offloaded states gradients of 0 dims stay on the device
            maxima = foreach.norm([grad for grad in pieces if grad.device == device], math.inf)
            is_finite &= bool(torch.stack([maximum.isfinite() for maximum in maxima]).all())
        flags = torch.tensor([*(p.grad is not None for p in params), not is_finite], dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        *present, is_bad = flags.tolist()
        chosen = [param for param, flag in zip(params, present, strict=True) if flag]
        for param in chosen:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return chosen, not is_bad

    def _compresses(self, param: Tensor) -> bool:
        """By the largest shard, so that all ranks think alike."""
        num_rows = -(-param.shape[0] // self._num_shards)
        return self.num_sites > 1 and self._all_reduce.compresses(num_rows, math.prod(param.shape[1:]))

    # What an EngineOptimizer asks of it

    def owns(self, key: str) -> bool:
        """Errors are a site's own; the optimizer's state is the same at all."""
        return key == GRAD_ERROR

    def consolidate_state_dict(self) -> bool:
        """See the base; sites are never apart."""
        for param, kept in self._state.items():
            state = self._inner.state[param]
            if (error := kept.get("error")) is not None:
                error = error.view_as(to_local(param))
                if self.num_sites > 1:
                    state[ROWS + GRAD_ERROR] = dtensor_local.as_rows_of_workers(error, param)
                else:
                    state[GRAD_ERROR] = dtensor_local.as_dtensor_like(error, param)
            if "q" in kept and isinstance(param, DTensor):
                over_shards = [Replicate(), Replicate() if self._num_shards == 1 else Shard(0)]
                q = kept["q"].unsqueeze(0)
                state[POWERSGD_Q] = DTensor.from_local(q, param.device_mesh, over_shards, run_check=False)
        return False

    def adopt_state(self) -> None:
        """State was loaded: errors and factors are its."""
        self._state = {}
        for param in self._params():
            entries, device = self._inner.state.get(param, {}), to_local(param).device
            error, q = entries.pop(GRAD_ERROR, None), entries.pop(POWERSGD_Q, None)
            if error is not None:
                self._state[param] = {"error": to_local(error).to(device)}
            if error is not None and q is not None and isinstance(param, DTensor):
                rows = to_local(dtensor_local.match_layout(q, param, [Replicate()] * param.device_mesh.ndim))
                self._state[param]["q"] = rows[self._shard % len(rows)].to(device)
