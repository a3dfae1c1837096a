"""The forward of each kind of split layer, given to a module by a disguised subclass.

A module keeps its class name, its parameters' names and its hooks; its parameters are this
rank's pieces.  ``column`` layers cut their outputs, ``row`` layers their inputs, so that
what lies between them needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from thalweg.ops.linear import conv1d, linear
from thalweg.ops.subclass import Disguised, subclass_of
from thalweg.parallel.cuts import Cut
from thalweg.parallel.logits import VocabularyShards
from thalweg.parallel.team import Team, gather, summed

Forward = Callable[..., Any]


class Split(Disguised):
    """Mixin of every module whose forward is one of these."""


def give_forward(module: nn.Module, forward: Forward) -> None:
    """Let this one module compute by ``forward(self, ...)``."""
    module.__class__ = subclass_of(type(module), Split, forward=forward)


@dataclass(frozen=True)
class Shared:
    """Rows of a cut layer that every rank needs some of: the tail of each rank's piece.

    ``own``: rows of the piece that are this rank's alone, before the tail; ``sizes``: lengths
    of all ranks' tails; ``select``: which rows of the joined tails this rank uses, or None for all.
    """

    own: int
    sizes: tuple[int, ...]
    select: tuple[int, ...] | None


@dataclass(frozen=True)
class Flow:
    """How activations run between split layers: whole on every rank."""

    team: Team
    name: str

    def enter(self, x: Tensor) -> Tensor:
        """A layer's input, whole."""
        entered = self.team.enter(x, self.name)
        self.team.own_stream()
        return entered

    def leave(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """A layer's partial output, summed, and its bias added once."""
        y = self.team.leave(x, self.name)
        return y if bias is None else y + bias


def multiply(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: str) -> Tensor:
    """``module``'s product with other tensors: an ``nn.Linear``'s, or a Conv1D's (weight (in, out))."""
    if _outputs_last(module):
        zeros = weight.new_zeros(weight.shape[1]) if bias is None else bias
        if kernels != "torch":
            return conv1d(x, weight, zeros)
        return torch.addmm(zeros, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])
    return F.linear(x, weight, bias) if kernels == "torch" else linear(x, weight, bias)


def _outputs_last(module: nn.Module) -> bool:
    return not isinstance(module, nn.Linear)


def column(flow: Flow, kernels: str, shared: Shared | None = None) -> Forward:
    """Outputs cut: x (..., K) whole -> y (..., own part of N)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = flow.enter(x)
        weight, bias = self.weight, self.bias
        if shared is not None:
            dim = 1 if _outputs_last(self) else 0
            weight = _joined(weight, dim, shared, flow)
            bias = None if bias is None else _joined(bias, 0, shared, flow)
        return multiply(self, x, weight, bias, kernels)

    return forward


def _joined(piece: Tensor, dim: int, shared: Shared, flow: Flow) -> Tensor:
    tail = piece.narrow(dim, shared.own, piece.size(dim) - shared.own)
    rows = gather(tail, dim, list(shared.sizes), flow.team, flow.name)
    if shared.select is not None:
        rows = rows.index_select(dim, torch.tensor(shared.select, device=piece.device))
    return torch.cat([piece.narrow(dim, 0, shared.own), rows], dim) if shared.own else rows


def row(flow: Flow, kernels: str) -> Forward:
    """Inputs cut: x (..., own part of K) -> y (..., N) whole, the bias added once."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return flow.leave(multiply(self, x, self.weight, None, kernels), self.bias)

    return forward


def embedding(flow: Flow, rows: Cut) -> Forward:
    """Rows cut by vocabulary: ids of other ranks give zeros here, and the sum is the embedding."""
    team = flow.team
    start, stop = rows.spans[team.rank][0]

    def forward(self: Any, input: Tensor) -> Tensor:
        own = (input >= start) & (input < stop)
        padding = self.padding_idx
        local_padding = padding - start if padding is not None and start <= padding < stop else None
        picked = F.embedding(torch.where(own, input - start, 0), self.weight, local_padding)
        return team.leave(picked * own.unsqueeze(-1), flow.name)

    return forward


def head(flow: Flow, kernels: str, rows: Cut) -> Forward:
    """Outputs cut by vocabulary: the logits stay cut, under their logical shape."""
    team = flow.team
    sizes = [rows.local_size(rank) for rank in range(team.size)]

    def forward(self: Any, input: Tensor) -> VocabularyShards:
        entered = team.enter(input, flow.name)
        local = multiply(self, entered, self.weight, self.bias, kernels)
        team.forget()
        return VocabularyShards(local, team, sizes)

    return forward


def partial(module: nn.Module, team: Team, name: str) -> Forward:
    """A whole module that works on a part of the activations: its gradients are summed."""
    inner = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {key: p for key, p in self._parameters.items() if p is not None}
        used = {key: summed(p, team, name) if p.requires_grad else p for key, p in named.items()}
        return call_with(self, inner, used, args, kwargs)

    return forward


def call_with(
    module: nn.Module, forward: Forward, used: dict[str, Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    bare = _Bare(module, forward)
    return functional_call(bare, {f"module.{key}": value for key, value in used.items()}, args, kwargs)


class _Bare(nn.Module):
    """Calls a given forward of a module, past its hooks."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)


def experts(module: nn.Module, flow: Flow) -> Forward:
    """A set of experts whose inner width is cut: (hidden, indices, weights) -> hidden."""
    inner = type(module).forward

    def forward(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        entered = flow.team.enter(hidden, flow.name)
        weights = flow.team.enter(top_k_weights, flow.name)
        flow.team.own_stream()
        return flow.team.leave(inner(self, entered, top_k_index, weights), flow.name)

    return forward


def own_heads(module: nn.Module, names: tuple[str, ...], span: tuple[int, int], total: int) -> Forward:
    """An attention whose named arguments carry all heads: (B * heads, ...) or (B, heads, ...)."""
    inner = type(module).forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in names:
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = _own(kwargs[name], hidden_states.shape[0], span, total)
        return inner(self, hidden_states, *args, **kwargs)

    return forward


def _own(value: Tensor, batch: int, span: tuple[int, int], total: int) -> Tensor:
    start, stop = span
    if value.dim() == 4:
        return value[:, start:stop] if value.shape[1] == total else value
    by_head = value.unflatten(0, (batch, total))[:, start:stop]
    return by_head.flatten(0, 1)
