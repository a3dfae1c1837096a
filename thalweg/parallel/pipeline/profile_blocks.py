"""What the parts of a model cost: measured on this machine, one part at a time.

One forward pass of the whole model gives each block's inputs; then each block is timed by itself,
both ways.  What the blocks do not account for is the head's and the loss's, on the last
stage (look-ups at the entry cost next to nothing).  Memory is what autograd saves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.device import synchronize
from thalweg.parallel.pipeline.schedules.simulate import ActionCosts
from thalweg.parallel.pipeline.split_model import without_cache
from thalweg.utils.trees import iter_tensors

_NUM_ROUNDS, _SECONDS = 3, 0.5  # at least


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
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    record_call = lambda module, args, kwargs: calls.append((args, kwargs))
    with torch.no_grad(), ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(record_call, prepend=True, with_kwargs=True))
        model(**batch)
    pairs = zip(modules, calls[: len(modules)], strict=True)
    parts: list[Part] = [(module, partial(_call_detached, module, *call)) for module, call in pairs]
    *block_costs, model_cost = _measure([*parts, (model, partial(model, **batch))])
    for key in ("forward", "backward", "saved_bytes"):
        remaining = max(0, getattr(model_cost, key) - sum(getattr(cost, key) for cost in block_costs))
        block_costs[-1] = replace(block_costs[-1], **{key: getattr(block_costs[-1], key) + remaining})
    model.zero_grad(set_to_none=True)
    return block_costs


Part = tuple[nn.Module, Callable[[], Any]]  # and how it is called


def _call_detached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same call, its hidden tensor beginning a graph of its own."""

    def leaf(key: Any, value: Any) -> Any:
        is_hidden = key in (0, "hidden_states") and isinstance(value, Tensor)
        return value.detach().requires_grad_(value.is_floating_point()) if is_hidden else value

    return module(*(leaf(i, value) for i, value in enumerate(args)), **{key: leaf(key, v) for key, v in kwargs.items()})


def _measure(parts: Sequence[Part]) -> list[BlockCost]:
    """The fastest of some rounds over all parts: what else the machine does comes, goes, and only adds to a time."""
    nbytes = [_count_bytes(*part) for part in parts]
    rounds, deadline = list[list[tuple[float, float]]](), time.perf_counter() + _SECONDS
    while len(rounds) < _NUM_ROUNDS or time.perf_counter() < deadline:
        rounds.append([_time_forward_backward(call) for _, call in parts])
    by_part = (zip(*times, strict=True) for times in zip(*rounds, strict=True))
    return [BlockCost(min(fw), min(bw), *sizes) for (fw, bw), sizes in zip(by_part, nbytes, strict=True)]


def _count_bytes(module: nn.Module, call: Callable[[], Any]) -> tuple[int, int]:
    """Of what autograd saves, and of parameters."""
    saved: dict[int, int] = {}
    parameter_storages = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def record_saved(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in parameter_storages:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
        _time_forward_backward(call)
    return sum(saved.values()), sum(p.nbytes for p in module.parameters())


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
