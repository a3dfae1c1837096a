"""Names that users write: matched without regard to case, and answered with the nearest one if unknown."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``, or an empty string."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(repr(by_lower[c]) for c in close)}?)" if close else ""


def match_name(kind: str, name: Any, known: Iterable[str]) -> str:
    """Return the member of ``known`` that ``name`` is, whatever its case; ``ValueError`` with the nearest."""
    names = sorted(known)
    if isinstance(name, str):
        for candidate in names:
            if candidate.lower() == name.lower():
                return candidate
    hint = did_you_mean(name, names) if isinstance(name, str) else ""
    raise ValueError(f"unknown {kind} {name!r}{hint}; known: {', '.join(names)}")


def get_keyword_parameters(function: Any, *, exclude: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """Return the keyword parameters that a function, or a class, takes, ``self`` and ``exclude`` left out."""
    excluded = {"self", *exclude}
    keyword_params: dict[str, inspect.Parameter] = {}
    for cls in inspect.getmro(function) if inspect.isclass(function) else (function,):
        target = cls.__dict__.get("__init__") if inspect.isclass(cls) else cls
        if target is None or not inspect.isfunction(target):
            continue
        parameters = inspect.signature(target).parameters
        keyword_params = {
            **{k: p for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)},
            **keyword_params,
        }
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    return {key: p for key, p in keyword_params.items() if key not in excluded}


def check_keywords(owner: str, keywords: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    """Raise ``ValueError`` for the keys of ``keywords`` that ``known`` lacks, and for required ones left out."""
    unknown = [f"{key!r}{did_you_mean(str(key), known)}" for key in keywords if key not in known]
    if unknown:
        raise ValueError(f"{owner} takes no {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in keywords]
    if missing:
        raise ValueError(f"{owner} needs {', '.join(repr(key) for key in missing)}")
