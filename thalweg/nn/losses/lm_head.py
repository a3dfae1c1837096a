"""The head that makes a model's logits: found, and taught to put them off (see ``lazy_logits.py``)."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.nn.losses.lazy_logits import HeadCall, LazyLogits, LossTiling, contains_lazy_logits
from thalweg.nn.losses.tiled_cross_entropy import tile_rows
from thalweg.ops._torch_private import hook_ids, is_plain_tensor
from thalweg.ops.dynamic_subclass import DynamicSubclass, cached_subclass, original_class
from thalweg.ops.linear.functional import is_patched, must_use_plain_ops

LossFromHead = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of hidden, weight and bias


class _LazyHead(DynamicSubclass):
    _thalweg_tiling: LossTiling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        if len(args) != 1 or kwargs or not _should_be_lazy(self, args[0]):
            return call(*args, **kwargs)
        head: Any = self
        hidden: Tensor = args[0]
        autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
        autocast_context: Any = nullcontext
        if autocast:
            autocast_context = lambda: torch.autocast(hidden.device.type, dtype=dtype)
        head_call = HeadCall(self, autocast_context, self._thalweg_tiling.generation, is_patched(head))
        return LazyLogits(head_call, hidden, dtype)

    def forward(self, hidden: Tensor, compute: LossFromHead | None = None) -> Tensor:
        head: Any = self
        if compute is not None:
            return compute(hidden, head.weight, head.bias)
        return super().forward(hidden)  # pyright: ignore[reportAttributeAccessIssue]


def _should_be_lazy(head: Any, hidden: Any) -> bool:
    tiling: LossTiling = head._thalweg_tiling
    if tiling.depth == 0 or not is_plain_tensor(hidden) or hidden.dim() < 2 or must_use_plain_ops():
        return False
    rows = hidden.numel() // max(1, hidden.shape[-1])
    num_tile_rows = tiling.tile_tokens or tile_rows(rows, head.out_features, hidden.device.type)
    return rows > num_tile_rows and not hook_ids(head) - tiling.known_hooks


def find_lm_head(model: nn.Module) -> nn.Module | None:
    """The linear layer that makes the logits: Hugging Face's output embeddings, or one tied to an embedding,
    or the only one as wide as the largest embedding; None if there is no such layer or several."""
    output_embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if output_embeddings is not None:
        return output_embeddings if original_class(output_embeddings) is nn.Linear else None
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [module for module in model.modules() if original_class(module) is nn.Linear]
    tied = [layer for layer in linears if any(layer.weight is table.weight for table in tables)]
    largest = max((table.num_embeddings for table in tables), default=0)
    candidates = tied or [layer for layer in linears if layer.out_features == largest]
    return candidates[0] if len(candidates) == 1 else None


def make_logits_lazy(model: nn.Module, head: nn.Module | None = None, tile_tokens: int | None = None) -> LossTiling:
    """Let ``model`` take its cross-entropy tile by tile; comes before sharding.

    ``head``: the linear layer that makes the logits, by default :func:`find_lm_head`'s.  Raises ValueError where
    there is none, or where it has hooks or is no plain ``nn.Linear``.
    """
    head = head if head is not None else find_lm_head(model)
    if head is None:
        raise ValueError(
            f"tiling.loss found no layer of {type(model).__name__} that makes its logits (an nn.Linear tied "
            'to or as wide as its embedding): name it, as in "tiling": {"head": "lm_head"}, or set '
            "tiling.loss to false"
        )
    # One that is split over tensor-parallel ranks has a class of its own, and only a part of the weight.
    own_class = type(head).__bases__[-1] if is_patched(head) else type(head)
    if own_class is not nn.Linear or hook_ids(head) or "forward" in head.__dict__:
        raise ValueError(
            f"tiling.loss needs a head that is a plain nn.Linear, whole and without hooks; this one is a "
            f"{type(head).__name__}: set tiling.loss to false"
        )
    tiling = LossTiling(tile_tokens, weakref.ref(head))

    head._thalweg_tiling = tiling  # type: ignore[assignment]
    head.__class__ = cached_subclass(type(head), _LazyHead)
    model.register_forward_pre_hook(partial(_before_forward, tiling))
    model.register_forward_hook(partial(_after_forward, tiling), always_call=True)
    return tiling


def _before_forward(tiling: LossTiling, *_: Any) -> None:
    tiling.depth += 1


def _after_forward(tiling: LossTiling, _module: nn.Module, _args: Any, output: Any) -> Any:
    tiling.depth -= 1
    return _materialize_unused(output)


def _materialize_unused(output: Any) -> Any:
    """The output with every deferred tensor that no loss was taken of made real."""
    if isinstance(output, LazyLogits):
        return output if output._head_call.has_loss else output.materialize()
    if isinstance(output, Mapping):
        for key, value in list(output.items()):
            materialized = _materialize_unused(value)
            if materialized is not value:
                output[key] = materialized  # type: ignore[index]
        return output
    if isinstance(output, tuple | list) and any(contains_lazy_logits(part) for part in output):
        items = [_materialize_unused(part) for part in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output
