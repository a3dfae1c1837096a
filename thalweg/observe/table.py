"""Plain text tables for the terminal."""

from collections.abc import Iterable, Sequence
from typing import Any


def format_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an aligned table: columns that hold only numbers to the right, others to the left.

    Floats are shown with four significant digits, ``None`` as ``-``.  Raises
    ``ValueError`` when a row is not as long as the headers.
    """
    body = [list(row) for row in rows]
    for row in body:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells under {len(headers)} headers: {row!r}")
    cells = [[_format_cell(value) for value in row] for row in body]
    widths = [max(len(header), *(len(row[i]) for row in cells), 0) for i, header in enumerate(headers)]
    numeric = [
        bool(body) and all(value is None or _is_number(value) for value in (row[i] for row in body))
        for i in range(len(headers))
    ]

    def format_line(values: Sequence[str]) -> str:
        padded = [
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    head = [format_line(list(headers)), format_line(["-" * width for width in widths])]
    return "\n".join([*head, *map(format_line, cells)])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
