"""The peak and the timeline of a deep model, from those of two shallow ones.

A model with a stack of many blocks is traced with the stack truncated (:mod:`.extrapolate`).  Between a mark of
the run and the next (a unit begins, its gradients are reduced) every byte is linear in depth; the peak of the
step is not, as another segment is the highest in a deep model than in a shallow one: at the end of the
forward pass, say, rather than where the embedding is gathered.  So each segment is extrapolated on its own line,
the blocks at the front by their number from there and those at the back by theirs, and the highest is taken
at full depth.  What is between front and back lies on a line between them.
"""

from __future__ import annotations

from dataclasses import asdict

from thalweg.plan.memory.rank_memory import MemoryBreakdown, MemorySample

_NUM_END_BLOCKS = 2  # blocks at the front, and at the back
_NUM_INTERPOLATED = 12  # samples of the timeline that stand for the blocks in between


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
