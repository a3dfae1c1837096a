"""The import graph of the package: who imports whom, at module level or inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from tests.repo.source import PACKAGE, SourceModule, resolve_from

# Imports point only upwards in this list: a room may use those named before it.
# fmt: off
LAYERS = [
    "config", "utils", "device", "observe", "accelerator", "parallel_dims", "comm", "ops", "storage_io",
    "deferred_init", "zero", "parallel", "nn", "moe", "pipe", "adapt", "activation_checkpointing", "optim",
    "compression", "runtime", "plan", "parallelize", "checkpoint", "data", "engine", "infer", "serve", "rlhf", "study",
    "launch", "compat", "cli",
    "__main__",
]
# fmt: on
STANDALONE = {"config", "utils"}  # these import nothing of ours


def module_imports(module: SourceModule, names: set[str], lazy: Mapping[str, str]) -> dict[str, int]:
    """The modules of ours that ``module`` imports, with a line each.

    ``names`` are all modules of the package; ``lazy`` maps the public names that ``thalweg`` resolves on
    first use to the module they live in.
    """
    lines_by_module: dict[str, int] = {}

    def add(name: str, line: int) -> None:
        while name not in names and "." in name:
            name = name.rpartition(".")[0]
        if name in names and name != module.name:
            lines_by_module.setdefault(name, line)

    for node in module.nodes:
        if node in module.type_checking:
            continue
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.split(".")[0] == PACKAGE:
                    add(item.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_from(module, node)
            if base.split(".")[0] == PACKAGE:
                for item in node.names:
                    name = f"{base}.{item.name}"
                    add(lazy.get(item.name, name) if base == PACKAGE else name, node.lineno)
        elif isinstance(node, ast.Attribute):
            dotted = module.dotted(node) or ""
            parts = dotted.split(".")
            if parts[0] == PACKAGE and len(parts) == 2 and parts[1] in lazy:
                add(lazy[parts[1]], node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            value = node.args[0].value
            ours = isinstance(value, str) and value.split(".")[0] == PACKAGE
            if ours and called in ("import_module", "__import__"):
                add(value, node.lineno)
    return lines_by_module


def import_graph(modules: Iterable[SourceModule], lazy: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """The edges of each module by name."""
    modules = list(modules)
    names = {module.name for module in modules}
    return {module.name: module_imports(module, names, lazy) for module in modules}


def find_layer_violations(modules: Iterable[SourceModule], lazy: Mapping[str, str]) -> list[str]:
    """Imports that point the wrong way in ``LAYERS``, and rooms that are not in it."""
    modules = list(modules)
    rooms = {module.name: module.subpackage for module in modules}
    wrong = [
        f"{m.path}: {m.subpackage} is not in the layout" for m in modules if m.subpackage and m.subpackage not in LAYERS
    ]
    for module, targets in zip(modules, import_graph(modules, lazy).values(), strict=True):
        if module.subpackage not in LAYERS:
            continue
        for target, line in targets.items():
            room = rooms[target]
            if not room or room == module.subpackage or room not in LAYERS:
                continue
            if module.subpackage in STANDALONE or LAYERS.index(room) > LAYERS.index(module.subpackage):
                wrong.append(f"{module.path}:{line}: {module.subpackage} imports {target}")
    return wrong


def find_cycles(imports: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in imports.get(name, ()):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                components.append(sorted(component))

    for name in imports:
        if name not in index:
            visit(name)
    return components
