"""Pictures of a schedule: text for a terminal, SVG for a page."""

from collections.abc import Iterator
from typing import Any

from thalweg.observe.html import render_page
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
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches, bubble {timeline.bubble:.1%}"
    )

    def boxes(rank: int) -> Iterator[tuple[Any, ...]]:
        first = schedule.stages_on_rank(rank)[:1]
        for action in schedule.orders[rank]:
            begin, end = timeline.intervals[action]
            x, box_width = _LEFT + begin * scale, max(0.5, (end - begin) * scale - 0.6)
            yield action, begin, end, x, box_width, _COLOURS[action.kind], 1.0 if action.stage in first else 0.6

    rows = [(rank, _TOP + _ROW * rank, list(boxes(rank))) for rank in range(schedule.num_ranks)]
    height, box_height = _TOP + _ROW * schedule.num_ranks + 10, _ROW - 3
    page = {"title": title, "width": width, "height": height, "left": _LEFT, "box_height": box_height, "rows": rows}
    return render_page("schedule.svg", **page)
