"""The private names of ``torch.distributed.pipelining`` that Thalweg touches, in one place.

``torch_schedule_orders`` asks one of torch's schedules for the order that it would run, without
building a stage; ``backward_inputs`` and ``backward_weights`` are torch's two halves of a
stage's backward pass.

They are imported where they are used: that module takes torch's compiler along, half a second
that jobs without a pipeline should not pay, and which exchanges ``torch.manual_seed``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.pipeline.schedules.schedule import Action, ActionKind
from thalweg.zero.whole_parameter import get_autograd_side

_KINDS: dict[str, ActionKind] = {"F": "F", "I": "I", "W": "W", "B": "B"}


def torch_schedule_orders(
    class_name: str, num_ranks: int, num_micro_batches: int, stage_to_rank: Sequence[int]
) -> tuple[tuple[Action, ...], ...]:
    """Each rank's order under torch's schedule of that name, over ``len(placement)`` stages.

    Raises:
        ValueError: torch's schedule does not take these counts.
    """
    from torch.distributed.pipelining import schedules

    schedule_class = getattr(schedules, class_name)
    schedule = schedule_class.__new__(schedule_class)
    schedule.pp_group_size, schedule._n_microbatches = num_ranks, num_micro_batches
    schedule._num_stages = schedule.num_stages = len(stage_to_rank)
    schedule.n_local_stages = len(stage_to_rank) // num_ranks
    if num_micro_batches < len(stage_to_rank):
        raise ValueError(
            f"{class_name} needs at least as many micro-batches as stages: {num_micro_batches} for {len(stage_to_rank)}"
        )
    by_rank = (schedule._calculate_single_rank_operations(rank) for rank in range(num_ranks))
    return tuple(tuple(_flatten_operations(operations)) for operations in by_rank)


def _flatten_operations(operations: Sequence[Any]) -> list[Action]:
    actions: list[Action] = []
    for operation in operations:
        if operation is None:
            continue
        if operation.sub_actions:
            actions += _flatten_operations(operation.sub_actions)
        elif (kind := _KINDS.get(str(operation.computation_type.value))) is not None:
            actions.append(Action(kind, operation.stage_index, operation.microbatch_index))
    return actions


def backward_inputs(
    outputs: list[Tensor], output_grads: list[Tensor] | None, inputs: list[Tensor], weights: list[nn.Parameter]
) -> tuple[tuple[Tensor | None, ...], Any]:
    """The gradients of ``inputs``; the second result is what :func:`backward_weights` goes on from."""
    from torch.distributed.pipelining import _backward

    # torch detaches them in place, which a view refuses.
    outputs = [tensor + 0 if tensor._is_view() else tensor for tensor in outputs]
    return _backward.stage_backward_input(outputs, output_grads, inputs, iter(weights))


def backward_weights(weights: list[nn.Parameter], graph_state: Any) -> None:
    """Add the gradients of ``weights`` to what autograd has of them."""
    from torch.distributed.pipelining import _backward

    weights = [get_autograd_side(weight) for weight in weights]
    saved_grads = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    _backward.stage_backward_weight(iter(weights), graph_state)
    for weight, saved_grad in zip(weights, saved_grads, strict=True):
        new_grad = weight.grad
        if saved_grad is not None:
            weight.grad = saved_grad if new_grad is None else saved_grad.add_(new_grad)
        elif new_grad is not None:
            # It may be a view that repeats one number, or the very tensor that is being sent upstream.
            weight.grad = new_grad.clone(memory_format=torch.contiguous_format)
