"""Deep models by shallow ones: every block of a stack costs the same, so costs are linear in depth.

Tracing takes some milliseconds a block.  A model with a stack of many equal blocks is
traced twice with the stack truncated, and each number is extrapolated on the line through
both; one with stacks of several depths (an encoder and a decoder, an image tower) once more for each.  The
blocks at the front stay, so a first block that differs is counted once.

Between a mark of
the run and the next (a unit begins, its gradients are reduced) every byte is linear in depth; the peak of the
step is not, as another segment is the highest in a deep model than in a shallow one: at the end of the
forward pass, say, rather than where the embedding is gathered.  So each segment is extrapolated on its own line,
the blocks at the front by their number from there and those at the back by theirs, and the highest is taken
at full depth.  What is between front and back lies on a line between them.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn

from thalweg.plan.memory.rank_memory import MemoryBreakdown, MemorySample

# Up to this many blocks, in one stack and in all, the full model is traced.
MAX_FULL_DEPTH, MAX_TOTAL_FULL_DEPTH = 24, 36
_NUM_END_BLOCKS = 2  # blocks at the front, and at the back
_SHORT_DEPTH, _LONGER_DEPTH = 2 * _NUM_END_BLOCKS, 2 * _NUM_END_BLOCKS + 1
_NUM_INTERPOLATED = 12  # samples of the timeline that stand for the blocks in between


def find_repeated_blocks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The module lists, by name, whose many children are of one class with equal parameters, or of two kinds
    in all; none where one lies in another."""
    block_lists = {}
    for name, module in model.named_modules():
        is_stack = isinstance(module, nn.ModuleList) and len(module) > _LONGER_DEPTH
        if is_stack and len({_block_signature(m) for m in module.children()}) <= 2:
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
    truncate_blocks(model, dict.fromkeys(depths, _LONGER_DEPTH))  # copies of it are cheap

    def measure_truncated(longer_depths: dict[str, int]) -> Any:
        return measure(truncate_blocks(copy.deepcopy(model), dict.fromkeys(depths, _SHORT_DEPTH) | longer_depths))

    short = result = measure_truncated({})
    for depth in dict.fromkeys(depths.values()):
        longer_depths = {name: _LONGER_DEPTH for name in depths if depths[name] == depth}
        longer = measure_truncated(longer_depths)
        result = extrapolate_tree(result, short, longer, (depth - _SHORT_DEPTH) / (_LONGER_DEPTH - _SHORT_DEPTH))
    return result


def extrapolate_tree(base: Any, short: Any, longer: Any, num_steps: float) -> Any:
    """``base + steps x (longer - short)`` for every number in equal trees of dicts."""
    if isinstance(base, dict):
        result, trees = {}, (base, short, longer)
        for key in dict.fromkeys((*base, *short, *longer)):
            # A branch that a tree lacks is empty there.
            empty: Any = {} if any(isinstance(tree.get(key), dict) for tree in trees) else 0
            result[key] = extrapolate_tree(*(tree.get(key, empty) for tree in trees), num_steps=num_steps)
        return result
    value = base + num_steps * (longer - short)
    return round(value) if all(isinstance(one, int) for one in (base, short, longer)) else value


def align_segments(segments: dict[str, MemoryBreakdown], depths: dict[str, int]) -> dict[str, dict[str, int]]:
    """The bytes of each segment of a model whose stacks have so many blocks, under names that models of
    another depth use as well; blocks in the middle are left out."""
    result: dict[str, dict[str, int]] = {}
    for key, parts in segments.items():
        begin, _, unit = key.rpartition("\t")
        position = _get_position(unit, depths)
        if position is not None:
            result[f"{begin}\t{position}"] = asdict(parts)
    return result


def get_highest_segment(segments: dict[str, dict[str, float]]) -> MemoryBreakdown:
    """The bytes of the highest segment."""
    parts = max(segments.values(), key=lambda found: sum(found.values()))
    return MemoryBreakdown(**{name: max(0, round(value)) for name, value in parts.items()})


def build_timeline(segments: dict[str, dict[str, float]]) -> list[MemorySample]:
    """One sample for each segment, and some for the blocks between front and back."""
    samples: list[MemorySample] = []
    previous_position: tuple[str, int] = ("", 0)
    previous_parts: dict[str, int] = {}
    for key, values in segments.items():
        parts = {name: max(0, round(value)) for name, value in values.items()}
        phase, unit = key.split("\t")[1], key.rpartition("\t")[2]
        stack, _, index = unit.rpartition("#")
        position = (f"{phase} {stack}", int(index)) if stack else ("", 0)
        if stack and position[0] == previous_position[0] and (position[1] < 0) != (previous_position[1] < 0):
            for step in range(1, _NUM_INTERPOLATED):
                fraction = step / _NUM_INTERPOLATED
                interpolated = {k: round(previous_parts[k] + fraction * (parts[k] - previous_parts[k])) for k in parts}
                samples.append(_make_sample(phase, interpolated))
        previous_position, previous_parts = position, parts
        samples.append(_make_sample(phase, parts))
    return samples


def _get_position(unit: str, depths: dict[str, int]) -> str | None:
    """``unit`` with its number in the stack, from the front or (below 0) the back; None in the middle."""
    for stack, depth in depths.items():
        if unit.startswith(f"{stack}."):
            number, _, rest = unit.removeprefix(f"{stack}.").partition(".")
            index = int(number)
            if _NUM_END_BLOCKS <= index < depth - _NUM_END_BLOCKS:
                return None
            return f"{stack}.{rest}#{index if index < _NUM_END_BLOCKS else index - depth}"
    return unit


def _make_sample(phase: str, parts: dict[str, int]) -> MemorySample:
    live_bytes = {name: value for name, value in parts.items() if name not in ("process", "fragmentation")}
    return MemorySample(phase, live_bytes | {"process": 0}, sum(parts.values()))
