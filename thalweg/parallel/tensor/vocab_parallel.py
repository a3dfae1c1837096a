"""Logits cut by vocabulary, and their cross-entropy without ever gathering them.

A model's head gives each tensor rank the logits of its part of the vocabulary.  The loss
needs of the others three numbers a token: the maximum, the sum of exponentials, the target's
logit (Shoeybi et al. 2019, section 3).  :class:`VocabParallelLogits` carries the local part
under the logical shape through what models do to logits on the way to a loss (casts, views
of the leading dims, slices of the sequence, scaling, soft caps), and is recognised by
``F.cross_entropy``.  Anything else makes it whole first, so that a metric or a sampler
sees ordinary logits; that is a collective, to be done by all ranks of the team.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from thalweg.ops._torch_private import METADATA_OPS
from thalweg.ops.losses import LossCall, leading_shape, leaves_last_dim
from thalweg.parallel.comm_group import ParallelGroup, gather_from_region

_LEDGER_NAME = "vocabulary"
# FSDP2 asks each output that needs a gradient for its ``_base``.
_LOCAL_OPS = {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_base")}
_LOCAL_OPS |= {Tensor.register_hook}
_SHAPE_PRESERVING_OPS = {
    *(getattr(Tensor, name) for name in ("float", "double", "half", "bfloat16", "to", "contiguous", "clone", "detach")),
    *(Tensor.neg, Tensor.tanh, torch.tanh, torch.clone),
}
_SCALAR_OPS = {
    *(getattr(Tensor, name) for name in ("mul", "mul_", "div", "div_", "__mul__", "__rmul__", "__truediv__")),
    *(torch.mul, torch.div),
}


class VocabParallelLogits(Tensor):
    """Logits of logical shape (..., V), of which this rank holds ``local`` (..., own part of V)."""

    local: Tensor
    tp_group: ParallelGroup
    shard_sizes: list[int]

    @staticmethod
    def __new__(cls, local: Tensor, tp_group: ParallelGroup, shard_sizes: list[int]) -> VocabParallelLogits:
        shape = (*local.shape[:-1], sum(shard_sizes))
        result = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        result.local, result.tp_group, result.shard_sizes = local, tp_group, shard_sizes
        return result

    def full_tensor(self) -> Tensor:
        """The ordinary logits; collective over the team."""
        return gather_from_region(self.local, self.local.dim() - 1, self.shard_sizes, self.tp_group, _LEDGER_NAME)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"VocabParallelLogits(shape={tuple(self.shape)}, local={tuple(self.local.shape)})"

    def _with_local(self, local: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits(local, self.tp_group, self.shard_sizes)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if func is Tensor.__repr__ and isinstance(first, VocabParallelLogits):
            return first.__repr__()
        if func in METADATA_OPS:
            return super().__torch_function__(func, types, args, kwargs)
        if isinstance(first, VocabParallelLogits):
            sharded_result = _vocab_parallel_result(func, first, args[1:], kwargs)
            if sharded_result is not None:
                return sharded_result[0]
        return func(*_materialize(args), **_materialize(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*_materialize(args), **_materialize(kwargs or {}))


def _vocab_parallel_result(
    func: Callable[..., Any], logits: VocabParallelLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """The result in a 1-tuple where the vocabulary stays as it is; None where it must be whole."""
    local = logits.local
    if func in _LOCAL_OPS:
        return (func(local, *rest, **kwargs),)
    if func in _SHAPE_PRESERVING_OPS and not any(isinstance(value, Tensor) for value in rest):
        return (logits._with_local(func(local, *rest, **kwargs)),)
    if func in _SCALAR_OPS and len(rest) == 1 and not isinstance(rest[0], Tensor):
        return (logits._with_local(func(local, *rest, **kwargs)),)
    if func in (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten):
        shape = leading_shape(func, logits, rest, kwargs)
        return None if shape is None else (logits._with_local(local.reshape(*shape, local.shape[-1])),)
    if func in (Tensor.index_select, torch.index_select) and rest[:1] == (0,) and local.dim() > 1:
        return (logits._with_local(local.index_select(*rest)),)
    if func is Tensor.__getitem__ and leaves_last_dim(rest[0], local.dim()):
        return (logits._with_local(local[rest[0]]),)
    if func is F.cross_entropy:
        loss = _sharded_cross_entropy(logits, LossCall(func, (logits, *rest), kwargs))
        return None if loss is None else (loss,)
    return None


def _materialize(tree: Any) -> Any:
    return _pytree.tree_map_only(VocabParallelLogits, VocabParallelLogits.full_tensor, tree)


def _sharded_cross_entropy(logits: VocabParallelLogits, loss: LossCall) -> Tensor | None:
    target, ignore_index = loss.arguments["target"], loss.arguments["ignore_index"]
    plain = loss.arguments["weight"] is None and loss.arguments["label_smoothing"] == 0.0
    if not plain or target.is_floating_point() or logits.dim() != 2 or target.dim() != 1:
        return None
    start = sum(logits.shard_sizes[: logits.tp_group.rank])
    losses: Any = _VocabParallelCrossEntropy.apply(logits.local, target, start, logits.tp_group, ignore_index)
    if loss.reduction == "none":
        return losses
    total = losses.sum()
    return total if loss.reduction == "sum" else total / (target != ignore_index).sum()


@torch.no_grad()
def vocab_parallel_entropy(logits: VocabParallelLogits) -> Tensor:
    """Entropy of each token (N,), in nats, of logits (N, V), fp32 or wider, without gradients; collective."""
    peak = logits.local.amax(-1)
    logits.tp_group.all_reduce(peak, _LEDGER_NAME, dist.ReduceOp.MAX)
    shifted = logits.local - peak[:, None]
    exponents = shifted.exp()
    sums = torch.stack([exponents.sum(-1), exponents.mul_(shifted).sum(-1)])
    logits.tp_group.all_reduce(sums, _LEDGER_NAME)
    return sums[0].log() - sums[1] / sums[0]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax at the target of each token (N,), in nats, fp32 or wider; 0 where that is ``ignore_index``.

    ``local`` (N, own part of V), from ``start`` on; ``target`` (N,) of logical indices, equal on all ranks.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: Tensor, target: Tensor, start: int, tp_group: ParallelGroup, ignore_index: int
    ) -> Tensor:
        valid = target != ignore_index
        upcast = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
        peak = upcast.amax(-1) if upcast.shape[-1] else upcast.new_full(upcast.shape[:1], -torch.inf)
        tp_group.all_reduce(peak, _LEDGER_NAME, dist.ReduceOp.MAX)
        exponents = torch.exp(upcast - peak[:, None])
        in_shard = valid & (target >= start) & (target < start + upcast.shape[-1])
        column = torch.where(in_shard, target - start, 0)
        target_logits = upcast.gather(1, column[:, None])[:, 0] if upcast.shape[-1] else torch.zeros_like(peak)
        sums = torch.stack([exponents.sum(-1), torch.where(in_shard, target_logits - peak, 0.0)])
        tp_group.all_reduce(sums, _LEDGER_NAME)
        ctx.save_for_backward(exponents.div_(sums[0][:, None]), column, in_shard, valid)
        ctx.dtype = local.dtype
        return torch.where(valid, sums[0].log() - sums[1], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, in_shard, valid = ctx.saved_tensors
        scale = torch.where(valid, grads[0], 0.0)
        grad = probabilities * scale[:, None]
        if grad.shape[-1]:
            grad.scatter_add_(1, column[:, None], torch.where(in_shard, -scale, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None, None, None
