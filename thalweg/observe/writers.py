"""Writers to CSV and JSON files, TensorBoard, Weights & Biases and Comet.

Rows of files are only ever added, so a resumed job keeps what the earlier one wrote.

A job that goes back to an older checkpoint writes some steps again; the later row of a
step is then the true one.  A row cut off by a kill is closed with a line break before
the next is written, so it spoils nothing but itself.  Every row is flushed.
The packages of services are imported only when asked for.
"""

import contextlib
import csv
import json
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from thalweg.observe.step_record import COLUMNS, StepRecord, to_json_scalar

_METRIC_COLUMNS = ("step", "name", "value")
_COMET_OPTIONS = ("api_key", "workspace", "project", "experiment_key", "mode", "online")


def open_for_append(path: Path) -> TextIOWrapper:
    """Open ``path`` to add rows to, making its folders; a torn last line is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = False
    if path.exists() and path.stat().st_size:
        with path.open("rb") as existing:
            existing.seek(-1, 2)
            torn = existing.read(1) != b"\n"
    file = path.open("a", encoding="utf-8", newline="")
    if torn:
        file.write("\n")
        file.flush()
    return file


class CsvWriter:
    """``steps.csv`` with one row a step, ``metrics.csv`` with ``step,name,value`` rows."""

    def __init__(self, folder: Path) -> None:
        self._step_file = _CsvFile(folder / "steps.csv", COLUMNS)
        self._metric_file: _CsvFile | None = None
        self._folder = folder

    def step(self, record: StepRecord) -> None:
        self._step_file.write_row(list(record.scalars().values()))
        for name, seconds in record.phases.items():
            self.metric(f"phase/{name}", seconds, record.step)

    def metric(self, name: str, value: float, step: int) -> None:
        if self._metric_file is None:
            self._metric_file = _CsvFile(self._folder / "metrics.csv", _METRIC_COLUMNS)
        self._metric_file.write_row([step, name, value])

    def close(self) -> None:
        self._step_file.close()
        if self._metric_file is not None:
            self._metric_file.close()


class _CsvFile:
    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        header = None
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8") as file:
                header = file.readline().rstrip("\r\n")
        if header is not None and header != ",".join(columns):
            raise ValueError(
                f"{path} has other columns ({header}) than this version writes ({','.join(columns)}): "
                "rename that file, or choose another output_path or job_name"
            )
        self._file = open_for_append(path)
        self._csv = csv.writer(self._file, lineterminator="\n")
        if header is None:
            self.write_row(list(columns))

    def write_row(self, values: list[Any]) -> None:
        self._csv.writerow(["" if value is None else value for value in values])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class JsonlWriter:
    """One JSON object a line: ``{"kind": "step", ...}`` or ``{"kind": "metric", name, value, step}``."""

    def __init__(self, path: Path) -> None:
        self._file = open_for_append(path)

    def step(self, record: StepRecord) -> None:
        row: dict[str, Any] = {"kind": "step"} | {name: to_json_scalar(v) for name, v in record.scalars().items()}
        if record.phases:
            row["phases"] = {name: to_json_scalar(seconds) for name, seconds in record.phases.items()}
        self._write_row(row)

    def metric(self, name: str, value: float, step: int) -> None:
        self._write_row({"kind": "metric", "name": name, "value": to_json_scalar(value), "step": step})

    def close(self) -> None:
        self._file.close()

    def _write_row(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()


def iter_jsonl(path: Path) -> Iterator[Any]:
    """Yield what the lines of a file say; one that was torn as its run died is passed over."""
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def read_jsonl(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Return the rows of one kind, the last of each step, in order of steps; torn lines are passed over."""
    rows: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in iter_jsonl(path):
        if isinstance(row, dict) and row.get("kind") == kind:
            rows[row.get("step"), row.get("name")] = row
    return sorted(rows.values(), key=lambda row: row["step"])


def _to_scalars(record: StepRecord) -> dict[str, float]:
    row = {f"train/{name}": float(v) for name, v in record.scalars().items() if v is not None and name != "step"}
    return row | {f"phase/{name}": seconds for name, seconds in record.phases.items()}


class TensorBoardWriter:
    """Scalars ``train/<field>``, ``phase/<name>`` and the user's own names, by step."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Each start adds an event file to the folder; TensorBoard reads them all, so nothing is lost.
        self._summary = SummaryWriter(log_dir=str(folder))

    def step(self, record: StepRecord) -> None:
        for name, value in _to_scalars(record).items():
            self.metric(name, value, record.step)

    def metric(self, name: str, value: float, step: int) -> None:
        self._summary.add_scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._summary.add_text(name, text, step)

    def close(self) -> None:
        self._summary.close()


class WandbWriter:
    """The same names, sent to a Weights & Biases run.

    It passes over a row whose ``step=`` is below the last one, and a program may count its own in samples: so each row
    says its step itself.
    """

    def __init__(self, *, project: str | None, group: str | None, team: str | None) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(project=project, group=group, entity=team, resume="allow")
        self._run.define_metric("*", step_metric="step")

    def step(self, record: StepRecord) -> None:
        self._run.log({**_to_scalars(record), "step": record.step})

    def metric(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value, "step": step})

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: text, "step": step})

    def close(self) -> None:
        self._run.finish()


class CometWriter:
    """The same names, sent to a Comet experiment; most of the section goes to ``comet_ml.start``."""

    def __init__(self, section: Any) -> None:
        import comet_ml  # pyright: ignore[reportMissingImports]

        options = {key: value for key in _COMET_OPTIONS if (value := getattr(section, key)) is not None}
        self._experiment = comet_ml.start(**options)
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)

    def step(self, record: StepRecord) -> None:
        self._experiment.log_metrics(_to_scalars(record), step=record.step)

    def metric(self, name: str, value: float, step: int) -> None:
        self._experiment.log_metric(name, value, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._experiment.log_text(text, step=step, metadata={"name": name})

    def close(self) -> None:
        self._experiment.end()
