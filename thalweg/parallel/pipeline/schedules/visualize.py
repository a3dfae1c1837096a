"""Pictures of a schedule: text for a terminal, SVG for a page."""

from __future__ import annotations

from html import escape

from thalweg.parallel.pipeline.schedules.schedule import Action
from thalweg.parallel.pipeline.schedules.simulate import Timeline

# Fill and text of each kind; a second stage on the same rank is drawn paler.
_COLOURS = {"F": "#3b6fb6", "B": "#2e8b57", "I": "#3fa66b", "W": "#d9952b"}
_ROW, _LEFT, _TOP = 26, 64, 28


def timeline_to_text(timeline: Timeline, unit: float = 1.0) -> str:
    """One line a rank, one column a unit of time: ``F3`` begins where it begins, dots are waits."""
    lines = []
    width = round(timeline.makespan / unit)
    for rank, order in enumerate(timeline.schedule.orders):
        cells = ["  ."] * width
        for action in order:
            begin, end = timeline.intervals[action]
            first = round(begin / unit)
            for column in range(first, min(width, max(first + 1, round(end / unit)))):
                cells[column] = f"{action.kind}{action.micro}".rjust(3) if column == first else "  -"
        lines.append(f"rank {rank}:{''.join(cells)}")
    return "\n".join(lines)


def timeline_to_svg(timeline: Timeline, width: int = 1100) -> str:
    """A self-contained picture: ranks downwards, time to the right, the bubble in the title."""
    schedule = timeline.schedule
    scale = (width - _LEFT - 10) / timeline.makespan
    height = _TOP + _ROW * schedule.num_ranks + 10
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches, bubble {timeline.bubble:.1%}"
    )
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>',
    ]
    for rank, order in enumerate(schedule.orders):
        y = _TOP + _ROW * rank
        elements.append(f'<text x="4" y="{y + 17}">rank {rank}</text>')
        elements.append(f'<rect x="{_LEFT}" y="{y}" width="{width - _LEFT - 10}" height="{_ROW - 3}" fill="#eeeeee"/>')
        first = schedule.stages_on_rank(rank)[:1]
        elements += [_action_box(timeline, action, y, scale, is_pale=action.stage not in first) for action in order]
    return "\n".join([*elements, "</svg>"]) + "\n"


def _action_box(timeline: Timeline, action: Action, y: int, scale: float, is_pale: bool) -> str:
    begin, end = timeline.intervals[action]
    x, box_width = _LEFT + begin * scale, max(0.5, (end - begin) * scale - 0.6)
    opacity = 0.6 if is_pale else 1.0
    label = (
        f'<text x="{x + box_width / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="white">{action.micro}</text>'
        if box_width > 12
        else ""
    )
    return (
        f"<g><title>{escape(f'{action} {begin:g} to {end:g}')}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{box_width:.1f}" height="{_ROW - 3}" '
        f'fill="{_COLOURS[action.kind]}" fill-opacity="{opacity}"/>{label}</g>'
    )
