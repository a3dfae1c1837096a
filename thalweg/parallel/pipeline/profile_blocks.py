"""What the parts of a model cost: measured on this machine, one part at a time.

One forward pass of the whole model gives each block's inputs; then each block is timed by itself,
both ways.  What the blocks do not account for is the head's and the loss's, on the last
stage (look-ups at the entry cost next to nothing).  Memory is what autograd saves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.device import synchronize
from thalweg.parallel.pipeline.schedules.simulate import ActionCosts
from thalweg.parallel.pipeline.split_model import without_cache
from thalweg.utils.trees import iter_tensors

_NUM_REPEATS = 3


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a forward and of a backward pass; bytes saved for the latter; bytes of parameters."""

    forward: float
    backward: float
    saved_bytes: int = 0
    parameter_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Of one micro-batch, both ways."""
        return self.forward + self.backward


def stage_costs(block_costs: Sequence[BlockCost], stage_ranges: Sequence[range]) -> ActionCosts:
    """Costs of the actions of each stage; a backward pass is half input's gradient, half weights'."""
    forward = [sum(block_costs[i].forward for i in cut) for cut in stage_ranges]
    half_backward = [sum(block_costs[i].backward for i in cut) / 2 for cut in stage_ranges]
    # An empty stage takes no time at all, which a clock cannot order.
    min_seconds = 1e-6
    forward, half_backward = ([max(min_seconds, s) for s in seconds] for seconds in (forward, half_backward))
    return ActionCosts(forward, half_backward, half_backward)


def profile_blocks(model: nn.Module, list_name: str, batch: Mapping[str, Any]) -> list[BlockCost]:
    """The cost of each block of the ``ModuleList`` named ``list_name``; the last one's includes the exit."""
    modules, batch = list(model.get_submodule(list_name).children()), {**without_cache(type(model).forward), **batch}
    calls: list[CallArgs] = []

    record_call = lambda module, args, kwargs: calls.append((args, kwargs))
    with torch.no_grad(), ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(record_call, prepend=True, with_kwargs=True))
        model(**batch)
    block_costs = [
        _measure_call(module, lambda module=module, call=call: module(*call[0], **call[1]))
        for module, call in zip(modules, (_detach_hidden(call) for call in calls[: len(modules)]), strict=True)
    ]
    model_cost = _measure_call(model, lambda: model(**batch))
    for key in ("forward", "backward", "saved_bytes"):
        remaining = max(0, getattr(model_cost, key) - sum(getattr(cost, key) for cost in block_costs))
        block_costs[-1] = replace(block_costs[-1], **{key: getattr(block_costs[-1], key) + remaining})
    model.zero_grad(set_to_none=True)
    return block_costs


CallArgs = tuple[tuple[Any, ...], dict[str, Any]]


def _detach_hidden(call: CallArgs) -> CallArgs:
    """The same call, its hidden tensor beginning a graph of its own."""

    def leaf(key: Any, value: Any) -> Any:
        is_hidden = key in (0, "hidden_states") and isinstance(value, Tensor)
        return value.detach().requires_grad_(value.is_floating_point()) if is_hidden else value

    args, kwargs = call
    return tuple(leaf(i, value) for i, value in enumerate(args)), {key: leaf(key, v) for key, v in kwargs.items()}


def _measure_call(module: nn.Module, call: Callable[[], Any]) -> BlockCost:
    saved: dict[int, int] = {}
    parameter_storages = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def record_saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
        _time_forward_backward(call)
    times = [_time_forward_backward(call) for _ in range(_NUM_REPEATS)]
    forward, backward = (sorted(column)[_NUM_REPEATS // 2] for column in zip(*times, strict=True))
    parameter_bytes = sum(p.nbytes for p in module.parameters())
    return BlockCost(forward, backward, sum(saved.values()), parameter_bytes)


def _time_forward_backward(call: Callable[[], Any]) -> tuple[float, float]:
    start = _synchronized_time()
    with torch.enable_grad():
        outputs = [t for t in iter_tensors(call()) if t.requires_grad][:1]
    middle = _synchronized_time()
    for output in outputs:
        output.float().sum().backward()
    return middle - start, _synchronized_time() - middle


def _synchronized_time() -> float:
    synchronize()
    return time.perf_counter()
