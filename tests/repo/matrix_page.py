"""Writes docs/MATRIX.md from the parity matrix: `python -m tests.repo.matrix_page > docs/MATRIX.md`."""

from __future__ import annotations

import sys
from itertools import combinations as pairs_of

from tests.dist.matrix import (
    FEATURES,
    PAIRED_FEATURES,
    TRIPLES,
    UNCOVERED_PAIRS,
    UNSUPPORTED_PAIRS,
    combinations,
    combinations_with,
    covering_combinations,
    mutually_exclusive,
)

_HEAD = """# What goes together

Made from `tests/dist/matrix.py` by `python -m tests.repo.matrix_page`; a test compares the two.

Each combination below is a test: `tests/dist/test_matrix.py::test_equals_one_process[COMBINATION]`. It trains a
small model for 20 steps on forked gloo ranks and compares every loss, the gradients of the first step and the
last parameters with one plain PyTorch process, in fp32 within 1e-5 (bf16 and fp16: within a rounding's
reach). A pair that is refused has a test as well, of the error that says so. `make nightly` runs them all; the gate
runs those in bold, in which each pair and triple occurs, for 4 steps (`test_each_pair_equals_one_process`).

In a name, `s0` to `s3` are the stages, `dp2`, `tp2` and so on the ranks along an axis, the rest are switches. With
`lora` PEFT's adapters beside the linear layers are trained and all else is frozen; such a combination shows LoRA with
each of the others, and nothing of the others among themselves.
"""


def pair_status(*keys: str) -> tuple[str, str]:
    """(mark, text) of a pair or triple of features; a pair that nobody has an answer for is an error."""
    for one, other in pairs_of(keys, 2):
        pair = (one, other) if (one, other) in UNSUPPORTED_PAIRS or (one, other) in UNCOVERED_PAIRS else (other, one)
        if mutually_exclusive(one, other):
            return "·", "one of the two is chosen"
        if pair in UNSUPPORTED_PAIRS:
            return "no", f"refused: “{UNSUPPORTED_PAIRS[pair].message}”"
        if pair in UNCOVERED_PAIRS:
            return "open", UNCOVERED_PAIRS[pair]
    found = combinations_with(*keys)
    if not found:
        raise LookupError(
            f"{' x '.join(keys)}: no combination shows it, and neither UNSUPPORTED_PAIRS nor UNCOVERED_PAIRS says why"
        )
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return "yes", f"`{found[0].id}`{more}"


def render_page() -> str:
    """The whole page."""
    lines = [_HEAD, "## Pairs at a glance", ""]
    lines += ["| | " + " | ".join(PAIRED_FEATURES) + " |", "| --- |" + " --- |" * len(PAIRED_FEATURES)]
    for one in PAIRED_FEATURES:
        cells = [pair_status(one, other)[0] if one != other else "" for other in PAIRED_FEATURES]
        lines.append(f"| **{one}** {FEATURES[one].title} | " + " | ".join(cells) + " |")
    lines += ["", "## Triples", "", "| what | features | shown by, or why not |", "| --- | --- | --- |"]
    lines += [f"| {name} | {' x '.join(keys)} | {pair_status(*keys)[1]} |" for keys, name in TRIPLES]
    lines += ["", "## Pairs", "", "| pair | shown by, or why not |", "| --- | --- |"]
    for one, other in pairs_of(PAIRED_FEATURES, 2):
        if not mutually_exclusive(one, other):
            lines.append(f"| {one} x {other} | {pair_status(one, other)[1]} |")
    lines += ["", "## Combinations", "", "| ranks | tests |", "| --- | --- |"]
    for world in sorted({one.world_size for one in combinations()}):
        same_world = combinations(world)
        names = [f"**`{one.id}`**" if one in covering_combinations() else f"`{one.id}`" for one in same_world]
        lines.append(f"| {world} | {', '.join(names)} ({len(names)}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_page())
