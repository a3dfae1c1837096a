"""Flatten the arguments of operators; torch's general pytrees cost more than the operators here."""

from typing import Any

from torch import Tensor

# A leaf is None; a sequence is (its type, its members).
TreeSpec = tuple[Any, list[Any]] | None
CallSpec = tuple[list[TreeSpec], dict[str, TreeSpec]]


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of ``value``, and how to put them back; a sequence without tensors is one leaf."""
    leaves: list[Any] = []
    return leaves, _append_leaves(value, leaves)


def _append_leaves(value: Any, leaves: list[Any]) -> TreeSpec:
    if type(value) in (tuple, list) and any(isinstance(x, Tensor | tuple | list) for x in value):
        return type(value), [_append_leaves(x, leaves) for x in value]
    leaves.append(value)
    return None


def unflatten(spec: TreeSpec, leaves: Any) -> Any:
    """Undo :func:`flatten`, taking from the iterator ``leaves``."""
    return next(leaves) if spec is None else spec[0](unflatten(child_spec, leaves) for child_spec in spec[1])


def flatten_call(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], CallSpec]:
    """Return the leaves of the arguments of a call, and how to put them back."""
    leaves: list[Any] = []
    spec = [_append_leaves(v, leaves) for v in args], {k: _append_leaves(v, leaves) for k, v in kwargs.items()}
    return leaves, spec


def unflatten_call(spec: CallSpec, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Undo :func:`flatten_call`."""
    leaf_iterator = iter(leaves)
    return [unflatten(part, leaf_iterator) for part in spec[0]], {
        k: unflatten(part, leaf_iterator) for k, part in spec[1].items()
    }
