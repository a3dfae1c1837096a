"""The forward of each kind of split layer, given to a module by a disguised subclass.

A module keeps its class name, its parameters' names and its hooks; its parameters are this
rank's pieces.  ``column_parallel`` layers cut their outputs, ``row_parallel`` layers their inputs, so that
what lies between them needs no communication.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from thalweg.ops.dynamic_subclass import DynamicSubclass, make_subclass
from thalweg.ops.linear.functional import conv1d, linear
from thalweg.parallel.comm_group import ParallelGroup, gather_params, sum_grads_over
from thalweg.parallel.shard_spec import ShardSpec
from thalweg.parallel.tensor.vocab_parallel import VocabParallelLogits

ForwardFn = Callable[..., Any]


class ReplacedForward(DynamicSubclass):
    """Mixin of every module whose forward is one of these."""


def replace_forward(module: nn.Module, forward: ForwardFn) -> None:
    """Let this one module compute by ``forward(self, ...)``."""
    module.__class__ = make_subclass(type(module), ReplacedForward, forward=forward)


@dataclass(frozen=True)
class SharedRows:
    """Rows of a cut layer that every rank needs some of: the tail of each rank's piece.

    ``num_exclusive``: rows of the piece that are this rank's alone, before the tail; ``tail_sizes``: lengths
    of all ranks' tails; ``row_spans``: which rows of the joined tails this rank uses, or None for all.
    """

    num_exclusive: int
    tail_sizes: tuple[int, ...]
    row_spans: tuple[tuple[int, int], ...] | None


def matmul(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: str) -> Tensor:
    """``module``'s product with other tensors: an ``nn.Linear``'s, or a Conv1D's (weight (in, out))."""
    if not isinstance(module, nn.Linear):
        zeros = weight.new_zeros(weight.shape[1]) if bias is None else bias
        if kernels != "torch":
            return conv1d(x, weight, zeros)
        return torch.addmm(zeros, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])
    return F.linear(x, weight, bias) if kernels == "torch" else linear(x, weight, bias)


def column_parallel(
    tp_group: ParallelGroup, name: str, kernels: str, shared_rows: SharedRows | None = None
) -> ForwardFn:
    """Outputs cut: x (..., K) whole -> y (..., own part of N)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = tp_group.copy_to_region(x, name)
        tp_group.use_local_rng()
        weight, bias = self.weight, self.bias
        if shared_rows is not None:
            out_dim = 0 if isinstance(self, nn.Linear) else 1
            weight = _gather_shared_rows(weight, out_dim, shared_rows, tp_group, name)
            bias = None if bias is None else _gather_shared_rows(bias, 0, shared_rows, tp_group, name)
        return matmul(self, x, weight, bias, kernels)

    return forward


def _gather_shared_rows(local: Tensor, dim: int, shared_rows: SharedRows, tp_group: ParallelGroup, name: str) -> Tensor:
    exclusive, tail = local.tensor_split([shared_rows.num_exclusive], dim)
    rows = gather_params(tail, dim, list(shared_rows.tail_sizes), tp_group, name)
    if shared_rows.row_spans is not None:  # no indices: to bring them to a device would wait for it
        rows = torch.cat([rows.narrow(dim, start, stop - start) for start, stop in shared_rows.row_spans], dim)
    return torch.cat([exclusive, rows], dim) if shared_rows.num_exclusive else rows


def row_parallel(tp_group: ParallelGroup, name: str, kernels: str) -> ForwardFn:
    """Inputs cut: x (..., own part of K) -> y (..., N) whole, the bias added once."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = tp_group.reduce_from_region(matmul(self, x, self.weight, None, kernels), name)
        return y if self.bias is None else y + self.bias

    return forward


def adapter_dropout(tp_group: ParallelGroup, is_part: bool) -> ForwardFn:
    """Dropout before LoRA's A, which comes after the base layer: alike on all ranks where they see the same inputs, of
    each rank's own where it sees a part of them."""

    def forward(self: Any, input: Tensor) -> Tensor:
        (tp_group.use_local_rng if is_part else tp_group.use_shared_rng)()
        return F.dropout(input, self.p, self.training)

    return forward


def vocab_parallel_embedding(tp_group: ParallelGroup, name: str, spec: ShardSpec) -> ForwardFn:
    """Rows cut by vocabulary: ids of other ranks give zeros here, and the sum is the embedding."""
    start, stop = spec.spans[tp_group.rank][0]

    def forward(self: Any, input: Tensor) -> Tensor:
        is_local = (input >= start) & (input < stop)
        padding = self.padding_idx
        local_padding = padding - start if padding is not None and start <= padding < stop else None
        embedded = F.embedding(torch.where(is_local, input - start, 0), self.weight, local_padding)
        return tp_group.reduce_from_region(embedded * is_local.unsqueeze(-1), name)

    return forward


def vocab_parallel_head(tp_group: ParallelGroup, name: str, kernels: str, spec: ShardSpec) -> ForwardFn:
    """Outputs cut by vocabulary: the logits stay cut, under their logical shape."""
    sizes = [spec.local_size(rank) for rank in range(tp_group.size)]

    def forward(self: Any, input: Tensor) -> VocabParallelLogits:
        replicated = tp_group.copy_to_region(input, name)
        local = matmul(self, replicated, self.weight, self.bias, kernels)
        tp_group.reset()
        return VocabParallelLogits(local, tp_group, sizes)

    return forward


def with_grad_all_reduce(module: nn.Module, tp_group: ParallelGroup, name: str) -> ForwardFn:
    """A whole module that works on a part of the activations: its gradients are summed."""
    inner = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trained_params = {key: p for key, p in self._parameters.items() if p is not None}
        params = {key: sum_grads_over(p, tp_group, name) if p.requires_grad else p for key, p in trained_params.items()}
        return functional_forward(self, inner, params, args, kwargs)

    return forward


def functional_forward(
    module: nn.Module, forward: ForwardFn, params: dict[str, Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    wrapper = _ForwardOnly(module, forward)
    return functional_call(wrapper, {f"module.{key}": value for key, value in params.items()}, args, kwargs)


class _ForwardOnly(nn.Module):
    """Calls a given forward of a module, past its hooks."""

    def __init__(self, module: nn.Module, forward: ForwardFn) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)


def expert_tensor_parallel(module: nn.Module, tp_group: ParallelGroup, name: str) -> ForwardFn:
    """A set of experts whose inner width is cut: (hidden, indices, weights) -> hidden."""
    inner = type(module).forward

    def forward(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        replicated = tp_group.copy_to_region(hidden, name)
        weights = tp_group.copy_to_region(top_k_weights, name)
        tp_group.use_local_rng()
        return tp_group.reduce_from_region(inner(self, replicated, top_k_index, weights), name)

    return forward


def slice_head_args(module: nn.Module, names: tuple[str, ...], span: tuple[int, int], num_heads: int) -> ForwardFn:
    """An attention whose named arguments carry all heads: (B * heads, ...) or (B, heads, ...)."""
    inner = type(module).forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in names:
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = _slice_heads(kwargs[name], hidden_states.shape[0], span, num_heads)
        return inner(self, hidden_states, *args, **kwargs)

    return forward


def _slice_heads(value: Tensor, batch: int, span: tuple[int, int], num_heads: int) -> Tensor:
    start, stop = span
    if value.dim() == 4:
        return value[:, start:stop] if value.shape[1] == num_heads else value
    by_head = value.unflatten(0, (batch, num_heads))[:, start:stop]
    return by_head.flatten(0, 1)
