"""The plan as one HTML page that needs no network: the table, and the memory timeline of a step as SVG."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from thalweg.observe.html import render_page
from thalweg.plan.memory.rank_memory import MemorySample
from thalweg.plan.result import LABELS, Plan, format_verdict

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 360, 80, 30
_COLOURS = {name: row["colour"] for name, row in LABELS.items() if row["colour"]}
_MAX_SAMPLES = 600


def plan_to_html(plan: Plan) -> str:
    """The page."""
    parts = asdict(plan.per_rank).items()
    return render_page(
        "plan.html",
        plan=plan,
        verdict=format_verdict(plan),
        parts=[(name, _COLOURS.get(name, "#ddd"), value, LABELS[name]["description"]) for name, value in parts],
        chart=_timeline_chart(plan.timeline, plan.limit, plan.per_rank.process) if plan.timeline else None,
        sent=[*plan.traffic.items(), *plan.links.items()],
    )


def _timeline_chart(timeline: Sequence[MemorySample], limit: int | None, process_bytes: int) -> dict[str, Any]:
    """Stacked areas of what is alive, the resident line above them, and where the phases begin."""
    stride = max(1, len(timeline) // _MAX_SAMPLES)
    windows = (timeline[i : i + stride] for i in range(0, len(timeline), stride))
    samples = [max(window, key=lambda sample: sum(sample.live_bytes.values())) for window in windows]
    highest = max(max(m.resident_bytes for m in samples), limit or 0) * 1.05
    labels = [label for label in _COLOURS if label == "process" or any(m.live_bytes.get(label) for m in samples)]

    def x(index: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * index / max(1, len(samples) - 1), 1)

    def y(value: float) -> float:
        return round((_HEIGHT - _BOTTOM) * (1 - value / highest), 1)

    def line(values: Sequence[float]) -> list[str]:
        return [f"{x(i)},{y(value)}" for i, value in enumerate(values)]

    floor, areas = [0.0] * len(samples), []
    for label in labels:
        roof = [
            low + (process_bytes if label == "process" else moment.live_bytes.get(label, 0))
            for low, moment in zip(floor, samples, strict=True)
        ]
        areas.append((label, _COLOURS[label], " ".join([*line(roof), *reversed(line(floor))])))
        floor = roof
    ticks = [highest * step / 4 for step in range(5)]
    steps = enumerate(pairwise(["", *(sample.phase for sample in samples)]))
    begun = [(phase, x(index)) for index, (before, phase) in steps if phase != before]
    return {
        "width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "bottom": _HEIGHT - _BOTTOM, "areas": areas,
        "resident": " ".join(line([moment.resident_bytes for moment in samples])),
        "ticks": [(value, y(value)) for value in ticks], "limit": None if limit is None else y(limit),
        "phases": [(phase, at) for phase, at in begun if phase in ("forward", "backward", "update")],
    }  # fmt: skip
