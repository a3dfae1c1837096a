"""Writes docs/MATRIX.md from the parity matrix: `python -m tests.repo.matrix_page > docs/MATRIX.md`."""

from __future__ import annotations

import sys
from itertools import combinations as pairs_of

from tests.dist.matrix import (
    FEATURES,
    LATER,
    OPEN,
    PAIRED,
    REFUSED,
    TRIPLES,
    combinations,
    exclusive,
    shown_by,
)

_HEAD = """# What goes together

Made from `tests/dist/matrix.py` by `python -m tests.repo.matrix_page`; a test compares the two.

Each combination below is a test: `tests/dist/test_matrix.py::test_equals_one_process[NAME]`. It trains a
small model for 20 steps on forked gloo ranks and compares every loss, the gradients of the first step and the
last parameters with one plain PyTorch process, in fp32 within 1e-5 (bf16 and fp16: within a rounding's
reach). A pair that is refused has a test as well, of the error that says so.

In a name, `s0` to `s3` are the stages, `dp2`, `tp2` and so on the ranks along an axis, the rest are switches.
"""


def verdict(*keys: str) -> tuple[str, str]:
    """(mark, text) of a pair or triple of features; a pair that nobody has an answer for is an error."""
    for one, other in pairs_of(keys, 2):
        pair = (one, other) if (one, other) in REFUSED or (one, other) in OPEN else (other, one)
        if exclusive(one, other):
            return "·", "one of the two is chosen"
        if later := LATER.get(one) or LATER.get(other):
            return "later", later
        if pair in REFUSED:
            return "no", f"refused: “{REFUSED[pair].says}”"
        if pair in OPEN:
            return "open", OPEN[pair]
    found = shown_by(*keys)
    if not found:
        raise LookupError(
            f"{' x '.join(keys)}: no combination shows it, and neither REFUSED nor OPEN says why"
        )
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return "yes", f"`{found[0].id}`{more}"


def page() -> str:
    """The whole page."""
    lines = [_HEAD, "## Pairs at a glance", ""]
    lines += ["| | " + " | ".join(PAIRED) + " |", "| --- |" + " --- |" * len(PAIRED)]
    for one in PAIRED:
        cells = [verdict(one, other)[0] if one != other else "" for other in PAIRED]
        lines.append(f"| **{one}** {FEATURES[one].title} | " + " | ".join(cells) + " |")
    lines += ["", "## Triples", "", "| what | features | shown by, or why not |", "| --- | --- | --- |"]
    lines += [f"| {name} | {' x '.join(keys)} | {verdict(*keys)[1]} |" for keys, name in TRIPLES]
    lines += ["", "## Pairs", "", "| pair | shown by, or why not |", "| --- | --- |"]
    for one, other in pairs_of(PAIRED, 2):
        if not exclusive(one, other):
            lines.append(f"| {one} x {other} | {verdict(one, other)[1]} |")
    lines += ["", "## Combinations", "", "| ranks | tests |", "| --- | --- |"]
    for world in sorted({one.world for one in combinations()}):
        same = combinations(world)
        lines.append(f"| {world} | {', '.join(f'`{one.id}`' for one in same)} ({len(same)}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
