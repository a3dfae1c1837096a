"""What the parts of a model cost: measured on this machine, one part at a time.

One forward pass of the whole model gives each block's inputs; then each block is timed by itself,
both ways.  What the blocks do not account for is the head's and the loss's, on the last
stage (look-ups at the entry cost next to nothing).  Memory is what autograd saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.pipeline.simulate import Costs
from thalweg.utils.trees import tensors_of

_REPEATS = 3


@dataclass(frozen=True)
class PartCost:
    """Seconds of a forward and of a backward pass; bytes saved for the latter; bytes of parameters."""

    forward: float
    backward: float
    saved_bytes: int = 0
    parameter_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Of one micro-batch, both ways."""
        return self.forward + self.backward


def stage_costs(parts: Sequence[PartCost], cuts: Sequence[range], transfer: float = 0.0) -> Costs:
    """Costs of the actions of each stage; a backward pass is half input's gradient, half weights'."""
    forward = [sum(parts[i].forward for i in cut) for cut in cuts]
    halves = [sum(parts[i].backward for i in cut) / 2 for cut in cuts]
    # An empty stage takes no time at all, which a clock cannot order.
    least = 1e-6
    return Costs(
        [max(least, f) for f in forward],
        [max(least, h) for h in halves],
        [max(least, h) for h in halves],
        transfer,
    )


def saved_per_stage(parts: Sequence[PartCost], cuts: Sequence[range]) -> list[int]:
    """Bytes that one micro-batch in flight holds on each stage."""
    return [sum(parts[i].saved_bytes for i in cut) for cut in cuts]


def measure_blocks(model: nn.Module, blocks: str, batch: Mapping[str, Any]) -> list[PartCost]:
    """The cost of each block of the ``ModuleList`` named ``blocks``; the last one's includes the exit."""
    modules = list(model.get_submodule(blocks).children())
    calls: list[Call] = []
    handles = [
        module.register_forward_pre_hook(
            lambda _m, args, kwargs: calls.append((args, kwargs)), prepend=True, with_kwargs=True
        )
        for module in modules
    ]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    found = [
        _timed(module, lambda module=module, call=call: module(*call[0], **call[1]))
        for module, call in zip(modules, (_leaves(call) for call in calls[: len(modules)]), strict=True)
    ]
    whole = _timed(model, lambda: model(**batch))
    last = found[-1]
    rest = [max(0.0, getattr(whole, k) - sum(getattr(c, k) for c in found)) for k in ("forward", "backward")]
    more = max(0, whole.saved_bytes - sum(cost.saved_bytes for cost in found))
    found[-1] = PartCost(
        last.forward + rest[0], last.backward + rest[1], last.saved_bytes + more, last.parameter_bytes
    )
    model.zero_grad(set_to_none=True)
    return found


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _leaves(call: Call) -> Call:
    """The same call, its hidden tensor beginning a graph of its own."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    args, kwargs = call
    first = tuple(leaf(value) if index == 0 else value for index, value in enumerate(args))
    return first, {key: leaf(v) if key == "hidden_states" else v for key, v in kwargs.items()}


def _timed(module: nn.Module, call: Callable[[], Any]) -> PartCost:
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _forward_backward(call)
    times = [_forward_backward(call) for _ in range(_REPEATS)]
    forward, backward = (sorted(column)[_REPEATS // 2] for column in zip(*times, strict=True))
    parameter_bytes = sum(p.nbytes for p in module.parameters())
    return PartCost(forward, backward, sum(saved.values()), parameter_bytes)


def _forward_backward(call: Callable[[], Any]) -> tuple[float, float]:
    start = _now()
    with torch.enable_grad():
        outputs = [t for t in tensors_of(_plain(call())) if t.requires_grad][:1]
    middle = _now()
    for output in outputs:
        output.float().sum().backward()
    return middle - start, _now() - middle


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
