"""Flatten the arguments of operators; torch's general pytrees cost more than the operators here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# A leaf is None; a sequence is (its type, its members).
Spec = tuple[Any, list[Any]] | None
CallSpec = tuple[list[Spec], dict[str, Spec]]


def flatten(value: Any, leaves: list[Any]) -> Spec:
    """Append the leaves of ``value`` to ``leaves``; a sequence without tensors is one leaf."""
    if type(value) in (tuple, list) and any(isinstance(x, Tensor | tuple | list) for x in value):
        return type(value), [flatten(x, leaves) for x in value]
    leaves.append(value)
    return None


def rebuild(spec: Spec, leaves: Any) -> Any:
    """Undo :func:`flatten`, taking from the iterator ``leaves``."""
    return next(leaves) if spec is None else spec[0](rebuild(part, leaves) for part in spec[1])


def flatten_call(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], CallSpec]:
    """Return the leaves of the arguments of a call, and how to put them back."""
    leaves: list[Any] = []
    spec = [flatten(value, leaves) for value in args], {k: flatten(v, leaves) for k, v in kwargs.items()}
    return leaves, spec


def rebuild_call(spec: CallSpec, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Undo :func:`flatten_call`."""
    rest = iter(leaves)
    return [rebuild(part, rest) for part in spec[0]], {k: rebuild(part, rest) for k, part in spec[1].items()}


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of ``value``."""
    leaves: list[Any] = []
    flatten(value, leaves)
    return leaves
