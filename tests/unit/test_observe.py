"""Writers keep every row, only rank 0 speaks, and nothing is imported that was not asked for."""

from __future__ import annotations

import builtins
import contextlib
import csv
import io
import json
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from thalweg.config import load
from thalweg.observe.console_writer import ConsoleWriter, format_record
from thalweg.observe.flops import flops_per_token, resident_mib
from thalweg.observe.recorder import Recorder, build_recorder
from thalweg.observe.step_record import MissingPackageError, StepRecord
from thalweg.observe.table import format_table
from thalweg.observe.writers import CsvWriter, JsonlWriter, read_jsonl
from thalweg.utils.timing import PhaseTimer

OFF = SimpleNamespace(enabled=False)


def config(folder: Path, *names: str, every: float | None = None) -> SimpleNamespace:
    on = SimpleNamespace(enabled=True, output_path=str(folder), job_name="job", project=None, group=None, team=None)
    keys = ("csv_monitor", "jsonl_monitor", "tensorboard", "wandb")
    return SimpleNamespace(steps_per_print=every, **{key: on if key in names else OFF for key in keys})


def record(step: int, **fields: object) -> StepRecord:
    return StepRecord(step=step, **({"loss": 9.0 / step, "lr": 1e-3, "tokens_per_s": 8100.0} | fields))  # type: ignore[arg-type]


def test_files_keep_earlier_rows_and_one_header_over_restarts(tmp_path):
    for first in (1, 4, 7):
        with contextlib.closing(build_recorder(config(tmp_path, "csv_monitor", "jsonl_monitor"), rank=0)) as recorder:
            for step in range(first, first + 3):
                recorder.step(record(step, phases={"forward": 0.5}))
            recorder.metric("eval/loss", first, step=first)
    lines = (tmp_path / "job" / "steps.csv").read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert [int(row["step"]) for row in rows] == list(range(1, 10))
    assert float(rows[4]["loss"]) == 9.0 / 5
    assert rows[0]["grad_norm"] == ""
    metrics = list(csv.DictReader((tmp_path / "job" / "metrics.csv").read_text().splitlines()))
    assert [m["step"] for m in metrics if m["name"] == "eval/loss"] == ["1", "4", "7"]
    assert sum(m["name"] == "phase/forward" for m in metrics) == 9
    steps = read_jsonl(tmp_path / "job" / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(1, 10))
    assert steps[0]["phases"] == {"forward": 0.5}
    assert len(read_jsonl(tmp_path / "job" / "metrics.jsonl", kind="metric")) == 3


def test_a_torn_last_row_spoils_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.step(record(1))
    writer.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 2, "lo')
    writer = JsonlWriter(path)
    writer.step(record(2, loss=0.25))
    writer.step(record(3))
    writer.close()
    rows = read_jsonl(path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1]["loss"] == 0.25


def test_a_repeated_step_is_read_as_its_later_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for loss in (5.0, 4.0):
        writer = JsonlWriter(path)
        writer.step(record(1, loss=loss))
        writer.close()
    assert [row["loss"] for row in read_jsonl(path)] == [4.0]
    assert len(path.read_text().splitlines()) == 2


def test_non_finite_values_stay_valid_json(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.step(record(1, loss=math.nan, grad_norm=math.inf))
    writer.metric("x", -math.inf, 1)
    writer.close()

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert math.isnan(float(rows[0]["loss"]))
    assert float(rows[0]["grad_norm"]) == math.inf
    assert float(rows[1]["value"]) == -math.inf


def test_a_csv_with_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("step,loss\n1,2.0\n")
    with pytest.raises(ValueError, match="rename that file"):
        CsvWriter(tmp_path)
    assert path.read_text() == "step,loss\n1,2.0\n"


def test_other_ranks_write_nothing(tmp_path, capfd):
    keys = ("csv_monitor", "jsonl_monitor", "tensorboard")
    recorder = build_recorder(config(tmp_path, *keys, every=1), rank=1)
    recorder.step(record(1))
    recorder.metric("x", 1.0, 1)
    recorder.close()
    assert not recorder._writers
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("every", [None, 0, math.inf])
def test_console_is_silent_unless_asked(tmp_path, capfd, every):
    recorder = build_recorder(config(tmp_path, every=every), rank=0)
    recorder.step(record(1))
    recorder.close()
    assert not recorder._writers
    assert capfd.readouterr() == ("", "")


def test_plain_console_prints_every_nth_and_the_last_step_to_stderr(tmp_path, capfd):
    every_tenth = config(tmp_path, every=10)
    every_tenth.scheduler = SimpleNamespace(params={"total_num_steps": 25})
    with contextlib.closing(build_recorder(every_tenth, rank=0)) as recorder:
        for step in range(1, 26):
            recorder.step(record(step, model_tflops=0.123, memory_mib=512.0))
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["step 10/25", "step 20/25", "step 25/25"]
    for part in ("loss 0.9000", "lr 1.00e-03", "8.1k tok/s", "0.123 TFLOP/s", "512 MiB"):
        assert part in err.splitlines()[0]


def test_plain_console_prints_the_step_it_stopped_at(capfd):
    writer = ConsoleWriter(steps_per_print=10, total_steps=100)
    for step in range(1, 4):
        writer.step(record(step, skipped=step == 3))
    writer.close()
    err = capfd.readouterr().err
    assert err.splitlines() == [err.strip()]
    assert "step 3/100" in err
    assert "skipped" in err


def test_a_record_tells_its_phases():
    assert format_record(record(1, phases={"forward": 0.5, "step": 0.25})).endswith(
        " | forward 500.0 ms | step 250.0 ms"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_bar_also_after_a_resume():
    stream = Terminal()
    writer = ConsoleWriter(steps_per_print=10, total_steps=100, stream=stream)
    for step in range(41, 101):
        writer.step(record(step))
    writer.metric("eval/loss", 2.5, 100)
    writer.close()
    text = stream.getvalue()
    assert "100/100" in text
    assert "loss 0.09" in text
    assert "eval/loss 2.5" in text
    assert text.count("\n") <= 3


def test_a_terminal_without_a_size_gets_a_bar_too():
    """A pseudo-terminal that nobody sized says 0 columns and 0 rows (as under `script`)."""
    code = (
        "from thalweg.observe.step_record import StepRecord\n"
        "from thalweg.observe.console_writer import ConsoleWriter\n"
        "writer = ConsoleWriter(steps_per_print=1, total_steps=3)\n"
        "[writer.step(StepRecord(step=step, loss=1.5)) for step in (1, 2, 3)]\n"
        "writer.close()\n"
    )
    ours, theirs = os.openpty()
    environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, timeout=60, env=environ)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 4096):
            text += piece
    os.close(ours)
    assert b"3/3" in text
    assert b"loss 1.5" in text


def test_tensorboard_holds_the_scalars_of_both_runs(tmp_path):
    for first in (1, 3):
        with contextlib.closing(build_recorder(config(tmp_path, "tensorboard"), rank=0)) as recorder:
            for step in (first, first + 1):
                recorder.step(record(step))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_named_on_every_rank(tmp_path, monkeypatch, rank):
    monkeypatch.setattr("thalweg.observe.step_record.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"wandb.*pip install wandb"):
        build_recorder(config(tmp_path, "wandb"), rank=rank)
    with pytest.raises(ValueError, match=r"thalweg\[monitor\]"):
        build_recorder(config(tmp_path, "tensorboard"), rank=rank)
    build_recorder(config(tmp_path, "csv_monitor"), rank=rank).close()


def test_wandb_gets_every_step_through_its_own_interface(tmp_path, monkeypatch):
    """Rows say their steps themselves: W&B drops one whose ``step=`` is below the last, and events count samples."""
    calls: list[tuple] = []
    run = SimpleNamespace(
        log=lambda row: calls.append((row.pop("step"), row)),
        finish=lambda: calls.append(("finish",)),
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
    )
    fake = SimpleNamespace(init=lambda **kw: calls.append(("init", kw)) or run, __spec__=object())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with contextlib.closing(build_recorder(config(tmp_path, "wandb"), rank=0)) as recorder:
        recorder.step(record(1))
        recorder.metric("eval/loss", 2.0, 16)
        recorder.text("eval/sample", "**a** b", 1)
        recorder.step(record(2))
    assert [call[0] for call in calls] == ["init", "*", 1, 16, 1, 2, "finish"]
    assert calls[1] == ("*", "step")
    assert calls[4][1] == {"eval/sample": "**a** b"}
    assert calls[2][1]["train/loss"] == 9.0 and calls[5][1].keys() == calls[2][1].keys()
    assert calls[3][1] == {"eval/loss": 2.0}


def test_comet_gets_every_step_through_its_own_interface(tmp_path, monkeypatch):
    calls: list[tuple] = []
    experiment = SimpleNamespace(
        set_name=lambda name: calls.append(("name", name)),
        log_metrics=lambda row, step: calls.append((step, row)),
        log_metric=lambda name, value, step: calls.append((step, {name: value})),
        log_text=lambda text, step, metadata: calls.append((step, {metadata["name"]: text})),
        end=lambda: calls.append(("end",)),
    )
    fake = SimpleNamespace(start=lambda **kw: calls.append(("start", kw)) or experiment, __spec__=object())
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    comet = {"enabled": True, "project": "rivers", "online": False, "experiment_name": "first"}
    with contextlib.closing(
        build_recorder(SimpleNamespace(comet=load({"comet": comet, "train_batch_size": 1}).comet), rank=0)
    ) as recorder:
        recorder.step(record(1))
        recorder.metric("eval/loss", 2.0, 1)
        recorder.text("eval/sample", "**a** b", 1)
    assert [call[0] for call in calls] == ["start", "name", 1, 1, 1, "end"]
    assert calls[4][1] == {"eval/sample": "**a** b"}
    assert calls[0][1] == {"project": "rivers", "online": False} and calls[1] == ("name", "first")
    assert calls[2][1]["train/loss"] == 9.0 and calls[3][1] == {"eval/loss": 2.0}


def test_a_text_goes_past_writers_that_show_none(tmp_path, caplog):
    with contextlib.closing(build_recorder(config(tmp_path, "csv_monitor", "jsonl_monitor"), rank=0)) as recorder:
        recorder.text("eval/sample", "**a** b", 1)
        recorder.metric("eval/loss", 2.0, 1)
    assert "stopped recording" not in caplog.text
    assert "eval/sample" not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_services_are_not_imported_unless_enabled(tmp_path, monkeypatch):
    real = builtins.__import__

    def guard(name, *args, **kwargs):
        assert name.split(".")[0] not in ("wandb", "tensorboard"), name
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guard)
    with contextlib.closing(build_recorder(config(tmp_path, "csv_monitor", "jsonl_monitor"), rank=0)) as recorder:
        recorder.step(record(1))


def test_a_failing_writer_is_dropped_with_one_warning(caplog):
    class Broken:
        def step(self, record):
            raise OSError(28, "No space left on device")

        metric = close = None

    seen: list[int] = []
    good = SimpleNamespace(step=lambda r: seen.append(r.step), metric=lambda *a: seen.append(-1), close=lambda: None)
    recorder = Recorder([Broken(), good])  # type: ignore[list-item]
    for step in (1, 2):
        recorder.step(record(step))
    recorder.metric("x", 1, 2)
    recorder.close()
    recorder.close()
    recorder.step(record(3))
    assert seen == [1, 2, -1]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_phase_timer_adds_up_and_starts_anew():
    edges: list[int] = []
    timer = PhaseTimer(synchronize=lambda: edges.append(1))
    for _ in range(3):
        with timer.span("forward"):
            pass
    with pytest.raises(RuntimeError), timer.span("backward"):
        raise RuntimeError
    taken = timer.pop_seconds()
    assert list(taken) == ["forward", "backward"]
    assert all(seconds >= 0 for seconds in taken.values())
    assert len(edges) == 8
    assert timer.pop_seconds() == {}
    silent = PhaseTimer(enabled=False, synchronize=lambda: edges.append(1))
    with silent.span("forward"):
        pass
    assert silent.pop_seconds() == {}
    assert len(edges) == 8


def test_flops_per_token_follows_palm():
    facts = SimpleNamespace(num_parameters=100, hidden_size=8, num_layers=2)
    assert flops_per_token(facts) == 600
    assert flops_per_token(facts, 16) == 600 + 12 * 2 * 8 * 16
    unknown = SimpleNamespace(num_parameters=100, hidden_size=None, num_layers=None)
    assert flops_per_token(unknown, 16) == 600


def test_resident_memory_is_of_this_process():
    before = resident_mib()
    with mmap.mmap(-1, 64 << 20) as block:  # pages of its own: the heap may hold 64 MiB that were freed before
        block.write(b"\x01" * (64 << 20))
        assert resident_mib() - before > 50
        assert resident_mib(peak=True) >= resident_mib() - 1


def test_table_aligns_numbers_right_and_text_left():
    text = format_table(["op", "calls", "ms"], [["all_gather", 1200, 1.23456], ["x", 3, None]])
    assert text.splitlines() == [
        "op          calls     ms",
        "----------  -----  -----",
        "all_gather  1,200  1.235",
        "x               3      -",
    ]
    assert format_table(["a", "b"], []).splitlines() == ["a  b", "-  -"]
    with pytest.raises(ValueError, match="a row of 1 cells under 2"):
        format_table(["a", "b"], [["x"]])
