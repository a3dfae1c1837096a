"""What every benchmark prints: rows that compare, a table, and the machine they were measured on.

A row has `case, peer, metric, ours, theirs, ratio`; the ratio is above 1 where Thalweg is better,
whichever way the metric points.  A peer that could not take part has a row too, with `theirs` null and
a `note` that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from _isa import asked_isa, isa_variables
from _peers import ROOT


@dataclass(frozen=True)
class Row:
    """One comparison; build it with :func:`compare` so that the ratio has the right way up."""

    case: str
    peer: str
    metric: str
    ours: float | None
    theirs: float | None
    ratio: float | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row for the JSON output, without an empty note."""
        fields = asdict(self)
        if not self.note:
            del fields["note"]
        return fields


def compare(
    case: str,
    peer: str,
    metric: str,
    ours: float | None,
    theirs: float | None,
    *,
    lower_is_better: bool = True,
    ratio: float | None = None,
    note: str = "",
) -> Row:
    """Return a row; `ratio` overrides the quotient of the two values, for ratios taken turn by turn."""
    if ratio is None and ours and theirs:
        ratio = theirs / ours if lower_is_better else ours / theirs
    return Row(case, peer, metric, _short(ours), _short(theirs), _short(ratio), note)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def machine_info() -> dict[str, Any]:
    """Return the machine's facts: processor, what it can do, cores, memory, torch and Python."""
    model, flags = platform.processor() or platform.machine(), set()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
            break
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    return {
        "processor": model,
        "features": [name for name in wanted if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        **({"asked": isa_variables(asked_isa())} if asked_isa() else {}),
    }


def format_machine(info: dict[str, Any]) -> str:
    """Return the machine on one line."""
    asked = " ".join(f"{name}={value}" for name, value in info.get("asked", {}).items())
    return (
        f"{info['processor']} ({', '.join(info['features']) or 'no vector extensions named'}), "
        f"{info['cores']} cores, {info['memory_gib']} GiB, torch {info['torch']}, Python {info['python']}"
        + (f", asked for less: {asked}" if asked else "")
    )


def commit() -> str:
    """Return the short commit of the checkout, with "+changes" when tracked files other than results differ from it."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return f"{name}+changes" if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results") else name


def now() -> str:
    """Return the date of a row, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def make_result(bench: str, rows: Iterable[Row], **extra: Any) -> dict[str, Any]:
    """Return the one JSON object of a benchmark."""
    return {
        "bench": bench,
        "date": now(),
        "commit": commit(),
        "machine": machine_info(),
        "rows": [row.to_dict() for row in rows],
        **extra,
    }


def format_cell(value: Any, digits: int = 0) -> str:
    """Return a table cell: a number with that many digits, "-" for None, text as it is."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float | int) else str(value)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns: the first one left, the others right."""
    widths = [max(len(str(line[i])) for line in [headers, *rows]) for i in range(len(headers))]

    def render(line: Sequence[str]) -> str:
        cells = [
            str(c).ljust(w) if i == 0 else str(c).rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([render(headers), f"|{rule}|", *(render(line) for line in rows)])


def rows_table(rows: Sequence[Row | dict[str, Any]]) -> str:
    """Return the comparison rows as a table, and below it why some have no ratio."""
    fields = [row.to_dict() if isinstance(row, Row) else row for row in rows]
    lines = [
        [
            row["case"],
            row["peer"],
            row["metric"],
            *(format_cell(row[key], 3 if (row[key] or 0) < 10 else 1) for key in ("ours", "theirs")),
            "absent" if row.get("note") else format_cell(row["ratio"], 2),
        ]
        for row in fields
    ]
    notes = dict.fromkeys(row["note"] for row in fields if row.get("note"))
    drawn = markdown_table(["case", "peer", "metric", "ours", "theirs", "ratio"], lines)
    return "\n".join([drawn, *(f"\nAbsent: {note}" for note in notes)])


def write_result(name: str, data: dict[str, Any], markdown: str) -> tuple[Path, Path]:
    """Write results/<name>.json and results/<name>.md; return both paths."""
    folder = ROOT / "results"
    folder.mkdir(exist_ok=True)
    paths = folder / f"{name}.json", folder / f"{name}.md"
    paths[0].write_text(json.dumps(data, indent=1) + "\n")
    paths[1].write_text(markdown.rstrip() + "\n")
    return paths


def rows_for(run: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows whose case begins with the run's name."""
    return [row for row in rows if row["case"].startswith(f"{run},")]


def merge_runs(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what results/<name>.json holds with `runs` in the place of earlier ones of the same name.

    A run's rows are those whose case begins with the run's name; they are kept once, in `rows`.
    """
    path = ROOT / "results" / f"{name}.json"
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows: list[Any] = list(old.get("rows", []))
    for run in runs:
        stale = rows_for(run["run"], rows)
        rows = [row for row in rows if row not in stale] + list(run["rows"])
    runs_by_name = {run["run"]: run for run in [*old.get("runs", []), *runs]}
    merged = [{**runs_by_name[key], "rows": []} for key in sorted(runs_by_name)]
    return {"bench": name, "commit": commit(), "rows": rows, "runs": merged}


def render_section(run: dict[str, Any], headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return one run as Markdown: its name, when and where, its own table, its rows."""
    summary = f"{run['date']}, commit {run['commit']}, {format_machine(run['machine'])}."
    if run.get("load", 0.0) > run["machine"]["cores"]:
        summary += f" Load before the run: {run['load']:.0f}, so of the times only paired ratios mean anything."
    parts = [
        f"## {run['run']}",
        "",
        summary,
        "",
        markdown_table(headers, lines),
        "",
        rows_table(run["rows"]),
        "",
    ]
    return "\n".join(parts)


Render = Callable[[dict[str, Any]], str]


def write_runs(name: str, title: str, runs: Sequence[dict[str, Any]], render: Render) -> None:
    """Put runs into results/<name>.{json,md}, in the place of earlier ones of the same name."""
    data = merge_runs(name, runs)
    texts = [render({**run, "rows": rows_for(run["run"], data["rows"])}) for run in data["runs"]]
    write_result(name, data, "\n".join([f"# {title}\n", *texts]))


def publish_runs(
    name: str, title: str, runs: Sequence[dict[str, Any]], render: Render, *, write: bool, as_json: bool
) -> None:
    """Print runs, as one JSON object or rendered; `write`: also put them into the results."""
    if not runs:
        return
    if write:
        write_runs(name, title, runs, render)
    one = {**runs[0], "rows": [row for run in runs for row in run["rows"]], "runs": list(runs)}
    print(json.dumps(one) if as_json else "\n".join(map(render, runs)))


def load_run(name: str, run: str) -> dict[str, Any]:
    """The run of that name in results/<name>.json, or an empty one."""
    path = ROOT / "results" / f"{name}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return next((one for one in runs if one["run"] == run), {})


def add_output_options(parser: argparse.ArgumentParser, name: str, quick_help: str) -> None:
    """Add what every benchmark understands; `quick` says what that leaves out."""
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help=f"write results/{name}.md and .json")
