"""Imports point only upwards in the layout, and there is no cycle."""

from __future__ import annotations

import pytest

import thalweg
from tests.repo.imports import find_cycles, find_layer_violations, import_graph
from tests.repo.source import SourceModule, package_modules

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
