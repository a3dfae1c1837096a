"""The promises of the README's first screen: the two commands set themselves up, and the pages tell the
truth."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import thalweg
from tests.repo.source import ROOT
from thalweg.cli import COMMANDS

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(target: str, tmp_path: Path) -> list[str]:
    """The commands of a make target on a machine where nothing is installed."""
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={tmp_path / 'venv'}"]
    # What this run's own make was told (TORCH=2.11.0) is none of that machine's business.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "TORCH")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_pytest_enters_every_folder_of_tests(request: pytest.FixtureRequest) -> None:
    """Its own list of folders to pass by has "dist" and "build"."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    folders = {part for path in paths for part in path.parts[:-1]}
    passed_by = request.config.getini("norecursedirs")
    assert {"tests", "dist"} <= folders
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in passed_by)]


@pytest.mark.parametrize(("target", "last"), [("demo", "thalweg demo"), ("test", "-m pytest")])
def test_make_installs_everything_and_torch_first(target: str, last: str, tmp_path: Path) -> None:
    lines = steps(target, tmp_path)
    venv = next(i for i, line in enumerate(lines) if "-m venv" in line)
    torch = next(i for i, line in enumerate(lines) if "install" in line and "torch==" in line)
    package = next(i for i, line in enumerate(lines) if "install" in line and "-e '.[" in line)
    assert venv < torch < package < len(lines) - 1
    assert "torch==2.13.0" in lines[torch] and "-e" not in lines[torch].split("install")[1], "alone"
    assert last in lines[-1]


def test_ci_makes_a_new_environment_and_runs_the_readmes_command() -> None:
    path = ROOT / ".ci" / "run"
    text = path.read_text()
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], timeout=60).returncode == 0
    assert "mktemp -d" in text and "trap 'rm -rf" in text
    last = [line for line in text.splitlines() if line and not line.startswith("#")][-1]
    assert re.match(r"make .*\bgate VENV=", last), "the runner's closing line is the last one printed"
    gate = (ROOT / "Makefile").read_text().partition("\ngate:")[2].partition("\n\n")[0]
    assert "lint" in gate and "$(call waiting,$(GATE)," in gate and "$(call others,$(GATE)," in gate, (
        "as `make test` has"
    )
    assert "make test" in (ROOT / "README.md").read_text() and "make demo" in (ROOT / "README.md").read_text()


def test_project_metadata() -> None:
    assert PROJECT["name"] == "thalweg" and PROJECT["license"] == "Apache-2.0"
    assert PROJECT["requires-python"] == ">=3.11"  # a newer one than tried is said, not refused
    assert "torch>=2.11" in PROJECT["dependencies"]
    assert {re.split(r"[<>=\[]", item)[0] for item in PROJECT["dependencies"]} <= {
        "torch", "safetensors", "numpy", "pydantic", "tqdm", "rich",
    }  # fmt: skip
    extras = {"hf", "serve", "plots", "quant", "monitor", "test", "docs"}
    assert extras <= set(PROJECT["optional-dependencies"])
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", thalweg.__version__)
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_what_the_tests_use_is_installed_by_make(tmp_path: Path) -> None:
    """Every third-party import of tests/ comes with the extras that `make test` names."""
    extras = re.search(r"-e '\.\[([\w,]+)\]'", "\n".join(steps("test", tmp_path)))
    assert extras is not None
    wanted = [item for name in extras[1].split(",") for item in PROJECT["optional-dependencies"][name]]
    names = {re.split(r"[<>=\[]", item)[0].replace("-", "_") for item in [*wanted, *PROJECT["dependencies"]]}
    imported: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.parent.name == "programs":  # users' scripts, in whose process `import deepspeed` is Thalweg
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update({item.name.split(".")[0]: path.name for item in node.names})
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported[(node.module or "").split(".")[0]] = path.name
    ours = {path.stem for path in ROOT.iterdir()}
    strangers = {name: where for name, where in imported.items() if name not in names | ours | sys.stdlib_module_names}
    assert not strangers, "add these to an extra in pyproject.toml"


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    text = re.sub(
        r"^```yaml\n[\s\S]*?^```", "", text, flags=re.MULTILINE
    )  # a study's techniques have names like commands
    quoted = " ".join(re.findall(r"`[^`]+`|^```[\s\S]*?^```", text, re.MULTILINE))
    for name in re.findall(r"\bthalweg ([a-z]+)\b", quoted):
        assert name in COMMANDS, f"`thalweg {name}` is no subcommand"
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), f"a link to {target}, which is not there"
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "bench" / "peers.mk").read_text()
    for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, re.MULTILINE):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"`make {name}` is no target"


def test_tracked_files_name_no_machine() -> None:
    """No path of the machine something was written on."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    machine = re.compile(r"(?<![\w.~-])/(home|root|work|Users)/[.\w]")
    found = []
    for name in done.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".png", ".bin", ".safetensors") or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if machine.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
