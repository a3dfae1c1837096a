"""Deep models by shallow ones: every block of a stack costs the same, so costs are linear in depth.

Tracing takes some milliseconds a block.  A model with a stack of many equal blocks is
traced twice with the stack truncated, and each number is extrapolated on the line through
both; one with stacks of several depths (an encoder and a decoder, an image tower) once more for each.  The
blocks at the front stay, so a first block that differs is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# Up to this many blocks, in one stack and in all, the full model is traced.
MAX_FULL_DEPTH, MAX_TOTAL_FULL_DEPTH = 24, 36
_SHORT_DEPTH, _LONGER_DEPTH = 5, 6


def find_repeated_blocks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The module lists, by name, whose many children are of one class with equal parameters, or of two kinds
    in all; none where one lies in another."""
    block_lists = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) > _LONGER_DEPTH
            and len({_block_signature(m) for m in module}) <= 2
        ):
            block_lists[name] = module
    has_nested = any(one.startswith(f"{other}.") for one in block_lists for other in block_lists)
    return {} if has_nested else block_lists


def _block_signature(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())


def truncate_blocks(model: nn.Module, depths: dict[str, int]) -> nn.Module:
    """Shorten the lists of these names to so many blocks, in place."""
    for name, depth in depths.items():
        block_list = model.get_submodule(name)
        assert isinstance(block_list, nn.ModuleList)
        del block_list[depth:]
    return model


def measure_extrapolated(
    make_model: Callable[[], nn.Module], measure: Callable[[nn.Module], Any], *, full_model: bool = False
) -> Any:
    """``measure`` of the full model: at once, or extrapolated from shallow ones (see :func:`extrapolate_tree`).

    ``full_model``: do not truncate it, as its costs are not linear in depth.
    """
    model = make_model()
    depths = {name: len(stack) for name, stack in find_repeated_blocks(model).items()}
    is_shallow = max(depths.values(), default=0) <= MAX_FULL_DEPTH and sum(depths.values()) <= MAX_TOTAL_FULL_DEPTH
    if full_model or is_shallow:
        return measure(model)
    all_short = dict.fromkeys(depths, _SHORT_DEPTH)
    short = result = measure(truncate_blocks(model, all_short))
    for depth in dict.fromkeys(depths.values()):
        longer_depths = {name: _LONGER_DEPTH for name in depths if depths[name] == depth}
        longer = measure(truncate_blocks(make_model(), all_short | longer_depths))
        result = extrapolate_tree(result, short, longer, (depth - _SHORT_DEPTH) / (_LONGER_DEPTH - _SHORT_DEPTH))
    return result


def extrapolate_tree(base: Any, short: Any, longer: Any, num_steps: float) -> Any:
    """``base + steps x (longer - short)`` for every number in equal trees of dicts."""
    if isinstance(base, dict):
        keys = dict.fromkeys((*base, *short, *longer))
        return {key: extrapolate_tree(*_get_branches(key, base, short, longer), num_steps) for key in keys}
    value = base + num_steps * (longer - short)
    return round(value) if all(isinstance(one, int) for one in (base, short, longer)) else value


def _get_branches(
    key: str, base: dict[str, Any], short: dict[str, Any], longer: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """One branch of three trees; one that a tree lacks is empty there."""
    empty: Any = {} if any(isinstance(tree.get(key), dict) for tree in (base, short, longer)) else 0
    return base.get(key, empty), short.get(key, empty), longer.get(key, empty)
