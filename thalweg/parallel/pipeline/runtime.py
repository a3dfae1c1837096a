"""Running a schedule: one rank's actions, in order, with what they send and receive.

For each micro-batch and stage of this rank there is a *cell*: the stage's inputs (leaves of
its graph), its outputs, and between I and W what the second half of the backward goes on from.

    F   inputs from the batch or the previous stage -> outputs to the next stage, or the loss
    B   gradients of the outputs from the next stage -> gradients of the inputs to the previous
    I   as B, without the gradients of the weights;  W  these

Two stages on one rank hand over by reference.  What is sent follows from the schedule, on both
sides, so receivers know the order of everybody's messages beforehand (:mod:`.wire`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.pipeline._torch import finish_weights, halve_backward
from thalweg.parallel.pipeline.actions import Action, Schedule
from thalweg.parallel.pipeline.wire import Wire
from thalweg.utils.trees import tensors_of

_NAMES = {"value": "activations", "grads": "gradients"}  # in the ledger


@dataclass(frozen=True)
class StageCalls:
    """How the stages of this rank are run.

    ``run(stage, value, batch)``: a stage's forward on the previous one's output (None for the
    first); the last one returns the loss (0-dim).  ``weights(stage)``: its parameters as its
    graph holds them.  ``scale(loss)``: the loss as it is to be differentiated.  ``keep()`` is asked
    after each forward for what its backward may need besides its graph, where it is recomputed;
    ``resume(kept)`` gives it back first.  ``before(action, last)`` is told of each backward action, and
    whether it is this rank's last; ``after(action)`` when it is done.
    """

    run: Callable[[int, Any, Any], Any]
    weights: Callable[[int], list[nn.Parameter]]
    scale: Callable[[Tensor], Tensor]
    before: Callable[[Action, bool], None] = lambda action, last: None
    after: Callable[[Action], None] = lambda action: None
    keep: Callable[[], Any] = lambda: None
    resume: Callable[[Any], None] = lambda kept: None


@dataclass
class _Cell:
    inputs: list[Tensor]
    outputs: list[Tensor]
    weights: list[nn.Parameter] = field(default_factory=list)
    rest: Any = None
    grads: list[Tensor | None] | None = None
    kept: Any = None


class Runner:
    """Runs one rank's part of ``schedule``.

    ``copied``: stages that write to their inputs and so get copies; runs add to it what they find.
    """

    def __init__(
        self, schedule: Schedule, rank: int, wire: Wire, calls: StageCalls, copied: set[int] | None = None
    ) -> None:
        self.schedule, self.rank = schedule, rank
        self._copied = set() if copied is None else copied
        self._wire, self._calls = wire, calls
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._here: dict[tuple[str, int, int], Any] = {}

    def train(self, batches: Sequence[Any]) -> list[Tensor]:
        """Forward and backward of all micro-batches; the losses, on the rank of the last stage."""
        return self._play(batches, self.schedule.orders, backward=True)

    def evaluate(self, batches: Sequence[Any]) -> list[Tensor]:
        """Forward of all micro-batches without gradients; the losses, on the rank of the last stage."""
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.schedule.orders)
        with torch.no_grad():
            return self._play(batches, orders, backward=False)

    def _play(
        self, batches: Sequence[Any], orders: Sequence[Sequence[Action]], backward: bool
    ) -> list[Tensor]:
        if len(batches) != self.schedule.num_micro_batches:
            raise ValueError(
                f"the schedule is for {self.schedule.num_micro_batches} micro-batches, got {len(batches)}"
            )
        for source, order in enumerate(orders):
            if source != self.rank:
                self._wire.expect(
                    source, (message for a in order for message in self._messages(a, self.rank))
                )
        losses: dict[int, Tensor] = {}
        try:
            final = orders[self.rank][-1] if orders[self.rank] else None
            for action in orders[self.rank]:
                if action.kind == "F":
                    self._forward(action, batches[action.micro], losses, backward)
                else:
                    self._calls.before(action, action is final)
                    self._backward(action)
                    self._calls.after(action)
            self._wire.drain()
        finally:
            self._cells.clear()
            self._here.clear()
        return [losses[micro] for micro in sorted(losses)]

    def _messages(self, action: Action, to: int) -> list[tuple[tuple[str, int], int]]:
        """What the rank of ``action`` sends to ``to`` when it has done it: (kind, name) pairs."""
        found = []
        target = self._target(action)
        if target is not None and self.schedule.placement[target] == to:
            found.append(((_carries(action), target), action.micro))
        return found

    def _target(self, action: Action) -> int | None:
        """The stage that gets the result of ``action``, or None."""
        stage = action.stage + (1 if action.kind == "F" else -1)
        return stage if action.kind != "W" and 0 <= stage < self.schedule.num_stages else None

    def _hand_over(self, action: Action, value: Any) -> None:
        target = self._target(action)
        assert target is not None
        where = self.schedule.placement[target]
        if where == self.rank:
            self._here[_carries(action), target, action.micro] = value
        else:
            carries = _carries(action)
            self._wire.send(where, (carries, target), value, _NAMES[carries])

    def _obtain(self, carries: str, stage: int, micro: int) -> Any:
        """What the neighbour of ``stage`` has made for it."""
        source = self.schedule.placement[stage - 1 if carries == "value" else stage + 1]
        if source == self.rank:
            return self._here.pop((carries, stage, micro))
        return self._wire.receive(source, (carries, stage), micro)

    def _forward(self, action: Action, batch: Any, losses: dict[int, Tensor], backward: bool) -> None:
        _, stage, micro = action
        value = None if stage == 0 else _as_leaves(self._obtain("value", stage, micro))
        result = self._run(stage, value, batch)
        if stage + 1 == self.schedule.num_stages:
            losses[micro] = result.detach()
            result = self._calls.scale(result) if backward else result
        else:
            self._hand_over(action, result)
        if backward:
            inputs = [t for t in tensors_of(value) if t.requires_grad]
            outputs = [t for t in tensors_of(result) if t.requires_grad]
            weights = self._calls.weights(stage) if (stage, micro) in self.schedule.halved else []
            self._cells[stage, micro] = _Cell(inputs, outputs, weights, kept=self._calls.keep())

    def _run(self, stage: int, value: Any, batch: Any) -> Any:
        given = _trees(value, torch.clone) if stage in self._copied else value
        try:
            return self._calls.run(stage, given, batch)
        except RuntimeError as error:  # a layer that works in place must not write to a leaf
            if stage in self._copied or "leaf Variable that requires grad" not in str(error):
                raise
        self._copied.add(stage)
        return self._run(stage, value, batch)

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        cell = self._cells[stage, micro]
        self._calls.resume(cell.kept)
        if kind == "W":
            _finish(cell)
            del self._cells[stage, micro]
            return
        if stage + 1 < self.schedule.num_stages:
            cell.grads = self._obtain("grads", stage, micro)
        if kind == "B":
            _differentiate(cell)
            grads: list[Tensor | None] = [t.grad for t in cell.inputs]
            del self._cells[stage, micro]
        elif cell.inputs and cell.outputs:
            known = (
                None
                if cell.grads is None
                else [_or_zeros(g, t) for g, t in zip(cell.grads, cell.outputs, strict=True)]
            )
            found, cell.rest = halve_backward(cell.outputs, known, cell.inputs, cell.weights)
            grads = list(found)
        else:
            grads = [None] * len(cell.inputs)  # nothing before this stage asks: W does it all
        if self._target(action) is not None:
            self._hand_over(action, grads)


def _finish(cell: _Cell) -> None:
    if cell.rest is None:
        _differentiate(cell)
    else:
        finish_weights(cell.weights, cell.rest)


def _carries(action: Action) -> str:
    return "value" if action.kind == "F" else "grads"


def _differentiate(cell: _Cell) -> None:
    grads = cell.grads if cell.grads is not None else [None] * len(cell.outputs)
    pairs = [(t, g) for t, g in zip(cell.outputs, grads, strict=True) if cell.grads is None or g is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _as_leaves(value: Any) -> Any:
    """The same tree with tensors that begin a graph of their own."""
    return _trees(value, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def _trees(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _trees(child, change) for key, child in value.items()}
    if isinstance(value, tuple | list):
        children = [_trees(child, change) for child in value]
        return children if isinstance(value, list) else tuple(children)
    return value
