"""One word has one meaning: retired names stay retired, and a class name stands for one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.repo.source import SourceModule, package_modules

RETIRED = Path(__file__).with_name("retired_names.txt")


def _retired() -> tuple[set[str], set[str]]:
    files, classes = RETIRED.read_text().partition("# files\n")[2].split("# classes\n")
    return set(files.split()), set(classes.split())


def _classes(modules: Iterable[SourceModule]) -> dict[str, list[str]]:
    classes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module.path)
    return classes


def retired_in_use(modules: Iterable[SourceModule]) -> list[str]:
    """Files and classes that bear a retired name."""
    modules = list(modules)
    files, classes = _retired()
    used = [module.path for module in modules if module.name.rpartition(".")[2] in files]
    return used + [f"{name}: {paths}" for name, paths in _classes(modules).items() if name in classes]


def homonyms(modules: Iterable[SourceModule]) -> dict[str, list[str]]:
    """Class names that stand for more than one class."""
    return {name: paths for name, paths in _classes(modules).items() if len(paths) > 1}


def test_no_retired_name_is_in_use() -> None:
    assert not retired_in_use(package_modules())


def test_a_class_name_stands_for_one_class() -> None:
    assert not homonyms(package_modules())


def test_a_retired_name_is_found() -> None:
    assert retired_in_use([SourceModule("thalweg/zero/homes.py", "")])
    assert retired_in_use([SourceModule("thalweg/zero/a.py", "class Slot: pass")])


def test_a_homonym_is_found() -> None:
    assert homonyms([SourceModule(f"thalweg/zero/{name}.py", "class Plan: pass") for name in "ab"])
