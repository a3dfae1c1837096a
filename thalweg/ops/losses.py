"""Losses that are means over targets, taken apart into a sum and a number of targets; logits on the way to a loss.

What a function mode needs to average them over more than one call: ranks that share a sequence, or
micro-batches that hold different numbers of targets.
"""

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thalweg.device import widest_float

_SIGNATURES = {func: inspect.signature(func) for func in (F.cross_entropy, F.nll_loss)}
_LEGACY = ("size_average", "reduce")


class LossCall:
    """One call of ``F.cross_entropy`` or ``F.nll_loss``: ``arguments``, by name, and among them ``reduction``."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        bound = _SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        self._func, self.arguments = func, dict(bound.arguments)
        if any(self.arguments[name] is not None for name in _LEGACY):
            mean = "sum" if self.arguments["size_average"] is False else "mean"
            self.arguments["reduction"] = "none" if self.arguments["reduce"] is False else mean
            self.arguments.update(dict.fromkeys(_LEGACY))
        self.reduction: Any = self.arguments["reduction"]

    @classmethod
    def from_call(cls, func: Any, args: Any, kwargs: Any) -> Self | None:
        """The call, or None if it is of another function."""
        return cls(func, args, kwargs) if func in _SIGNATURES else None

    def summed_loss(self) -> Tensor:
        """The sum over targets (0-dim)."""
        arguments = {**self.arguments, "reduction": "sum"}
        return self._func(arguments.pop("input"), arguments.pop("target"), **arguments)

    def num_targets(self) -> Tensor:
        """By what the mean divides (0-dim, the widest dtype there): targets not ignored, weighted where classes are."""
        target, weight = self.arguments["target"], self.arguments["weight"]
        dtype = widest_float(target.device)
        if target.is_floating_point():  # probabilities of classes, in dim 1, or 0 without a batch
            classes = target.shape[1 if target.dim() > 1 else 0]
            return torch.tensor(float(target.numel() // classes), dtype=dtype, device=target.device)
        valid = target != self.arguments["ignore_index"]
        return (valid if weight is None else weight[target[valid]]).sum(dtype=dtype)


def leading_shape(func: Callable[..., Any], logits: Tensor, args: Any, kwargs: Any) -> torch.Size | None:
    """The shape but for the last dim that ``func``, a view or the like, gives logits; None where it touches that."""
    try:
        probe = func(torch.empty(tuple(logits.shape), dtype=logits.dtype, device="meta"), *args, **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return None
    keeps_last_dim = probe.dim() and probe.shape[-1] == logits.shape[-1] and probe.dtype == logits.dtype
    return probe.shape[:-1] if keeps_last_dim else None


def leaves_last_dim(index: Any, num_dims: int) -> bool:
    """Whether an index of slices and whole numbers does not touch the last dim (``logits[..., :-1, :]``)."""
    items = index if isinstance(index, tuple) else (index,)
    if any(type(item) not in (slice, int) and item is not Ellipsis for item in items):
        return False
    num_indexed = sum(item is not Ellipsis for item in items)
    indexes_last_dim = num_indexed == num_dims or (num_indexed < len(items) and items[-1] is not Ellipsis)
    return num_indexed <= num_dims and (not indexes_last_dim or items[-1] == slice(None))


class TargetCountMode(TorchFunctionMode):
    """While it is on, ``on_token_count`` hears of the number of targets of each loss that is a mean (0-dim, fp64).

    Such a loss without any target is 0 then, not NaN, so that a micro-batch without targets counts nothing.
    """

    def __init__(self, on_token_count: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._on_token_count = on_token_count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        loss = LossCall.from_call(func, args, kwargs)
        if loss is None or loss.reduction != "mean":
            return func(*args, **kwargs)
        count = loss.num_targets()
        self._on_token_count(count)
        total = loss.summed_loss()
        return total / count.clamp(min=torch.finfo(torch.float32).tiny).to(total.dtype)
