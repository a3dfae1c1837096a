"""The peak and the timeline of a deep model, from those of two shallow ones.

A model with a stack of many blocks is rehearsed with the stack cut short (:mod:`.depth`).  Between a mark of
the run and the next (a unit begins, its gradients are reduced) every byte is linear in depth; the peak of the
whole is not, as another stretch is the highest in a deep model than in a shallow one: at the end of the
forward pass, say, rather than where the embedding is gathered.  So each stretch is continued on its own line,
the blocks at the front by their number from there and those at the back by theirs, and the highest is taken
at full depth.  What is between front and back lies on a line between them.
"""

from __future__ import annotations

from dataclasses import asdict

from thalweg.plan.process import Moment, PerRank

_ENDS = 2  # blocks at the front, and at the back
_BETWEEN = 12  # moments of the timeline that stand for the blocks in between


def aligned(stretches: dict[str, PerRank], depths: dict[str, int]) -> dict[str, dict[str, int]]:
    """The bytes of each stretch of a model whose stacks have so many blocks, under names that models of
    another depth use as well; blocks in the middle are left out."""
    found: dict[str, dict[str, int]] = {}
    for key, parts in stretches.items():
        begin, _, unit = key.rpartition("\t")
        place = _place(unit, depths)
        if place is not None:
            found[f"{begin}\t{place}"] = asdict(parts)
    return found


def highest(stretches: dict[str, dict[str, float]]) -> PerRank:
    """The bytes of the highest stretch."""
    parts = max(stretches.values(), key=lambda found: sum(found.values()))
    return PerRank(**{name: max(0, round(value)) for name, value in parts.items()})


def moments(stretches: dict[str, dict[str, float]]) -> list[Moment]:
    """One moment for each stretch, and some for the blocks between front and back."""
    found: list[Moment] = []
    before: tuple[str, int] = ("", 0)
    last: dict[str, int] = {}
    for key, values in stretches.items():
        parts = {name: max(0, round(value)) for name, value in values.items()}
        phase, unit = key.split("\t")[1], key.rpartition("\t")[2]
        stack, _, index = unit.rpartition("#")
        here = (f"{phase} {stack}", int(index)) if stack else ("", 0)
        if stack and here[0] == before[0] and (here[1] < 0) != (before[1] < 0):
            for step in range(1, _BETWEEN):
                share = step / _BETWEEN
                between = {k: round(last[k] + share * (parts[k] - last[k])) for k in parts}
                found.append(_moment(phase, between))
        before, last = here, parts
        found.append(_moment(phase, parts))
    return found


def _place(unit: str, depths: dict[str, int]) -> str | None:
    """``unit`` with its number in the stack, from the front or (below 0) the back; None in the middle."""
    for stack, depth in depths.items():
        if unit.startswith(f"{stack}."):
            number, _, rest = unit.removeprefix(f"{stack}.").partition(".")
            index = int(number)
            if _ENDS <= index < depth - _ENDS:
                return None
            return f"{stack}.{rest}#{index if index < _ENDS else index - depth}"
    return unit


def _moment(phase: str, parts: dict[str, int]) -> Moment:
    alive = {name: value for name, value in parts.items() if name not in ("process", "fragmentation")}
    return Moment(phase, alive | {"process": 0}, sum(parts.values()))
