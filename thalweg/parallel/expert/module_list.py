"""Experts that are modules in a list, called one by one by the layer around them.

Such a layer (transformers 4, code that comes with a checkpoint, Switch) routes, cuts out each
expert's rows and puts the results together in code of its own, which nothing here needs to
know: its forward simply runs twice.

    listen   experts note the rows they are called with and answer zeros
    exchange the rows go to the ranks of their experts, are worked on, and come back
    answer   the same forward again; experts give the results in the order they were asked

What the layer calls besides (router, shared experts) is computed while listening and handed
out again while answering, and random numbers are drawn alike both times, so that the two runs
take the same way.  Gradients reach the rows through the first run and the weights of the sum
through the second.  An expert must be a function of rows; whether it mixes them does not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from thalweg.device import get_rng_state, set_rng_state
from thalweg.ops.grouped_mm import RowGroups
from thalweg.parallel.expert.expert_parallel import AllToAllDispatcher, ExpertShardSpec, local_rows
from thalweg.parallel.shard_spec import ShardSpec, split_evenly
from thalweg.parallel.tensor.layers import functional_forward, replace_forward
from thalweg.zero.units import is_expert_list


def find_expert_lists(model: nn.Module) -> dict[str, ExpertModuleList]:
    """The lists of experts of a model, by name."""
    expert_lists = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if is_expert_list(name, module):
            own_forward = type(module).forward is not nn.Module.forward
            parent = module if own_forward else modules[name.rpartition(".")[0]]
            expert_lists[name] = ExpertModuleList(parent, module)
    return expert_lists


@dataclass
class _TwoPassCall:
    """One forward of the layer: what was asked, and what is answered."""

    is_recording: bool = True
    requests: list[tuple[int, Tensor]] = field(default_factory=list)
    results: deque[Tensor] = field(default_factory=deque)
    cached_outputs: dict[int, deque[Any]] = field(default_factory=dict)


class ExpertModuleList:
    """Alike modules in a list; ``parent`` is the layer whose forward calls them."""

    ep_size = 1

    def __init__(self, parent: nn.Module, experts: nn.Module) -> None:
        self.parent = parent
        self.names = [name for name, _ in experts.named_children()]
        self.experts = list(experts.children())
        self.siblings = [] if parent is experts else [m for m in parent.children() if m is not experts]
        self.num_experts = len(self.experts)

    def shard_specs(self, num_ranks: int) -> Iterator[ExpertShardSpec]:
        """Whole experts; a rank has no rows of those that it does not own."""
        for owner, (start, stop) in enumerate(split_evenly(self.num_experts, num_ranks)):
            for index in range(start, stop):
                prefix = self.names[index]
                for path, module in self.experts[index].named_modules(prefix=prefix):
                    for key, parameter in module._parameters.items():
                        if parameter is not None:
                            spans = tuple(((0, len(parameter)),) if rank == owner else () for rank in range(num_ranks))
                            yield ExpertShardSpec(f"{path}.{key}", module, key, ShardSpec(0, len(parameter), spans))

    def attach_dispatcher(self, dispatcher: AllToAllDispatcher) -> None:
        """Take the exchange that brings tokens to their experts."""
        active_calls: list[_TwoPassCall] = []  # innermost last; a layer is not called within itself
        expert_forwards = [(expert, type(expert).forward) for expert in self.experts]
        first = [next(expert.parameters()) for expert in self.experts]
        is_local = [len(local_rows(p, p.dtype)) > 0 for p in first]
        local_experts = [pair for pair, mine in zip(expert_forwards, is_local, strict=True) if mine]
        for index, expert in enumerate(self.experts):
            replace_forward(expert, _recording_forward(index, active_calls))
        for module in self.siblings:
            replace_forward(module, _cached_forward(type(module).forward, active_calls))
        num_experts, inner = self.num_experts, type(self.parent).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = _TwoPassCall()
            active_calls.append(call)
            state = get_rng_state()
            try:
                # The first run may write into its tensors.
                first_args, first_kwargs = _pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
                inner(self, *first_args, **first_kwargs)
                sample = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
                zero = _run_experts(call, num_experts, dispatcher, local_experts, sample)
                set_rng_state(state)
                result = inner(self, *args, **kwargs)
                return result if zero is None else _with_dependency(result, zero)
            finally:
                active_calls.pop()

        replace_forward(self.parent, forward)


def _recording_forward(index: int, active_calls: list[_TwoPassCall]) -> Any:
    def forward(self: Any, rows: Tensor) -> Tensor:
        call = active_calls[-1]
        if not call.is_recording:
            return call.results.popleft()
        call.requests.append((index, rows))
        return torch.zeros_like(rows)

    return forward


def _cached_forward(inner: Any, active_calls: list[_TwoPassCall]) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not active_calls:
            return inner(self, *args, **kwargs)
        outputs = active_calls[-1].cached_outputs.setdefault(id(self), deque())
        if not active_calls[-1].is_recording:
            return outputs.popleft()
        outputs.append(inner(self, *args, **kwargs))
        return outputs[-1]

    return forward


def _run_experts(
    call: _TwoPassCall, num_experts: int, dispatcher: AllToAllDispatcher, local_experts: list[Any], sample: Tensor
) -> Tensor | None:
    """Find the answers, in the order of the calls; where none were asked, a 0 that hangs on the exchange."""
    requests, call.is_recording = call.requests, False
    sizes = [rows.shape[:-1].numel() for _, rows in requests]
    order = sorted(range(len(requests)), key=lambda i: requests[i][0])  # stable: calls of one expert stay in order
    width = requests[0][1].shape[-1] if requests else sample.shape[-1]
    flat = torch.cat([requests[i][1].reshape(-1, width) for i in order] or [sample.reshape(-1, width)[:0]])
    counts = [0] * num_experts
    for i in order:
        counts[requests[i][0]] += sizes[i]
    count = torch.tensor(counts, device=flat.device)
    index = torch.arange(num_experts, device=flat.device).repeat_interleave(count, output_size=sum(counts))
    rows, groups, combine = dispatcher.dispatch(flat, RowGroups(count, index, counts))
    results = [rows[:0]]
    for (expert, inner), expert_rows in zip(local_experts, rows.split(groups.counts_list), strict=True):
        if not len(expert_rows):
            continue
        parameters = {name: dispatcher.local_weight(p, rows.dtype) for name, p in expert.named_parameters()}
        results.append(functional_forward(expert, inner, parameters, (expert_rows,), {}))
    returned = combine(torch.cat(results))
    if not requests:
        return returned.sum()
    call_results: list[Tensor] = [flat] * len(requests)
    for i, result in zip(order, returned.split([sizes[i] for i in order]), strict=True):
        call_results[i] = result.view(requests[i][1].shape)
    call.results = deque(call_results)
    return None


def _with_dependency(result: Any, zero: Tensor) -> Any:
    """The layer's output, depending on the exchange: the backward pass of the others waits for ours."""
    if isinstance(result, Tensor):
        return result + zero.to(result.dtype)
    return type(result)((_with_dependency(result[0], zero), *result[1:]))
