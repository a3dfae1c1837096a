"""`import deepspeed` is Thalweg where that was asked for: modules, names, metadata, children, another one beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT
from thalweg.compat.deepspeed.surface import SURFACE
from thalweg.compat.startup import deepspeed_environ


def _run(code: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code]
    variables = {**os.environ, "PYTHONPATH": path, **environ}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done


def test_every_name_of_the_surface_resolves() -> None:
    code = """
import thalweg.compat.deepspeed, importlib
from thalweg.compat.deepspeed.surface import SURFACE
from thalweg.compat.finder import FALLBACK, PROGRAM
for name, names in SURFACE.items():
    module = importlib.import_module(name)
    for attribute in names:
        if attribute not in (FALLBACK, PROGRAM):
            getattr(module, attribute)
import deepspeed
assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
assert deepspeed.zero.Init is deepspeed.runtime.zero.partition_parameters.Init
assert deepspeed.comm.is_initialized() is False
print(len(SURFACE))
"""
    assert int(_run(code).stdout) == len(SURFACE)


def test_the_same_paths_below_thalweg() -> None:
    """As a program reads in which somebody has replaced deepspeed by thalweg."""
    from thalweg.optim import lr_scheduler
    from thalweg.runtime.lr_schedules import OneCycle, WarmupLR

    assert (OneCycle, WarmupLR) == (lr_scheduler.OneCycle, lr_scheduler.WarmupLR)
    for name in ("FusedAdam", "DeepSpeedCPUAdam"):
        with pytest.raises(ImportError, match=rf"{name} is not needed.*torch.optim.AdamW.*config.*--as-deepspeed"):
            exec(f"from thalweg.ops.adam import {name}")
    with pytest.raises(ImportError, match="cannot import name 'FusedEve'"):
        exec("from thalweg.ops.adam import FusedEve")


def test_opting_in_loads_nothing_and_says_nothing() -> None:
    code = """
import sys, thalweg.compat.deepspeed
import importlib.metadata, importlib.util
assert importlib.metadata.version("deepspeed").startswith("0.19.")
assert importlib.util.find_spec("deepspeed") and importlib.util.find_spec("deepspeed.zero")
import deepspeed
assert deepspeed.__version__ == importlib.metadata.version("deepspeed")
print("torch" in sys.modules)
"""
    done = _run(code)
    assert done.stdout == "False\n" and done.stderr == ""


def test_nothing_changes_where_nobody_asks() -> None:
    done = _run("import thalweg, deepspeed", check=False)
    assert "No module named 'deepspeed'" in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("from deepspeed.ops.sparse_attention import BertSparseSelfAttention as S; S()", "sparse_attention"),
        ("import deepspeed.autotuning", "not among the modules"),
        ("import deepspeed; deepspeed.no_such_name", "not among the names"),
    ],
)
def test_what_is_not_offered_names_the_way(code: str, said: str) -> None:
    done = _run(f"import thalweg.compat.deepspeed; {code}", check=False)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]


def test_children_are_told_by_the_environment(tmp_path: Path) -> None:
    """A child of a child too, and a `sitecustomize` of the user's own still runs."""
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.users_own = 1\n")
    environ = deepspeed_environ({"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    inner = "import deepspeed, mii; print(deepspeed.__version__, mii.__version__, users_own)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    assert _run(code, **environ).stdout == "0.19.8 0.3.4 1\n"


def _install_other(folder: Path) -> dict[str, str]:
    """What a real DeepSpeed looks like from outside."""
    package, metadata = folder / "deepspeed", folder / "deepspeed-0.17.1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.17.1'\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.1\n")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def test_a_line_says_which_of_two_is_in_use(tmp_path: Path) -> None:
    environ = _install_other(tmp_path)
    done = _run("import thalweg.compat.deepspeed, deepspeed.zero; print(deepspeed.__version__)", **environ)
    assert done.stdout == "0.19.8\n"
    (line,) = done.stderr.splitlines()
    assert "is Thalweg" in line and f"DeepSpeed 0.17.1 in {tmp_path}" in line
    done = _run("import deepspeed; print(deepspeed.__version__)", **environ)
    assert done.stdout == "0.17.1\n" and done.stderr == ""


def test_too_late_is_an_error(tmp_path: Path) -> None:
    done = _run("import deepspeed, thalweg.compat.deepspeed", check=False, **_install_other(tmp_path))
    assert done.returncode == 1 and "imported already" in done.stderr


def test_who_looked_before_is_named() -> None:
    """A library that has remembered that there is no DeepSpeed goes on without: a line says so, and the cure."""
    late = "import sys, types; sys.modules['accelerate.utils'] = types.ModuleType('accelerate.utils')"
    done = _run(f"{late}; import thalweg.compat.deepspeed; import deepspeed")
    (line,) = done.stderr.splitlines()
    assert "accelerate.utils was imported before thalweg.compat.deepspeed" in line and "--as-deepspeed" in line
    assert _run(f"import thalweg.compat.deepspeed; {late}; import deepspeed").stderr == ""


def test_a_cell_of_a_notebook_may_run_again(tmp_path: Path) -> None:
    """And what the user does in later cells reloads nothing; the line about another DeepSpeed comes once."""
    cells = ["import thalweg.compat.deepspeed", "import deepspeed", "from deepspeed.zero import Init"] * 2
    code = f"""
import code
cell = code.InteractiveInterpreter()
for text in {cells!r}:
    assert not cell.runsource(text)
cell.runsource("print(deepspeed.__version__)")
"""
    done = _run(code, **_install_other(tmp_path))
    assert done.stdout == "0.19.8\n" and len(done.stderr.splitlines()) == 1, done.stderr
