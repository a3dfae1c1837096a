"""Running a schedule: one rank's actions, in order, with what they send and receive.

For each micro-batch and stage of this rank there is a *cell*: the stage's inputs (leaves of
its graph), its outputs, and between I and W what the second half of the backward goes on from.

    F   inputs from the batch or the previous stage -> outputs to the next stage, or the loss
    B   gradients of the outputs from the next stage -> gradients of the inputs to the previous
    I   as B, without the gradients of the weights;  W  these

Two stages on one rank hand over by reference.  What is sent follows from the schedule, on both
sides, so receivers know the order of everybody's messages beforehand (:mod:`.p2p`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.pipeline._torch_pipelining import backward_inputs, backward_weights
from thalweg.parallel.pipeline.p2p import P2PChannel
from thalweg.parallel.pipeline.schedules.schedule import Action, PipelineSchedule
from thalweg.utils.trees import iter_tensors, map_tensors

_LEDGER_NAMES = {"value": "activations", "grads": "gradients"}  # in the ledger


@dataclass(frozen=True)
class StageCallbacks:
    """How the stages of this rank are run.

    ``run(stage, value, batch)``: a stage's forward on the previous one's output (None for the
    first); the last one returns the loss (0-dim).  ``weights(stage)``: its parameters as its
    graph holds them.  ``scale_loss(loss)``: the loss as it is to be differentiated.  ``save_context()`` is asked
    after each forward for what its backward may need besides its graph, where it is recomputed;
    ``restore_context(kept)`` gives it back first.  ``before_backward(action, last)`` is told of each backward
    action, and whether it is this rank's last; ``after_backward(action)`` when it is done.
    """

    run: Callable[[int, Any, Any], Any]
    weights: Callable[[int], list[nn.Parameter]]
    scale_loss: Callable[[Tensor], Tensor]
    before_backward: Callable[[Action, bool], None] = lambda action, last: None
    after_backward: Callable[[Action], None] = lambda action: None
    save_context: Callable[[], Any] = lambda: None
    restore_context: Callable[[Any], None] = lambda kept: None


@dataclass
class _MicroBatchState:
    inputs: list[Tensor]
    outputs: list[Tensor]
    weights: list[nn.Parameter] = field(default_factory=list)
    graph_state: Any = None
    output_grads: list[Tensor | None] | None = None
    saved_context: Any = None


class ScheduleExecutor:
    """Runs one rank's part of ``schedule``.

    ``copied_stages``: stages that write to their inputs and so get copies; runs add to it what they find.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        rank: int,
        channel: P2PChannel,
        callbacks: StageCallbacks,
        copied_stages: set[int] | None = None,
    ) -> None:
        self.schedule, self.rank = schedule, rank
        self._copied_stages = set() if copied_stages is None else copied_stages
        self._channel, self._callbacks = channel, callbacks
        self._states: dict[tuple[int, int], _MicroBatchState] = {}
        self._local_outputs: dict[tuple[str, int, int], Any] = {}

    def train(self, batches: Sequence[Any]) -> None:
        """Forward and backward of all micro-batches."""
        self._execute(batches, self.schedule.orders, backward=True)

    def evaluate(self, batches: Sequence[Any]) -> None:
        """Forward of all micro-batches without gradients."""
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.schedule.orders)
        with torch.no_grad():
            self._execute(batches, orders, backward=False)

    def _execute(self, batches: Sequence[Any], orders: Sequence[Sequence[Action]], backward: bool) -> None:
        if len(batches) != self.schedule.num_micro_batches:
            raise ValueError(f"the schedule is for {self.schedule.num_micro_batches} micro-batches, got {len(batches)}")
        for source, order in enumerate(orders):
            if source != self.rank:
                sent = ((*self._destination(action), action.micro) for action in order)
                self._channel.set_recv_order(source, ((kind, micro) for rank, kind, micro in sent if rank == self.rank))
        try:
            final = orders[self.rank][-1] if orders[self.rank] else None
            for action in orders[self.rank]:
                if action.kind == "F":
                    self._forward(action, batches[action.micro], backward)
                else:
                    self._callbacks.before_backward(action, action is final)
                    self._backward(action)
                    self._callbacks.after_backward(action)
            self._channel.wait_sends()
        finally:
            self._states.clear()
            self._local_outputs.clear()

    def _destination(self, action: Action) -> tuple[int | None, tuple[str, int]]:
        """The rank that gets the result of ``action``, or None, and the kind of the message: payload and stage."""
        payload, stage = ("value", action.stage + 1) if action.kind == "F" else ("grads", action.stage - 1)
        has_target = action.kind != "W" and 0 <= stage < self.schedule.num_stages
        return self.schedule.stage_to_rank[stage] if has_target else None, (payload, stage)

    def _send_output(self, action: Action, value: Any) -> None:
        destination, kind = self._destination(action)
        if destination == self.rank:
            self._local_outputs[(*kind, action.micro)] = value
        elif destination is not None:
            self._channel.send(destination, kind, value, _LEDGER_NAMES[kind[0]])

    def _get_input(self, payload: str, stage: int, micro: int) -> Any:
        """What the neighbour of ``stage`` has made for it."""
        source = self.schedule.stage_to_rank[stage - 1 if payload == "value" else stage + 1]
        if source == self.rank:
            return self._local_outputs.pop((payload, stage, micro))
        return self._channel.receive(source, (payload, stage), micro)

    def _forward(self, action: Action, batch: Any, backward: bool) -> None:
        _, stage, micro = action
        value = None if stage == 0 else _detach_tree(self._get_input("value", stage, micro))
        result = self._run(stage, value, batch)
        if stage + 1 == self.schedule.num_stages:
            result = self._callbacks.scale_loss(result) if backward else result
        else:
            self._send_output(action, result)
        if backward:
            inputs = [t for t in iter_tensors(value) if t.requires_grad]
            outputs = [t for t in iter_tensors(result) if t.requires_grad]
            weights = self._callbacks.weights(stage) if (stage, micro) in self.schedule.split_backward else []
            context = self._callbacks.save_context()
            self._states[stage, micro] = _MicroBatchState(inputs, outputs, weights, saved_context=context)

    def _run(self, stage: int, value: Any, batch: Any) -> Any:
        stage_input = map_tensors(value, torch.clone) if stage in self._copied_stages else value
        try:
            return self._callbacks.run(stage, stage_input, batch)
        except RuntimeError as error:  # a layer that works in place must not write to a leaf
            if stage in self._copied_stages or "leaf Variable that requires grad" not in str(error):
                raise
        self._copied_stages.add(stage)
        return self._run(stage, value, batch)

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        state = self._states[stage, micro]
        self._callbacks.restore_context(state.saved_context)
        if kind == "W":
            if state.graph_state is None:
                _run_backward(state)
            else:
                backward_weights(state.weights, state.graph_state)
            del self._states[stage, micro]
            return
        if stage + 1 < self.schedule.num_stages:
            state.output_grads = self._get_input("grads", stage, micro)
        if kind == "B":
            _run_backward(state)
            grads: list[Tensor | None] = [t.grad for t in state.inputs]
            del self._states[stage, micro]
        elif state.inputs and state.outputs:
            output_grads = state.output_grads
            if output_grads is not None:
                pairs = zip(output_grads, state.outputs, strict=True)
                output_grads = [torch.zeros_like(output) if grad is None else grad for grad, output in pairs]
            input_grads, state.graph_state = backward_inputs(state.outputs, output_grads, state.inputs, state.weights)
            grads = list(input_grads)
        else:
            grads = [None] * len(state.inputs)  # nothing before this stage asks: W does it all
        self._send_output(action, grads)


def _run_backward(state: _MicroBatchState) -> None:
    if state.output_grads is None:
        pairs = [(output, None) for output in state.outputs]
    else:
        pairs = [(t, g) for t, g in zip(state.outputs, state.output_grads, strict=True) if g is not None]
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, grads)


def _detach_tree(value: Any) -> Any:
    """The same tree with tensors that begin a graph of their own."""
    return map_tensors(value, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
