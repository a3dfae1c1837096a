"""Adam that updates the important columns of a gradient at once and the rest now and then.

After ZenFlow (Lan et al. 2025, "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates").
A few columns of a weight's gradient hold most of its norm, and they stay the same ones for a while.  So

    every step            the selected columns: Adam;  the rest: added up in ``delayed``
    every update_interval the rest: one Adam update with the mean of what was added up
    every select_interval what is delayed is applied, then the columns with the largest gradients are selected

A *column* is an index of all dims but the first; parameters of one dim, and those cut along other dims than
the first, are updated whole at every step.  With ``overlap`` the update of the rest is computed by a thread
while the next forward and backward pass run, and is added to the weights when the next step begins: one step
late.

State, beside Adam's own, all of it in the checkpoint: ``delayed`` (a logical tensor like the parameter),
``waiting`` (how many gradients are in it), ``selected`` (a flag for each column), ``column_steps`` (how many
updates each column has had; the bias correction of a column goes by it), ``step`` (steps in all), and with
``overlap`` between two steps ``pending``, what is still to be added.

Invariants: with ``topk_ratio`` 1, and in the first ``warmup_steps`` steps, the result is torch's fused Adam to the
bit; decoupled weight decay acts on every column at every step; all ranks select the same columns; what a run
computes does not depend on how fast the thread is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.config.schema.zero import ZenFlow
from thalweg.optim.algorithms.fused_adam import AbstractAdam, fused_adam_step
from thalweg.optim.algorithms.lion import evaluate_closure
from thalweg.optim.dtensor_local import (
    AllReduce,
    all_reduce_tensors_,
    default_all_reduce,
    get_sharded_axes,
    local_grad,
    sharded_dim,
    to_local,
    zeros_state_like,
)
from thalweg.utils.dtypes import HALF_DTYPES

_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class ZenFlowPolicy:
    """Which columns are updated when.

    ``topk_ratio``: the part of the columns that is updated at once.  ``select_interval`` and
    ``update_interval`` are counted in steps.  ``update_interval`` None: when the columns that wait have, on
    average, gathered ``auto_ratio`` of the squared gradient of a selected one, and at each selection.
    """

    topk_ratio: float = 0.1
    select_interval: int = 16
    update_interval: int | None = 4
    overlap: bool = False
    auto_ratio: float = 0.99
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.topk_ratio <= 1:
            raise ValueError(f"topk_ratio is {self.topk_ratio!r}; it must be above 0 and at most 1")
        if self.select_interval < 1 or (self.update_interval is not None and self.update_interval < 1):
            raise ValueError("select_interval and update_interval must be at least 1 step")

    @classmethod
    def from_config(cls, section: ZenFlow | None) -> ZenFlowPolicy | None:
        """What the ``zenflow`` block asks for; None without one.

        Raises:
            ValueError: selection goes by epochs and their length is not given.
        """
        if section is None:
            return None
        select_interval, update_interval = section.select_interval, section.update_interval
        if section.select_strategy == "epoch":
            if section.steps_per_epoch is None:
                raise ValueError(
                    'zenflow.select_strategy is "epoch" and nobody knows how long one is: set '
                    'zenflow.steps_per_epoch, or select_strategy to "step"'
                )
            select_interval = section.steps_per_epoch * (1 if select_interval == "auto" else int(select_interval))
        return cls(
            topk_ratio=section.topk_ratio,
            select_interval=cls.select_interval if select_interval == "auto" else int(select_interval),
            update_interval=None if update_interval == "auto" else int(update_interval),
            overlap=section.overlap_step,
            auto_ratio=section.auto_ratio,
            warmup_steps=section.full_warm_up_rounds,
        )


@dataclass
class _ZenFlowParam:
    """One parameter in a step: this rank's piece, gradient and state as matrices of fp32."""

    group: dict[str, Any]
    param: Tensor
    state: dict[str, Any]
    weight: Tensor
    grad: Tensor

    @property
    def selected(self) -> Tensor:
        return self.state["selected"].nonzero().squeeze(1)

    def state_matrix(self, key: str) -> Tensor:
        piece = to_local(self.state[key])
        return piece.view(self.weight.shape)


class ZenFlowAdam(AbstractAdam):
    """See the module; ``policy`` holds for all groups."""

    def __init__(self, params: Any, *options: Any, policy: ZenFlowPolicy | None = None, **hyper: Any) -> None:
        self._state: Any = {}
        self._pending_update: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.policy = policy or ZenFlowPolicy()
        self.all_reduce: AllReduce = default_all_reduce
        super().__init__(params, *options, **hyper)

    # State, which a thread may be working on

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state, at rest: waits for the update under way."""
        self._wait_for_update()
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wait_for_update()
        state = dict(state)
        if "state" in state:
            self._state = state.pop("state")
        super().__setstate__(state)

    def _wait_for_update(self) -> None:
        pending, self._pending_update = self._pending_update, None
        if pending is not None:
            pending.result()

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what is due; returns the closure's loss if one is given.

        All ranks of a process group must have gradients for the same parameters.
        """
        loss = evaluate_closure(closure)
        self._wait_for_update()
        self._apply_pending()
        zenflow_params, copies = [], []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    zenflow_param, copies_back = self._prepare_param(group, param)
                    zenflow_params.append(zenflow_param)
                    copies += copies_back
        by_column = [part for part in zenflow_params if "selected" in part.state]
        all_columns = [part for part in zenflow_params if "selected" not in part.state]
        in_warmup = [part for part in by_column if self._in_warmup(part)]
        for zenflow_param in (*all_columns, *in_warmup):
            self._update_all_columns(zenflow_param)
        past_warmup = [part for part in by_column if not self._in_warmup(part)]
        self._step_by_column(past_warmup)
        for piece, work in copies:
            piece.copy_(work)
        return loss

    def _in_warmup(self, zenflow_param: _ZenFlowParam) -> bool:
        return self.policy.topk_ratio >= 1 or int(zenflow_param.state["step"]) <= self.policy.warmup_steps

    def _prepare_param(self, group: dict[str, Any], param: Tensor) -> tuple[_ZenFlowParam, list[tuple[Tensor, Tensor]]]:
        state, piece = self._state[param], to_local(param)
        self._init_state(param, state)
        state["step"] += 1
        work = piece.float() if piece.dtype in HALF_DTYPES or not piece.is_contiguous() else piece
        work = work.contiguous()
        shape = (piece.shape[0], -1) if piece.ndim > 1 and piece.numel() else (piece.numel(), 1)
        grad = local_grad(param).to(work.dtype).reshape(shape)
        zenflow_param = _ZenFlowParam(group, param, state, work.view(shape), grad)
        return zenflow_param, [] if work is piece else [(piece, work)]

    def _init_state(self, param: Tensor, state: dict[str, Any]) -> None:
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = zeros_state_like(param), zeros_state_like(param)
        if "delayed" in state or not _can_split_columns(param):
            return
        columns = param.numel() // param.shape[0]
        device = to_local(param).device
        state["delayed"] = zeros_state_like(param)
        state["waiting"] = torch.zeros((), dtype=torch.float32)
        state["selected"] = torch.zeros(columns, dtype=torch.bool, device=device)
        state["column_steps"] = state["step"].to(device).expand(columns).clone()

    def _update_all_columns(self, zenflow_param: _ZenFlowParam) -> None:
        step, moments = (
            zenflow_param.state["step"],
            (zenflow_param.state_matrix("exp_avg"), zenflow_param.state_matrix("exp_avg_sq")),
        )
        fused_adam_step(zenflow_param.group, zenflow_param.weight, zenflow_param.grad, *moments, float(step - 1))
        if "column_steps" in zenflow_param.state:
            zenflow_param.state["column_steps"].fill_(float(step))

    def _step_by_column(self, zenflow_params: Sequence[_ZenFlowParam]) -> None:
        if not zenflow_params:
            return
        policy = self.policy
        due_for_selection = [
            p for p in zenflow_params if (int(p.state["step"]) - policy.warmup_steps - 1) % policy.select_interval == 0
        ]
        with_deferred = [zenflow_param for zenflow_param in due_for_selection if float(zenflow_param.state["waiting"])]
        for part in with_deferred:
            self._update_deferred_columns(part.group, part.param, part.weight, part.weight)
        self._select_columns(due_for_selection)
        for part in zenflow_params:
            group = part.group
            if group["weight_decay"] and group["decoupled_weight_decay"]:
                part.weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
            columns = part.selected
            moments = part.state_matrix("exp_avg"), part.state_matrix("exp_avg_sq")
            steps = part.state["column_steps"]
            _adam_step_columns(group, columns, part.weight, part.grad, *moments, steps, part.weight)
            steps[columns] += 1
            delayed = part.state_matrix("delayed")
            delayed.add_(part.grad)
            delayed.index_fill_(1, columns, 0.0)
            part.state["waiting"] += 1
        self._run_deferred_updates(
            [part for part in zenflow_params if self._is_deferred_update_due(part)] if policy.update_interval else []
        )
        if policy.update_interval is None and self._is_auto_update_due(zenflow_params):
            self._run_deferred_updates(zenflow_params)

    def _is_deferred_update_due(self, zenflow_param: _ZenFlowParam) -> bool:
        return float(zenflow_param.state["waiting"]) >= (self.policy.update_interval or 0)

    def _select_columns(self, zenflow_params: Sequence[_ZenFlowParam]) -> None:
        """Take the columns with the largest gradients; one collective for each process group."""
        norms = [zenflow_param.grad.square().sum(0) for zenflow_param in zenflow_params]
        shard_groups = [tuple(group for group, _ in get_sharded_axes(part.param)) for part in zenflow_params]
        if norms:
            all_reduce_tensors_(norms, shard_groups, self.all_reduce)
        for part, norm in zip(zenflow_params, norms, strict=True):
            count = max(1, round(self.policy.topk_ratio * norm.numel()))
            # Ties go to the smaller index, so that every rank and device selects alike.
            chosen = norm.sort(descending=True, stable=True).indices[:count]
            part.state["selected"].zero_()
            part.state["selected"][chosen] = True

    def _is_auto_update_due(self, zenflow_params: Sequence[_ZenFlowParam]) -> bool:
        """Whether the columns that wait have gathered enough; the same on every rank."""
        pairs = []
        for zenflow_param in zenflow_params:
            chosen = zenflow_param.state["selected"]
            selected_mean = zenflow_param.grad[:, chosen].square().sum() / max(1, int(chosen.sum()))
            deferred_mean = zenflow_param.state_matrix("delayed").square().sum() / max(1, int((~chosen).sum()))
            pairs.append(torch.stack([deferred_mean, selected_mean]))
        shard_groups = [tuple(group for group, _ in get_sharded_axes(part.param)) for part in zenflow_params]
        all_reduce_tensors_(pairs, shard_groups, self.all_reduce)
        deferred_mean, selected_mean = torch.stack(pairs).sum(0).tolist()
        return deferred_mean >= self.policy.auto_ratio * selected_mean

    def _run_deferred_updates(self, zenflow_params: Sequence[_ZenFlowParam]) -> None:
        if not zenflow_params:
            return
        if not self.policy.overlap:
            for zenflow_param in zenflow_params:
                self._update_deferred_columns(
                    zenflow_param.group, zenflow_param.param, zenflow_param.weight, zenflow_param.weight
                )
            return
        jobs: list[Callable[[], None]] = []
        for zenflow_param in zenflow_params:
            pending = torch.zeros_like(zenflow_param.weight)
            zenflow_param.state["pending"] = _as_dtensor_like_state(pending, zenflow_param.param, zenflow_param.state)
            weight = zenflow_param.weight
            if to_local(zenflow_param.param).data_ptr() != weight.data_ptr():
                weight = weight.clone()
            jobs.append(
                _bind(self._update_deferred_columns, dict(zenflow_param.group), zenflow_param.param, weight, pending)
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="thalweg-delayed")
        self._pending_update = self._thread.submit(_run_all, jobs)

    def _update_deferred_columns(self, group: dict[str, Any], param: Tensor, weight: Tensor, out: Tensor) -> None:
        """One update of the columns that wait: in ``weight`` itself, or as the difference in ``out``."""
        state = self._state[param]
        delayed = to_local(state["delayed"]).view(weight.shape)
        exp_avg, exp_avg_sq = (to_local(state[key]).view(weight.shape) for key in ("exp_avg", "exp_avg_sq"))
        columns = (~state["selected"]).nonzero().squeeze(1)
        delayed.div_(float(state["waiting"]))
        _adam_step_columns(group, columns, weight, delayed, exp_avg, exp_avg_sq, state["column_steps"], out)
        state["column_steps"][columns] += 1
        delayed.zero_()
        state["waiting"].zero_()

    def _apply_pending(self) -> None:
        for param, state in self._state.items():
            pending = state.pop("pending", None)
            if pending is not None:
                piece = to_local(param)
                piece.add_(to_local(pending).view(piece.shape))


def _can_split_columns(param: Tensor) -> bool:
    sharded_dims = [] if not isinstance(param, DTensor) else [sharded_dim(p) for p in param.placements]
    return param.ndim > 1 and param.numel() > 0 and all(dim in (None, 0) for dim in sharded_dims)


def _as_dtensor_like_state(piece: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    like = state["exp_avg"]
    if not isinstance(like, DTensor):
        return piece.view(like.shape)
    return DTensor.from_local(
        piece.view(like._local_tensor.shape),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _bind(call: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: call(*args)


@torch.no_grad()
def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _adam_step_columns(
    group: dict[str, Any],
    columns: Tensor,
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    steps: Tensor,
    out: Tensor,
) -> None:
    """Adam on some columns, a few rows at a time; ``out``: the weight itself, or where the change goes."""
    step_counts = steps[columns]
    decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
    for rows in _row_chunks(weight):
        w, g, m, v = (t[rows].index_select(1, columns) for t in (weight, grad, exp_avg, exp_avg_sq))
        old = None if out is weight else w.clone()
        for chosen, count in _group_by_step_count(step_counts):
            if chosen is None:
                fused_adam_step(group, w, g, m, v, count, weight_decay=decay)
            else:
                some_w, some_g, some_m, some_v = (t.index_select(1, chosen) for t in (w, g, m, v))
                fused_adam_step(group, some_w, some_g, some_m, some_v, count, weight_decay=decay)
                for full, updated in ((w, some_w), (m, some_m), (v, some_v)):
                    full.index_copy_(1, chosen, updated)
        exp_avg[rows].index_copy_(1, columns, m)
        exp_avg_sq[rows].index_copy_(1, columns, v)
        out[rows].index_copy_(1, columns, w if old is None else w.sub_(old))


def _row_chunks(matrix: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], size):
        yield slice(start, start + size)


def _group_by_step_count(step_counts: Tensor) -> Iterator[tuple[Tensor | None, float]]:
    """The columns that have had equally many updates, and how many; None for all of them."""
    counts = step_counts.unique().tolist()
    for count in counts:
        yield (None if len(counts) == 1 else (step_counts == count).nonzero().squeeze(1)), float(count)
