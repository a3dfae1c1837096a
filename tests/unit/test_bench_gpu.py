"""`make gpu`: each check leaves its line, whatever becomes of it, and a run goes on where it was cut off."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).parents[2] / "bench" / "gpu" / "run.py"


@pytest.fixture
def run(monkeypatch):
    """The script as a module, its checks replaced by short ones."""
    spec = importlib.util.spec_from_file_location("bench_gpu_run", RUN)
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, run)  # where its dataclass looks itself up
    spec.loader.exec_module(run)
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
    monkeypatch.setattr(run, "_git", lambda *words: "abc")
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

    monkeypatch.setattr(run, "_git", lambda *words: "def")  # another commit: nothing has been shown of it
    assert _main(run, monkeypatch, tmp_path, "--only", "1") == 0
    assert "passed before" not in capsys.readouterr().out
    assert run.latest_lines(tmp_path / "simulated-device.jsonl")[1]["commit"] == "def"


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
def test_tests_that_are_all_left_out_show_nothing(run):
    check = run.Check(1, "claim", 60, ("tests/gpu/test_cuda.py",))
    found = run.run_check(check, argparse.Namespace(device="sim"), 60.0)
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
