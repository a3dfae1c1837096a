"""Lines of code by room, without comments, docstrings and blank lines: ``python -m tests.code_lines``."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "thalweg"
# What came after the house: other libraries' names, RLHF and adapters, the study, compression.
_MISSION = {"compat", "rlhf", "adapt", "study", "compression"}
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def count_code_lines(source: str) -> int:
    """Physical lines that hold a token of code; a docstring is none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in _LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def count_rooms(package: Path = PACKAGE) -> Counter[str]:
    """Lines by folder of the package; its own files together are "(top)"."""
    rooms: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        folder, *rest = path.relative_to(package).parts
        rooms[folder if rest else "(top)"] += count_code_lines(path.read_text())
    return rooms


if __name__ == "__main__":
    found = count_rooms()
    for room, lines in found.most_common():
        print(f"{lines:7,}  {room}")
    house = sum(lines for room, lines in found.items() if room not in _MISSION)
    print(f"{found.total():7,}  in all; {house:,} without the rooms {', '.join(sorted(_MISSION))}")
