"""The disk: Thalweg's transfers against fio and DeepSpeed's operator, and the streamed step against the disk.

Transfers: 1 GiB past the page cache, write and read, the contestants in turns.  fio uses io_uring with blocks
of 8 MiB, each way with the best of four settings of jobs and depth; DeepSpeed's operator runs with its documented
defaults and with the settings that were best here.  The streamed step: an AdamW update of 100M fp32 parameters
whose masters, moments and gradients all lie on the disk; its bound is what it reads over fio's reading rate plus
what it writes over fio's writing rate, measured before and after each step; the same by the rates of our own
transfers.

    python bench/nvme.py --folder /mnt/nvme
    python bench/nvme.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _fio import BLOCK, Fio
from _peers import PEERS_PYTHON, ROOT, aio_missing_reason
from _report import Row, compare, format_machine, make_result, rows_table, write_result

sys.path.insert(0, str(ROOT))

import torch
from torch import nn

from thalweg.optim.algorithms.elementwise import AdamW
from thalweg.optim.offload.nvme_step import NvmeStep, optimizer_state_bytes
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.io_threads import IoFuture
from thalweg.storage_io.swap_file import SwapFile

MIB = 1 << 20
AIO_SETTINGS = {
    "DeepSpeed aio, defaults": {"block": MIB, "depth": 8, "threads": 1},
    "DeepSpeed aio, 8 MiB x 2": {"block": BLOCK, "depth": 32, "threads": 2},
}


class Ours:
    """A swap file and a ring of buffers, as the streamed step uses them."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.swap = SwapFile(folder, nbytes)
        self.ring = BufferRing(4, 2 * BLOCK)
        for i in range(len(self.ring)):
            self.ring[i].random_()

    def move(self, verb: str) -> float:
        """Transfer the whole file; returns seconds."""
        call = self.swap.write if verb == "write" else self.swap.read
        tickets = [IoFuture() for _ in range(len(self.ring))]
        start = time.perf_counter()
        for turn, offset in enumerate(range(0, self.nbytes, self.ring.buffer_bytes)):
            tickets[turn % len(tickets)].wait()
            count = min(self.ring.buffer_bytes, self.nbytes - offset)
            tickets[turn % len(tickets)] = call(offset, self.ring[turn][:count])
        for ticket in tickets:
            ticket.wait()
        return time.perf_counter() - start

    def close(self) -> None:
        """Give the file back."""
        self.swap.close()


class Aio:
    """DeepSpeed's operator in a process of its own."""

    def __init__(self, folder: Path, nbytes: int, setting: dict[str, int]) -> None:
        command = [str(PEERS_PYTHON), str(ROOT / "bench" / "_deepspeed_aio.py"), "--folder", str(folder)]
        command += ["--bytes", str(nbytes)]
        for key, value in setting.items():
            command += [f"--{key}", str(value)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._answer() != "ready":
            raise RuntimeError("DeepSpeed's operator did not start: `make bench-peers` compiles it")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def move(self, verb: str) -> float:
        """Transfer the whole file; returns seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("quit\n")
        self._process.stdin.close()
        self._process.wait(timeout=60)


def transfers(folder: Path, nbytes: int, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Measure all contestants in turns."""
    contestants: dict[str, Any] = {"thalweg": Ours(folder, nbytes)}
    absent: dict[str, str] = {}
    if Fio.is_installed():
        contestants["fio"] = Fio(folder, nbytes)
    else:
        absent["fio"] = "fio is not installed"
    for name, setting in AIO_SETTINGS.items():
        missing = aio_missing_reason()
        try:
            if missing is None:
                contestants[name] = Aio(folder, nbytes, setting)
        except (RuntimeError, OSError) as error:
            missing = str(error)
        if missing is not None:
            absent[name] = missing
    seconds = {name: {"write": [], "read": []} for name in contestants}
    try:
        for contestant in contestants.values():
            contestant.move("write")  # the first pass claims the blocks of the file
        for number in range(rounds):
            names = list(contestants)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for verb in ("write", "read"):
                    seconds[name][verb].append(contestants[name].move(verb))
    finally:
        for contestant in contestants.values():
            contestant.close()
    rows = []
    case = f"{nbytes / 2**30:g} GiB past the page cache"
    for name in [*contestants, *absent]:
        if name == "thalweg":
            continue
        for verb in ("write", "read"):
            ours = nbytes / 1e9 / min(seconds["thalweg"][verb])
            theirs = None if name in absent else nbytes / 1e9 / min(seconds[name][verb])
            paired = None
            if name not in absent:
                pairs = zip(seconds["thalweg"][verb], seconds[name][verb], strict=True)
                paired = statistics.median(b / a for a, b in pairs)
            for metric, ratio in (
                (f"{verb}, GB/s at best", None),
                (f"{verb}, median of paired turns", paired),
            ):
                values = (ours, theirs) if ratio is None else (None, None)
                if ratio is not None or metric.endswith("best"):
                    rows.append(
                        compare(
                            case, name, metric, *values, lower_is_better=False, ratio=ratio,
                            note=absent.get(name, ""),
                        )
                    )  # fmt: skip
    return rows, {"seconds": seconds}


def shapes_of(num_parameters: int) -> list[tuple[int, ...]]:
    """Shapes as a GPT of 768 wide has them, about ``num_parameters`` elements in all."""
    layer = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    layer += [(768,)] * 4
    shapes, total = [(8192, 768)], 8192 * 768
    while total < num_parameters:
        shapes += layer
        total += sum(torch.Size(s).numel() for s in layer)
    return shapes


class Step:
    """A model's worth of parameters on the disk, and its optimiser."""

    def __init__(self, folder: Path, num_parameters: int, buffers: BufferRing) -> None:
        shapes = shapes_of(num_parameters)
        sizes = [round_up(torch.Size(s).numel() * 4) for s in shapes]
        params = [nn.Parameter(torch.empty(s, device="meta")) for s in shapes]
        state = optimizer_state_bytes(AdamW(params, fused=False))
        self.swap = SwapFile(folder, 2 * sum(sizes) + state)

        def place(shape: tuple[int, ...], value: float) -> torch.Tensor:
            nbytes = torch.Size(shape).numel() * 4
            offset = self.swap.allocate(nbytes)
            made = self.swap.view(offset, shape, torch.float32).fill_(value)
            self.swap.trim(offset, nbytes)
            return made

        self.params = [nn.Parameter(place(s, 0.02)) for s in shapes]
        for param in self.params:
            param.grad = place(tuple(param.shape), 1e-3)
        self.optimizer = AdamW(self.params, lr=1e-4, fused=True)
        self.update = NvmeStep(self.optimizer, self.swap, buffers)
        self.num_parameters = sum(p.numel() for p in self.params)

    def run(self) -> tuple[float, float, int, int]:
        """One update; returns seconds, process CPU seconds, bytes read and bytes written."""
        read, written = self.swap.reads.nbytes, self.swap.writes.nbytes
        start, cpu = time.perf_counter(), time.process_time()
        self.update.apply()
        return (
            time.perf_counter() - start,
            time.process_time() - cpu,
            self.swap.reads.nbytes - read,
            self.swap.writes.nbytes - written,
        )


def streamed_step(
    folder: Path, num_parameters: int, rounds: int, buffers: BufferRing
) -> tuple[list[Row], dict[str, Any]]:
    """The step against the time that fio needs for the same bytes, in turns."""
    step = Step(folder, num_parameters, buffers)
    nbytes = 512 * MIB
    bounds: dict[str, Any] = {"own transfers": Ours(folder, nbytes)}
    if Fio.is_installed():
        bounds["fio"] = Fio(folder, nbytes)

    def rates() -> dict[str, dict[str, float]]:
        return {name: {v: nbytes / b.move(v) for v in ("read", "write")} for name, b in bounds.items()}

    try:
        step.run()  # makes the state
        for bound in bounds.values():
            bound.move("write")
        turns, before = [], rates()
        for _ in range(rounds):
            seconds, cpu, read, written = step.run()
            after = rates()
            turn = {"seconds": seconds, "cpu": cpu, "waited": step.update.io_pipeline.io_wait_seconds}
            turn |= {"read": read, "written": written}
            for name in bounds:
                mean = {verb: (before[name][verb] + after[name][verb]) / 2 for verb in ("read", "write")}
                turn[name] = read / mean["read"] + written / mean["write"]
            turns.append(turn)
            before = after
    finally:
        for bound in bounds.values():
            bound.close()
        step.swap.close()
    case = f"AdamW step, {step.num_parameters / 1e6:.0f}M fp32 parameters, all on the disk"
    rows = []
    for name in bounds:
        middle = statistics.median(t["seconds"] / t[name] for t in turns)
        ours, theirs = min(t["seconds"] for t in turns), min(t[name] for t in turns)
        rows += [
            compare(case, f"bytes at the rates of {name}", "s at best (ratio 1: at the bound)", ours, theirs),
            compare(case, f"bytes at the rates of {name}", "median of turns", None, None, ratio=1 / middle),
        ]
    return rows, {"turns": turns}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all and return the JSON object."""
    rows, raw = transfers(folder, args.mib * MIB, args.rounds)
    buffers = BufferRing(args.buffers, args.buffer_mib * MIB)
    more, step = streamed_step(folder, args.parameters, args.rounds, buffers)
    return make_result("nvme", [*rows, *more], rounds=args.rounds, **raw, **step)


def render(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    turns = data["turns"]
    middle: Callable[[str], float] = lambda key: statistics.median(t[key] for t in turns)
    return "\n".join(
        [
            "# The disk",
            "",
            f"{data['date']}, commit {data['commit']}, {format_machine(data['machine'])}.",
            "",
            f"{data['rounds']} turns. The step reads {middle('read') / 1e9:.2f} GB and writes "
            f"{middle('written') / 1e9:.2f} GB; median {middle('seconds'):.2f} s, of which "
            f"{middle('waited'):.2f} s waiting for the disk, {middle('cpu'):.2f} s of CPU.",
            "",
            rows_table(data["rows"]),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: /tmp)")
    parser.add_argument("--mib", type=int, default=1024, help="size of a transfer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--buffer-mib", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2, help="cores for the arithmetic")
    parser.add_argument("--quick", action="store_true", help="a quarter of the size, two turns")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/nvme.md and .json")
    args = parser.parse_args(argv)
    if args.quick:
        args.mib, args.rounds, args.parameters = 256, 2, 25_000_000
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-", dir=args.folder) as folder:
        data = measure(args, Path(folder))
    if args.write:
        write_result("nvme", data, render(data))
    print(json.dumps(data) if args.json else render(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
