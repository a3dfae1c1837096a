"""What a run did, as lines of JSON while it goes on and as one HTML page that needs no network."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thalweg.observe.html import render_page
from thalweg.observe.writers import iter_jsonl

_METRICS, _REPORT = "metrics.jsonl", "report.html"
_WIDTH, _HEIGHT, _PAD = 460, 180, 40


class RunLog:
    """Metrics of a run's updates in ``DIR/metrics.jsonl``, and the page of them; rank 0 writes.

    ``start``: the update that a run goes on from; lines after it, of a run that died before it had committed them, go.
    """

    def __init__(self, directory: str | Path, start: int = 0) -> None:
        self.directory, self.rows = Path(directory), list[dict[str, Any]]()
        if dist.get_rank() > 0:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _METRICS
        if path.is_file():
            self.rows = [row for row in iter_jsonl(path) if row["step"] <= start]
        kept = path.with_name(f".{_METRICS}")
        kept.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        kept.replace(path)  # a run may die while it writes

    def add(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record an update's metrics, and texts of it (``prompt``, ``response``, ``reward``)."""
        if dist.get_rank() > 0:
            return
        row = {"step": step, **metrics, **({"samples": list(samples)} if samples else {})}
        self.rows.append(row)
        with open(self.directory / _METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def write_report(self, title: str) -> None:
        """Write ``DIR/report.html``: a curve for each metric, and the samples of the first and the last update."""
        if dist.get_rank() == 0 and self.rows:
            (self.directory / _REPORT).write_text(render_report({title: self.rows}), encoding="utf-8")


def write_report_of_steps(directory: Path, steps: Iterable[str]) -> None:
    """Write ``DIR/report.html`` of all steps whose metrics are below it; rank 0 does."""
    files = {step: path for step in steps if (path := directory / step / _METRICS).is_file()}
    if files and dist.get_rank() == 0:
        page = render_report({step: list(iter_jsonl(path)) for step, path in files.items()})
        (directory / _REPORT).write_text(page, encoding="utf-8")


def render_report(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The page of the lines of one run or several, by title."""
    size = {"width": _WIDTH, "height": _HEIGHT, "pad": _PAD}
    return render_page("rlhf.html", runs=[_describe(title, rows) for title, rows in runs.items()], **size)


def _describe(title: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(key for row in rows for key in row if key not in ("step", "samples")))
    curves = [_curve(name, [(row["step"], row[name]) for row in rows if name in row]) for name in names]
    sampled = [row for row in rows if row.get("samples")]
    chosen = [sampled[0], sampled[-1]] if len(sampled) > 1 else sampled
    samples = [(row["step"], sample) for row in chosen for sample in row["samples"]]
    return {"title": title, "curves": curves, "samples": samples}


def _curve(name: str, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    x_span, y_span = max(xs[-1] - xs[0], 1), (high - low) or 1.0

    def place(x: float, y: float) -> str:
        left = _PAD + (x - xs[0]) / x_span * (_WIDTH - 2 * _PAD)
        return f"{left:.1f},{_HEIGHT - _PAD / 2 - (y - low) / y_span * (_HEIGHT - _PAD):.1f}"

    line = " ".join(place(x, y) for x, y in points)
    return {"name": name, "last": ys[-1], "points": line, "high": high, "low": low, "step": xs[-1]}
