"""The wheel is pure Python: it builds and installs where there is no compiler (rows 25, 26 and 48)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import timeit
import zipfile
from pathlib import Path

import pytest

from tests.repo.source import ROOT

COPIED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "thalweg")


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
    programs = {name for name in packaged if name.startswith("thalweg/cli/bin/")}
    assert {Path(name).suffix for name in packaged - programs} <= {
        ".py",
        ".typed",
        ".html",
        ".svg",
        ".jsonl",
        ".yaml",
        ".csv",
        ".toml",
        ".ini",
    }
    with zipfile.ZipFile(wheel) as archive:
        assert all(archive.getinfo(name).external_attr >> 16 & 0o111 for name in programs) and len(programs) == 4
    tables = [path for path in (ROOT / "thalweg").rglob("*") if path.suffix in (".csv", ".ini", ".toml", ".yaml")]
    assert {"thalweg/serve/page.html", *(path.relative_to(ROOT).as_posix() for path in tables)} <= packaged
    assert not [name for name in names if name.startswith(("tests/", "bench/", "examples/"))]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, torch by way of PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(next(folder.glob("lib/python*/site-packages")))
    return folder / "bin" / "python"


def run_installed(python: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` there, far from the sources."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "THALWEG"))}
    environ |= {"PYTHONPATH": sysconfig.get_path("purelib"), **variables}
    command = [str(python), "-c", code]
    return subprocess.run(command, env=environ, cwd=python.parent, capture_output=True, text=True, timeout=120)


def test_a_variable_alone_makes_deepspeed_thalweg(installed: Path) -> None:
    """In the program and in its children; no launcher, no PYTHONPATH."""
    code = """
import subprocess, sys
import deepspeed, mii
child = [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"]
print(deepspeed.__version__, subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip())
assert "torch" not in sys.modules
"""
    done = run_installed(installed, code, THALWEG_AS_DEEPSPEED="1")
    assert (done.stdout, done.stderr) == ("0.19.8 0.19.8\n", "")


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_have_it_too(installed: Path, start: str) -> None:
    script = """
import sys
import deepspeed
import torch
class Versions(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index):
        import deepspeed.utils.logging
        return deepspeed.__version__
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Versions(), num_workers=1, multiprocessing_context=sys.argv[1])
    print(*[name for batch in loader for name in batch])
    assert deepspeed.initialize.__module__.startswith("thalweg."), deepspeed.initialize
"""
    path = installed.parent / "loader.py"
    path.write_text(script)
    code = f"import runpy, sys; sys.argv = ['loader.py', {start!r}]; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = run_installed(installed, code, THALWEG_AS_DEEPSPEED="1")
    assert done.stdout == "0.19.8 0.19.8\n", done.stderr


def test_the_variable_unset_nothing_happens(installed: Path) -> None:
    """Not even an import of thalweg; the line that looks takes microseconds."""
    code = "import sys; print('thalweg' in sys.modules, 'importlib.metadata' in sys.modules); import deepspeed"
    for variables in ({}, {"THALWEG_AS_DEEPSPEED": "0"}):
        done = run_installed(installed, code, **variables)
        assert done.stdout == "False False\n" and "No module named 'deepspeed'" in done.stderr
    (line,) = next(installed.parent.parent.glob("lib/python*/site-packages/*.pth")).read_text().splitlines()
    assert min(timeit.repeat(line, number=1, repeat=20)) < 1e-4


@pytest.mark.nightly
def test_an_editable_install_has_the_line_too(tmp_path: Path) -> None:
    for name in COPIED:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, tmp_path / name)
    code = "import setuptools.build_meta as build; print(build.build_editable('out'))"
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))) as archive:
        assert "thalweg-as-deepspeed.pth" in archive.namelist()


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
