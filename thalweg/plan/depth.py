"""Deep models by two shallow ones: every block of a stack costs the same, so costs are linear in depth.

A rehearsal takes some milliseconds a block.  A model with a stack of many equal blocks is
rehearsed twice with the stack cut short, and each number is continued on the line through
both.  The blocks at the front stay, so a first block that differs is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# Below this many blocks the whole model is rehearsed.
SHALLOW = 24
_SHORT, _LONGER = 5, 6


def stacks_of(model: nn.Module) -> list[nn.ModuleList]:
    """The module lists whose children, three or more, are of one class with equal parameters."""
    found = []
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) > _LONGER
            and len({_shape(m) for m in module}) <= 2
        ):
            found.append(module)
    return found


def _shape(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())


def depth_of(model: nn.Module) -> int:
    """Blocks of the deepest stack, or 0 where depth cannot be cut."""
    stacks = stacks_of(model)
    inside = {id(child) for stack in stacks for block in stack for child in block.modules()}
    if not stacks or any(id(stack) in inside for stack in stacks) or len({len(s) for s in stacks}) > 1:
        return 0
    return len(stacks[0])


def cut(model: nn.Module, depth: int) -> nn.Module:
    """Shorten every stack of ``model`` to ``depth`` blocks, in place."""
    for stack in stacks_of(model):
        del stack[depth:]
    return model


def at_full_depth(
    fresh: Callable[[], nn.Module], measure: Callable[[nn.Module], Any], *, whole: bool = False
) -> Any:
    """``measure`` of the whole model: at once, or continued from two shallow ones (see :func:`continued`).

    ``whole``: do not cut it, as its costs are not linear in depth.
    """
    model = fresh()
    depth = depth_of(model)
    if whole or depth <= SHALLOW:
        return measure(model)
    short = measure(cut(model, _SHORT))
    longer = measure(cut(fresh(), _LONGER))
    return continued(short, longer, (depth - _SHORT) / (_LONGER - _SHORT))


def continued(short: Any, longer: Any, steps: float) -> Any:
    """``short + steps x (longer - short)`` for every number in two equal trees of dicts."""
    if isinstance(short, dict):
        keys = [*short, *(key for key in longer if key not in short)]
        return {key: continued(short.get(key, 0), longer.get(key, 0), steps) for key in keys}
    value = short + steps * (longer - short)
    return round(value) if isinstance(short, int) and isinstance(longer, int) else value
