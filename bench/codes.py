"""Codes of few bits on a CPU: the generated kernels against a copy of memory, and torch's operators against them.

1-bit optimisers add momentum to their errors, encode the sums and keep what the code leaves out; they decode a row, or
the mean of two.  QLoRA's weights become numbers before each product.  Inference multiplies int4 weights as they come
from memory, against a sum that reads as many bytes.  All take turns on buffers larger than the caches (a plain weight
of the NF4 rows may fit); the ratio is the median over turns, by processor time where the row says so, else the clock.

    python bench/codes.py --write
    python bench/codes.py --quick --json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from _peers import ROOT
from _report import Row, add_output_options, compare, make_result, publish_runs, render_section

sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F

from thalweg.adapt.quantized_weight import QuantizedWeight
from thalweg.comm.collectives.onebit import BLOCK_SIZE, OneBitCode, payload_bytes
from thalweg.ops import cpu_kernels
from thalweg.ops.onebit import get_onebit_code

COPY, READ = "a copy", "a sum of what is read"
_INT4_WIDTH, _INT4_WEIGHTS = 4096, 6


def _with_torch(compute: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        with mock.patch.object(cpu_kernels, "unsupported_reason", return_value="left out"):
            compute()

    return run


def get_int4_contestants() -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return products with more int4 weights than a cache holds, and a sum over their bytes as if they were fp32."""
    width = _INT4_WIDTH
    weight = torch.cat([
        block["weight"].clone()
        for block in cpu_kernels.iter_packed_blocks(
            (width, width), lambda start, stop, out: out.normal_(), "int4"
        )
    ])  # fmt: skip
    weights = [weight, *(weight.clone() for _ in range(_INT4_WEIGHTS - 1))]
    numel = _INT4_WEIGHTS * weight.numel() // 4
    read = torch.ones(numel)
    contestants: dict[str, tuple[int, Callable[[], Any]]] = {READ: (numel, read.sum)}
    kernels, bias, unused = cpu_kernels.KernelSet(), torch.zeros(width), torch.zeros(width)
    kind = kernels.isa.operand_kind("int4")
    for rows in (1, 8):
        x, out, count = torch.randn(rows, width), torch.zeros(rows, width), torch.tensor([rows])
        ready = cpu_kernels.ActivationBuffer(rows, width, kind, cpu_kernels.allocate_rows(rows, width))
        strides = ready.operand_stride, 4 * width
        prepare = cpu_kernels.Instruction(kernels.norm("none", kind), [
            x, 4 * width, unused, unused, torch.zeros(1), count, width, *ready.output_args(),
        ])  # fmt: skip
        products = [
            cpu_kernels.Instruction(kernels.gemm("int4"), [
                ready.operand, part, out, count, width, width // 16, *strides, bias, 0, ready.scale, 0,
                *ready.sum_args("int4"),
            ])
            for part in weights
        ]  # fmt: skip
        program = cpu_kernels.build_program([prepare, *products], kernels.compile(), weights)
        contestants[f"int4 product, {rows} row{'s' * (rows > 1)}"] = numel, program.run
    return contestants


def get_contestants(numel: int, width: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return what is timed, with the numbers that each goes over."""
    source, out, errors = torch.randn(numel), torch.empty(numel), torch.zeros(numel)
    blocks = numel // BLOCK_SIZE
    counts = torch.full((blocks,), float(BLOCK_SIZE))
    payloads = torch.zeros(2, payload_bytes(blocks), dtype=torch.uint8)
    contestants: dict[str, tuple[int, Callable[[], Any]]] = {COPY: (numel, lambda: out.copy_(source))}
    for name, code in (("", get_onebit_code(source.device)), (", torch's operators", OneBitCode())):
        contestants |= {
            f"1 bit: add, encode, keep the errors{name}": (
                numel,
                lambda code=code: code.compress_(errors, counts, payloads[0], [(0, source)]),
            ),
            f"1 bit: decode{name}": (numel, lambda code=code: code.decompress(payloads[:1], out)),
            f"1 bit: mean of two{name}": (numel, lambda code=code: code.decompress(payloads, out)),
        }
    for dtype in (torch.float32, torch.bfloat16):
        weight = QuantizedWeight.quantize(torch.randn(width, width, dtype=dtype), "nf4")
        plain, few, many = weight.dequantize(), torch.randn(8, width, dtype=dtype), torch.randn(512, width, dtype=dtype)
        short = str(dtype).removeprefix("torch.")
        todo: dict[str, Callable[[], Any]] = {
            f"NF4 to {short}": weight.dequantize,
            f"NF4 product, {short}, 8 rows": lambda weight=weight, rows=few: F.linear(rows, weight),
            f"NF4 product, {short}, 512 rows": lambda weight=weight, rows=many: F.linear(rows, weight),
        }
        contestants |= {name: (width * width, run) for name, run in todo.items()}
        contestants |= {f"{name}, torch's operators": (width * width, _with_torch(run)) for name, run in todo.items()}
        for rows in (few, many):
            name = f"plain product, {short}, {len(rows)} rows"
            contestants[name] = width * width, lambda plain=plain, rows=rows: F.linear(rows, plain)
    return contestants


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Let all take turns and return the run's JSON object."""
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    contestants = get_contestants(args.mib << 18, args.width)
    if not cpu_kernels.unsupported_reason():
        contestants |= get_int4_contestants()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    with torch.no_grad():
        for turn in range(args.repeats + 1):
            for name, (_, run) in contestants.items():
                clock, cpu = time.perf_counter(), time.process_time()
                run()
                cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
                if turn:  # the first one compiles, and touches pages
                    times[name].append((cpu, clock))
    head = f"{args.mib} MiB, {args.width} x {args.width}, {args.threads} thread{'s' * (args.threads > 1)}"

    def row(name: str, peer: str, which: int) -> Row:
        numels = [contestants[n][0] for n in (name, peer)]
        speeds = [4 * n / min(t[which] for t in times[x]) / 1e9 for n, x in zip(numels, (name, peer), strict=True)]
        pairs = zip(times[name], times[peer], strict=True)
        ratio = statistics.median(numels[0] * b[which] / numels[1] / a[which] for a, b in pairs)
        metric = f"GB/s{' of fp32' * (peer != READ)}, best, {('processor time', 'clock')[which]}"
        return compare(f"{head}, {name}", peer, metric, *speeds, lower_is_better=False, ratio=ratio)

    rows = []
    for name in contestants:
        if name.startswith("int4"):
            rows += [row(name, READ, which) for which in (0, 1)]
            continue
        if name in (COPY, READ) or "torch's" in name or name.startswith("plain"):
            continue
        peers = [f"{name}, torch's operators", name.replace("NF4", "plain") if "product" in name else COPY]
        rows += [row(name, peer, which) for peer in peers for which in (0, 1)]
    return make_result("codes", rows, run=head, load=load)


def render(run: dict[str, Any]) -> str:
    """Return one run as Markdown."""
    return render_section(run, ["instruction set"], [[str(getattr(cpu_kernels.host_isa(), "name", "none"))]])


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print one object or the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="fp32 numbers of the 1-bit code")
    parser.add_argument("--width", type=int, default=2048, help="of a square NF4 weight")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    add_output_options(parser, "codes", "small buffers, three turns")
    args = parser.parse_args(argv)
    if args.quick:
        args.mib, args.width, args.repeats = 4, 256, 3
    publish_runs("codes", "Codes of few bits", [measure(args)], render, write=args.write, as_json=args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
