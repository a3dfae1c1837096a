"""Rows sorted by group, and one matrix product for all groups.

The picture, for N tokens with k choices each among E groups (experts):

    experts (N, k)  --sort once-->  order (M,): which choice stands in each row, M <= N k
    rows    (M, K)  row i is token order[i] // k; those of group e stand together
    product (M, N)  row i times the matrix of its group
    unsort          back to (N, k, ...), to be weighted and added up

Sorting is a permutation, so forward and backward are gathers alone, which run in parallel and
add in one order whatever the hardware; torch's own ``x[index]`` would scatter with additions in
the backward pass, one row after the other on a CPU.  On a CPU the product is one BLAS call a
group, written where the result belongs, bias and weight gradients included; on a GPU it is
torch's grouped kernel for bf16 (in other dtypes torch itself goes through the groups, after a wait).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from thalweg.ops._torch_private import is_fake
from thalweg.ops.autograd import with_backward


def fake_grouped_mm(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """What the operator ``name`` gives, uninitialised, where torch refuses on fakes what it does on a CPU.

    Grouped products: their form without values takes bf16 alone.  (M, K) by (E, K, N) is (M, N); in the
    backward pass (K, M) by (M, N), cut along M where ``offs`` (E,) says, is (E, K, N).
    """
    if name != "aten::_grouped_mm" or args[0].dtype == torch.bfloat16:
        return None
    first, second = args[:2]
    if not (first.is_meta or is_fake(first)):
        return None
    if first.ndim == second.ndim == 2:
        return first.new_empty(len(args[2]), first.shape[0], second.shape[1])
    return first.new_empty(*first.shape[:-1], second.shape[-1])


@dataclass(frozen=True)
class RowGroups:
    """Rows, those of a group together: ``counts`` (E,) of each group, ``group_ids`` (M,) of each row.

    ``known_counts``: the same as ``counts``, where somebody has read them already."""

    counts: Tensor
    group_ids: Tensor
    known_counts: list[int] | None = None

    @cached_property
    def counts_list(self) -> list[int]:
        """``counts`` as numbers; waits for a GPU.  Without values (a rehearsal) all groups are alike."""
        if self.known_counts is not None:
            return self.known_counts
        if is_fake(self.counts) or self.counts.is_meta:
            base, rest = divmod(len(self.group_ids), len(self.counts))
            return [base + (group < rest) for group in range(len(self.counts))]
        return self.counts.tolist()

    @cached_property
    def offsets(self) -> Tensor:
        """Where each group ends, int32."""
        return self.counts.cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class TokenPermutation:
    """N x k choices in the order of their groups.

    ``order`` (M,): the choice in each row.  ``row_of_choice`` (N * k,): the row of each choice, any
    row for one that was left out; ``valid_mask`` (N, k) says which were not, None if none was.
    """

    order: Tensor
    row_of_choice: Tensor
    groups: RowGroups
    top_k: int
    valid_mask: Tensor | None = None

    def permute(self, x: Tensor) -> Tensor:
        """``x`` (N, D) of the tokens -> (M, D), one row a choice."""
        token_of_row = self.order if self.top_k == 1 else self.order // self.top_k

        def add_up(grad: Tensor) -> Tensor:
            if not len(grad):
                return grad.new_zeros(len(self.row_of_choice) // self.top_k, grad.shape[1])
            unpermuted = grad.index_select(0, self.row_of_choice)
            if self.valid_mask is not None:
                unpermuted.mul_(self.valid_mask.reshape(-1, 1))
            return unpermuted if self.top_k == 1 else unpermuted.view(-1, self.top_k, grad.shape[1]).sum(1)

        return with_backward(x, lambda x: x.index_select(0, token_of_row), add_up)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's choices of ``weights`` (N, k) times its row: (N, D), in their dtype."""
        if self.valid_mask is not None:
            weights = weights * self.valid_mask
        if not len(rows):  # a sum over nothing, so that the backward pass still goes where the rows went
            return weights.sum(1, keepdim=True) * rows.new_zeros(1, rows.shape[1]) + rows.sum()
        unpermuted = unpermute(rows, self)
        if self.top_k == 1:
            return unpermuted * weights
        return (unpermuted.view(-1, self.top_k, rows.shape[1]) * weights[..., None]).sum(1)


def count_groups(group_ids: Tensor, num_groups: int) -> Tensor:
    """How many of ``group_ids`` (N,) int64 are of each group, and last of none (``num_groups``): (num_groups + 1,).

    ``bincount`` would wait for a GPU.
    """
    return group_ids.new_zeros(num_groups + 1).scatter_add_(0, group_ids, torch.ones_like(group_ids))


def sort_by_expert(expert_ids: Tensor, num_groups: int, valid_mask: Tensor | None = None) -> TokenPermutation:
    """Sort the choices ``expert_ids`` (N, k) by group, in order within one; those not ``valid_mask`` are left out."""
    k = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    if valid_mask is not None:
        flat = torch.where(valid_mask.reshape(-1), flat, num_groups)
    counts = count_groups(flat, num_groups)
    order = flat.argsort(stable=True)
    known_counts = None if valid_mask is None or is_fake(counts) else counts.tolist()
    num_dropped = 0 if known_counts is None else known_counts.pop()
    if num_dropped:
        order = order[: len(flat) - num_dropped]
    row_of_choice = torch.zeros_like(flat)
    row_of_choice[order] = torch.arange(len(order), device=flat.device)
    return TokenPermutation(
        order, row_of_choice, RowGroups(counts[:-1], flat[order], known_counts), k, valid_mask if num_dropped else None
    )


def unpermute(rows: Tensor, permutation: TokenPermutation) -> Tensor:
    """Undo ``permutation.take`` of rows that have one choice each, none left out."""
    order, row_of_choice = permutation.order, permutation.row_of_choice
    return with_backward(rows, lambda x: x.index_select(0, row_of_choice), lambda grad: grad.index_select(0, order))


def grouped_linear(
    x: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None, *, in_features_first: bool = False
) -> Tensor:
    """Each row of ``x`` (M, K) times the matrix of its group, plus its bias: (M, N).

    ``weight``: (E, N, K), or (E, K, N) with ``in_features_first``; ``bias``: (E, N).  All in one
    dtype, or whatever autocast makes of it.  A group without rows gets gradients of zero.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if device != "cpu" and len(x) and _grouped_mm_supports(weight, in_features_first):
        y = F.grouped_mm(x, weight if in_features_first else weight.transpose(1, 2), offs=groups.offsets)
        return y if bias is None else y + bias[groups.group_ids]
    return _GroupedLinear.apply(x, weight, bias, groups, in_features_first)  # type: ignore[return-value]


def _grouped_mm_supports(weight: Tensor, in_features_first: bool) -> bool:
    """Whether torch's grouped product has a kernel for it: bf16, both widths in multiples of 16 bytes."""
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return hasattr(F, "grouped_mm") and weight.dtype == torch.bfloat16 and aligned and weight.is_contiguous()


def has_grouped_kernel(weight: Tensor) -> bool:
    """Whether rows times their groups' matrices of ``weight`` (E, N, K) are one kernel, so that the host need not know
    whose rows are which: torch's, on Hopper and data centres' Blackwells; elsewhere torch goes through the groups."""
    if not weight.is_cuda or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in (9, 10) and _grouped_mm_supports(weight, False)


class _GroupedLinear(torch.autograd.Function):
    """One BLAS call a group, each into its part of the result."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: RowGroups, in_features_first: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.in_features_first = groups, in_features_first
        y = x.new_empty(len(x), weight.shape[2 if in_features_first else 1])
        for e, rows in _group_slices(groups):
            matrix = weight[e] if in_features_first else weight[e].t()
            if bias is None:
                torch.mm(x[rows], matrix, out=y[rows])
            else:
                torch.addmm(bias[e], x[rows], matrix, out=y[rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(x) if need_x else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = grad.new_zeros(len(weight), grad.shape[1]) if need_bias else None
        if grad_weight is not None:
            for e, size in enumerate(ctx.groups.counts_list):
                if not size:
                    grad_weight[e].zero_()
        for e, rows in _group_slices(ctx.groups):
            x_rows, grad_rows = x[rows], grad[rows]
            if grad_x is not None:
                torch.mm(grad_rows, weight[e].t() if ctx.in_features_first else weight[e], out=grad_x[rows])
            if grad_weight is not None:
                left, right = (x_rows, grad_rows) if ctx.in_features_first else (grad_rows, x_rows)
                torch.mm(left.t(), right, out=grad_weight[e])
            if grad_bias is not None:
                torch.sum(grad_rows, 0, out=grad_bias[e])
        return grad_x, grad_weight, grad_bias, None, None


def _group_slices(groups: RowGroups) -> Iterator[tuple[int, slice]]:
    """The number of each group that has rows, and where they stand."""
    start = 0
    for group, size in enumerate(groups.counts_list):
        if size:
            yield group, slice(start, start + size)
        start += size
