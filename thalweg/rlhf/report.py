"""What a run did, as lines of JSON while it goes on and as one HTML page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch.distributed as dist

_METRICS, _REPORT = "metrics.jsonl", "report.html"
_WIDTH, _HEIGHT, _PAD = 460, 180, 40
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; color: #222; }
figure { display: inline-block; margin: .5em; } figcaption { font-weight: 600; }
svg text { font: 11px system-ui, sans-serif; fill: #555; } polyline { fill: none; stroke: #3b6fb6; stroke-width: 1.5; }
td, th { padding: .3em .8em; text-align: left; vertical-align: top; } tr:nth-child(even) { background: #f5f5f5; }
pre { margin: 0; white-space: pre-wrap; }
"""


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
            lines = path.read_text(encoding="utf-8").splitlines()
            self.rows = [row for row in map(_parse, lines) if row is not None and row["step"] <= start]
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

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
            (self.directory / _REPORT).write_text(render_report(title, self.rows), encoding="utf-8")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None  # the last line of a run that died while it wrote


def render_report(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of a run's lines."""
    names = list(dict.fromkeys(key for row in rows for key in row if key not in ("step", "samples")))
    figures = "".join(_curve(name, [(row["step"], row[name]) for row in rows if name in row]) for name in names)
    sampled = [row for row in rows if row.get("samples")]
    chosen = [sampled[0], sampled[-1]] if len(sampled) > 1 else sampled
    cells = "".join(
        f"<tr><td>{row['step']}</td><td><pre>{escape(s['prompt'])}</pre></td><td><pre>{escape(s['response'])}</pre></td>"
        f"<td>{s['reward']:.3g}</td></tr>"
        for row in chosen
        for s in row["samples"]
    )
    table = f"<h2>Samples</h2><table><tr><th>step<th>prompt<th>response<th>reward</tr>{cells}</table>" if cells else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1>
{figures}
{table}
</body></html>
"""


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    x_span, y_span = max(xs[-1] - xs[0], 1), (high - low) or 1.0

    def place(x: float, y: float) -> str:
        left = _PAD + (x - xs[0]) / x_span * (_WIDTH - 2 * _PAD)
        return f"{left:.1f},{_HEIGHT - _PAD / 2 - (y - low) / y_span * (_HEIGHT - _PAD):.1f}"

    line = " ".join(place(x, y) for x, y in points)
    return (
        f'<figure><figcaption>{escape(name)}: {ys[-1]:.4g}</figcaption><svg width="{_WIDTH}" height="{_HEIGHT}">'
        f'<polyline points="{line}"/><text x="0" y="14">{high:.3g}</text>'
        f'<text x="0" y="{_HEIGHT - _PAD // 2}">{low:.3g}</text>'
        f'<text x="{_WIDTH - _PAD}" y="{_HEIGHT - 4}">{xs[-1]}</text></svg></figure>'
    )
