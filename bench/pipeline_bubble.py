"""The bubble of each pipeline schedule, run and measured, against the textbook and the simulator.

Every rank runs the true runtime over gloo: messages, autograd graphs and the halving of the backward
are real.  What a stage computes is replaced by sleeping for a given time (forward, gradient of the input
and gradient of the weights alike), so that every micro-batch costs the same, and so that more ranks than
cores still run side by side.  The bubble is 1 - busy / (ranks x makespan) from a barrier to the last
rank's end; `theirs` is (p - 1)/(m + p - 1).

    python bench/pipeline_bubble.py
    python bench/pipeline_bubble.py --ranks 4 --micro-batches 8 16 --cost-ms 10 --write
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare, format_machine, make_result, rows_table, write_result

sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.parallel.pipeline.p2p import P2PChannel
from thalweg.parallel.pipeline.schedule_executor import ScheduleExecutor, StageCallbacks
from thalweg.parallel.pipeline.schedules.builders import SCHEDULE_NAMES, build_schedule
from thalweg.parallel.pipeline.schedules.simulate import simulate


class SleepInBackward(torch.autograd.Function):
    """The identity, whose backward takes a given time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A stage: the sum of input and weight, which meet in one node, each behind a backward that sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.seconds)
        value = value if value.requires_grad else value.requires_grad_()
        return SleepInBackward.apply(value, self.seconds) + SleepInBackward.apply(self.weight, self.seconds)


def run_rank(
    rank: int, world: int, store: str, name: str, num_micro: int, seconds: float, times: int, out: Any
) -> None:
    """One rank of the pipeline: the seconds of each step on this rank, from the barrier on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    schedule = build_schedule(name, world, num_micro)  # type: ignore[arg-type]
    # Halves of a stage where a rank has two, so that a micro-batch costs a rank the same everywhere.
    cost = seconds * world / schedule.num_stages
    mine = {stage: Sleeper(cost) for stage in schedule.stages_on_rank(rank)}

    def run(stage: int, value: Any, batch: Any) -> Any:
        value = mine[stage](batch.clone() if stage == 0 else value)
        return value.sum() if stage + 1 == schedule.num_stages else value

    calls = StageCallbacks(run, lambda stage: list(mine[stage].parameters()), lambda loss: loss)
    runner = ScheduleExecutor(schedule, rank, P2PChannel(dist.group.WORLD, torch.device("cpu")), calls)
    found = []
    for _ in range(times + 1):
        dist.barrier()
        begin = time.perf_counter()
        runner.train([torch.zeros(4)] * num_micro)
        found.append(time.perf_counter() - begin)
    out.put((rank, found[1:]))
    dist.destroy_process_group()


def measure(name: str, world: int, num_micro: int, seconds: float, times: int) -> float:
    """The median bubble of the schedule over `times` steps."""
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=run_rank, args=(r, world, store, name, num_micro, seconds, times, out))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        steps = dict(out.get(timeout=120) for _ in ranks)
        for process in ranks:
            process.join()
    makespans = [max(steps[rank][i] for rank in steps) for i in range(times)]
    return statistics.median(1 - 3 * num_micro * seconds / span for span in makespans)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--schedule", nargs="+", choices=SCHEDULE_NAMES, default=list(SCHEDULE_NAMES))
    parser.add_argument("--cost-ms", type=float, default=20.0, help="of a forward, of half a backward (20)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 ranks, 4 micro-batches, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/pipeline_bubble.md and .json")
    args = parser.parse_args(argv)
    if args.quick:
        args.ranks, args.micro_batches, args.steps = [2], [4], 3
    rows: list[Row] = []
    for world in args.ranks:
        for num_micro in args.micro_batches:
            textbook = (world - 1) / (num_micro + world - 1)
            for name in args.schedule:
                case = f"{name}, {world} ranks, {num_micro} micro-batches"
                bubble = measure(name, world, num_micro, args.cost_ms / 1000, args.steps)
                expected = simulate(build_schedule(name, world, num_micro)).bubble
                rows.append(compare(case, "(p - 1)/(m + p - 1)", "bubble", bubble, textbook))
                rows.append(compare(case, "simulator", "bubble", bubble, expected))
    data = make_result("pipeline_bubble", rows, cost_ms=args.cost_ms, steps=args.steps)
    text = "\n".join(
        [
            "# The bubble of pipeline schedules",
            "",
            f"{data['date']}, commit {data['commit']}, {format_machine(data['machine'])}.",
            f"Forward, input and weight gradient of {args.cost_ms:g} ms each; medians of {args.steps} steps.",
            "",
            rows_table(data["rows"]),
        ]
    )
    if args.write:
        write_result("pipeline_bubble", data, text)
    print(json.dumps(data) if args.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
