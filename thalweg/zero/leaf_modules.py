"""Modules that are gathered as a whole at stage 3, as a program names them before ``initialize``.

A mixture of experts that uses other experts in each step, or on each rank, would be gathered in parts that ranks do not
agree on.  ``zero_optimization.leaf_module`` in the config does the same.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

_leaf_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Gather each module of these classes (or of their subclasses) as a whole; returns the modules.

    Raises:
        ValueError: the model has none.
    """
    found = _of_classes(model, leaf_module_classes)
    return _mark(model, found, f"no module of type {list(leaf_module_classes)}", raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same for the modules of these names; returns them and the names that the model does not have."""
    return _mark_by_name(model, module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same for modules whose names end so."""
    return _mark_by_name(model, suffixes, str.endswith, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or no longer."""
    (_leaf_modules.add if flag else _leaf_modules.discard)(model)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`; returns the modules."""
    found = [module for module in _of_classes(model, leaf_module_classes) if z3_leaf_module(module)]
    for module in found:
        _leaf_modules.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered as a whole."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is one of them."""
    return model in _leaf_modules


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Nothing to do: a parameter that another module uses is whole while any unit that holds it runs."""


def _of_classes(model: nn.Module, classes: Iterable[type | str]) -> list[nn.Module]:
    names = {name.rpartition(".")[2] if isinstance(name, str) else name.__name__ for name in classes}
    return [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]


def _mark_by_name(
    model: nn.Module, wanted: Sequence[str], matches: Callable[[str, str], bool], raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    found = [module for name, module in named.items() if any(matches(name, text) for text in wanted)]
    missing = [text for text in wanted if not any(matches(name, text) for name in named)]
    return _mark(model, found, f"no module of name {missing}", raise_if_not_found), missing


def _mark(model: nn.Module, found: list[nn.Module], problem: str, raise_if_not_found: bool) -> list[nn.Module]:
    if not found and raise_if_not_found:
        raise ValueError(f"{problem} is in {type(model).__name__}: name what the model has")
    for module in found:
        _leaf_modules.add(module)
    return found
