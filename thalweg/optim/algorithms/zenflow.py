"""Adam that updates the important columns of a gradient at once and the rest now and then.

After ZenFlow (Lan et al. 2025, "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates").
A few columns of a weight's gradient hold most of its norm, and they stay the same ones for a while.  So

    every step            the selected columns: Adam;  the rest: added up in ``delayed``
    every update_interval the rest: one Adam update with the mean of what was added up
    every select_interval what is delayed is applied, then the columns with the largest gradients are selected

A *column* is an index of all dims but the first; parameters of one dim, and those cut along other dims than
the first, are updated whole at every step.  With ``overlap_step`` the update of the rest is computed by a thread
while the next forward and backward pass run, and is added to the weights when the next step begins: one step
late.

State, beside Adam's own, all of it in the checkpoint: ``delayed`` (a logical tensor like the parameter),
``waiting`` (how many gradients are in it), ``selected`` (a flag for each column), ``column_steps`` (how many
updates each column has had; the bias correction of a column goes by it), ``step`` (steps in all), and with
``overlap_step`` between two steps ``pending``, what is still to be added.

Invariants: with ``topk_ratio`` 1, and in the first ``full_warm_up_rounds`` steps, the result is torch's fused Adam to
the bit; decoupled weight decay acts on every column at every step; all ranks select the same columns; what a run
computes does not depend on how fast the thread is.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thalweg.config.schema.zero import ZenFlow
from thalweg.optim import dtensor_local
from thalweg.optim.algorithms.fused_adam import AbstractAdam, fused_adam_step
from thalweg.optim.algorithms.lamb import init_adam_state
from thalweg.optim.dtensor_local import to_local

_CHUNK_ELEMENTS = 1 << 18


def _select_interval(policy: ZenFlow) -> int:
    """Steps from one selection to the next.

    Raises:
        ValueError: selection goes by epochs and their length is not given, or 0.
    """
    interval = policy.select_interval
    if policy.select_strategy != "epoch":
        return 16 if interval == "auto" else interval
    if policy.steps_per_epoch is None:
        raise ValueError(
            'zenflow.select_strategy is "epoch" and nobody knows how long one is: set '
            'zenflow.steps_per_epoch, or select_strategy to "step"'
        )
    if policy.steps_per_epoch < 1:
        raise ValueError("select_interval and update_interval must be at least 1 step")
    return policy.steps_per_epoch * (1 if interval == "auto" else interval)


@dataclass
class _ZenFlowParam:
    """One parameter in a step: this rank's piece, gradient and state as matrices of fp32; ``is_copy``: ``weight`` is
    beside the parameter, to be copied back."""

    group: dict[str, Any]
    param: Tensor
    state: dict[str, Any]
    weight: Tensor
    grad: Tensor
    is_copy: bool

    def matrix(self, key: str) -> Tensor:
        """State of the parameter's layout."""
        return to_local(self.state[key]).view(self.weight.shape)

    def update_columns(self, columns: Tensor, grad: Tensor, out: Tensor) -> None:
        """One Adam step of some columns, a few rows at a time; ``out``: the weight itself, or where the change goes."""
        group, steps, weight = self.group, self.state["column_steps"], self.weight
        exp_avg, exp_avg_sq, step_counts = self.matrix("exp_avg"), self.matrix("exp_avg_sq"), steps[columns]
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
        steps[columns] += 1

    def update_deferred_columns(self, out: Tensor) -> None:
        """One update of the columns that wait: in the weight itself, or as the difference in ``out``."""
        delayed = self.matrix("delayed").div_(float(self.state["waiting"]))
        self.update_columns((~self.state["selected"]).nonzero().squeeze(1), delayed, out)
        delayed.zero_()
        self.state["waiting"].zero_()


class ZenFlowAdam(AbstractAdam):
    """See the module; ``policy``, the config's block, holds for all groups.

    Its ``update_interval`` "auto": when the columns that wait have, on average, gathered ``auto_ratio`` of the squared
    gradient of a selected one, and at each selection.
    """

    def __init__(self, params: Any, *options: Any, policy: ZenFlow | None = None, **hyper: Any) -> None:
        self._state: Any = {}
        self._pending_update: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.policy = policy = policy or ZenFlow()
        self._select_interval = _select_interval(policy)
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

    def _update_params(self) -> None:
        self._wait_for_update()
        for param, state in self._state.items():
            if (pending := state.pop("pending", None)) is not None:
                piece = to_local(param)
                piece.add_(to_local(pending).view(piece.shape))
        groups, policy, by_column = self.param_groups, self.policy, []
        parts = [self._prepare(group, p) for group in groups for p in group["params"] if p.grad is not None]
        for part in parts:
            step = int(part.state["step"])
            if "selected" in part.state and policy.topk_ratio < 1 and step > policy.full_warm_up_rounds:
                by_column.append(part)
                continue
            moments = part.matrix("exp_avg"), part.matrix("exp_avg_sq")
            fused_adam_step(part.group, part.weight, part.grad, *moments, float(step - 1))
            if "selected" in part.state:
                part.state["column_steps"].fill_(float(step))
        if by_column:
            self._step_by_column(by_column)
        for part in parts:
            if part.is_copy:
                piece = to_local(part.param)
                piece.copy_(part.weight.view(piece.shape))

    def _prepare(self, group: dict[str, Any], param: Tensor) -> _ZenFlowParam:
        state, piece = self._state[param], to_local(param)
        init_adam_state(state, param, 0)
        if "delayed" not in state and _can_split_columns(param):
            columns = param.numel() // param.shape[0]
            state["delayed"] = dtensor_local.zeros_state_like(param)
            state["waiting"] = torch.zeros((), dtype=torch.float32)
            state["selected"] = torch.zeros(columns, dtype=torch.bool, device=piece.device)
            state["column_steps"] = state["step"].to(piece.device).expand(columns).clone()
        state["step"] += 1
        work = dtensor_local.upcast_half(piece).contiguous()
        shape = (piece.shape[0], piece.shape[1:].numel()) if piece.ndim > 1 else (piece.numel(), 1)
        grad = dtensor_local.local_grad(param).to(work.dtype).reshape(shape)
        return _ZenFlowParam(group, param, state, work.view(shape), grad, work is not piece)

    def _step_by_column(self, parts: Sequence[_ZenFlowParam]) -> None:
        policy = self.policy
        first = policy.full_warm_up_rounds + 1
        to_select = [p for p in parts if (int(p.state["step"]) - first) % self._select_interval == 0]
        for part in to_select:
            if float(part.state["waiting"]):
                part.update_deferred_columns(part.weight)
        self._select_columns(to_select)
        for part in parts:
            group = part.group
            if group["weight_decay"] and group["decoupled_weight_decay"]:
                part.weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
            columns = part.state["selected"].nonzero().squeeze(1)
            part.update_columns(columns, part.grad, part.weight)
            part.matrix("delayed").add_(part.grad).index_fill_(1, columns, 0.0)
            part.state["waiting"] += 1
        if policy.update_interval != "auto":
            due = [part for part in parts if float(part.state["waiting"]) >= policy.update_interval]
        else:
            due = parts if self._is_auto_update_due(parts) else []
        if not policy.overlap_step:
            for part in due:
                part.update_deferred_columns(part.weight)
        elif due:
            self._start_deferred_updates(due)

    def _select_columns(self, parts: Sequence[_ZenFlowParam]) -> None:
        """Take the columns with the largest gradients; one collective for each process group."""
        norms = [part.grad.square().sum(0) for part in parts]
        dtensor_local.all_reduce_tensors_(norms, dtensor_local.get_shard_groups(part.param for part in parts))
        for part, norm in zip(parts, norms, strict=True):
            count = max(1, round(self.policy.topk_ratio * norm.numel()))
            # Ties go to the smaller index, so that every rank and device selects alike.
            chosen = norm.sort(descending=True, stable=True).indices[:count]
            part.state["selected"].zero_()
            part.state["selected"][chosen] = True

    def _is_auto_update_due(self, parts: Sequence[_ZenFlowParam]) -> bool:
        """Whether the columns that wait have gathered enough; the same on every rank."""
        pairs = []
        for part in parts:
            chosen = part.state["selected"]
            selected_mean = part.grad[:, chosen].square().sum() / max(1, int(chosen.sum()))
            deferred_mean = part.matrix("delayed").square().sum() / max(1, int((~chosen).sum()))
            pairs.append(torch.stack([deferred_mean, selected_mean]))
        dtensor_local.all_reduce_tensors_(pairs, dtensor_local.get_shard_groups(part.param for part in parts))
        deferred_mean, selected_mean = torch.stack(pairs).sum(0).tolist()
        return deferred_mean >= self.policy.auto_ratio * selected_mean

    def _start_deferred_updates(self, parts: Sequence[_ZenFlowParam]) -> None:
        jobs: list[Callable[[], None]] = []
        for part in parts:
            pending, weight, state = torch.zeros_like(part.weight), part.weight, part.state
            shape = to_local(state["exp_avg"]).shape
            state["pending"] = dtensor_local.as_dtensor_like(pending.view(shape), state["exp_avg"])
            if part.is_copy:
                weight = weight.clone()
            part = replace(part, group=dict(part.group), weight=weight)
            jobs.append(partial(part.update_deferred_columns, pending))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="thalweg-delayed")
        self._pending_update = self._thread.submit(_run_all, jobs)


def _can_split_columns(param: Tensor) -> bool:
    sharded_dims = [dtensor_local.sharded_dim(p) for p in getattr(param, "placements", ())]
    return param.ndim > 1 and param.numel() > 0 and all(dim in (None, 0) for dim in sharded_dims)


@torch.no_grad()
def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _row_chunks(matrix: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], size):
        yield slice(start, start + size)


def _group_by_step_count(step_counts: Tensor) -> Iterator[tuple[Tensor | None, float]]:
    """The columns that have had equally many updates, and how many; None for all of them."""
    counts = step_counts.unique().tolist()
    for count in counts:
        yield (None if len(counts) == 1 else (step_counts == count).nonzero().squeeze(1)), float(count)
