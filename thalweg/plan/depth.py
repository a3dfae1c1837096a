"""Deep models by shallow ones: every block of a stack costs the same, so costs are linear in depth.

A rehearsal takes some milliseconds a block.  A model with a stack of many equal blocks is
rehearsed twice with the stack cut short, and each number is continued on the line through
both; one with stacks of several depths (an encoder and a decoder, an image tower) once more for each.  The
blocks at the front stay, so a first block that differs is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# Up to this many blocks, in one stack and in all, the whole model is rehearsed.
SHALLOW, SHALLOW_IN_ALL = 24, 36
_SHORT, _LONGER = 5, 6


def stacks_of(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The module lists, by name, whose many children are of one class with equal parameters, or of two kinds
    in all; none where one lies in another."""
    found = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) > _LONGER
            and len({_shape(m) for m in module}) <= 2
        ):
            found[name] = module
    nested = any(one.startswith(f"{other}.") for one in found for other in found)
    return {} if nested else found


def _shape(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())


def cut(model: nn.Module, depths: dict[str, int]) -> nn.Module:
    """Shorten the lists of these names to so many blocks, in place."""
    for name, depth in depths.items():
        stack = model.get_submodule(name)
        assert isinstance(stack, nn.ModuleList)
        del stack[depth:]
    return model


def at_full_depth(
    fresh: Callable[[], nn.Module], measure: Callable[[nn.Module], Any], *, whole: bool = False
) -> Any:
    """``measure`` of the whole model: at once, or continued from shallow ones (see :func:`continued`).

    ``whole``: do not cut it, as its costs are not linear in depth.
    """
    model = fresh()
    depths = {name: len(stack) for name, stack in stacks_of(model).items()}
    shallow = max(depths.values(), default=0) <= SHALLOW and sum(depths.values()) <= SHALLOW_IN_ALL
    if whole or shallow:
        return measure(model)
    all_short = dict.fromkeys(depths, _SHORT)
    short = found = measure(cut(model, all_short))
    for depth in dict.fromkeys(depths.values()):
        these = {name: _LONGER for name in depths if depths[name] == depth}
        longer = measure(cut(fresh(), all_short | these))
        found = continued(found, short, longer, (depth - _SHORT) / (_LONGER - _SHORT))
    return found


def continued(base: Any, short: Any, longer: Any, steps: float) -> Any:
    """``base + steps x (longer - short)`` for every number in equal trees of dicts."""
    if isinstance(base, dict):
        keys = dict.fromkeys((*base, *short, *longer))
        return {key: continued(*_of(key, base, short, longer), steps) for key in keys}
    value = base + steps * (longer - short)
    return round(value) if all(isinstance(one, int) for one in (base, short, longer)) else value


def _of(
    key: str, base: dict[str, Any], short: dict[str, Any], longer: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """One branch of three trees; one that a tree lacks is empty there."""
    empty: Any = {} if any(isinstance(tree.get(key), dict) for tree in (base, short, longer)) else 0
    return base.get(key, empty), short.get(key, empty), longer.get(key, empty)
