"""The head that makes a model's logits: found, and taught to put them off (see ``deferred.py``)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.nn.deferred import DeferredLogits, LossTiling, Now, Source, holds_deferred, hook_ids
from thalweg.nn.tiled_loss import tile_rows
from thalweg.ops._private import is_plain
from thalweg.ops.linear import plain_only
from thalweg.ops.subclass import Disguised, plain_class, subclass_of, undisguise
from thalweg.ops.switch import is_switched


class _Deferring(Disguised):
    _thalweg_tiling: LossTiling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        if len(args) != 1 or kwargs or not _worth_deferring(self, args[0]):
            return call(*args, **kwargs)
        head: Any = self
        hidden: Tensor = args[0]
        autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
        context: Any = nullcontext
        if autocast:
            context = lambda: torch.autocast(hidden.device.type, dtype=dtype)
        source = Source(self, hidden, context, self._thalweg_tiling.generation, is_switched(head))
        return DeferredLogits(source, hidden, dtype)

    def forward(self, hidden: Tensor, now: Now | None = None) -> Tensor:
        if now is not None and now.compute is not None:
            head: Any = self
            return now.compute(hidden, head.weight, head.bias)
        return super().forward(hidden)  # pyright: ignore[reportAttributeAccessIssue]


def _worth_deferring(head: Any, hidden: Any) -> bool:
    tiling: LossTiling = head._thalweg_tiling
    if tiling.depth == 0 or not is_plain(hidden) or hidden.dim() < 2 or plain_only():
        return False
    rows = hidden.numel() // max(1, hidden.shape[-1])
    tile = tiling.tile_tokens or tile_rows(rows, head.out_features, hidden.device.type)
    return rows > tile and not set(hook_ids(head)) - tiling.known_hooks


@cache
def _deferring_class(plain: type) -> type:
    return subclass_of(plain, _Deferring)


def find_head(model: nn.Module) -> nn.Module | None:
    """The linear layer that makes the logits: Hugging Face's output embeddings, or one tied to an embedding,
    or the only one as wide as the largest embedding; None if there is no such layer or several."""
    ask = getattr(model, "get_output_embeddings", None)
    found: Any = ask() if callable(ask) else None
    if found is not None:
        return found if plain_class(found) is nn.Linear else None
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [module for module in model.modules() if plain_class(module) is nn.Linear]
    tied = [layer for layer in linears if any(layer.weight is table.weight for table in tables)]
    largest = max((table.num_embeddings for table in tables), default=0)
    wide = tied or [layer for layer in linears if layer.out_features == largest]
    return wide[0] if len(wide) == 1 else None


def _is_whole_linear(head: nn.Module) -> bool:
    """Whether the layer computes ``x @ weight.T + bias`` and nothing else: one that is split over
    tensor-parallel ranks has a class of its own, and only a part of the weight."""
    bare = type(head).__bases__[-1] if is_switched(head) else type(head)
    return bare is nn.Linear


def defer_logits(
    model: nn.Module, head: nn.Module | None = None, tile_tokens: int | None = None
) -> LossTiling:
    """Let ``model`` take its cross-entropy tile by tile; comes before sharding.  Undo: :func:`undo_defer`.

    ``head``: the linear layer that makes the logits, by default :func:`find_head`'s.  Raises ValueError where
    there is none, or where it has hooks or is no plain ``nn.Linear``.
    """
    head = head if head is not None else find_head(model)
    if head is None:
        raise ValueError(
            f"tiling.loss found no layer of {type(model).__name__} that makes its logits (an nn.Linear tied "
            'to or as wide as its embedding): name it, as in "tiling": {"head": "lm_head"}, or set '
            "tiling.loss to false"
        )
    if not _is_whole_linear(head) or any(hook_ids(head)) or "forward" in head.__dict__:
        raise ValueError(
            f"tiling.loss needs a head that is a plain nn.Linear, whole and without hooks; this one is a "
            f"{type(head).__name__}: set tiling.loss to false"
        )
    tiling = LossTiling(tile_tokens, weakref.ref(head))

    head._thalweg_tiling = tiling  # type: ignore[assignment]
    head.__class__ = _deferring_class(type(head))
    tiling.handles = [
        model.register_forward_pre_hook(partial(_enter, tiling)),
        model.register_forward_hook(partial(_leave, tiling), always_call=True),
    ]
    return tiling


def _enter(tiling: LossTiling, *_: Any) -> None:
    tiling.depth += 1


def _leave(tiling: LossTiling, _module: nn.Module, _args: Any, output: Any) -> Any:
    tiling.depth -= 1
    return _settled(output)


def undo_defer(model: nn.Module) -> int:
    """Give the heads of ``model`` their class back; returns how many there were."""
    for module in model.modules():
        tiling = module.__dict__.pop("_thalweg_tiling", None)
        for handle in tiling.handles if tiling is not None else ():
            handle.remove()
    return undisguise(model, _Deferring)


def _settled(output: Any) -> Any:
    """The output with every deferred tensor that no loss was taken of made real."""
    if isinstance(output, DeferredLogits):
        return output if output._source.used else output.real()
    if isinstance(output, Mapping):
        for key, value in list(output.items()):
            renewed = _settled(value)
            if renewed is not value:
                output[key] = renewed  # type: ignore[index]
        return output
    if isinstance(output, tuple | list) and any(holds_deferred(part) for part in output):
        parts = [_settled(part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output
