"""The private names of ``torch.distributed.pipelining`` that Thalweg touches, in one place.

``torch_orders`` asks one of torch's schedules for the order that it would run, without
building a stage; ``halve_backward`` and ``finish_weights`` are torch's two halves of a
stage's backward pass.

They are imported where they are used: that module takes torch's compiler along, half a second
that jobs without a pipeline should not pay, and which exchanges ``torch.manual_seed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.pipeline.actions import Action, Kind

_KINDS: dict[str, Kind] = {"F": "F", "I": "I", "W": "W", "B": "B"}


def torch_orders(
    class_name: str, num_ranks: int, num_micro: int, placement: Sequence[int]
) -> tuple[tuple[Action, ...], ...]:
    """Each rank's order under torch's schedule of that name, over ``len(placement)`` stages.

    Raises:
        ValueError: torch's schedule does not take these counts.
    """
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, class_name)
    maker = kind.__new__(kind)
    maker.pp_group_size, maker._n_microbatches = num_ranks, num_micro
    maker._num_stages = maker.num_stages = len(placement)
    maker.n_local_stages = len(placement) // num_ranks
    if num_micro < len(placement):
        raise ValueError(
            f"{class_name} needs at least as many micro-batches as stages: {num_micro} for {len(placement)}"
        )
    return tuple(tuple(_flat(maker._calculate_single_rank_operations(rank))) for rank in range(num_ranks))


def _flat(operations: Sequence[Any]) -> list[Action]:
    found: list[Action] = []
    for operation in operations:
        if operation is None:
            continue
        if operation.sub_actions:
            found += _flat(operation.sub_actions)
        elif (kind := _KINDS.get(str(operation.computation_type.value))) is not None:
            found.append(Action(kind, operation.stage_index, operation.microbatch_index))
    return found


def halve_backward(
    outputs: list[Tensor],
    output_grads: list[Tensor] | None,
    inputs: list[Tensor],
    weights: list[nn.Parameter],
) -> tuple[tuple[Tensor | None, ...], Any]:
    """The gradients of ``inputs``; the second result is what :func:`finish_weights` goes on from."""
    from torch.distributed.pipelining import _backward

    # torch detaches them in place, which a view refuses.
    outputs = [tensor + 0 if tensor._is_view() else tensor for tensor in outputs]
    return _backward.stage_backward_input(outputs, output_grads, inputs, iter(weights))


def finish_weights(weights: list[nn.Parameter], rest: Any) -> None:
    """Add the gradients of ``weights`` to their ``.grad``."""
    from torch.distributed.pipelining import _backward

    kept = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    _backward.stage_backward_weight(iter(weights), rest)
    for weight, before in zip(weights, kept, strict=True):
        found = weight.grad
        if before is not None:
            weight.grad = before if found is None else before.add_(found)
        elif found is not None:
            # It may be a view that repeats one number, or the very tensor that is being sent upstream.
            weight.grad = found.clone(memory_format=torch.contiguous_format)
