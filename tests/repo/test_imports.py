"""Imports point only upwards in the layout, and there is no cycle."""

from __future__ import annotations

import pytest

import thalweg
from tests.repo.imports import cycles, downward, graph
from tests.repo.source import Module, package_modules

LAZY = thalweg._PUBLIC


def test_imports_point_upwards() -> None:
    wrong = downward(package_modules(), LAZY)
    assert not wrong, "\n" + "\n".join(wrong)


def test_there_is_no_cycle() -> None:
    assert cycles(graph(package_modules(), LAZY)) == []


def test_the_graph_sees_the_package() -> None:
    imports = graph(package_modules(), LAZY)
    assert "thalweg.utils.env" in imports["thalweg.utils.log"]
    assert "thalweg.launch.local" in imports["thalweg.cli.run"], "imports inside functions count"


def _package(**files: str) -> list[Module]:
    modules = [Module("thalweg/__init__.py", "")]
    for name, text in files.items():
        modules.append(Module(f"thalweg/{name}/__init__.py", ""))
        modules.append(Module(f"thalweg/{name}/part.py", text))
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
    assert downward(_package(zero=text, engine=""), lazy)


def test_upward_and_type_checking_imports_are_not_flagged() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from thalweg.engine import part"
    assert not downward(_package(zero=text, engine="from thalweg.zero import part\nimport thalweg"), {})


def test_config_and_utils_stand_alone() -> None:
    assert downward(_package(config="", utils="from thalweg.config import part"), {})
    assert downward(_package(config="from thalweg.utils import part", utils=""), {})


def test_a_room_outside_the_layout_is_flagged() -> None:
    assert downward(_package(misc=""), {})


def test_a_cycle_is_found() -> None:
    files = {"zero": "from thalweg.comm import part", "comm": "def f():\n    import thalweg.zero.part"}
    assert cycles(graph(_package(**files), {})) == [["thalweg.comm.part", "thalweg.zero.part"]]
    within = [Module("thalweg/zero/__init__.py", "from thalweg.zero.part import x")]
    within.append(Module("thalweg/zero/part.py", "from thalweg.zero import x"))
    assert cycles(graph(within, {})) == [["thalweg.zero", "thalweg.zero.part"]]
