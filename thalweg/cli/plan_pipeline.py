"""``thalweg plan --pipeline``: a schedule drawn, validated and simulated, without a device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``thalweg plan`` that are about a pipeline."""
    group = parser.add_argument_group("pipeline")
    drawn = "draw the schedule of the config's pipeline instead of planning the run (to FILE.svg, too)"
    group.add_argument("--pipeline", nargs="?", const="", metavar="FILE.svg", help=drawn)
    group.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline, before the config's")
    group.add_argument("--schedule", metavar="NAME", help="gpipe, 1f1b, zb_h1, ..., or auto")
    group.add_argument("--micro-batches", type=int, metavar="M", help="of one step, before the config's")


def show_pipeline(args: argparse.Namespace, config: Any) -> int:
    """Print the picture and its facts; returns the exit code."""
    from thalweg.parallel.pipeline.schedules.visualize import timeline_to_svg, timeline_to_text

    chosen, evaluated = _choose_schedule(args, config)
    timeline, schedule = chosen.timeline, chosen.timeline.schedule
    ranks = range(schedule.num_ranks)
    facts = {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_micro_batches,
        "bubble": round(timeline.bubble, 6),
        "textbook_bubble": round((len(ranks) - 1) / (schedule.num_micro_batches + len(ranks) - 1), 6),
        "makespan": timeline.makespan,
        "in_flight": [timeline.peak_in_flight(rank) for rank in ranks],
        "bubbles": {one.name: round(one.timeline.bubble, 6) for one in evaluated},
    }
    svg = timeline_to_svg(timeline)
    if args.pipeline:
        Path(args.pipeline).write_text(svg)
    if args.json:
        orders = [[str(action) for action in order] for order in schedule.orders]
        print(json.dumps({**facts, "orders": orders, "picture": args.pipeline or None}, indent=2))
        return 0
    unit = min(end - begin for begin, end in timeline.intervals.values())
    print(timeline_to_text(timeline, unit))
    print(
        f"\n{schedule.name}: {facts['ranks']} ranks, {facts['stages']} stages, {facts['micro_batches']} "
        f"micro-batches; sound: no rank waits forever"
    )
    print(f"bubble {timeline.bubble:.1%}; (p - 1)/(m + p - 1) is {facts['textbook_bubble']:.1%}")
    print(f"micro-batches in flight by rank: {', '.join(map(str, facts['in_flight']))}")
    print("bubble by schedule: " + ", ".join(f"{one.name} {one.timeline.bubble:.1%}" for one in evaluated))
    if args.pipeline:
        print(f"picture in {args.pipeline}")
    return 0


def _choose_schedule(args: argparse.Namespace, config: Any) -> Any:
    from thalweg.config import load
    from thalweg.parallel.pipeline.schedules.auto_schedule import choose_schedule, rank_schedules
    from thalweg.parallel.pipeline.schedules.builders import SCHEDULE_NAMES

    parsed = load(config)
    section = parsed.pipeline
    stages = args.stages or (section.stages if isinstance(section.stages, int) else 4)
    num_micro_batches = args.micro_batches or section.micro_batches
    if not isinstance(num_micro_batches, int):
        accumulation_steps = parsed.gradient_accumulation_steps
        num_micro_batches = accumulation_steps if isinstance(accumulation_steps, int) else 2 * stages
    name = args.schedule or section.schedule
    if name != "auto" and name not in SCHEDULE_NAMES:
        raise ValueError(f"unknown pipeline schedule {name!r}: choose one of auto, {', '.join(SCHEDULE_NAMES)}")
    if stages < 1 or num_micro_batches < 1:
        raise ValueError(f"a pipeline needs stages and micro-batches, got {stages} and {num_micro_batches}")
    chunks = max(2, section.virtual_stages)
    evaluated = rank_schedules(stages, num_micro_batches, max_stages=stages * chunks, num_virtual_stages=chunks)
    if name == "auto":
        return choose_schedule(evaluated), evaluated
    chosen = next((one for one in evaluated if one.name == name), None)
    if chosen is None:
        raise ValueError(f"{name} does not take {num_micro_batches} micro-batches on {stages} ranks: take more of them")
    return chosen, evaluated
