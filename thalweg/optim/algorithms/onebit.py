"""Optimisers that send one bit of momentum where others send a gradient: 1-bit Adam, 1-bit LAMB, 0/1 Adam.

A *worker* holds all parameters: the ranks of a host together (each all of them at stage 0, a shard at stages 1 and 2;
what they exchange costs no link).  Workers agree on momentum, not on gradients::

    1-bit Adam (arXiv 2102.02888)     T steps of Adam, gradients reduced as ever;  then, with the variance v fixed,
                                      m = mean over workers, in bits, of (b1 m + (1 - b1) g_i);  p -= lr m / sqrt(v)
    1-bit LAMB (arXiv 2104.06069)     T steps of LAMB;  then the same m, and a trust ratio that is the average of those
                                      seen before, times a factor by which v would have changed since
    0/1 Adam   (arXiv 2202.06009)     u_i += lr m_i, p_i -= lr m_i / sqrt(v) on each worker by itself; now and then
                                      u = mean in bits of u_i, m = u / sum of lr, p = p of the last time - u / sqrt(v);
                                      v follows the exact mean gradient at steps that come ever more seldom

Bits cannot restore what they leave out of a parameter or of v, so these are whole on every worker: on a single worker
a stage saves what it always does, over several it shards within each host.

Phases.  ``is_compressing`` tells how the *next* gradients are wanted, and ``ReplicaSync`` passes it on to the
reducers: from there on a gradient is one worker's.  Its norm is then the root mean square of the workers' norms, by
which all of them clip, or skip, alike.

Errors (``worker_error``, one row for each worker) are part of the state.  A checkpoint also gets ``server_error``,
gathered; at another number of workers each begins with the mean of what all of them owed, so that nothing is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.comm import CommsLog
from thalweg.comm.collectives.onebit import OneBitAllReduce
from thalweg.comm.collectives.reducer import ReplicaSync
from thalweg.comm.topology import HostTopology
from thalweg.device import widest_float
from thalweg.optim import dtensor_local, foreach
from thalweg.optim.algorithms.elementwise import Adam
from thalweg.optim.algorithms.fused_adam import AbstractAdam, fused_adam_step
from thalweg.optim.algorithms.lamb import Lamb, init_adam_state
from thalweg.optim.dtensor_local import get_worker_axis, to_local, trainable_params, working_copies, working_pieces
from thalweg.optim.norms import square_sums
from thalweg.parallel_dims import control_group

# 1-bit Adam's own criterion (section 7.1 of the paper): the variance's 1-norm, now and 1 / (1 - b2) steps ago.
_STABLE_RATIO = 0.96
_LOOKS_PER_PERIOD = 10
# A variance by which nothing moves.
_STANDS_STILL = 1e30


@dataclass(frozen=True)
class MomentumLink:
    """What a compressed optimiser shares with the reducers of its gradients: whether these reduce, and the ledger."""

    sync: ReplicaSync = field(default_factory=ReplicaSync)
    ledger: CommsLog = field(default_factory=CommsLog)


class MomentumExchange:
    """The workers of some parameters of one device, and their collective; made anew where the parameters are others."""

    def __init__(self, ledger: CommsLog) -> None:
        self._ledger = ledger
        self._params: list[Tensor] = []
        self._reducer: OneBitAllReduce | None = None

    def open(self, params: list[Tensor], state: Any) -> OneBitAllReduce:
        """The collective of ``params``, which several workers hold, with the errors that ``state`` has; collective."""
        same = len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True))
        if same and self._reducer is not None and self._is_live(state):
            return self._reducer
        if self._reducer is not None and not same:
            self.save_errors(state)
        group, size = worker_group(params[0])
        if any(worker_group(param)[0] is not group for param in params):
            raise ValueError(
                "1-bit optimisers exchange momentum among the ranks that hold the same parameters, and here not all "
                "parameters (experts?) are held by the same ranks: use Adam or Lamb"
            )
        pieces = [to_local(param) for param in params]
        topology = HostTopology.discover(group, pieces[0].device)
        from thalweg.ops.onebit import get_onebit_code  # LLVM is loaded for those who compress

        numels, device, first = [p.numel() for p in pieces], pieces[0].device, params[0]
        assert isinstance(first, DTensor)
        alike = first.device_mesh.ndim == 2 and first.placements[1].is_replicate()  # a host's: each sends a part
        within = control_group(first.device_mesh.get_group(1), device) if alike else None
        self._reducer = OneBitAllReduce(numels, group, topology, self._ledger, device, get_onebit_code(device), within)
        self._params = params
        owed = [_owed_errors(param, state[param], size) for param in params]
        self._reducer.load_errors([worker for worker, _ in owed], [server for _, server in owed])
        for param, error in zip(params, self._reducer.worker_errors, strict=True):
            state[param].pop("server_error", None)
            state[param]["worker_error"] = dtensor_local.as_rows_of_workers(error.view_as(to_local(param)), param)
        return self._reducer

    def save_errors(self, state: Any) -> None:
        """Put the server's errors into ``state``, whole; the workers' are there; collective."""
        if self._reducer is None:
            return
        for param, error in zip(self._params, self._reducer.gather_server_errors(), strict=True):
            state[param]["server_error"] = dtensor_local.as_dtensor_like(error.view_as(to_local(param)).clone(), param)

    def drop_saved(self, state: Any) -> None:
        """What :meth:`save_errors` has put there is out of date."""
        for param in self._params:
            state[param].pop("server_error", None)

    def _is_live(self, state: Any) -> bool:
        assert self._reducer is not None
        errors = (state[param].get("worker_error") for param in self._params)
        pairs = zip(errors, self._reducer.worker_errors, strict=True)
        return all(e is not None and to_local(e).data_ptr() == view.data_ptr() for e, view in pairs)


def worker_group(param: Tensor) -> tuple[dist.ProcessGroup, int]:
    """The ranks that hold the same piece of ``param``, as a group that takes tensors of its device; their number."""
    axis = get_worker_axis(param)
    assert axis is not None and isinstance(param, DTensor)
    group = param.device_mesh.get_group(axis)
    return control_group(group, to_local(param).device), param.device_mesh.size(axis)


def _owed_errors(param: Tensor, state: dict[str, Any], num_workers: int) -> tuple[Tensor, Tensor]:
    """This worker's errors and the server's as ``state`` has them, each like the local piece of ``param``."""
    zeros = torch.zeros_like(to_local(param), dtype=torch.float32)
    if "worker_error" not in state:
        return zeros, zeros
    assert isinstance(param, DTensor)
    rows = dtensor_local.get_worker_rows(state["worker_error"], param)
    server = state.get("server_error")
    server_piece = zeros if server is None else to_local(dtensor_local.match_layout(server, param, param.placements))
    if len(rows) == num_workers:
        return rows[dist.get_rank(param.device_mesh.get_group(get_worker_axis(param)))], server_piece
    return rows.mean(0) + server_piece, zeros


_PHASE_KEYS = (
    "frozen_at", "variance_norms", "num_variance_updates", "next_variance_step", "next_meeting", "rate_sum",
)  # fmt: skip


class CompressedMixin:
    """Mixin before an ``Optimizer``: the phases, the norm, and what checkpoints need."""

    takes_found_inf = False  # what travels depends on whether there is an update
    param_groups: list[dict[str, Any]]
    state: Any

    def _init_link(self, link: MomentumLink | None) -> None:
        self._link = link or MomentumLink()
        self._exchanges: dict[torch.device, MomentumExchange] = {}
        self._link.sync.enabled = not self.is_compressing

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that joins later is where the first one stands.

        Raises:
            ValueError: the variance stays as it is by now, and of these parameters there is none.
        """
        first = self.param_groups[0] if self.param_groups else {}
        if first.get("frozen_at") is not None:
            raise ValueError("no parameters can join after freeze_step: give all of them first, or a later freeze_step")
        super().add_param_group({key: first[key] for key in _PHASE_KEYS if key in first} | param_group)  # type: ignore[misc]

    @property
    def is_compressing(self) -> bool:
        """Whether the next step exchanges momentum, so that its gradients are to be this worker's own."""
        raise NotImplementedError

    def combine_norms(self, norm: Tensor) -> Tensor:
        """The root mean square of the workers' gradient norms (0-dim fp64); collective."""
        param = next((p for p in trainable_params(self) if get_worker_axis(p) is not None), None)
        if param is None:
            return norm
        group, size = worker_group(param)
        total = norm.square()
        dist.all_reduce(total, group=group)
        return (total / size).sqrt()

    def consolidate_state_dict(self) -> bool:
        """Make ``state`` all that another job needs to go on; collective.  Whether parameters have changed."""
        for exchange in self._exchanges.values():
            exchange.save_errors(self.state)
        return False

    def adopt_state(self) -> None:
        """``state`` was loaded: the phase is that of its steps, and errors become this worker's; collective."""
        self._link.sync.enabled = not self.is_compressing
        if any("worker_error" in self.state.get(p, ()) for p in trainable_params(self)):
            self._open_exchanges(trainable_params(self))

    def _end_step(self) -> None:
        for exchange in self._exchanges.values():
            exchange.drop_saved(self.state)
        self._link.sync.enabled = not self.is_compressing

    def _num_steps(self) -> int:
        """Updates so far."""
        steps = (self.state[p]["step"] for p in trainable_params(self) if "step" in self.state.get(p, ()))
        return int(next(steps, 0))

    def _open_exchanges(self, params: Sequence[Tensor]) -> list[tuple[OneBitAllReduce, list[Tensor]]]:
        """The collectives of the ``params`` that several workers hold, each with its own; collective.

        One for each device: of offloaded states a parameter of 0 dims stays where the model is.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            if get_worker_axis(param) is not None:
                by_device.setdefault(to_local(param).device, []).append(param)
        opened = []
        for device, members in by_device.items():
            exchange = self._exchanges.setdefault(device, MomentumExchange(self._link.ledger))
            opened.append((exchange.open(members, self.state), members))
        return opened

    def _average(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Exchange ``tensors``, the pieces of a value for each of ``params``, with the other workers."""
        by_param = dict(zip(params, tensors, strict=True))
        for reducer, members in self._open_exchanges(params):
            reducer([by_param[param] for param in members])
        for param, tensor in zip(params, tensors, strict=True):
            if get_worker_axis(param) is None and "worker_error" in self.state[param]:  # of a job with more workers
                tensor.add_(_owed_errors(param, self.state[param], 1)[0])
                for key in ("worker_error", "server_error"):
                    self.state[param].pop(key, None)

    def _mean_variances(self, params: Sequence[Tensor]) -> list[float]:
        """The mean of ``exp_avg_sq`` of each logical parameter."""
        pieces = [to_local(self.state[p]["exp_avg_sq"]) for p in params]
        sums = [piece.sum(dtype=widest_float(piece.device)).reshape(1) for piece in pieces]
        if sums:
            dtensor_local.all_reduce_tensors_(sums, dtensor_local.get_shard_groups(params))
        totals = torch.cat([s.to(sums[0].device) for s in sums]).tolist() if sums else []  # see ``square_sums``
        return [total / max(1, p.numel()) for total, p in zip(totals, params, strict=True)]

    def _fill_missing_grads(self) -> list[Tensor]:
        """All parameters that train; one that this step did not reach has a gradient of zero, as every rank exchanges
        the same ones."""
        params = trainable_params(self)
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return params


class WarmupMixin(CompressedMixin):
    """The first phase: ``freeze_step`` steps of the optimiser behind it, or until the variance is stable ("auto").

    Group keys: ``frozen_at``, the step after which the variance stays (None before), and ``variance_norms``.
    """

    def _init_phase(self, freeze_step: int | str, link: MomentumLink | None) -> None:
        if freeze_step != "auto" and (not isinstance(freeze_step, int) or freeze_step < 1):
            raise ValueError(f'freeze_step must be a whole number of at least 1, or "auto", not {freeze_step!r}')
        self._freeze_step = freeze_step
        for group in self.param_groups:
            group.setdefault("frozen_at", None)
            group.setdefault("variance_norms", [])
        self._init_link(link)

    @property
    def is_compressing(self) -> bool:
        return self.param_groups[0]["frozen_at"] is not None

    def _end_warmup_step(self) -> None:
        """Freeze the variance if it is time."""
        num_steps, limit = self._num_steps(), self._freeze_step
        if num_steps and (num_steps >= limit if isinstance(limit, int) else self._is_stable(num_steps)):
            # Bits move what has had no gradient so far, too, and by m / eps it would go far: such an element takes the
            # mean of its parameter, and a parameter that has none stands still.
            params = [p for p in trainable_params(self) if "exp_avg_sq" in self.state.get(p, ())]
            for param, mean in zip(params, self._mean_variances(params), strict=True):
                variance = to_local(self.state[param]["exp_avg_sq"])
                variance.masked_fill_(variance == 0, mean or _STANDS_STILL)
            for group in self.param_groups:
                group["frozen_at"] = num_steps
        self._end_step()

    def _init_late(self, param: Tensor, group: dict[str, Any]) -> None:
        """State of a parameter that had no gradient before the freeze: it stands still."""
        if "exp_avg" not in self.state[param]:
            init_adam_state(self.state[param], param, group["frozen_at"])
            to_local(self.state[param]["exp_avg_sq"]).fill_(_STANDS_STILL)

    def _is_stable(self, num_steps: int) -> bool:
        """Whether the variance's 1-norm is what it was 1 / (1 - b2) steps ago, and the rate no longer rises."""
        group = self.param_groups[0]
        beta2 = group["betas"][1]
        interval = max(1, round(1 / (1 - beta2) / _LOOKS_PER_PERIOD))
        if num_steps % interval:
            return False
        params = [p for p in trainable_params(self) if "exp_avg_sq" in self.state.get(p, ())]
        means = self._mean_variances(params)
        norm = sum(mean * p.numel() for mean, p in zip(means, params, strict=True)) / (1 - beta2**num_steps)
        history = [*group["variance_norms"], [norm, float(group["lr"])]][-_LOOKS_PER_PERIOD - 1 :]
        for other in self.param_groups:
            other["variance_norms"] = history
        (old, old_lr), lr = history[0], float(group["lr"])
        ratio = min(old, norm) / max(old, norm) if max(old, norm) > 0 else 0.0
        return len(history) > _LOOKS_PER_PERIOD and ratio >= _STABLE_RATIO and lr <= old_lr


class OneBitAdam(WarmupMixin, Adam):
    """1-bit Adam: :class:`Adam` (with ``decoupled_weight_decay``: AdamW) to the bit until the freeze.

    ``freeze_step``: steps before it, or "auto".  Afterwards the bias corrections go on (of the variance, that of its
    last step), so that nothing jumps.  State, beside Adam's: ``worker_error``.
    """

    def __init__(
        self,
        params: Any,
        *,
        freeze_step: int | str = 100_000,
        decoupled_weight_decay: bool = True,
        link: MomentumLink | None = None,
        **hyper: Any,
    ) -> None:
        super().__init__(params, decoupled_weight_decay=decoupled_weight_decay, **hyper)
        self._init_phase(freeze_step, link)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adam's step, or a compressed one; collective from the freeze on."""
        if not self.is_compressing:
            loss = super().step(closure)
            self._end_warmup_step()
            return loss
        return dtensor_local.StepMixin.step(self, closure)  # type: ignore[arg-type]

    def _update_params(self) -> None:
        """The step of :class:`StepMixin`, from the freeze on."""
        self._fill_missing_grads()
        exchanged: list[tuple[Tensor, Tensor]] = []
        groups = [(group, [p for p in group["params"] if p.requires_grad]) for group in self.param_groups]
        for group, params in groups:
            for param in params:
                self._init_late(param, group)
            with working_copies(params) as (work, grads):
                moments = [to_local(self.state[p]["exp_avg"]) for p in params]
                foreach.lerp_(moments, _effective_grads(group, work, grads), 1 - group["betas"][0])
            exchanged += zip(params, moments, strict=True)
        self._average([p for p, _ in exchanged], [m for _, m in exchanged])
        for group, params in groups:
            with working_pieces(params) as work:
                states = [self.state[p] for p in params]
                foreach.add_([s["step"] for s in states], 1)
                if group["weight_decay"] and group["decoupled_weight_decay"]:
                    foreach.mul_(work, 1 - float(group["lr"]) * group["weight_decay"])
                for piece, state in zip(work, states, strict=True):
                    rate = float(group["lr"]) / _correction(group, 0, float(state["step"]))
                    denominator = _denominator(group, to_local(state["exp_avg_sq"]), group["frozen_at"])
                    piece.addcdiv_(to_local(state["exp_avg"]), denominator, value=-rate)
        self._end_step()


class OneBitLamb(WarmupMixin, Lamb):
    """1-bit LAMB: :class:`Lamb` to the bit until the freeze.

    ``coeff_beta``: of the running mean of trust ratios, which stays after the freeze; ``factor_max``, ``factor_min``
    and ``factor_threshold`` bound the factor that follows the variance since, and its change from step to step.  The
    paper scales momenta to one magnitude before the exchange; here each block has its own scale, which comes to the
    same.  State, beside LAMB's: ``exp_avg_sq_fresh``, ``trust_ratio``, ``factor``, ``worker_error``.
    """

    def __init__(
        self,
        params: Any,
        *,
        freeze_step: int | str = 100_000,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        link: MomentumLink | None = None,
        **hyper: Any,
    ) -> None:
        if not (0 <= coeff_beta < 1 and 0 < factor_min <= factor_max and factor_threshold > 0):
            raise ValueError(
                "OneBitLamb: 0 <= coeff_beta < 1, 0 < factor_min <= factor_max and factor_threshold > 0 must hold, got "
                f"{coeff_beta!r}, {factor_min!r}, {factor_max!r} and {factor_threshold!r}"
            )
        super().__init__(params, **hyper)
        self._coeff_beta, self._factor_threshold = coeff_beta, factor_threshold
        self._factor_bounds = (factor_min, factor_max)
        self._init_phase(freeze_step, link)

    def _observe_ratios(self, params: Sequence[Tensor], ratios: Sequence[float]) -> None:
        for param, ratio in zip(params, ratios, strict=True):
            mean = float(self.state[param].get("trust_ratio", ratio))
            self.state[param]["trust_ratio"] = torch.tensor(self._coeff_beta * mean + (1 - self._coeff_beta) * ratio)

    def _update_params(self) -> None:
        if not self.is_compressing:
            super()._update_params()
            self._end_warmup_step()
            return
        params = self._fill_missing_grads()
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        groups = [group_of[id(p)] for p in params]
        with working_copies(params) as (work, grads):
            states = [self.state[p] for p in params]
            for state, param, group in zip(states, params, groups, strict=True):
                self._init_late(param, group)
                state.setdefault("trust_ratio", torch.tensor(1.0))
                state.setdefault("factor", torch.tensor(1.0))
                if "exp_avg_sq_fresh" not in state:
                    state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
                state["step"] += 1
            moments = [to_local(state["exp_avg"]) for state in states]
            previous = [moment.clone() for moment in moments]
            for moment, grad, group in zip(moments, grads, groups, strict=True):
                moment.lerp_(grad, 1 - group["betas"][0])
            self._average(params, moments)
            # (|direction|^2, |direction + decay|^2) and the largest quotient of denominators, of logical parameters.
            directions, updates, maxima = [], [], []
            for moment, old, piece, state, group in zip(moments, previous, work, states, groups, strict=True):
                beta1, beta2 = group["betas"]
                mean_grad = (moment - beta1 * old) / (1 - beta1)
                fresh = to_local(state["exp_avg_sq_fresh"])
                fresh.mul_(beta2).addcmul_(mean_grad, mean_grad, value=1 - beta2)
                count = float(state["step"])
                denominator = _denominator(group, to_local(state["exp_avg_sq"]), group["frozen_at"])
                quotient = denominator / _denominator(group, fresh, count)
                maxima.append(quotient.max().reshape(1) if quotient.numel() else quotient.new_zeros(1))
                directions.append(moment / denominator / _correction(group, 0, count))
                updates.append(directions[-1] + group["weight_decay"] * piece)
            sums = torch.stack([square_sums(directions), square_sums(updates)], dim=1)
            shard_groups = dtensor_local.get_shard_groups(params)
            dtensor_local.all_reduce_tensors_(sums.unbind(), shard_groups)
            dtensor_local.all_reduce_tensors_(maxima, shard_groups, dist.ReduceOp.MAX)
            norms, quotients = sums.sqrt().tolist(), torch.cat([m.to(sums.device) for m in maxima]).tolist()
            for i, (state, group) in enumerate(zip(states, groups, strict=True)):
                factor = self._next_factor(float(state["factor"]), quotients[i], *norms[i])
                state["factor"] = torch.tensor(factor)
                work[i].add_(updates[i], alpha=-float(group["lr"]) * float(state["trust_ratio"]) * factor)
        self._end_step()

    def _next_factor(self, last: float, quotient: float, direction_norm: float, update_norm: float) -> float:
        """By how much the trust ratio follows the variance that would be; decay, which it leaves alone, damps it."""
        share = min(1.0, direction_norm / update_norm) if update_norm > 0 else 1.0
        low, high = self._factor_bounds
        factor = min(max(quotient * share + (1 - share), low), high)
        return min(max(factor, last * (1 - self._factor_threshold)), last * (1 + self._factor_threshold))


class ZeroOneAdam(CompressedMixin, AbstractAdam):
    """0/1 Adam: bits from the first step, ever fewer looks at the variance, and local steps once it is fixed.

    The exact mean gradient is taken for the variance at intervals that double after every ``var_update_scaler`` of
    them, until ``var_freeze_step``; momentum takes it, too, where it is there, as in the authors' program: a variance
    of few gradients can be tiny where the bits are not.  As long as that is each step, a step is Adam's to the bit.
    After ``var_freeze_step`` workers meet at intervals that double every ``local_step_scaler`` steps, up to
    ``local_step_clipper`` steps.  In between their parameters differ; a save makes them meet.
    ``decoupled_weight_decay``: as AdamW's.  The bias corrections are Adam's, by the number of updates of each moment.

    State: ``step``, ``exp_avg``, ``exp_avg_sq``, ``worker_error``; between two meetings ``local_update`` (what this
    worker has subtracted, times the denominator) and ``anchor`` (the parameter as they left it).
    """

    keeps_saved_dtype = False

    def __init__(
        self,
        params: Any,
        *options: Any,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        link: MomentumLink | None = None,
        **hyper: Any,
    ) -> None:
        limits = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"ZeroOneAdam: {name} must be at least 1, got {value!r}")
        super().__init__(params, *options, **hyper)
        # Where the policies stand: updates of the variance, the next step that has one, the next meeting.
        policies = {"num_variance_updates": 0, "next_variance_step": 1, "next_meeting": 1, "rate_sum": 0.0}
        self.defaults |= policies
        for group in self.param_groups:
            group.update({**policies, **group})
        self._limits = limits
        self._init_link(link)

    @property
    def is_compressing(self) -> bool:
        return True

    def consolidate_state_dict(self) -> bool:
        """See the base; workers whose parameters differ meet first."""
        differ = any("local_update" in self.state.get(p, ()) for p in trainable_params(self))
        if differ:
            with torch.no_grad():
                self._meet(self._num_steps())
        super().consolidate_state_dict()
        return differ

    def _update_params(self) -> None:
        params = self._fill_missing_grads()
        step = self._num_steps() + 1
        updates_variance = step == self.param_groups[0]["next_variance_step"]
        mean_grads = self._mean_grads(params) if updates_variance else {}
        meets_now = step >= self.param_groups[0]["next_meeting"]
        assert meets_now or not updates_variance
        for group in self.param_groups:
            members = [p for p in group["params"] if p.requires_grad]
            group["num_variance_updates"] += int(updates_variance)
            weight = float(group["lr"]) / _correction(group, 0, step)
            group["rate_sum"] += weight
            is_adam = updates_variance and group["num_variance_updates"] == step  # no bits so far: to the bit
            decoupled_decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
            with working_copies(members) as (work, grads):
                grads = _effective_grads(group, work, grads)
                for param, piece, own_grad in zip(members, work, grads, strict=True):
                    state, grad = self.state[param], mean_grads.get(param, own_grad)
                    init_adam_state(state, param, step - 1)
                    state["step"] += 1
                    if is_adam:
                        moments = to_local(state["exp_avg"]), to_local(state["exp_avg_sq"])
                        changes = {"maximize": False, "weight_decay": decoupled_decay}  # the rest is in ``grad``
                        fused_adam_step(group, piece, grad, *moments, step - 1, **changes)
                        continue
                    if updates_variance:
                        beta2 = group["betas"][1]
                        to_local(state["exp_avg_sq"]).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                    moment = to_local(state["exp_avg"]).lerp_(grad, 1 - group["betas"][0])
                    if not updates_variance:
                        if "local_update" not in state:
                            state["local_update"] = dtensor_local.zeros_state_like(param)
                            if not meets_now:
                                state["anchor"] = dtensor_local.as_dtensor_like(piece.clone(), param)
                        to_local(state["local_update"]).add_(moment, alpha=weight)
                    if decoupled_decay:
                        decay = 1 - float(group["lr"]) * decoupled_decay
                        piece.mul_(decay)
                        if "anchor" in state:
                            to_local(state["anchor"]).mul_(decay)
        if updates_variance:
            for group in self.param_groups:
                interval = 2 ** ((group["num_variance_updates"] - 1) // self._limits["var_update_scaler"])
                following = step + interval
                group["next_variance_step"] = following if following <= self._limits["var_freeze_step"] else -1
            for param, mean in zip(params, self._mean_variances(params), strict=True):
                self.state[param]["mean_variance"] = torch.tensor(mean)
        if (updates_variance and self.param_groups[0]["num_variance_updates"] < step) or not meets_now:
            self._step_by_own_momentum(step)
        if meets_now:
            self._meet(step)
        self._end_step()

    def _step_by_own_momentum(self, step: int) -> None:
        """Workers move by the momentum they have: one that they share, or each by its own."""
        for group in self.param_groups:
            members = [p for p in group["params"] if p.requires_grad]
            weight = float(group["lr"]) / _correction(group, 0, step)
            with working_pieces(members) as work:
                for param, piece in zip(members, work, strict=True):
                    denominator = self._variance_denominator(group, self.state[param])
                    piece.addcdiv_(to_local(self.state[param]["exp_avg"]), denominator, value=-weight)

    def _mean_grads(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """The exact mean over workers of the gradients that several hold."""
        own: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            members = [p for p in group["params"] if p.requires_grad and get_worker_axis(p) is not None]
            with working_copies(members) as (work, grads):
                own |= zip(members, _effective_grads(group, work, grads), strict=True)
        means: dict[Tensor, Tensor] = {}
        for reducer, members in self._open_exchanges(params):
            means |= zip(members, reducer.exact_mean([own[param] for param in members]), strict=True)
        return means

    def _meet(self, step: int) -> None:
        """All workers go on from one parameter and one momentum."""
        interval, limits = 1, self._limits  # steps until the next meeting: 1 while the variance moves
        if step >= limits["var_freeze_step"]:
            doublings = (step - limits["var_freeze_step"]) // limits["local_step_scaler"]
            interval = min(limits["local_step_clipper"], 2 ** min(doublings, 30))
        params = [p for p in trainable_params(self) if "local_update" in self.state[p]]
        if params and any(group["rate_sum"] > 0 for group in self.param_groups):  # a rate of 0 has moved nobody
            self._average(params, [to_local(self.state[p]["local_update"]) for p in params])
        for group in self.param_groups:
            members = [p for p in group["params"] if "local_update" in self.state.get(p, ())]
            with working_pieces(members) as work:
                for param, piece in zip(members, work, strict=True):
                    state = self.state[param]
                    update = to_local(state.pop("local_update"))
                    if group["rate_sum"] > 0:
                        to_local(state["exp_avg"]).copy_(update / group["rate_sum"])
                    if "anchor" in state:
                        piece.copy_(to_local(state.pop("anchor")))
                    piece.addcdiv_(update, self._variance_denominator(group, state), value=-1.0)
            group["rate_sum"] = 0.0
            group["next_meeting"] = step + interval

    @staticmethod
    def _variance_denominator(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """An element without a gradient so far takes the mean variance of its parameter, as bits move it, too."""
        variance, mean = to_local(state["exp_avg_sq"]), float(state.get("mean_variance", 0.0)) or _STANDS_STILL
        return _denominator(group, variance.masked_fill(variance == 0, mean), group["num_variance_updates"])


def _effective_grads(group: dict[str, Any], work: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients of what is minimised, with the decay that is part of it."""
    if group["maximize"]:
        grads = [-grad for grad in grads]
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        grads = [grad.add(piece, alpha=group["weight_decay"]) for grad, piece in zip(grads, work, strict=True)]
    return grads


def _correction(group: dict[str, Any], moment: int, num_updates: float) -> float:
    """What a moment (0 or 1) of so many updates is to be divided by."""
    return 1 - group["betas"][moment] ** num_updates if group["bias_correction"] else 1.0


def _denominator(group: dict[str, Any], variance: Tensor, num_updates: float) -> Tensor:
    return (variance.sqrt() / _correction(group, 1, num_updates) ** 0.5).add_(group["eps"])


COMPRESSED_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls for cls in (OneBitAdam, OneBitLamb, ZeroOneAdam)
}
