"""The report of a study: one page that needs no network, the same as Markdown, and the rows as JSON.

Both texts are made of the same list of blocks: headings, paragraphs, tables, figures.
"""

import base64
import importlib.util
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from thalweg.observe.html import render_page
from thalweg.study.metrics import Estimate
from thalweg.study.prepare import write_json
from thalweg.study.results import collect
from thalweg.utils.formatting import format_bytes


@dataclass(frozen=True)
class ReportTable:
    """A table; a cell is a text, or a text and the number that it is sorted by."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str | tuple[str, float]]]


@dataclass(frozen=True)
class ReportFigure:
    """A picture as SVG; ``name`` is that of its file beside the Markdown."""

    name: str
    title: str
    svg: bytes

    @property
    def data_url(self) -> str:
        """The picture itself, for a page that needs no other file."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


# ``## `` begins a heading, ``### `` a lesser one; another text is a paragraph.
Block = str | ReportTable | ReportFigure


def write_report(folder: Path) -> dict[str, Any]:
    """Write report.json, report.md with figures/, and report.html into a study's folder; return the first's content.

    Raises FileNotFoundError where the folder holds no study.
    """
    found = collect(folder)
    blocks = build_blocks(found)
    write_json(folder / "report.json", found)
    for block in blocks:
        if isinstance(block, ReportFigure):
            (folder / "figures").mkdir(exist_ok=True)
            (folder / "figures" / f"{block.name}.svg").write_bytes(block.svg)
    (folder / "report.md").write_text(to_markdown(blocks), encoding="utf-8")
    page = render_page("study.html", name=found["name"], blocks=blocks, width="1280px")
    (folder / "report.html").write_text(page, encoding="utf-8")
    return found


def build_blocks(found: dict[str, Any]) -> list[Block]:
    """Return what both texts say, in order."""
    blocks: list[Block] = [f"# Study: {found['name']}", _describe_machine(found["provenance"]), *found["notes"]]
    if any(row["random_weights"] for row in found["rows"]):
        blocks.append(_TEXTS["random weights"])
    measured = [row for row in found["rows"] if row["status"] == "ok"]
    if measured and all(row["joules_per_sample"] is None for row in measured):
        blocks.append("No energy: this machine has no counters (RAPL, NVML) that may be read.")
    if found["recommended"]:
        blocks += ["## What to use", _recommended_table(found["recommended"])]
    for task, title in (("inference", "Inference"), ("training", "Training")):
        rows = [row for row in found["rows"] if row["task"] == task]
        if not rows:
            continue
        blocks += [f"## {title}", _overview_table(rows), _cells_table(rows), *_time_figures(found, task)]
        lines = [[*_place(row), row["technique"], row["why"]] for row in rows if row["status"] == "ok"]
        blocks += [f"### Why: {title.lower()}", ReportTable([*_PLACE, "technique", "why"], lines)]
    if found["planned"]:
        blocks += ["## Planned, not measured", _TEXTS["planned"], _planned_table(found["planned"])]
    failed = [row for row in (*found["rows"], *found["planned"]) if row["status"] not in ("ok", "planned")]
    if failed:
        lines = [[*_place(row), row["technique"], row["status"], row["reason"]] for row in failed]
        blocks += ["## Cells without a measurement", ReportTable([*_PLACE, "technique", "status", "reason"], lines)]
    lines = [[*_place(one), one["task"], _ratio(one["ratio"]), one["status"]] for one in found["noise"]]
    noise = ReportTable([*_PLACE, "task", "baseline to itself", "status"], lines)
    blocks += ["## Noise", _TEXTS["noise"], noise]
    blocks += ["## Datasets", *_dataset_blocks(found["explored"])]
    return [*blocks, "## Method", _TEXTS["method"].format(**found["config"])]


_PLACE = ("hardware", "model", "dataset")
_TEXTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("report.yaml").read_text("utf-8"))


def _describe_machine(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "deepspeed") if facts.get(name))
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    return (
        f"{facts['date']}, thalweg {facts['thalweg']}{commit}; {facts['processor']} "
        f"({', '.join(facts['features']) or 'no vector extensions named'}), {facts['cores']} cores, "
        f"{format_bytes(facts['memory'])}, load {facts['load']:.1f} at the start; {versions}, Python {facts['python']}."
    )


def _place(row: dict[str, Any]) -> list[str]:
    model = f"{row['model']} (random)" if row.get("random_weights") else row["model"]
    return [row["hardware"], model, row["dataset"]]


Cell = str | tuple[str, float]


def _cell(value: float | None, text: Callable[[float], str]) -> Cell:
    return "-" if value is None else (text(value), value)


def _ms(estimate: Estimate | None) -> Cell:
    return "-" if estimate is None else (_bracket(estimate, lambda one: _digits(1e3 * one)), 1e3 * estimate[0])


def _bracket(estimate: Estimate, write: Callable[[float], str]) -> str:
    middle, *ends = (None if one is None else write(one) for one in estimate)
    return f"{middle} [{ends[0]}, {ends[1]}]" if ends[0] else f"{middle} [one round]"


def _digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _ratio(estimate: Estimate | None) -> Cell:
    return "-" if estimate is None else (_bracket(estimate, lambda one: f"{one:.2f}"), estimate[0])


def _overview_table(rows: list[dict[str, Any]]) -> ReportTable:
    """The report's Table 1: a line for each model and technique, milliseconds a sample for each dataset."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        lines.setdefault((*_place(row)[:2], row["technique"]), {})[row["dataset"]] = row
    body = []
    for key, by_dataset in lines.items():
        cells = []
        for name in datasets:
            row = by_dataset[name]
            is_ok = row["status"] == "ok"
            times = f"{_digits(1e3 * row['seconds_per_sample'][0])} ms" if is_ok else row["status"]
            ratio = f", {row['ratio'][0]:.2f}x" if is_ok and row.get("ratio") else ""
            cells.append((times + ratio, row["seconds_per_sample"][0]) if is_ok else times)
        body.append([*key, *cells])
    return ReportTable(["hardware", "model", "technique", *(f"{name}: a sample" for name in datasets)], body)


def _cells_table(rows: list[dict[str, Any]]) -> ReportTable:
    is_inference = rows[0]["task"] == "inference"
    timed = ["first token ms", "next tokens ms"] if is_inference else ["samples/s"]
    headers = [*_PLACE, "technique", "ms a sample", "baseline's / its time", *timed, "tokens/s"]
    headers += ["load s", "memory peak", "of it after loading", "disk"]
    compared = "equal outputs" if is_inference else "plan: ms a step, a rank"
    headers += ["J a sample", "1,000 samples cost", compared, "quality"]
    body = []
    for row in rows:
        if row["status"] != "ok":
            continue
        cells = [*_place(row), row["technique"], _ms(row["seconds_per_sample"]), _ratio(row.get("ratio"))]
        rate = 1 / row["seconds_per_sample"][0]
        timings = [_ms(row[key]) for key in ("first_seconds", "step_seconds") if is_inference]
        cells += timings or [(_digits(rate), rate)]
        peak = row["host_peak"] if row["device_peak"] is None else row["device_peak"]
        running = row["host_run_peak"] if row["device_peak"] is None else row["device_peak"]
        load, speed = row["load_seconds"], row["tokens_per_second"]
        cells += [(f"{speed:,.0f}", speed), (f"{load:.1f}", load)]
        cells += [(format_bytes(value), value) for value in (peak, running)]
        cells.append((format_bytes(row["disk"]), row["disk"]) if row["disk"] else "-")
        cells += [_cell(row["joules_per_sample"], "{:.3g}".format), _cost_cell(row)]
        if is_inference:
            more = f"{row.get('different_outputs')} different"
            cells.append(_cell(row.get("equal_outputs"), lambda equal, more=more: f"{equal:.0%}, {more}"))
        else:
            size = format_bytes(row["plan"].get("bytes", 0))
            cells.append(_cell(row["plan"].get("seconds"), lambda plan, size=size: f"{1e3 * plan:.1f}, {size}"))
        quality = (f"{key} {'-' if value is None else f'{value:.3f}'}" for key, value in row["quality"].items())
        body.append([*cells, ", ".join(quality)])
    return ReportTable(headers, body)


def _cost_cell(row: dict[str, Any]) -> Any:
    return _cell(row["cost_per_1000"], lambda cost: f"{cost:.3g} {row['currency']}")


def _planned_table(rows: list[dict[str, Any]]) -> ReportTable:
    """The report's Figure 4: fine-tuning by hardware, batch, precision (which the technique names), time and cost."""
    headers = [*_PLACE, "technique", "batch a rank", "ms a step", "samples/s", "memory a rank", "fits", "limited by"]
    body = []
    for row in rows:
        if row["status"] != "planned":
            continue
        plan = row["plan"]
        seconds, size = plan["seconds"], plan["bytes"]
        fits = {True: "yes", False: f"no, {format_bytes(plan['limit'] or 0)}", None: "not known"}[plan["fits"]]
        cells = [*_place(row), row["technique"], (f"{row['batch_size']}", row["batch_size"])]
        cells += [(_digits(1e3 * seconds), seconds), (_digits(row["samples"] / seconds), row["samples"] / seconds)]
        cells += [(format_bytes(size), size), fits, plan["bottleneck"]]
        body.append([*cells, _cost_cell(row) if plan["fits"] else "-"])
    return ReportTable([*headers, "1,000 samples cost"], body)


def _recommended_table(recommended: list[dict[str, Any]]) -> ReportTable:
    headers = [*_PLACE, "task", "fastest without loss of quality", "ratio", "its config", "least memory", "bytes"]
    lines = []
    for one in recommended:
        size = one["least_memory_bytes"]
        cells = [*_place(one), one["task"], one["fastest"], _ratio(one["ratio"]), json.dumps(one["config"])]
        lines.append([*cells, one["least_memory"], (format_bytes(size), size), json.dumps(one["least_memory_config"])])
    return ReportTable([*headers, "its config"], lines)


def _dataset_blocks(explored: dict[str, Any]) -> list[Block]:
    """The report's Figures 1 and 2, as numbers and as pictures."""
    rows, lengths = [], []
    for name, one in explored.items():
        if "error" in one:
            rows.append([name, "-", "-", one["error"]])
            continue
        labels = ", ".join(f"{label} {count:,}" for label, count in one["labels"].items()) or "texts, no labels"
        rows.append([name, (f"{one['rows']:,}", one["rows"]), (f"{one['skipped']:,}", one["skipped"]), labels])
        for model, columns in one["tokens"].items():
            for column, found in columns.items():
                keys = ("mean", "min", "p25", "median", "p75", "p95", "max")
                lengths.append([name, model, column, *((f"{found[key]:.0f}", found[key]) for key in keys)])
    blocks: list[Block] = [ReportTable(["dataset", "rows", "left out", "labels"], rows)]
    headers = ["dataset", "tokenizer of", "column", "mean tokens", "min", "25%", "median", "75%", "95%", "max"]
    blocks.append(ReportTable(headers, lengths))
    good = {name: one for name, one in explored.items() if "error" not in one}
    labelled = {name: one["labels"] for name, one in good.items() if one["labels"]}
    return [
        *blocks,
        *_draw("labels", "Labels", labelled, _draw_labels),
        *_draw("lengths", "Tokens of inputs", good, _draw_lengths),
    ]


def _draw_labels(axis: Any, name: str, counts: dict[str, int]) -> None:
    bars = axis.bar(list(counts), list(counts.values()), color=_COLOURS[0])
    axis.bar_label(bars)
    axis.set_title(name)


def _draw_lengths(axis: Any, name: str, explored: dict[str, Any]) -> None:
    for model, columns in explored["tokens"].items():
        histogram = columns["input"]["histogram"]
        axis.stairs(histogram["counts"], histogram["edges"], label=model, linewidth=1.8)
    axis.set_title(name)
    axis.set_xlabel("tokens")
    axis.set_ylabel("rows")
    axis.legend(frameon=False)


_COLOURS = ("#2f6690", "#d9822b", "#9aa5b1")


def _time_figures(found: dict[str, Any], task: str) -> list[Block]:
    """Milliseconds a sample with their intervals, and of inference what a step is made of."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["task"] == task and row["status"] == "ok":
            groups.setdefault(tuple(_place(row)), []).append(row)
    figures = _draw(f"{task}_times", f"Time of a sample, {task}", groups, _draw_times)
    if task == "inference":
        figures += _draw("inference_steps", "What a decoding step is made of", groups, _draw_steps)
    return figures


def _draw_times(axis: Any, place: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    names, times = [row["technique"] for row in rows], [row["seconds_per_sample"] for row in rows]
    errors = [[1e3 * abs(t[0] - (t[end] or t[0])) for t in times] for end in (1, 2)]
    axis.barh(names, [1e3 * t[0] for t in times], xerr=errors, color=_COLOURS[0], capsize=3)
    _label_bars(axis, place, "ms a sample")


def _draw_steps(axis: Any, place: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    names = [row["technique"] for row in rows]
    steps = [1e3 * row["step_seconds"][0] for row in rows]
    moved = [
        min(step, 1e3 * max(row["predicted"]["memory_seconds"], row["predicted"]["streamed_seconds"]))
        for step, row in zip(steps, rows, strict=True)
    ]
    axis.barh(names, moved, color=_COLOURS[1], label="bytes, by the plan")
    rest = [step - part for step, part in zip(steps, moved, strict=True)]
    axis.barh(names, rest, left=moved, color=_COLOURS[2], label="the rest")
    _label_bars(axis, place, "ms of a decoding step")
    axis.legend(frameon=False)


def _label_bars(axis: Any, place: tuple[str, ...], label: str) -> None:
    axis.invert_yaxis()
    axis.set_title(f"{place[1]}\n{place[2]}, {place[0]}", fontsize=10)
    axis.set_xlabel(label)


def _draw(name: str, title: str, panels: Mapping[Any, Any], draw: Callable[[Any, Any, Any], None]) -> list[Block]:
    """Return a figure of ``panels``, two beside each other, each drawn by its axis, key and value; nothing without any,
    a line of text without matplotlib."""
    if not panels:
        return []
    if importlib.util.find_spec("matplotlib") is None:
        return [f"{title}: no figure without matplotlib (pip install 'thalweg[study]')."]
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    count, lines = len(panels), -(-len(panels) // 2)
    figure = Figure(figsize=(12 if count > 1 else 6.5, 3.4 * lines), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(lines, 2 if count > 1 else 1, squeeze=False).ravel()
    for axis, panel in zip(axes, panels.items(), strict=False):
        draw(axis, *panel)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[count:]:
        axis.set_axis_off()
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    return [ReportFigure(name, title, picture.getvalue())]


def to_markdown(blocks: Sequence[Block]) -> str:
    """Return the report as Markdown; its figures lie in ``figures/`` beside it."""
    parts = []
    for block in blocks:
        if isinstance(block, ReportTable):
            lines = [block.headers, ["---"] * len(block.headers), *block.rows]
            texts = [[cell if isinstance(cell, str) else cell[0] for cell in line] for line in lines]
            texts = [[text.replace("|", "\\|").replace("\n", " ") for text in line] for line in texts]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in texts))
        elif isinstance(block, ReportFigure):
            parts.append(f"![{block.title}](figures/{block.name}.svg)")
        else:
            parts.append(block)
    return "\n\n".join(parts) + "\n"
