"""Imports point only upwards in the layout, and there is no cycle."""

from __future__ import annotations

import ast
import importlib
from types import ModuleType

import pytest

import thalweg
from tests.repo.imports import find_cycles, find_layer_violations, import_graph
from tests.repo.source import PACKAGE, ROOT, SourceModule, package_modules, snippet

LAZY = thalweg._PUBLIC


def test_imports_point_upwards() -> None:
    wrong = find_layer_violations(package_modules(), LAZY)
    assert not wrong, "\n" + "\n".join(wrong)


def test_there_is_no_cycle() -> None:
    assert find_cycles(import_graph(package_modules(), LAZY)) == []


def test_the_graph_sees_the_package() -> None:
    imports = import_graph(package_modules(), LAZY)
    assert "thalweg.utils.env" in imports["thalweg.utils.log"]
    assert "thalweg.launch.local" in imports["thalweg.cli.run"], "imports inside functions count"


def missing_names(module: SourceModule) -> set[str]:
    """Names of the package that ``module`` uses and that are not there: its first attribute past a module's own."""
    used = {name for name in module.aliases.values() if name.startswith(f"{PACKAGE}.")}
    used |= {name for node in module.nodes if isinstance(node, ast.Attribute) and (name := module.dotted(node))}
    missing = set()
    for name in used:
        first, *parts = name.split(".")
        found: object = importlib.import_module(first) if first == PACKAGE else None
        while parts and isinstance(found, ModuleType):
            part = parts.pop(0)
            if not hasattr(found, part):
                try:
                    importlib.import_module(f"{found.__name__}.{part}")
                except ModuleNotFoundError as error:  # of its own libraries (Triton) nothing is said here
                    if (error.name or "").startswith(PACKAGE):
                        missing.add(name)
                    break
            found = getattr(found, part)
    return missing


def test_benchmarks_and_examples_name_what_is_there() -> None:
    """No test runs all of them: a row that takes an hour shall not end at a name that moved."""
    paths = [path for folder in ("bench", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 20
    modules = [SourceModule(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    assert {one.path: missing for one in modules if (missing := missing_names(one))} == {}


def test_a_name_that_moved_is_flagged() -> None:
    text = "from thalweg.optim import build, nowhere\nbuild.build_optimizer(1)\nbuild.make_optimizer(1)\nimport json"
    assert missing_names(snippet(text)) == {"thalweg.optim.nowhere", "thalweg.optim.build.make_optimizer"}


def _package(**files: str) -> list[SourceModule]:
    modules = [SourceModule("thalweg/__init__.py", "")]
    for name, text in files.items():
        modules.append(SourceModule(f"thalweg/{name}/__init__.py", ""))
        modules.append(SourceModule(f"thalweg/{name}/part.py", text))
    return modules


@pytest.mark.parametrize(
    "text",
    [
        "import thalweg.engine.part",
        "from thalweg.engine import part",
        "from thalweg.engine.part import x",
        "from ..engine import part",
        "def f():\n    from thalweg.engine import part",
        "import importlib\nimportlib.import_module('thalweg.engine.part')",
        "import thalweg\nthalweg.initialize()",
        "from thalweg import initialize",
    ],
)
def test_a_downward_import_is_flagged(text: str) -> None:
    lazy = {"initialize": "thalweg.engine"}
    assert find_layer_violations(_package(zero=text, engine=""), lazy)


def test_upward_and_type_checking_imports_are_not_flagged() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from thalweg.engine import part"
    assert not find_layer_violations(_package(zero=text, engine="from thalweg.zero import part\nimport thalweg"), {})


def test_config_and_utils_stand_alone() -> None:
    assert find_layer_violations(_package(config="", utils="from thalweg.config import part"), {})
    assert find_layer_violations(_package(config="from thalweg.utils import part", utils=""), {})


def test_a_room_outside_the_layout_is_flagged() -> None:
    assert find_layer_violations(_package(misc=""), {})


def test_a_cycle_is_found() -> None:
    files = {"zero": "from thalweg.comm import part", "comm": "def f():\n    import thalweg.zero.part"}
    assert find_cycles(import_graph(_package(**files), {})) == [["thalweg.comm.part", "thalweg.zero.part"]]
    within = [SourceModule("thalweg/zero/__init__.py", "from thalweg.zero.part import x")]
    within.append(SourceModule("thalweg/zero/part.py", "from thalweg.zero import x"))
    assert find_cycles(import_graph(within, {})) == [["thalweg.zero", "thalweg.zero.part"]]
