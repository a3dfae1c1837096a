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
        ("import deepspeed.no_such_module", "not among the modules"),
        ("import deepspeed.autotuning.tuner.index_based_tuner", "`thalweg tune`"),
        ("import deepspeed; deepspeed.no_such_name", "not among the names"),
    ],
)
def test_what_is_not_offered_names_the_way(code: str, said: str) -> None:
    done = _run(f"import thalweg.compat.deepspeed; {code}", check=False)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]


# What an audit of DeepSpeed's own documentation, tests and examples asked for, and what the answer must name.
ASKED = {
    "autotuning": ("Autotuner", "thalweg tune"),
    "compile": ("pad_tensors", "engine.compile"),
    "elasticity": ("compute_elastic_config", ""),
    "inference.config": ("DtypeEnum", "init_inference"),
    "inference.engine": ("InferenceEngine", ""),
    "io": ("FastFileWriter", "save_checkpoint"),
    "linear": ("OptimizedLinear", "peft"),
    "monitor.monitor": ("MonitorMaster", "engine.monitor"),
    "nvme": ("sweep_main", "nvme_path"),
    "ops.transformer": ("DeepSpeedTransformerConfig", "thalweg.nn.transformer"),
    "ops.op_builder.all_ops": ("ALL_OPS", ""),
    "runtime.lr_schedules": ("add_tuning_arguments", "scheduler"),
    "runtime.sequence_parallel.ulysses_sp": ("TiledMLP", "tiling"),
    "sequence.fpdt_layer": ("FPDT_Attention", "sequence_parallel_size"),
    "utils.nvtx": ("instrument_w_nvtx", ""),
    "utils.tensor_fragment": ("safe_get_full_fp32_param", ""),
}


def test_each_asked_name_is_there_or_names_the_way() -> None:
    """Calls and attributes of what is not offered, at the class and at an object; ``hasattr`` says no."""
    code = f"""
import thalweg.compat.deepspeed, importlib, deepspeed
for name, (asked, way) in {ASKED!r}.items():
    found = getattr(importlib.import_module("deepspeed." + name), asked)
    if not way:
        assert type(found).__name__ != "_Placeholder", name
        continue
    assert not hasattr(found, "no_such_attribute")
    for use, error in ((lambda: found(1), NotImplementedError), (lambda: found.apply, AttributeError)):
        try:
            use()
        except error as raised:
            assert way in str(raised) and "is not offered by Thalweg" in str(raised), (name, raised)
        else:
            raise AssertionError(name)
for name in ("InferenceEngine", "DeepSpeedInferenceConfig", "default_inference_config", "DeepSpeedTransformerConfig",
             "add_tuning_arguments"):
    assert getattr(deepspeed, name), name
assert deepspeed.InferenceEngine is type(deepspeed.init_inference(__import__("torch").nn.Linear(2, 2)))
assert deepspeed.utils.instrument_w_nvtx(lambda x: x + 1)(1) == 2
assert all(hasattr(op, "is_compatible") for op in deepspeed.ops.op_builder.ALL_OPS.values())
for module in list(thalweg.compat.deepspeed.PACKAGE.surface):  # none has a bare error for what nobody has heard of
    try:
        found = importlib.import_module(module).no_such_name
        found.no_such_attribute
    except AttributeError as raised:
        assert "Thalweg" in str(raised), (module, raised)
"""
    _run(code)


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
