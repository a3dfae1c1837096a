"""The log of a run's metrics: a run that dies while it takes the log up has lost no line."""

from __future__ import annotations

from pathlib import Path

import pytest

from thalweg.rlhf import report
from thalweg.rlhf.report import RunLog


def test_a_run_that_dies_while_it_drops_uncommitted_lines_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.dist, "get_rank", lambda: 0)
    log, path = RunLog(tmp_path), tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        log.add(step, {"loss": 1.0 / step})
    before = path.read_text()

    def die(self: Path, text: str, **options: str) -> None:
        self.open("w").close()  # as a kill after the file was cut, and before anything was written
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", die)
        with pytest.raises(KeyboardInterrupt):
            RunLog(tmp_path, 2)
    assert path.read_text() == before
    assert [row["step"] for row in RunLog(tmp_path, 2).rows] == [1, 2]
    assert path.read_text() == "".join(before.splitlines(keepends=True)[:2])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
