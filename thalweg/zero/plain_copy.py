"""Copies and saves of a model in training, as the plain model that it was before.

Below stage 3 the parameters are whole, so a deep copy (an average of weights, the best model so far) and a pickle are
of the plain model: its own classes, without the hooks of training.  At stage 3 there is no plain model on any one
rank: what would save or copy shards in silence raises, before anything is written, and says what to do.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thalweg.deferred_init.tensor_swap import deepcopy_plain
from thalweg.ops.dynamic_subclass import DynamicSubclass

_OUR_MODULES = ("thalweg.", "torch.distributed.fsdp.")


class ShardedCopyError(ValueError):
    """A whole copy was asked of a model whose parameters are sharded."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} at ZeRO stage 3 (or with tensor parallelism) would take this rank's shards for the model: "
            "use engine.state_dict(), which every rank calls (save_pretrained(DIR, state_dict=...) takes what it "
            "returns), engine.save_16bit_model(DIR), or do this inside "
            "`with thalweg.zero.GatheredParameters(list(engine.module.parameters())):`"
        )


def copy_plain(module: nn.Module, memo: dict[int, Any], *, left_out: tuple[str, ...]) -> Any:
    """A copy of ``module`` (in training, whole or a part) as a plain model with parameters of its own.

    ``memo``: as of ``copy.deepcopy``; a parameter that it knows already stands for a sharded one, too.
    ``left_out``: how the names of attributes begin that it does not have, beside those of Thalweg's.

    Raises:
        ShardedCopyError: its parameters are sharded.
    """
    own = [param for param in module.parameters() if id(param) not in memo]
    check_whole(own, "copy.deepcopy")
    for param in own:
        deepcopy_plain(param, memo)
    with _shown_plain(module, left_out):
        return copy.deepcopy(module, memo)


def check_whole(params: Iterable[Tensor], operation: str) -> None:
    """Raise where this rank has a shard of one of ``params``."""
    if any(isinstance(param, DTensor) for param in params):
        raise ShardedCopyError(operation)


class ShardedStateDict(OrderedDict[str, Any]):
    """The state dict of a sharded model: DTensors, which load into the same layout and cannot be pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedStateDict:
        return ShardedStateDict((name, copy.deepcopy(value, memo)) for name, value in self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedCopyError("saving module.state_dict()")


@contextmanager
def _shown_plain(module: nn.Module, left_out: tuple[str, ...]) -> Iterator[None]:
    undo: list[Callable[[], object]] = []
    try:
        strip_training(module, left_out, undo)
        yield
    finally:
        for step in reversed(undo):
            step()


def strip_training(module: nn.Module, left_out: tuple[str, ...], undo: list[Callable[[], object]]) -> None:
    """Give all modules their own classes, and take out what training has put into them; the steps back go into
    ``undo``.  ``left_out``: as for :func:`copy_plain`."""
    for child in module.modules():
        undo.append(partial(setattr, child, "__class__", type(child)))
        attributes = child.__dict__
        for name in [name for name in attributes if name.startswith(("_thalweg", *left_out))]:
            undo.append(partial(attributes.__setitem__, name, attributes.pop(name)))
        for hooks in [value for name, value in attributes.items() if name.endswith("_hooks")]:
            if isinstance(hooks, dict) and any(map(_is_ours, hooks.values())):
                undo.append(partial(_refill, hooks, dict(hooks)))
                _refill(hooks, {key: hook for key, hook in hooks.items() if not _is_ours(hook)})
        child.__class__ = next(cls for cls in type(child).__mro__ if not issubclass(cls, FSDPModule | DynamicSubclass))


def _refill(hooks: dict[int, Any], content: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(content)


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "hook", hook)  # torch wraps those of state dicts
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith(_OUR_MODULES)
