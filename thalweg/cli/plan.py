"""Say what a run will need: bytes of each rank, bytes over each link, seconds of a step; whether it fits, and the
cheapest configuration that does.

examples:
  thalweg plan --model ./llama-3-70b --config ds_config.json --nodes 128 --devices-per-node 8 --device h100
  thalweg plan --model config.json --config ds_config.json --device-memory 80GiB --sequence-length 4096 --json
  thalweg plan --model config.json --config ds_config.json --devices-per-node 2 --html plan.html
  thalweg plan --pipeline schedule.svg --stages 4 --micro-batches 8 --schedule zb_h1

Without --device and --device-memory the ranks use this machine's accelerator, or its processor where it has none.
Exit code 0, also for a run that does not fit: `fits` says so.
"""

import argparse
import atexit
import gc
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from thalweg.cli.arguments import int_at_least
from thalweg.utils.timing import PausedCollector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add_model_options(parser, required=False)
    add_pipeline_options(parser)
    parser.add_argument("--html", metavar="FILE", help="also write one page with the memory timeline of a step")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")


def add_model_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The options that name the model, the config and the machines."""
    add = parser.add_argument
    add("--model", required=required, metavar="DIR_OR_CONFIG", help="folder with config.json, or that file")
    add("--config", metavar="FILE", help="ds_config.json; without one, AdamW in bf16 at stage 0")
    add("--nodes", dest="num_nodes", type=int, default=1, metavar="N", help="machines (1)")
    add("--devices-per-node", type=int, default=1, metavar="M", help="ranks on each (1)")
    add("--device", metavar="KIND", help="cpu, auto (what is here), or a name: h100, a100, l4, ...")
    add("--device-memory", metavar="SIZE", help="of one device, as in 80GiB")
    add("--host-memory", metavar="SIZE", help="of one machine, as in 512GiB")
    add("--sequence-length", type=int_at_least(1), metavar="T", help="tokens (the model's longest, at most 1024)")


def check_parent_folder(option: str, file: str | Path | None) -> None:
    """Raise ValueError where a file that is to be written has no folder: the work comes before it."""
    folder = Path(file or ".").absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {folder}")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    if args.pipeline is not None:
        return show_pipeline(args, read_config(args))
    if args.model is None:
        raise ValueError("thalweg plan needs --model (or --pipeline, to look at a schedule alone)")
    check_parent_folder("--html", args.html)
    atexit.register(gc.freeze)  # or the interpreter's end looks for garbage in all that torch has made, for a second
    is_like_rank = args.device_memory is None and args.device in (None, "cpu")
    with nullcontext() if is_like_rank else PausedCollector():
        if is_like_rank:
            import thalweg.engine  # noqa: F401  (a rank on this processor imports it: its pages count)
        from thalweg.plan.api import plan
        from thalweg.plan.inputs.model_loader import load_meta_model

        model = load_meta_model(args.model)
        if not is_like_rank:
            gc.freeze()  # some 10 MiB of garbage stay
    result = plan(model, read_config(args), **cluster_options(args))
    if args.html:
        from thalweg.plan.html import plan_to_html

        Path(args.html).write_text(plan_to_html(result))
    print(json.dumps(result.to_dict(), indent=2) if args.json else result)
    return 0


def read_config(args: argparse.Namespace) -> Any:
    """The config that the user named, or the default."""
    if args.config is not None:
        return args.config
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {}},
    }


def cluster_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``thalweg.plan`` for the machines and the sequence."""
    names = ("num_nodes", "devices_per_node", "device", "device_memory", "host_memory", "sequence_length")
    return {name: getattr(args, name) for name in names}


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
