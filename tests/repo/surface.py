"""The public surface as text: ``python -m tests.repo.surface > tests/repo/public_surface.txt`` freezes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import thalweg


def surface_lines() -> Iterator[str]:
    """The public names, initialize's signature, and the engine's public members with theirs."""
    yield from (f"thalweg.{name}" for name in sorted(thalweg.__all__))
    yield f"thalweg.initialize{inspect.signature(thalweg.initialize)}"
    yield f"thalweg.init_distributed{inspect.signature(thalweg.init_distributed)}"
    yield from member_lines("thalweg.Engine", thalweg.Engine)
    for name in sorted(thalweg.zero.__all__):
        value = getattr(thalweg.zero, name)
        yield f"thalweg.zero.{name}{inspect.signature(value)}" if callable(value) else f"thalweg.zero.{name}"


def member_lines(label: str, cls: type) -> Iterator[str]:
    """The public methods and properties that a class of ours defines, with signatures."""
    for name in sorted(dir(cls)):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith("thalweg"):
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            yield f"{label}.{name} -> {inspect.signature(value.fget).return_annotation}"  # type: ignore[arg-type]
        elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            yield f"{label}.{name}{inspect.signature(getattr(cls, name))}"
        else:
            yield f"{label}.{name}"


if __name__ == "__main__":
    print("\n".join(surface_lines()))
