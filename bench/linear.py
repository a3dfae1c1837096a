"""Linear layers: the measured kernels (`"cpu_kernels": "auto"`) against torch's own, alone and in a step.

The two contestants run in turns in one process on equal copies of a layer or model; what is compared is the
least process CPU time (robust where the machine is shared) and the median on the clock of one forward and
backward.  The choices are measured afresh, in a temporary cache, and listed with what finding them cost.

    python bench/linear.py
    python bench/linear.py --quick --json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _peers import ROOT
from _report import Row, compare, format_machine, make_result, rows_table, write_result

sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor, nn

from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.ops import export_autotune_cache, patch_linear_layers
from thalweg.utils.dtypes import dtype_name, parse_dtype

BLOCKS = {
    "256 wide": [(256, 768), (256, 256), (256, 1024), (1024, 256), (256, 8192)],
    "GPT-2 small": [(768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 8192)],
}
STEPS = {
    "step, 4 x 256, sequence 128, batch 4": (GPTConfig(block_size=128), 4, 128),
    "step, 8 x 768, sequence 64, batch 1": (
        GPTConfig(n_layer=8, n_head=12, n_embd=768, block_size=64, tied=False),
        1,
        64,
    ),
}


@dataclass
class Times:
    """What one contestant took, a value for each repeat."""

    cpu: list[float]
    clock: list[float]


def time_interleaved(
    ours: Callable[[], None], theirs: Callable[[], None], repeats: int, seconds: float
) -> tuple[Times, Times]:
    """Run both in turns, `repeats` times each or until `seconds` are over (three times at least)."""
    results = Times([], []), Times([], [])
    for run in (ours, theirs):
        run()
        run()
    deadline = time.perf_counter() + seconds
    for number in range(repeats):
        if number >= 3 and time.perf_counter() > deadline:
            break
        turn = list(zip((ours, theirs), results, strict=True))
        for run, times in turn if number % 2 else reversed(turn):  # who follows whom leaves its mark on the caches
            clock, cpu = time.perf_counter(), time.process_time()
            run()
            times.cpu.append(time.process_time() - cpu)
            times.clock.append(time.perf_counter() - clock)
    return results


def rows_of(case: str, ours: Times, theirs: Times) -> list[Row]:
    """Return the comparison of one case in both metrics, in milliseconds."""
    return [
        compare(case, "torch", "least CPU ms", 1e3 * min(ours.cpu), 1e3 * min(theirs.cpu)),
        compare(
            case,
            "torch",
            "median clock ms",
            1e3 * statistics.median(ours.clock),
            1e3 * statistics.median(theirs.clock),
        ),
    ]


def layer_run(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return one forward and backward of a layer, input gradient included."""

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(grad)

    return run


def layer_case(dtype: torch.dtype, rows: int, k: int, n: int, repeats: int, seconds: float) -> list[Row]:
    """Compare one layer with `rows` input rows."""
    theirs = nn.Linear(k, n).to(dtype)
    ours = copy.deepcopy(theirs)
    patch_linear_layers(ours)
    x = torch.randn(rows, k).to(dtype).requires_grad_()
    grad = torch.randn(rows, n).to(dtype)
    case = f"layer, {dtype_name(dtype)}, {torch.get_num_threads()} threads, {rows} x {k} x {n}"
    return rows_of(case, *time_interleaved(layer_run(ours, x, grad), layer_run(theirs, x, grad), repeats, seconds))


def step_case(case: str, dtype: torch.dtype, repeats: int, seconds: float) -> list[Row]:
    """Compare forward and backward of a whole model."""
    config, batch, length = STEPS[case]
    theirs = GPT(config).to(dtype)
    ours = copy.deepcopy(theirs)
    patch_linear_layers(ours)
    tokens = torch.randint(config.vocab_size, (2, batch, length))

    def step_of(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(tokens[0], tokens[1]).backward()

        return run

    name = f"{case}, {dtype_name(dtype)}, {torch.get_num_threads()} threads"
    return rows_of(name, *time_interleaved(step_of(ours), step_of(theirs), repeats, seconds))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take every measurement and return the JSON object."""
    torch.manual_seed(0)
    rows: list[Row] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in map(parse_dtype, args.dtypes):
            for case in STEPS:
                rows += step_case(case, dtype, args.repeats, args.seconds)
            for shapes in BLOCKS.values():
                for k, n in shapes:
                    for count in args.rows:
                        rows += layer_case(dtype, count, k, n, args.repeats, args.seconds)
        rows += layer_case(torch.float16, 64, 256, 1024, args.repeats, args.seconds)
    return make_result("linear", rows, repeats=args.repeats, choices=export_autotune_cache())


def render(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    chosen: dict[str, int] = {}
    for key, name in data["choices"].items():
        kind = " ".join(key.split("/")[1:3])
        chosen[f"{kind}: {name}"] = chosen.get(f"{kind}: {name}", 0) + 1
    return "\n".join(
        [
            "# Linear layers",
            "",
            f"{data['date']}, commit {data['commit']}, {format_machine(data['machine'])}.",
            "",
            f"Forward and backward, up to {data['repeats']} turns each.",
            "",
            rows_table(data["rows"]),
            "",
            "Choices (kind of product, dtype: candidate, number of shape classes): "
            + "; ".join(f"{what} {count}" for what, count in sorted(chosen.items()))
            + ".",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each case, at most")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case, after three turns")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 512, 4096])
    parser.add_argument("--quick", action="store_true", help="one thread, fp32, few turns: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/linear.md and .json")
    args = parser.parse_args(argv)
    if args.quick:
        args.repeats, args.seconds, args.threads, args.dtypes, args.rows = 7, 0.5, [1], ["fp32"], [64, 512]
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as folder:
        os.environ["THALWEG_CACHE_DIR"] = folder
        data = measure(args)
    if args.write:
        write_result("linear", data, render(data))
    print(json.dumps(data) if args.json else render(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
