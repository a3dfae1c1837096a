"""Weight-only products on CUDA: microseconds by shape and rows, to set the block sizes and the number of rows.

bf16 F.linear, the plain forms of int8 and int4 (numbers for the time of a product), tinygemm, and Triton's kernel with
the blocks of `triton_packed.BLOCKS` and some others.  Each contestant has copies of its weights beyond the L2 cache,
taken in turn; the launches are captured in a graph, so that the host's time is not in the figure; it stands alone in
the last table.  A median of three replays.  Under 40 s; what is left when the time is over is not measured.

    python bench/gpu/packed.py                      # tables and a last line of JSON
    python bench/gpu/packed.py --seconds 100 --kind int4
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from thalweg.ops.linear import packed as packed_linear
from thalweg.ops.linear import triton_packed
from thalweg.ops.linear.triton_packed import Blocks

SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632), (32000, 2048))  # outputs, inputs
ROWS = (1, 8, 32, 64, 128, 512)
BEYOND_CACHE = 160 << 20  # bytes of a contestant's weights; an H200 has 50 MB of L2
# By HALVES (1: int8, 2: int4): what is tried besides the table.  A 0 for the rows of a tile: as many as come.
ONE_ROW = {
    1: [(2, 1024, 4, 1), (2, 2048, 4, 1), (4, 2048, 8, 1), (8, 1024, 4, 1), (4, 512, 2, 1), (8, 256, 1, 1)],
    2: [(1, 1024, 4, 1), (2, 512, 2, 1), (1, 512, 2, 1), (2, 2048, 8, 1), (2, 256, 1, 1), (4, 1024, 4, 1)],
}
SOME_ROWS = {
    1: [
        (16, 32, 256, 4, 3, 1), (16, 32, 256, 4, 3, 4), (16, 64, 128, 4, 4, 4), (16, 16, 256, 2, 4, 2),
        (0, 32, 128, 4, 4, 1), (0, 64, 128, 4, 3, 4), (0, 64, 128, 4, 4, 2), (0, 32, 128, 4, 4, 2),
        (0, 128, 64, 8, 4, 4),
    ],
    2: [
        (16, 32, 128, 4, 3, 1), (16, 32, 128, 4, 3, 4), (16, 64, 64, 4, 4, 4), (16, 16, 128, 2, 4, 2),
        (0, 32, 64, 4, 4, 1), (0, 64, 64, 4, 3, 4), (0, 64, 64, 4, 4, 2), (0, 32, 64, 4, 4, 2),
    ],
}  # fmt: skip


def candidates(halves: int, rows: int) -> list[Blocks]:
    """What is tried for these rows, the table's first."""
    table = triton_packed.BLOCKS[halves]
    found = [next((one for one in table if rows <= one.max_rows), table[-1])]
    if rows == 1:
        found += [Blocks(1, 1, *one) for one in ONE_ROW[halves]]
    else:
        tile = min(64, max(16, rows))
        found += [Blocks(rows, one[0] or tile, *one[1:]) for one in SOME_ROWS[halves] if one[0] in (0, tile)]
        if rows == 8:
            found.append(table[0])  # one row at a time
    return found


def variants(kinds: list[str]) -> list[tuple[int, Blocks, bool]]:
    """Each kernel that is going to be measured: HALVES, blocks, whether its inputs are shared."""
    found: dict = {}
    for halves in (1 if kind == "int8" else 2 for kind in kinds):
        for rows in ROWS[:5]:
            for blocks in candidates(halves, rows):
                one = blocks._replace(max_rows=0, split_k=1)
                found |= dict.fromkeys((halves, one, shared) for shared in {False, blocks.split_k > 1})
    return list(found)


def compile_some(some: list[tuple[int, Blocks, bool]]) -> None:
    """Compile into Triton's cache, in a process of its own."""
    for halves, blocks, shared in some:
        outputs = 32 if shared else triton_packed.MIN_PROGRAMS * blocks.n
        packed = torch.zeros(outputs, 2048 // halves, dtype=torch.int8, device="cuda")
        table = torch.zeros(2, outputs, 64) if halves == 2 else torch.zeros(outputs)
        x = torch.zeros(blocks.rows, 2048, dtype=torch.bfloat16, device="cuda")
        with contextlib.suppress(Exception):  # reported where it is measured
            triton_packed.linear(x, packed, table.to(x), blocks._replace(split_k=1 + shared))


def microseconds(calls: list[Callable[[], object]], repeats: int = 3) -> float:
    """Median microseconds of one of ``calls``, which are captured in a graph in turn, twenty or more."""
    calls = calls * -(-20 // len(calls))
    for call in calls[:2]:  # compiles, and makes cuBLAS choose
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end) / len(calls))
    return statistics.median(found[1:])


def host_microseconds(call: Callable[[], object]) -> float:
    """Microseconds until the host goes on, with the device far from full."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            call()
        found.append((time.perf_counter() - begin) / 20 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def plain_of(kind: str, weight: torch.Tensor) -> tuple[Callable, torch.Tensor, torch.Tensor, Callable | None]:
    """The plain form, packed weights, their table and torch's own product, as the package makes them."""
    seen: dict = {}
    original = packed_linear._triton_product

    def keep(packed: torch.Tensor, table: torch.Tensor, *_: object) -> tuple[None, tuple[int, ...]]:
        seen.update(packed=packed, table=table)
        return None, ()

    def take(name: str, fused: Callable | None, row_counts: object, plain: Callable, *_: object) -> object:
        seen.update(fused=fused, plain=plain)
        return packed_linear.PackedLinear(name, plain)

    taken, packed_linear._triton_product, packed_linear._take_fused = packed_linear._take_fused, keep, take
    try:
        packed_linear._DEVICE_PACKERS[kind](weight.float(), None, torch.bfloat16)
    finally:
        packed_linear._triton_product, packed_linear._take_fused = original, taken
    return seen["plain"], seen["packed"], seen["table"], seen["fused"]


class Bench:
    """What is measured, and the time that there is for it."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.lines: list[dict] = []
        self.host: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def measure_shape(self, kind: str, outputs: int, inputs: int, with_host: bool) -> None:
        """All rows of one shape."""
        halves = 1 if kind == "int8" else 2
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
        whole = [weight.clone() for _ in range(-(-BEYOND_CACHE // weight.nbytes))]
        made = [plain_of(kind, weight) for _ in range(-(-BEYOND_CACHE * 2 * halves // weight.nbytes))]
        for rows in ROWS:
            if time.monotonic() > self.end:
                return
            self.measure_rows({"kind": kind, "outputs": outputs, "inputs": inputs, "rows": rows}, whole, made)
        if with_host:
            self.measure_host(kind, weight, *made[0])

    def measure_rows(self, line: dict, whole: list[torch.Tensor], made: list[tuple]) -> None:
        """One line of the table."""
        rows, kind, halves = line["rows"], line["kind"], 1 if line["kind"] == "int8" else 2
        x = torch.randn(rows, line["inputs"], device="cuda", dtype=torch.bfloat16)
        line["bf16"] = microseconds([functools.partial(F.linear, x, w) for w in whole])
        line["plain"] = microseconds([functools.partial(plain, x) for plain, *_ in made[:20]])
        if made[0][3] is not None and rows <= 128:
            line["tinygemm"] = microseconds([functools.partial(fused, x) for *_, fused in made])
        wanted = made[0][0](x).float()
        tried: dict[str, float] = {}
        for blocks in candidates(halves, rows) if rows <= 128 else ():
            name = str(tuple(blocks[1:]))
            calls = [functools.partial(triton_packed.linear, x, codes, table, blocks) for _, codes, table, _ in made]
            key = f"{kind} {line['outputs']} {line['inputs']} {rows} {name}"
            try:
                error = ((calls[0]().float() - wanted).norm() / wanted.norm()).item()
                if error < 0.02:
                    tried[name] = microseconds(calls)
                else:
                    self.failed[key] = f"off by {error:.3g}"
            except Exception as problem:  # blocks that the device cannot take
                self.failed[key] = str(problem).partition("\n")[0][:200]
        best = min(tried, key=lambda name: tried[name], default="")
        head = " ".join(f"{line[name]:6}" for name in ("outputs", "inputs", "rows"))
        torchs = f"{line['bf16']:6.1f} {line['plain']:6.1f} {line.get('tinygemm', 0):8.1f}"
        mine = f"{tried.get(best, 0):6.1f} {next(iter(tried.values()), 0):6.1f}"
        print(f"{kind} {head} | {torchs} | {mine}  {best}", flush=True)
        rounded = {name: round(line[name], 2) for name in ("bf16", "plain", "tinygemm") if name in line}
        self.lines.append(line | rounded | {"triton": {name: round(value, 2) for name, value in tried.items()}})

    def measure_host(
        self,
        kind: str,
        weight: torch.Tensor,
        plain: Callable,
        codes: torch.Tensor,
        table: torch.Tensor,
        fused: Callable,
    ) -> None:
        """Calls by the host, for one row."""
        x = torch.randn(1, weight.shape[1], device="cuda", dtype=torch.bfloat16)
        calls = {"bf16": functools.partial(F.linear, x, weight), f"{kind} plain": functools.partial(plain, x)}
        if fused is not None:
            calls["tinygemm"] = functools.partial(fused, x)
        calls[f"{kind} Triton"] = functools.partial(triton_packed.linear, x, codes, table)
        self.host |= {name: round(host_microseconds(call), 1) for name, call in calls.items()}


def main() -> None:
    """Measure, print the tables and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=38.0)
    parser.add_argument("--kind", choices=("int8", "int4"), action="append", help="default: both, int8 first")
    args = parser.parse_args()
    start = time.monotonic()
    bench, kinds = Bench(args.seconds), args.kind or ["int8", "int4"]
    kernels = variants(kinds)
    processes = min(12, multiprocessing.cpu_count())
    fork = multiprocessing.get_context("fork")  # before this process has a device
    workers = [fork.Process(target=compile_some, args=(kernels[i::processes],)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(kernels)} kernels compiled in {time.monotonic() - start:.1f} s")
    torch.manual_seed(0)
    print(
        "microseconds; Triton's kernel with the best blocks and the table's;"
        " blocks: rows, outputs, bytes, warps, stages, split"
    )
    print("     outputs inputs rows |   bf16  plain tinygemm |   best  table  best blocks")
    for kind in kinds:
        for shape in SHAPES:
            bench.measure_shape(kind, *shape, with_host=shape == SHAPES[0])
    if time.monotonic() > bench.end:
        print("the time was over before the end")
    print("host, microseconds a call for one row:", bench.host)
    for name, problem in bench.failed.items():
        print("failed:", name, problem)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": [torch.__version__, triton_packed.triton.__version__],
        "seconds": round(time.monotonic() - start, 1),
        "host": bench.host,
        "failed": bench.failed,
        "lines": bench.lines,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
