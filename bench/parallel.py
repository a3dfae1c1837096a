"""Each axis of parallelism at 1, 2, 4, 8 ranks: traffic against its formula, processor time, memory a rank.

One GPT (or one with experts), one global batch; an axis divides it among the ranks, a pipeline among as many as there
are layers at most.  The rows of an axis:

    sent_mib    bytes a rank sends in a step by the ledger (ring forms); `theirs` is the textbook's formula
    cpu_ms      processor time of the busiest rank; `theirs` is one rank's divided by their number, so the
                ratio is the efficiency
    modelled_ms the clock that a core for each rank would give: cpu_ms, and the bytes at --gbytes a second;
                `theirs` the same of one rank, so the ratio is the speed-up
    memory_mib  peak beyond the imports, of the busiest rank; `theirs` is one rank's

Clock times are a row only where there is a core for each rank: beyond that ranks take turns, and a clock
says how they queue.  Processor time includes what gloo and shared memory take, not waiting.

With --write the rows of axes that were not asked for stay as they are.

    python bench/parallel.py --axis zero3 tp cp --write
    python bench/parallel.py --quick --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare, format_machine, make_result, rows_table, write_result

sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thalweg
from thalweg.moe import MoE
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.observe.flops import resident_mib


@dataclass(frozen=True)
class Shape:
    """The job: ``rows`` sequences of ``length`` tokens a step, over all ranks."""

    layers: int = 4
    width: int = 256
    vocabulary: int = 2048
    rows: int = 8
    length: int = 128
    experts: int = 8

    @property
    def activation(self) -> int:
        """Bytes of one activation of the whole batch in fp32."""
        return 4 * self.rows * self.length * self.width


MICROS = 8


@dataclass(frozen=True)
class Axis:
    """``sent``: bytes a rank sends in a step on ``n`` ranks with ``parameters`` bytes of parameters, as the
    textbook has it; ``counts`` picks the ledger's entries that this is about."""

    config: Callable[[int], dict[str, Any]]
    sent: Callable[[Shape, int, int], float]
    counts: Callable[[Any], bool]
    divides_rows: bool = False
    experts: bool = False
    micros: int = 1  # micro-batches that take turns


def _zero(stage: int) -> Callable[[int], dict[str, Any]]:
    return lambda n: {"zero_optimization": {"stage": stage}}


def _state(entry: Any) -> bool:
    return entry.transport not in ("tensor", "sequence", "context", "expert", "pipeline")


def _ring(passes: int) -> Callable[[Shape, int, int], float]:
    return lambda shape, n, parameters: passes * parameters * (n - 1) / n


# All on one host, where stage 3 frees nothing (shards in shared memory) and so gathers once, as stages 1
# and 2 do.
AXES: dict[str, Axis] = {
    **{f"zero{stage}": Axis(_zero(stage), _ring(2), _state, divides_rows=True) for stage in range(4)},
    "tp": Axis(
        lambda n: {"tensor_parallel": {"autotp_size": n}},
        lambda shape, n, _: 4 * shape.layers * shape.activation * 2 * (n - 1) / n,
        lambda entry: entry.transport == "tensor" and "blocks." in entry.module and entry.kind == "all_reduce",
    ),
    "sp": Axis(
        lambda n: {"sequence_parallel_size": n},
        lambda shape, n, _: shape.layers * 2 * 4 * shape.activation / n * (n - 1) / n,
        lambda entry: entry.module == "attention" and entry.kind == "all_to_all",
    ),
    "cp": Axis(
        lambda n: {"context_parallel_size": n},
        lambda shape, n, _: shape.layers * 3 * 2 * shape.activation / n * (n - 1),
        lambda entry: entry.module == "attention" and entry.kind == "send",
    ),
    "pp": Axis(
        lambda n: {"gradient_accumulation_steps": MICROS} | ({"pipeline": {"stages": n}} if n > 1 else {}),
        lambda shape, n, _: (1 if n == 2 else 2) * shape.activation,
        lambda entry: entry.transport == "pipeline",
        micros=MICROS,
    ),
    "ep": Axis(
        _zero(1),
        lambda shape, n, _: shape.layers * 4 * shape.activation / n * (n - 1) / n,
        lambda entry: entry.transport == "expert",
        divides_rows=True,
        experts=True,
    ),
}


class Experts(nn.Module):
    """Experts in an MLP's place, each token to the one of its position, so that all ranks have as many."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        width = shape.width
        expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.moe = MoE(width, expert, shape.experts, ranks, k=1, drop_tokens=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.moe(x_BTD)[0]


def build(shape: Shape, axis: Axis, ranks: int) -> nn.Module:
    """The model of a run; the same weights on every rank."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=shape.vocabulary,
        n_layer=shape.layers,
        n_head=8,
        n_embd=shape.width,
        block_size=shape.length,
        tied=False,
    )
    model = GPT(config)
    for block in model.blocks if axis.experts else ():
        block.mlp = Experts(shape, ranks)
    return model


def run_rank(rank: int, world: int, store: str, name: str, shape: Shape, steps: int, threads: int, out: Any) -> None:
    """One rank: what each step took, and what a step sent."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    axis, before = AXES[name], resident_mib()
    parts = world if axis.divides_rows else 1
    config = {
        "train_micro_batch_size_per_gpu": shape.rows // parts // axis.micros,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **axis.config(world),
    }
    engine, *_ = thalweg.initialize(model=build(shape, axis, world), config=config)
    num_bytes = sum(4 * p.numel() for p in engine.module.parameters())
    pipelined = axis.micros > 1 and world > 1
    found: dict[str, Any] = {"rank": rank, "cpu": [], "clock": [], "sent": 0.0, "parameters": num_bytes}
    for step in range(steps + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, shape.vocabulary, (shape.rows, shape.length + 1), generator=generator)
        own = tokens[rank::parts] if axis.divides_rows else tokens
        sent = sum(entry.sent_bytes for entry in engine.ledger.entries() if axis.counts(entry))
        dist.barrier()
        clock, cpu = time.perf_counter(), time.process_time()
        if pipelined:
            engine.train_batch((part[:, :-1], part[:, 1:]) for part in own.split(shape.rows // axis.micros))
        else:
            for part in own.split(own.shape[0] // axis.micros):
                engine.backward(engine(part[:, :-1], part[:, 1:]))
                engine.step()
        found["cpu"].append(1e3 * (time.process_time() - cpu))
        found["clock"].append(1e3 * (time.perf_counter() - clock))
        found["sent"] = sum(entry.sent_bytes for entry in engine.ledger.entries() if axis.counts(entry)) - sent
    found["memory"] = resident_mib(peak=True) - before
    engine.close()
    dist.destroy_process_group()
    out.put(found)


def measure(name: str, world: int, shape: Shape, steps: int, threads: int) -> dict[str, float]:
    """Medians over steps of the busiest rank; raises RuntimeError where a rank ends without an answer."""
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=run_rank, args=(r, world, store, name, shape, steps, threads, out), daemon=True)
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            found: list[dict[str, Any]] = []
            while len(found) < world:
                failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
                if failed:
                    raise RuntimeError(f"{name} at {world} ranks: ended with {failed} (rank: exit code)")
                with contextlib.suppress(queue.Empty):
                    found.append(out.get(timeout=1))
        finally:
            for process in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
    return {
        "cpu": max(statistics.median(one["cpu"][1:]) for one in found),
        "clock": max(statistics.median(one["clock"][1:]) for one in found),
        "memory": max(one["memory"] for one in found),
        "sent": max(one["sent"] for one in found),
        "parameters": found[0]["parameters"],
    }


def measure_in_turns(name: str, worlds: list[int], plan: Plan) -> dict[int, dict[str, float]]:
    """The least of some rounds, in each of which every number of ranks has its turn: on a virtual machine one turn may
    take half as much again as another."""
    turns = [
        {world: measure(name, world, plan.shape, plan.steps, plan.threads) for world in worlds}
        for _ in range(plan.rounds)
    ]
    return {world: {key: min(turn[world][key] for turn in turns) for key in turns[0][world]} for world in worlds}


def rows_of(name: str, world: int, found: dict[str, float], one: dict[str, float], plan: Plan) -> list[Row]:
    """The rows of one axis at one number of ranks, ``one`` being a single rank's."""
    case, rate = f"{name}, {world} ranks", plan.gbytes * 1e9 / 1e3
    formula = AXES[name].sent(plan.shape, world, int(found["parameters"]))
    rows = [compare(case, "formula", "sent_mib", found["sent"] / 2**20, formula / 2**20)]
    rows.append(compare(case, "one rank / n", "cpu_ms", found["cpu"], one["cpu"] / world))
    rows.append(compare(case, "one rank", "modelled_ms", found["cpu"] + found["sent"] / rate, one["cpu"]))
    if world * plan.threads <= len(os.sched_getaffinity(0)):
        rows.append(compare(case, "one rank", "clock_ms", found["clock"], one["clock"]))
    rows.append(compare(case, "one rank", "memory_mib", found["memory"], one["memory"]))
    return rows


@dataclass(frozen=True)
class Plan:
    """How to measure; ``gbytes`` a second is what the model of time gives the ranks' link."""

    shape: Shape
    steps: int
    rounds: int
    threads: int
    gbytes: float


def _with_others(
    axes: list[str], rows: list[Row], lines: list[dict[str, Any]]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Add what results/parallel.json has of axes that were not measured now."""
    path = ROOT / "results" / "parallel.json"
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = [Row(**{"note": "", **row}) for row in old.get("rows", []) if row["case"].split(",")[0] not in axes]
    order = list(AXES)
    lines = [*(line for line in old.get("runs", []) if line["axis"] not in axes), *lines]
    return (
        sorted([*kept, *rows], key=lambda row: order.index(row.case.split(",")[0])),
        sorted(lines, key=lambda line: order.index(line["axis"])),
    )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", nargs="+", choices=sorted(AXES), default=list(AXES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="of all numbers of ranks in turn; the least counts (3)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (1)")
    parser.add_argument("--gbytes", type=float, default=10.0, help="a second, of the link in modelled_ms (10)")
    parser.add_argument("--quick", action="store_true", help="four axes at 2 ranks, small, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/parallel.md and .json")
    args = parser.parse_args(argv)
    shape = Shape()
    if args.quick:
        args.axis, args.ranks, args.steps, args.rounds = ["zero3", "tp", "sp", "cp"], [2], 2, 1
        shape = Shape(layers=2, width=64, vocabulary=256, rows=4, length=64)
    plan = Plan(shape, args.steps, args.rounds, args.threads, args.gbytes)
    rows: list[Row] = []
    lines: list[dict[str, Any]] = []
    for name in args.axis:
        worlds = [ranks for ranks in args.ranks if ranks > 1 and (name != "pp" or ranks <= shape.layers)]
        by_world = measure_in_turns(name, [1, *worlds], plan)
        for world in worlds:
            rows += rows_of(name, world, by_world[world], by_world[1], plan)
            lines.append({"axis": name, "ranks": world, **by_world[world]})
    if args.write:
        rows, lines = _with_others(args.axis, rows, lines)
    data = make_result("parallel", rows, shape=asdict(shape), steps=args.steps, gbytes=args.gbytes, runs=lines)
    text = "\n".join(
        [
            "# Axes of parallelism",
            "",
            f"{data['date']}, commit {data['commit']}, {format_machine(data['machine'])}.",
            f"GPT of {shape.layers} x {shape.width}, {shape.rows} x {shape.length} tokens, {args.threads} "
            "thread(s) a "
            f"rank; medians of {args.steps} steps of the busiest rank, the least of {args.rounds} rounds.",
            "",
            rows_table(data["rows"]),
        ]
    )
    if args.write:
        write_result("parallel", data, text)
    print(json.dumps(data) if args.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
