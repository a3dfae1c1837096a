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

Invariants: with ``topk_ratio`` 1, and in the first ``warm_up`` steps, the result is torch's fused Adam to the
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

from thalweg.config.schema_zero import ZenFlow
from thalweg.optim.kernel import AdamOptions, step_adam
from thalweg.optim.lion import loss_of
from thalweg.optim.local import local, local_grad, new_state
from thalweg.optim.reduce import AllReduce, cut_dim, cuts_of, plain_all_reduce, reduce_tensors_
from thalweg.utils.dtypes import HALF_DTYPES

_CHUNK = 1 << 18


@dataclass(frozen=True)
class DelayPolicy:
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
    warm_up: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.topk_ratio <= 1:
            raise ValueError(f"topk_ratio is {self.topk_ratio!r}; it must be above 0 and at most 1")
        if self.select_interval < 1 or (self.update_interval is not None and self.update_interval < 1):
            raise ValueError("select_interval and update_interval must be at least 1 step")

    @classmethod
    def from_config(cls, section: ZenFlow | None) -> DelayPolicy | None:
        """What the ``zenflow`` block asks for; None without one.

        Raises:
            ValueError: selection goes by epochs and their length is not given.
        """
        if section is None:
            return None
        every, update = section.select_interval, section.update_interval
        if section.select_strategy == "epoch":
            if section.steps_per_epoch is None:
                raise ValueError(
                    'zenflow.select_strategy is "epoch" and nobody knows how long one is: set '
                    'zenflow.steps_per_epoch, or select_strategy to "step"'
                )
            every = section.steps_per_epoch * (1 if every == "auto" else int(every))
        return cls(
            topk_ratio=section.topk_ratio,
            select_interval=cls.select_interval if every == "auto" else int(every),
            update_interval=None if update == "auto" else int(update),
            overlap=section.overlap_step,
            auto_ratio=section.auto_ratio,
            warm_up=section.full_warm_up_rounds,
        )


@dataclass
class _Part:
    """One parameter in a step: this rank's piece, gradient and state as matrices of fp32."""

    group: dict[str, Any]
    param: Tensor
    state: dict[str, Any]
    weight: Tensor
    grad: Tensor

    @property
    def selected(self) -> Tensor:
        return self.state["selected"].nonzero().squeeze(1)

    @property
    def rest(self) -> Tensor:
        return (~self.state["selected"]).nonzero().squeeze(1)

    def matrix(self, key: str) -> Tensor:
        piece = local(self.state[key])
        return piece.view(self.weight.shape)


class DelayedAdam(AdamOptions):
    """See the module; ``policy`` holds for all groups."""

    def __init__(self, params: Any, *options: Any, policy: DelayPolicy | None = None, **hyper: Any) -> None:
        self._state: Any = {}
        self._job: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.policy = policy or DelayPolicy()
        self.all_reduce: AllReduce = plain_all_reduce
        super().__init__(params, *options, **hyper)

    # State, which a thread may be working on

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state, at rest: waits for the update under way."""
        self._join()
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._join()
        state = dict(state)
        if "state" in state:
            self._state = state.pop("state")
        super().__setstate__(state)

    def _join(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.result()

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what is due; returns the closure's loss if one is given.

        All ranks of a process group must have gradients for the same parameters.
        """
        loss = loss_of(closure)
        self._join()
        self._add_pending()
        parts, copies = [], []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    part, back = self._part(group, param)
                    parts.append(part)
                    copies += back
        split = [part for part in parts if "selected" in part.state]
        whole = [part for part in parts if "selected" not in part.state]
        warm = [part for part in split if self._is_warm(part)]
        for part in (*whole, *warm):
            self._update_whole(part)
        late = [part for part in split if not self._is_warm(part)]
        self._step_late(late)
        for piece, work in copies:
            piece.copy_(work)
        return loss

    def _is_warm(self, part: _Part) -> bool:
        return self.policy.topk_ratio >= 1 or int(part.state["step"]) <= self.policy.warm_up

    def _part(self, group: dict[str, Any], param: Tensor) -> tuple[_Part, list[tuple[Tensor, Tensor]]]:
        state, piece = self._state[param], local(param)
        self._new_state(param, state)
        state["step"] += 1
        work = piece.float() if piece.dtype in HALF_DTYPES or not piece.is_contiguous() else piece
        work = work.contiguous()
        shape = (piece.shape[0], -1) if piece.ndim > 1 and piece.numel() else (piece.numel(), 1)
        grad = local_grad(param).to(work.dtype).reshape(shape)
        part = _Part(group, param, state, work.view(shape), grad)
        return part, [] if work is piece else [(piece, work)]

    def _new_state(self, param: Tensor, state: dict[str, Any]) -> None:
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = new_state(param), new_state(param)
        if "delayed" in state or not _has_columns(param):
            return
        columns = param.numel() // param.shape[0]
        device = local(param).device
        state["delayed"] = new_state(param)
        state["waiting"] = torch.zeros((), dtype=torch.float32)
        state["selected"] = torch.zeros(columns, dtype=torch.bool, device=device)
        state["column_steps"] = state["step"].to(device).expand(columns).clone()

    def _update_whole(self, part: _Part) -> None:
        step, moments = part.state["step"], (part.matrix("exp_avg"), part.matrix("exp_avg_sq"))
        step_adam(part.group, part.weight, part.grad, *moments, float(step - 1))
        if "column_steps" in part.state:
            part.state["column_steps"].fill_(float(step))

    def _step_late(self, parts: Sequence[_Part]) -> None:
        if not parts:
            return
        policy = self.policy
        due = [p for p in parts if (int(p.state["step"]) - policy.warm_up - 1) % policy.select_interval == 0]
        waits = [part for part in due if float(part.state["waiting"])]
        for part in waits:
            self._update_rest(part.group, part.param, part.weight, part.weight)
        self._select(due)
        for part in parts:
            group = part.group
            if group["weight_decay"] and group["decoupled_weight_decay"]:
                part.weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
            columns = part.selected
            moments = part.matrix("exp_avg"), part.matrix("exp_avg_sq")
            steps = part.state["column_steps"]
            _adam_columns(group, columns, part.weight, part.grad, *moments, steps, part.weight)
            steps[columns] += 1
            delayed = part.matrix("delayed")
            delayed.add_(part.grad)
            delayed.index_fill_(1, columns, 0.0)
            part.state["waiting"] += 1
        self._apply_rest([part for part in parts if self._is_due(part)] if policy.update_interval else [])
        if policy.update_interval is None and self._rest_matters(parts):
            self._apply_rest(parts)

    def _is_due(self, part: _Part) -> bool:
        return float(part.state["waiting"]) >= (self.policy.update_interval or 0)

    def _select(self, parts: Sequence[_Part]) -> None:
        """Take the columns with the largest gradients; one collective for each process group."""
        norms = [part.grad.square().sum(0) for part in parts]
        spans = [tuple(group for group, _ in cuts_of(part.param)) for part in parts]
        if norms:
            reduce_tensors_(norms, spans, self.all_reduce)
        for part, norm in zip(parts, norms, strict=True):
            count = max(1, round(self.policy.topk_ratio * norm.numel()))
            # Ties go to the smaller index, so that every rank and device selects alike.
            chosen = norm.sort(descending=True, stable=True).indices[:count]
            part.state["selected"].zero_()
            part.state["selected"][chosen] = True

    def _rest_matters(self, parts: Sequence[_Part]) -> bool:
        """Whether the columns that wait have gathered enough; the same on every rank."""
        pairs = []
        for part in parts:
            chosen = part.state["selected"]
            now = part.grad[:, chosen].square().sum() / max(1, int(chosen.sum()))
            gathered = part.matrix("delayed").square().sum() / max(1, int((~chosen).sum()))
            pairs.append(torch.stack([gathered, now]))
        spans = [tuple(group for group, _ in cuts_of(part.param)) for part in parts]
        reduce_tensors_(pairs, spans, self.all_reduce)
        gathered, now = torch.stack(pairs).sum(0).tolist()
        return gathered >= self.policy.auto_ratio * now

    def _apply_rest(self, parts: Sequence[_Part]) -> None:
        if not parts:
            return
        if not self.policy.overlap:
            for part in parts:
                self._update_rest(part.group, part.param, part.weight, part.weight)
            return
        jobs: list[Callable[[], None]] = []
        for part in parts:
            pending = torch.zeros_like(part.weight)
            part.state["pending"] = _like_state(pending, part.param, part.state)
            weight = part.weight
            if local(part.param).data_ptr() != weight.data_ptr():
                weight = weight.clone()
            jobs.append(_bound(self._update_rest, dict(part.group), part.param, weight, pending))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="thalweg-delayed")
        self._job = self._thread.submit(_run_all, jobs)

    def _update_rest(self, group: dict[str, Any], param: Tensor, weight: Tensor, into: Tensor) -> None:
        """One update of the columns that wait: in ``weight`` itself, or as the difference in ``into``."""
        state = self._state[param]
        delayed = local(state["delayed"]).view(weight.shape)
        mean, square = (local(state[key]).view(weight.shape) for key in ("exp_avg", "exp_avg_sq"))
        columns = (~state["selected"]).nonzero().squeeze(1)
        delayed.div_(float(state["waiting"]))
        _adam_columns(group, columns, weight, delayed, mean, square, state["column_steps"], into)
        state["column_steps"][columns] += 1
        delayed.zero_()
        state["waiting"].zero_()

    def _add_pending(self) -> None:
        for param, state in self._state.items():
            pending = state.pop("pending", None)
            if pending is not None:
                piece = local(param)
                piece.add_(local(pending).view(piece.shape))


def _has_columns(param: Tensor) -> bool:
    cuts = [] if not isinstance(param, DTensor) else [cut_dim(p) for p in param.placements]
    return param.ndim > 1 and param.numel() > 0 and all(cut in (None, 0) for cut in cuts)


def _like_state(piece: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
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


def _bound(call: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: call(*args)


@torch.no_grad()
def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _adam_columns(
    group: dict[str, Any],
    columns: Tensor,
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    steps: Tensor,
    into: Tensor,
) -> None:
    """Adam on some columns, a few rows at a time; ``into``: the weight itself, or where the change goes."""
    before = steps[columns]
    decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
    for rows in _row_chunks(weight):
        w, g, m, v = (t[rows].index_select(1, columns) for t in (weight, grad, mean, square))
        old = None if into is weight else w.clone()
        for chosen, count in _by_count(before):
            if chosen is None:
                step_adam(group, w, g, m, v, count, weight_decay=decay)
            else:
                some_w, some_g, some_m, some_v = (t.index_select(1, chosen) for t in (w, g, m, v))
                step_adam(group, some_w, some_g, some_m, some_v, count, weight_decay=decay)
                for whole, part in ((w, some_w), (m, some_m), (v, some_v)):
                    whole.index_copy_(1, chosen, part)
        mean[rows].index_copy_(1, columns, m)
        square[rows].index_copy_(1, columns, v)
        into[rows].index_copy_(1, columns, w if old is None else w.sub_(old))


def _row_chunks(matrix: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], size):
        yield slice(start, start + size)


def _by_count(before: Tensor) -> Iterator[tuple[Tensor | None, float]]:
    """The columns that have had equally many updates, and how many; None for all of them."""
    counts = before.unique().tolist()
    for count in counts:
        yield (None if len(counts) == 1 else (before == count).nonzero().squeeze(1)), float(count)
