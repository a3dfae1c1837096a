"""Which modules FSDP2 wraps: the units that are gathered and reduced together.

A unit is the model's own repeated block where it names one (``_no_split_modules``),
else each child of its module lists, else submodules by size.  What no unit holds
(embeddings, the head, small stragglers) belongs to the root unit, and so does every
parameter that is shared across units: FSDP2 wants each parameter in one group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from thalweg.zero.leaf_modules import z3_leaf_module

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class UnitPolicy:
    """User's wishes: modules below ``min_num_params`` are no units; ``leaf_*`` are kept whole."""

    min_num_params: int = 0
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()

    def is_leaf(self, name: str, module: nn.Module) -> bool:
        """Whether the user asked for this module to be one unit."""
        types = {cls.__name__ for cls in type(module).__mro__}
        types |= {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}
        by_suffix = any(name.endswith(suffix) for suffix in self.leaf_suffixes)
        return bool(types & set(self.leaf_classes)) or name in self.leaf_names or by_suffix or z3_leaf_module(module)


def num_parameters(module: nn.Module) -> int:
    """Number of elements of the module's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def find_units(model: nn.Module, policy: UnitPolicy | None = None) -> dict[str, nn.Module]:
    """Return the modules to wrap, by name, in the model's own order; the root is not among them."""
    policy = policy or UnitPolicy()
    candidates = _named_blocks(model, policy) or _module_list_children(model) or _modules_by_size(model)
    never, units = getattr(model, "_no_unit_modules", ()), dict[str, nn.Module]()
    for name, module in candidates:
        inside = any(f"{name}.".startswith(f"{outer}.") for outer in (*units, *never))
        if name and not inside and num_parameters(module) > policy.min_num_params:
            units[name] = module
    return _without_shared(model, units)


def with_large_leaves(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The units, and the large leaf modules that none of them holds (an embedding, a head).

    They bound the root unit, whose gradients are otherwise kept until the backward pass
    ends.  Only where every unit is unsharded for the whole forward pass: a model may read
    its embedding's weight outside of the embedding's forward.
    """
    min_numel = max((num_parameters(unit) for unit in units.values()), default=0) // 4
    candidates = dict(units)
    for name, module in model.named_modules():
        inside = any(name == unit or name.startswith(f"{unit}.") for unit in units)
        leaf = bool(module._parameters) and not any(True for _ in module.children())
        large = num_parameters(module) >= max(1, min_numel)
        if name and leaf and large and not inside and not isinstance(module, _CONTAINERS):
            candidates[name] = module
    unshared = _without_shared(model, candidates)
    return {name: module for name, module in candidates.items() if name in unshared or name in units}


def _named_blocks(model: nn.Module, policy: UnitPolicy) -> list[tuple[str, nn.Module]]:
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    blocks = []
    for name, module in model.named_modules():
        is_block = type(module).__name__ in names or policy.is_leaf(name, module)
        if is_block and module is not model and not isinstance(module, _CONTAINERS):
            blocks.append((name, module))
    return blocks


def _module_list_children(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children of every outermost list of two modules or more."""
    children: list[tuple[str, nn.Module]] = []
    outer_lists: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in outer_lists):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not is_expert_list(name, module):
            outer_lists.append(name)
            children += [(f"{name}.{key}", child) for key, child in module.named_children()]
    if any(isinstance(child, _CONTAINERS) for _, child in children):
        return []
    return children


def is_expert_list(name: str, module: nn.Module) -> bool:
    """Whether a list (or dict) of alike modules is called experts: a rank uses some of them only, so that
    none of them can be a unit."""
    list_name = name.rpartition(".")[2].lower()
    if "expert" not in list_name or "shared" in list_name or not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    shapes = {(type(one), *((key, p.shape, p.dtype) for key, p in one.named_parameters())) for one in module.children()}
    return len(module) > 1 and len(shapes) == 1 and num_parameters(module) > 0


def _modules_by_size(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Submodules that hold at least a hundredth of the model, as deep as that goes."""
    min_numel = max(1, num_parameters(model) // 100)

    def descend(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            size = num_parameters(child)
            may_split = size > 10 * min_numel and not getattr(child, "_is_one_unit", False)
            deeper = list(descend(f"{name}.", child)) if may_split else []
            if len(deeper) > 1 or (deeper and isinstance(child, _CONTAINERS)):
                yield from deeper
            elif size >= min_numel and not isinstance(child, _CONTAINERS):
                yield name, child

    return list(descend("", model))


def _without_shared(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop the units that share a parameter with another unit or with the rest of the model, and those in a leaf module
    that is no unit itself: the model, or a list."""
    leaves = [name and f"{name}." for name, m in model.named_modules() if z3_leaf_module(m) and name not in units]
    units = {name: unit for name, unit in units.items() if not any(name.startswith(leaf) for leaf in leaves)}
    owners: dict[int, set[str]] = {}
    names: Sequence[str] = list(units)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((unit for unit in names if name.startswith(f"{unit}.")), "")
        owners.setdefault(id(parameter), set()).add(owner)
    shared = {unit for owned in owners.values() if len(owned) > 1 for unit in owned}
    return {name: module for name, module in units.items() if name not in shared}
