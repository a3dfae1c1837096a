"""Logits cut by vocabulary, and their cross-entropy without ever gathering them.

A model's head gives each tensor rank the logits of its part of the vocabulary.  The loss
needs of the others three numbers a token: the maximum, the sum of exponentials, the target's
logit (Shoeybi et al. 2019, section 3).  :class:`VocabularyShards` carries the local part
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

from thalweg.parallel.team import Team, whole

_HEAD = "vocabulary"
_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
}
_OF_LOCAL = {
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.register_hook,
}
_SHAPE_KEPT = {
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.to,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.detach,
    Tensor.neg,
    Tensor.tanh,
    torch.tanh,
    torch.clone,
}
_WITH_NUMBER = {
    Tensor.mul,
    Tensor.mul_,
    Tensor.div,
    Tensor.div_,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.__truediv__,
    torch.mul,
    torch.div,
}


class VocabularyShards(Tensor):
    """Logits of logical shape (..., V), of which this rank holds ``local`` (..., own part of V)."""

    local: Tensor
    team: Team
    sizes: list[int]

    @staticmethod
    def __new__(cls, local: Tensor, team: Team, sizes: list[int]) -> VocabularyShards:
        shape = (*local.shape[:-1], sum(sizes))
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        made.local, made.team, made.sizes = local, team, sizes
        return made

    def whole(self) -> Tensor:
        """The ordinary logits; collective over the team."""
        return whole(self.local, self.local.dim() - 1, self.sizes, self.team, _HEAD)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"VocabularyShards(shape={tuple(self.shape)}, local={tuple(self.local.shape)})"

    def _with(self, local: Tensor) -> VocabularyShards:
        return VocabularyShards(local, self.team, self.sizes)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if func is Tensor.__repr__ and isinstance(first, VocabularyShards):
            return first.__repr__()
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if isinstance(first, VocabularyShards):
            known = _known(func, first, args[1:], kwargs)
            if known is not None:
                return known[0]
        return func(*_made_whole(args), **_made_whole(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*_made_whole(args), **_made_whole(kwargs or {}))


def _known(
    func: Callable[..., Any], logits: VocabularyShards, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """The result in a 1-tuple where the vocabulary stays as it is; None where it must be whole."""
    local, size = logits.local, logits.shape[-1]
    if func in _OF_LOCAL:
        return (func(local, *rest, **kwargs),)
    if func in _SHAPE_KEPT and not any(isinstance(value, Tensor) for value in rest):
        return (logits._with(func(local, *rest, **kwargs)),)
    if func in _WITH_NUMBER and len(rest) == 1 and not isinstance(rest[0], Tensor):
        return (logits._with(func(local, *rest, **kwargs)),)
    if func in (Tensor.view, Tensor.reshape, torch.reshape):
        shape = list(rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple | torch.Size) else rest)
        if shape and all(isinstance(n, int) for n in shape) and shape[-1] == size:
            return (logits._with(local.reshape(*shape[:-1], local.shape[-1])),)
        return None
    if func in (Tensor.flatten, torch.flatten):
        ends = (*rest, *kwargs.values())
        if len(ends) == 2 and ends[1] % local.dim() < local.dim() - 1:
            return (logits._with(local.flatten(*rest, **kwargs)),)
        return None
    if func is Tensor.__getitem__ and _leaves_last(rest[0], local.dim()):
        return (logits._with(local[rest[0]]),)
    if func is F.cross_entropy:
        loss = _cross_entropy(logits, *rest, **kwargs)
        return None if loss is None else (loss,)
    return None


def _leaves_last(index: Any, dim: int) -> bool:
    """Whether an index of slices and integers does not touch the last dim."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(item, int | slice) or item is Ellipsis for item in items):
        return False
    if Ellipsis in items:
        return items[-1] is Ellipsis or (isinstance(items[-1], slice) and items[-1] == slice(None))
    return len(items) < dim or items[-1] == slice(None)


def _made_whole(tree: Any) -> Any:
    if isinstance(tree, VocabularyShards):
        return tree.whole()
    if isinstance(tree, dict):
        return {key: _made_whole(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_made_whole(value) for value in tree)
    return tree


def _cross_entropy(
    logits: VocabularyShards,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not plain or target.is_floating_point() or logits.dim() != 2 or target.dim() != 1:
        return None
    losses = token_losses(logits.local, target, logits.sizes, logits.team, ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _TokenLosses(torch.autograd.Function):
    """-log softmax at the target, of logits cut along their last dim; N tokens."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: Tensor, target: Tensor, start: int, team: Team, ignore_index: int
    ) -> Tensor:
        kept = target != ignore_index
        wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
        peak = wide.amax(-1) if wide.shape[-1] else wide.new_full(wide.shape[:1], -torch.inf)
        team.all_reduce(peak, _HEAD, dist.ReduceOp.MAX)
        exponents = torch.exp(wide - peak[:, None])
        own = kept & (target >= start) & (target < start + wide.shape[-1])
        column = torch.where(own, target - start, 0)
        hit = wide.gather(1, column[:, None])[:, 0] if wide.shape[-1] else torch.zeros_like(peak)
        sums = torch.stack([exponents.sum(-1), torch.where(own, hit - peak, 0.0)])
        team.all_reduce(sums, _HEAD)
        ctx.save_for_backward(exponents.div_(sums[0][:, None]), column, own, kept)
        ctx.dtype = local.dtype
        return torch.where(kept, sums[0].log() - sums[1], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, own, kept = ctx.saved_tensors
        scale = torch.where(kept, grads[0], 0.0)
        grad = probabilities * scale[:, None]
        if grad.shape[-1]:
            grad.scatter_add_(1, column[:, None], torch.where(own, -scale, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None, None, None


def token_losses(
    local: Tensor, target: Tensor, sizes: list[int], team: Team, ignore_index: int = -100
) -> Tensor:
    """Cross-entropy of each token (N,), in nats, fp32 or wider; 0 where the target is ``ignore_index``.

    ``local`` (N, own part of V), ``target`` (N,) of logical indices, equal on all ranks.
    """
    return _TokenLosses.apply(local, target, sum(sizes[: team.rank]), team, ignore_index)  # type: ignore[return-value]
