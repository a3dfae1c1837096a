"""Sizes as people write them: ``80GiB``, ``16 GB``, ``512m``; and back.  The name that somebody may have meant."""

import difflib
import re
from collections.abc import Iterable

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_bytes(value: int | float | str, label: str = "size") -> int:
    """Bytes of a size; ``GB`` counts in thousands, ``GiB`` and a bare ``G`` in 1,024s.

    Raises:
        ValueError: no such size.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{label} is {value!r}; write bytes or a size such as 80GiB, 512MiB, 2TB")
    number, letter, binary, unit = match.groups()
    table = _DECIMAL if unit and not binary else _BINARY
    return int(float(number) * table[letter.lower()])


def format_bytes(num_bytes: float) -> str:
    """A size with three digits and a unit of 1,024s."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError


def format_seconds(seconds: float) -> str:
    """A time with three digits and a unit."""
    units = (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0))
    for unit, size, end in units:
        if seconds < end:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:,.3g} days" if seconds < 86400 * 999 else f"{seconds / 86400:,.0f} days"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Words for an error, beginning with a comma, that name the nearest of ``known``; none where none is near."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {matches[0]}?" if matches else ""
