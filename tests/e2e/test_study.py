"""`thalweg study` as a user runs it: killed in the middle, given again; its page in a browser."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.chromium import CHROMIUM, Page, open_browser
from thalweg.study.config import load_study

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
_peers = importlib.import_module("_peers")
PEERS_PYTHON, deepspeed_env, deepspeed_missing_reason = (
    _peers.PEERS_PYTHON, _peers.deepspeed_env, _peers.deepspeed_missing_reason,
)  # fmt: skip
STUDY = """
rounds: 2
turns: 1
models:
  - name: llama
    config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
             vocab_size: 300, max_position_embeddings: 512, pad_token_id: 0, initializer_range: 0.3}
datasets:
  - {name: SciTail, path: "sample:scitail", schema: bigbio_te, samples: 4, batch_size: 2, new_tokens: 4}
techniques: [hugging face, thalweg]
"""
pytestmark = pytest.mark.nightly


def processes_of(folder: Path) -> list[int]:
    """Processes that have a file of the folder open: cells write their log there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(folder) in os.readlink(file) for file in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, int]:
    """A study that was killed after its first cell and then run to its end: folder, report, cells that were there."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.yaml").write_text(STUDY)
    out = folder / "out"
    command = [sys.executable, "-m", "thalweg", "study", "run", str(folder / "small.yaml"), "--out", str(out), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (done := list(out.glob("cells/*/*/*/*/round-*.json"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = {path: path.stat().st_mtime_ns for path in done}
    while processes_of(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(out), "a cell outlived its study"
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert second.returncode == 0, second.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a cell was measured again"
    return out, json.loads(second.stdout), len(before)


def test_a_study_that_was_killed_goes_on(study: tuple[Path, dict, int]) -> None:
    out, report, there = study
    assert 1 <= there < 6
    assert report["processes"] <= 6 - there
    assert [row["status"] for row in report["rows"]] == ["ok", "ok"]
    assert [row["rounds"] for row in report["rows"]] == [2, 2]
    assert report["rows"][1]["equal_outputs"] == 1
    assert report["provenance"]["torch"]
    assert (out / "report.html").is_file() and not (out / "scratch").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_opens_from_a_file_and_its_tables_sort(study: tuple[Path, dict, int], tmp_path: Path) -> None:
    with open_browser(tmp_path) as page:
        page.call("Page.navigate", url=(study[0] / "report.html").as_uri())
        page.wait_until("document.readyState === 'complete'")
        assert page.evaluate("[...document.images].every(image => image.naturalWidth > 300)")
        column = "[...document.querySelectorAll('table')[2].tBodies[0].rows].map(row => +row.cells[4].dataset.value)"
        head = "document.querySelectorAll('table')[2].querySelectorAll('th')[4].click()"
        page.evaluate(head)
        rising = page.evaluate(column)
        page.evaluate(head)
        assert rising == sorted(rising) and page.evaluate(column) == rising[::-1]
        assert not complaints(page)
        # The control: each way to complain is heard.
        page.evaluate(
            "console.error('the console'); setTimeout(() => { throw 'a script' }); new Image().src = 'none.png'"
        )
        deadline = time.monotonic() + 20
        while len(complaints(page)) < 3 and time.monotonic() < deadline:
            page.evaluate("new Promise(done => setTimeout(done, 20))")
        methods = {event["method"] for event in complaints(page)}
        assert methods == {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}


def complaints(page: Page) -> list[dict]:
    """What a user would see in red in the console."""
    return [
        event for event in page.events
        if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
        or (event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "assert"))
    ]  # fmt: skip


def run_study_command(file: Path, out: Path) -> dict:
    """Run a study to its end and return its report."""
    command = [sys.executable, "-m", "thalweg", "study", "run", str(file), "--out", str(out), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_training_on_real_text_learns_with_each_technique(tmp_path: Path) -> None:
    tree = load_study("training_text").model_dump(by_alias=True, mode="json")
    tree |= {"rounds": 1, "steps": 4}
    tree["datasets"][0] |= {"samples": 8, "new_tokens": 64}
    (tmp_path / "short.yaml").write_text(json.dumps(tree))
    report = run_study_command(tmp_path / "short.yaml", tmp_path / "out")
    assert [row["technique"] for row in report["rows"]] == [one["name"] for one in tree["techniques"]]
    baseline = report["rows"][0]
    for row in report["rows"]:
        assert row["status"] == "ok", row["reason"]
        # Two batches in turns, so the last of 6 steps has the batch of the second.
        assert row["losses"][-1] < row["losses"][1] - 0.1, "it learns"
        assert row["losses"] == pytest.approx(baseline["losses"], rel=2e-2 if "bf16" in row["technique"] else 1e-4)
        assert row["plan"]["bytes"] > 0 and row["host_run_peak"] > 0
    assert report["explored"]["standard library"]["rows"] > 100
    assert report["recommended"][0]["task"] == "training"


@pytest.mark.skipif(deepspeed_missing_reason() is not None, reason=str(deepspeed_missing_reason()))
def test_real_deepspeed_takes_part_by_its_own_interpreter(tmp_path: Path) -> None:
    deepspeed = {"name": "deepspeed stage 3 offload", "python": str(PEERS_PYTHON), "env": deepspeed_env()}
    techniques = f"techniques: {json.dumps(['hugging face', deepspeed])}"
    (tmp_path / "s.yaml").write_text(STUDY.replace("techniques: [hugging face, thalweg]", techniques))
    report = run_study_command(tmp_path / "s.yaml", tmp_path / "out")
    row = report["rows"][1]
    assert row["status"] == "ok", row["reason"]
    assert row["equal_outputs"] == 1
