"""The wheel is pure Python: it builds and installs where there is no compiler (rows 25, 26 and 48)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.repo.source import ROOT

COPIED = ("pyproject.toml", "README.md", "LICENSE", "thalweg")


def no_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled: no cc on PATH, and CC and CXX that fail."""
    empty = tmp_path / "bin"
    empty.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CPPFLAGS")}
    environ.update(PATH=str(empty), CC="/bin/false", CXX="/bin/false", TORCH_EXTENSIONS_DIR="/dev/null/none")
    return environ


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, without a compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in COPIED:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, source / name)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--wheel-dir", str(folder)]
    done = subprocess.run(command, env=no_compiler(folder), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/WHEEL"))).decode()
    assert "Root-Is-Purelib: true" in metadata
    packaged = {name for name in names if name.startswith("thalweg/")}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "thalweg").rglob("*.py")}
    assert sources <= packaged, "a file is missing from the wheel"
    assert {Path(name).suffix for name in packaged} <= {".py", ".typed", ".html"}
    assert "thalweg/serve/page.html" in packaged
    assert not [name for name in names if name.startswith(("tests/", "bench/", "examples/"))]


def test_wheel_works_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """The installed files train a step with nothing to compile with."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environ = no_compiler(tmp_path)
    environ["PYTHONPATH"] = str(site)
    code = """
import torch, thalweg
torch.manual_seed(0)
assert thalweg.__file__.startswith(SITE), thalweg.__file__
engine, *_ = thalweg.initialize(
    model=torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)),
    config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 3}},
)
x = torch.ones(2, 8)
losses = []
for _ in range(5):
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
"""
    command = [sys.executable, "-c", code.replace("SITE", repr(str(site)))]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_compiler_would_be_missed(tmp_path: Path) -> None:
    """Negative control: in that environment nothing compiles."""
    code = "import os, shutil, subprocess; assert not shutil.which('cc') and not shutil.which('gcc')\n"
    code += "raise SystemExit(subprocess.run([os.environ['CC'], '--version']).returncode)"
    done = subprocess.run([sys.executable, "-c", code], env=no_compiler(tmp_path), timeout=60)
    assert done.returncode != 0
