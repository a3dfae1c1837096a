"""The plan as one HTML page that needs no network: the table, and the memory timeline of a step as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from html import escape

from thalweg.plan.memory.rank_memory import MemoryBreakdown, MemorySample
from thalweg.plan.result import LABEL_DESCRIPTIONS, Plan, format_verdict
from thalweg.utils.formatting import format_bytes, format_seconds

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 360, 80, 30
_COLOURS = {
    "process": "#9aa0a6",
    "parameters": "#3b6fb6",
    "gradients": "#c8553d",
    "optimizer": "#7a5195",
    "gathered": "#6fa8dc",
    "buffers": "#e0a458",
    "activations": "#4c9f70",
    "logits": "#a3c585",
    "update": "#b08bbb",
}
_MAX_SAMPLES = 600

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } td, th { padding: .25em 1em; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } tr:nth-child(even) { background: #f5f5f5; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em; }
.verdict { font-weight: 600; padding: .6em 1em; background: #eef3ee; } .no { background: #f9e9e6; }
svg text { font: 12px system-ui, sans-serif; fill: #444; }
"""


def plan_to_html(plan: Plan) -> str:
    """The page."""
    css_class = "verdict no" if plan.fits is False else "verdict"
    row = "<tr><td>{}</td><td class=n>{}</td></tr>".format
    time_rows = "".join(row(escape(name), format_seconds(value)) for name, value in plan.time_breakdown.items())
    sent_bytes = [*plan.traffic.items(), *plan.links.items()]
    traffic_rows = "".join(row(escape(name), format_bytes(value)) for name, value in sent_bytes)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Plan of {escape(plan.model)}</title>
<style>{_STYLE}</style></head>
<body>
<h1>{escape(plan.model)}</h1>
<p>{plan.num_parameters / 1e6:,.1f} million parameters on {plan.world_size} ranks,
{plan.tokens_per_step:,} tokens a step, {format_seconds(plan.step_seconds)} a step,
limited by {escape(plan.bottleneck)}.</p>
<p class="{css_class}">{escape(format_verdict(plan))}</p>
<h2>Bytes of one rank at its peak</h2>
{_breakdown_table(plan.per_rank)}
<h2>One step</h2>
{_timeline_svg(plan.timeline, plan.limit, plan.per_rank.process)}
<h2>Seconds</h2><table>{time_rows}</table>
<h2>Bytes sent by each rank in a step, by collective and by link</h2>
<table>{traffic_rows or "<tr><td>none</td></tr>"}</table>
</body></html>
"""


def _breakdown_table(per_rank: MemoryBreakdown) -> str:
    rows = []
    for item in fields(MemoryBreakdown):
        value = getattr(per_rank, item.name)
        swatch = f'<span class=swatch style="background:{_COLOURS.get(item.name, "#ddd")}"></span>'
        cells = f"<td>{swatch}{item.name}</td><td class=n>{format_bytes(value)}</td>"
        rows.append(f"<tr>{cells}<td>{LABEL_DESCRIPTIONS[item.name]}</td></tr>")
    rows.append(f"<tr><th>total</th><td class=n><b>{format_bytes(per_rank.total)}</b></td><td></td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _timeline_svg(timeline: Sequence[MemorySample], limit: int | None, process_bytes: int) -> str:
    """Stacked areas of what is alive, the resident line above them, and where the phases begin."""
    if not timeline:
        return "<p>No timeline: the model was extrapolated from a shallow one.</p>"
    samples = _downsample(timeline)
    highest = max(max(m.resident_bytes for m in samples), limit or 0) * 1.05
    labels = [label for label in _COLOURS if label == "process" or any(m.live_bytes.get(label) for m in samples)]

    def x(index: int) -> float:
        return _LEFT + (_WIDTH - _LEFT) * index / max(1, len(samples) - 1)

    def y(value: float) -> float:
        return (_HEIGHT - _BOTTOM) * (1 - value / highest)

    floor = [0.0] * len(samples)
    elements = []
    for label in labels:
        roof = [
            low + (process_bytes if label == "process" else moment.live_bytes.get(label, 0))
            for low, moment in zip(floor, samples, strict=True)
        ]
        points = [f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(roof)]
        points += [f"{x(i):.1f},{y(floor[i]):.1f}" for i in reversed(range(len(samples)))]
        title = f"<title>{label}</title>"
        elements.append(f'<polygon points="{" ".join(points)}" fill="{_COLOURS[label]}">{title}</polygon>')
        floor = roof
    line = " ".join(f"{x(i):.1f},{y(m.resident_bytes):.1f}" for i, m in enumerate(samples))
    elements.append(f'<polyline points="{line}" fill="none" stroke="#222" stroke-width="1.5"/>')
    for step in range(5):
        value = highest * step / 4
        elements.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{format_bytes(value)}</text>')
    if limit is not None:
        elements.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="#c00" '
            'stroke-dasharray="6 4"/>'
        )
    elements += _phase_markers(samples, x)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory over one step">'
        f"{''.join(elements)}</svg>"
        "<p>Areas: what is alive. Black line: what is resident. Dashed: the limit.</p>"
    )


def _phase_markers(samples: Sequence[MemorySample], x: Callable[[int], float]) -> list[str]:
    elements, previous_phase = [], ""
    for index, sample in enumerate(samples):
        if sample.phase != previous_phase and sample.phase in ("forward", "backward", "update"):
            elements.append(f'<text x="{x(index):.1f}" y="{_HEIGHT - 8}">{sample.phase}</text>')
            ends = f'x1="{x(index):.1f}" x2="{x(index):.1f}" y1="0" y2="{_HEIGHT - _BOTTOM}"'
            elements.append(f'<line {ends} stroke="#0003"/>')
        previous_phase = sample.phase
    return elements


def _downsample(timeline: Sequence[MemorySample]) -> list[MemorySample]:
    """At most ``_MAX_SAMPLES`` entries, the highest of each window."""
    stride = max(1, len(timeline) // _MAX_SAMPLES)
    windows = (timeline[i : i + stride] for i in range(0, len(timeline), stride))
    return [max(window, key=lambda sample: sum(sample.live_bytes.values())) for window in windows]
