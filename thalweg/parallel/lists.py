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

from thalweg.ops.grouped import Groups
from thalweg.parallel.cuts import Cut, even
from thalweg.parallel.expert import Exchange, Share, give_forward, local_rows
from thalweg.parallel.layers import call_with
from thalweg.zero.units import is_list_of_experts


def find_lists(model: nn.Module) -> dict[str, ExpertList]:
    """The lists of experts of a model, by name."""
    found = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if is_list_of_experts(name, module):
            own_forward = type(module).forward is not nn.Module.forward
            around = module if own_forward else modules[name.rpartition(".")[0]]
            found[name] = ExpertList(around, module)
    return found


@dataclass
class _Talk:
    """One forward of the layer: what was asked, and what is answered."""

    listening: bool = True
    asked: list[tuple[int, Tensor]] = field(default_factory=list)
    answers: deque[Tensor] = field(default_factory=deque)
    others: dict[int, deque[Any]] = field(default_factory=dict)


class ExpertList:
    """Alike modules in a list; ``around`` is the layer whose forward calls them."""

    ep_size = 1

    def __init__(self, around: nn.Module, experts: nn.Module) -> None:
        self.around = around
        self.names = [name for name, _ in experts.named_children()]
        self.experts = list(experts.children())
        self.beside = [] if around is experts else [m for m in around.children() if m is not experts]
        self.num_experts = len(self.experts)

    def shares(self, ranks: int) -> Iterator[Share]:
        """Whole experts; a rank has no rows of those that it does not own."""
        for owner, (start, stop) in enumerate(even(self.num_experts, ranks)):
            for index in range(start, stop):
                prefix = self.names[index]
                for path, module in self.experts[index].named_modules(prefix=prefix):
                    for key, parameter in module._parameters.items():
                        if parameter is not None:
                            spans = tuple(
                                ((0, len(parameter)),) if rank == owner else () for rank in range(ranks)
                            )
                            yield Share(f"{path}.{key}", module, key, Cut(0, len(parameter), spans))

    def spread(self, exchange: Exchange) -> None:
        """Take the exchange that brings tokens to their experts."""
        talks: list[_Talk] = []  # innermost last; a layer is not called within itself
        plain = [(expert, type(expert).forward) for expert in self.experts]
        first = [next(expert.parameters()) for expert in self.experts]
        owned = [len(local_rows(p, p.dtype)) > 0 for p in first]
        own = [pair for pair, mine in zip(plain, owned, strict=True) if mine]
        for index, expert in enumerate(self.experts):
            give_forward(expert, _stub(index, talks))
        for module in self.beside:
            give_forward(module, _remembered(module, type(module).forward, talks))
        num_experts, inner = self.num_experts, type(self.around).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            talk = _Talk()
            talks.append(talk)
            state = torch.get_rng_state()
            try:
                inner(self, *_copies(args), **{key: _copies((value,))[0] for key, value in kwargs.items()})
                seen = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
                nothing = _ask(talk, num_experts, exchange, own, seen)
                torch.set_rng_state(state)
                result = inner(self, *args, **kwargs)
                return result if nothing is None else _joined(result, nothing)
            finally:
                talks.pop()

        give_forward(self.around, forward)


def _copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors that the first run may write into."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in args)


def _stub(index: int, talks: list[_Talk]) -> Any:
    def forward(self: Any, rows: Tensor) -> Tensor:
        talk = talks[-1]
        if not talk.listening:
            return talk.answers.popleft()
        talk.asked.append((index, rows))
        return torch.zeros_like(rows)

    return forward


def _remembered(module: nn.Module, inner: Any, talks: list[_Talk]) -> Any:
    key = id(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not talks:
            return inner(self, *args, **kwargs)
        kept = talks[-1].others.setdefault(key, deque())
        if not talks[-1].listening:
            return kept.popleft()
        kept.append(inner(self, *args, **kwargs))
        return kept[-1]

    return forward


def _ask(talk: _Talk, num_experts: int, exchange: Exchange, own: list[Any], seen: Tensor) -> Tensor | None:
    """Find the answers, in the order of the calls; where none were asked, a 0 that hangs on the exchange."""
    asked, talk.listening = talk.asked, False
    sizes = [rows.shape[:-1].numel() for _, rows in asked]
    order = sorted(range(len(asked)), key=lambda i: asked[i][0])  # stable: calls of one expert stay in order
    width = asked[0][1].shape[-1] if asked else seen.shape[-1]
    flat = torch.cat([asked[i][1].reshape(-1, width) for i in order] or [seen.reshape(-1, width)[:0]])
    counts = [0] * num_experts
    for i in order:
        counts[asked[i][0]] += sizes[i]
    count = torch.tensor(counts, device=flat.device)
    index = torch.arange(num_experts, device=flat.device).repeat_interleave(count)
    rows, groups, back = exchange.to_experts(flat, Groups(count, index))
    results = [rows[:0]]
    for (expert, inner), part in zip(own, rows.split(groups.sizes), strict=True):
        if not len(part):
            continue
        parameters = {name: exchange.own(p, rows.dtype) for name, p in expert.named_parameters()}
        results.append(call_with(expert, inner, parameters, (part,), {}))
    returned = back(torch.cat(results))
    if not asked:
        return returned.sum()
    answers: list[Tensor] = [flat] * len(asked)
    for i, result in zip(order, returned.split([sizes[i] for i in order]), strict=True):
        answers[i] = result.view(asked[i][1].shape)
    talk.answers = deque(answers)
    return None


def _joined(result: Any, nothing: Tensor) -> Any:
    """The layer's output, depending on the exchange: the backward pass of the others waits for ours."""
    if isinstance(result, Tensor):
        return result + nothing.to(result.dtype)
    return type(result)((_joined(result[0], nothing), *result[1:]))
