"""`make gpu`: each check leaves its line, whatever becomes of it, and a run goes on where it was cut off."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
RUN = ROOT / "bench" / "gpu" / "run.py"


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bench_gpu_run", RUN)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # where its dataclass looks itself up
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def run(script, monkeypatch):
    """The script, its checks replaced by short ones."""
    run = script
    claims = {"holds": 'print(\'{"speed": 3.14159, "why": {}}\')', "fails": "raise SystemExit('RuntimeError: no')"}
    claims |= {"hangs": "import time; time.sleep(60)", "cuts": "print('{\"a\": 1')"}
    monkeypatch.setattr(
        run, "CHECKS", [run.Check(n, c, 1 if c == "hangs" else 20, figure=c) for n, c in enumerate(claims, 1)]
    )
    real = subprocess.Popen

    def short(names, **options):
        return real([sys.executable, "-c", claims[names[2]]] if "figures.py" in str(names[1]) else names, **options)

    monkeypatch.setattr(run.subprocess, "Popen", short)
    return run


def _main(run, monkeypatch, out, *options) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "sim", "--out", str(out), *options])
    return run.main()


def test_every_check_leaves_its_line_and_a_run_goes_on(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "source_version", lambda: "abc")
    assert _main(run, monkeypatch, tmp_path) == 1
    lines = [json.loads(row) for row in (tmp_path / "simulated-device.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["passed", "failed", "timeout", "passed"]
    assert lines[0]["figures"] == {"speed": 3.14159, "why": {}} and lines[0]["found"] == "speed 3.142"
    assert "RuntimeError: no" in lines[1]["found"]
    with (tmp_path / "simulated-device.jsonl").open("a") as out:
        out.write('{"check": 2, "outc')  # a run that died in the middle of a line

    assert _main(run, monkeypatch, tmp_path) == 1
    said = capsys.readouterr().out
    assert "passed before at abc: holds" in said and "passed before at abc: fails" not in said
    table = (tmp_path / "simulated-device.md").read_text()
    assert "| 1 | holds | passed |" in table and "| 3 | hangs | timeout |" in table

    monkeypatch.setattr(run, "source_version", lambda: "def")  # another commit: nothing has been shown of it
    assert _main(run, monkeypatch, tmp_path, "--only", "1") == 0
    assert "passed before" not in capsys.readouterr().out
    assert run.latest_lines(tmp_path / "simulated-device.jsonl")[1]["commit"] == "def"


def test_a_check_leaves_nothing_running(run, monkeypatch, tmp_path):
    """Not even where it fails by itself; what holds its output open delays nobody."""
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
open({str(tmp_path / "pid")!r}, 'w').write(str(child.pid))
print(b'\\xff'.decode(errors='surrogateescape'), '{{"speed": 1}}', sep='\\n')
raise SystemExit(1)
"""
    real = subprocess.Popen
    monkeypatch.setattr(run.subprocess, "Popen", lambda names, **options: real([sys.executable, "-c", code], **options))
    start = time.monotonic()
    found = run.run_check(
        run.Check(1, "claim", 30, figure="a"), argparse.Namespace(jobs=1, device="sim", out=tmp_path), 30.0
    )
    assert found["outcome"] == "failed" and found["figures"] == {"speed": 1}
    assert time.monotonic() - start < 20
    pid = int((tmp_path / "pid").read_text())
    status = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 5
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_has_passed_is_known_by_its_sources(script, monkeypatch, tmp_path):
    """Also in a copy of the tree without git, where a second run began anew; a change makes it another."""
    (tmp_path / "thalweg").mkdir()
    (tmp_path / "thalweg" / "a.py").write_text("a = 1")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "_git", lambda *words: "")
    first = script.source_version()
    assert first == script.source_version() and len(first) == 9
    (tmp_path / "thalweg" / "a.py").write_text("a = 2")
    assert script.source_version() != first
    monkeypatch.setattr(script, "_git", lambda *words: "" if "status" in words else "abc")
    assert script.source_version() == "abc"
    monkeypatch.setattr(script, "_git", lambda *words: " M thalweg/a.py" if "status" in words else "abc")
    assert script.source_version().startswith("abc+")


def _names_of_the_simulated_device(tree: ast.Module) -> Iterator[str]:
    """Where a test that runs on a real device, or a function that its ranks run, says "sim"."""

    def calls(function: ast.FunctionDef) -> list[ast.Call]:
        found = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        return [call for call in found if isinstance(call.func, ast.Name) and call.func.id in ("run", "run_ranks")]

    def looks_inside(call: ast.Call) -> bool:
        devices = [word.value for word in call.keywords if word.arg == "device"]
        return any(isinstance(device, ast.Constant) and device.value == "simulated" for device in devices)

    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    exempt = set()
    for function in functions:
        inside = [call for call in calls(function) if looks_inside(call)]
        exempt |= {call.args[0].id for call in inside if isinstance(call.args[0], ast.Name)}
        exempt |= {function.name} if inside else set()
    for function in functions:
        translated = {id(node) for call in calls(function) for node in ast.walk(call)}  # by run_ranks
        body = [] if function.name in exempt else function.body  # decorators' parameters go to run_ranks
        for node in (node for statement in body for node in ast.walk(statement)):
            said = node.value if isinstance(node, ast.Constant) and id(node) not in translated else None
            if said == "sim" or (isinstance(said, str) and said.startswith("sim:")):
                yield f"{function.name}, line {node.lineno}"


def _files(check: Any) -> list[Path]:
    paths = [ROOT / word for word in check.tests if word.startswith("tests/")]
    return [file for path in paths for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]


def test_no_check_of_a_gpu_names_the_simulated_device(script):
    """M4: these tests said "sim" to torch, and would all have failed on the first GPU."""
    files = {file for check in script.CHECKS for file in _files(check)}
    assert len(files) > 10
    found = [
        f"{file.name}: {where}"
        for file in files
        for where in _names_of_the_simulated_device(ast.parse(file.read_text()))
    ]
    assert found == []
    control = ast.parse('def _on_ranks(rank):\n    x = torch.ones(2, device="sim")\n')
    assert list(_names_of_the_simulated_device(control)) == ["_on_ranks, line 2"]


# What the audit missed in the tests of a GPU (M4), and the checks that have it now.
COVERED = {
    "offload": 3, "accumulation at stages 2 and 3": 4, "preflight": 5, "NVMe": 6, "resume": 8, "clipping": 13,
    "compile": 15, "tensor, sequence, pipeline, experts": 18, "penalties": 19, "int8": 10, "serve": 20, "zero.Init": 2,
}  # fmt: skip


@pytest.mark.parametrize("feature", COVERED)
def test_each_feature_has_its_check(script, feature):
    """M4: by a figure, or by tests that are there."""
    (check,) = [check for check in script.CHECKS if check.number == COVERED[feature]]
    if check.figure:
        assert f"def {check.figure}(" in RUN.with_name("figures.py").read_text()
        return
    text = "".join(file.read_text() for file in _files(check))
    chosen = re.split(r" (?:or|and) ", check.tests[-1]) if "-k" in check.tests else ["test_"]
    assert any(re.search(rf"def test_\w*{word.removeprefix('test_')}", text) for word in chosen)
    if feature == "zero.Init":
        assert "zero.Init()" in text


def test_the_page_says_what_has_run_where(run, tmp_path):
    page, results = tmp_path / "devices.md", tmp_path / "gpu"
    results.mkdir()
    page.write_text("# Devices\n\n<!-- from results/gpu -->\nstale\n<!-- end -->\nthe rest\n")
    run.write_page(page, results)
    assert "On no GPU yet" in page.read_text()
    (results / "a.jsonl").write_text('{"check": 1, "name": "NVIDIA A", "outcome": "passed"}\n')
    for _ in range(2):  # again and again
        run.write_page(page, results)
        text = page.read_text()
        assert "| 1 | holds | passed |" in text and "| 2 | fails | not run |" in text and "NVIDIA A" in text
        assert text.startswith("# Devices\n\n<!--") and text.endswith("the rest\n") and "stale" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_tests_that_are_all_left_out_show_nothing(run, tmp_path):
    check = run.Check(1, "claim", 60, ("tests/gpu/test_cuda.py",))
    found = run.run_check(check, argparse.Namespace(jobs=1, device="sim", out=tmp_path), 60.0)
    assert found["outcome"] == "left out"


@pytest.mark.nightly
def test_the_checks_run_through_on_a_simulated_device(tmp_path):
    """All but those that need CUDA itself, or speed; each selection of tests has some."""
    command = [sys.executable, str(RUN), "--device", "sim", "--out", str(tmp_path), "--limit", "3000"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(row) for row in (tmp_path / "simulated-device.jsonl").read_text().splitlines()]
    wrong = {
        line["check"]: line["found"] for line in lines if line["outcome"] != "passed" and line["check"] not in (2, 11)
    }
    assert wrong == {}, done.stdout
