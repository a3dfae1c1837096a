"""Reads the package's source once, for the gates."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "thalweg"


@dataclass(frozen=True)
class SourceModule:
    """One source file: ``path`` is relative to the repository, ``name`` as Python imports it."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def name(self) -> str:
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def subpackage(self) -> str:
        """The first name below the package: ``zero`` of thalweg/zero/units.py; empty for the package
        itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @cached_property
    def type_checking(self) -> set[ast.AST]:
        """Nodes below ``if TYPE_CHECKING:``, which never run."""
        inside: set[ast.AST] = set()
        for node in self.nodes:
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                for child in node.body:
                    inside.update(ast.walk(child))
        return inside

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for: ``F`` -> ``torch.nn.functional``."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for item in node.names:
                    name = item.asname or item.name.partition(".")[0]
                    names[name] = item.name if item.asname else name
            elif isinstance(node, ast.ImportFrom):
                for item in node.names:
                    names[item.asname or item.name] = f"{resolve_from(self, node)}.{item.name}"
        return names

    def dotted(self, node: ast.AST) -> str | None:
        """``nn.Linear.forward`` as ``torch.nn.Linear.forward``; None for what does not start at an import."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.aliases:
            return None
        return ".".join([self.aliases[node.id], *reversed(parts)])


def resolve_from(module: SourceModule, node: ast.ImportFrom) -> str:
    """The absolute name of the module in a ``from ... import``."""
    if not node.level:
        return node.module or ""
    base = module.name.split(".")
    base = base[: len(base) - node.level + (1 if module.is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def package_modules() -> tuple[SourceModule, ...]:
    """All source files of the package."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert paths, "no source found"
    return tuple(SourceModule(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


def snippet(text: str, path: str = "thalweg/optim/example.py") -> SourceModule:
    """A piece of source as if it stood at ``path``: the negative controls are written with it."""
    return SourceModule(path, textwrap.dedent(text))
