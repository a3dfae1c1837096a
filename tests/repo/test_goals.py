"""results/goals.md says what its goals and rows say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def goals():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        spec = importlib.util.spec_from_file_location("bench_goals", ROOT / "bench" / "goals.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return module


def test_the_page_of_goals_is_made_from_todays_rows(goals):
    page = (ROOT / "results" / "goals.md").read_text()
    assert page == goals.make_page(), "results/goals.md is stale: python bench/goals.py --write"


def test_the_worst_row_decides(goals, tmp_path, monkeypatch):
    rows = [
        {"case": f"case {n}", "peer": "peer", "metric": "s", "ours": 1.0, "theirs": ratio, "ratio": ratio}
        for n, ratio in enumerate([3.0, 1.4, 2.0, None])
    ]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(goals, "RESULTS", tmp_path)
    goal = {"promise": "fast", "result": "some", "case": r"case \d", "peer": "peer", "metric": "s"}
    line = goals.make_line({**goal, "least": 1.5})
    assert line[1] == "**NO**" and line[2].startswith("case 1,") and line[5] == "2 of 3"
    assert goals.make_line({**goal, "least": 1.4})[1] == "yes"
    assert goals.make_line({**goal, "most": 2.5})[1] == "**NO**"
    assert goals.make_line({**goal, "least": 1.5, "share": 0.6})[1] == "yes"
    assert goals.make_line({**goal, "case": "case", "least": 1.0})[1] == "not measured"
