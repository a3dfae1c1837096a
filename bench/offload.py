"""Parameters and optimiser state outside of memory: what it costs and saves, and that it changes nothing.

    equality    50M parameters, every placement of parameters and state: losses equal to those without
    nvme        100M parameters, one rank, everything on NVMe: the step against max(the same step without
                tiers, bytes moved / bandwidth), both measured in this run, and against DeepSpeed
    host        100M parameters, state on the host with updates within the backward pass, against none:
                seconds, and the peak, which should fall by the gradients of all units but one
    gpt2-1.5b   5 steps of GPT-2's largest shape (sequence 256) on NVMe: the step against its bytes over the disk's
                rates; the peak after the first step and at the end; page faults; seconds that the disk was busy
    hf-1.5b     the same of Hugging Face's GPT-2 in bf16, in a cgroup of 4 GiB

    python bench/offload.py [--case nvme host equality gpt2-1.5b hf-1.5b] [--folder DIR] [--quick] [--write] [--json]

The bandwidth is that of the swap file's own threads in 8 MiB blocks, read and written as much as a step does
(and fio's where it is installed).  Runs alternate where they are compared; medians over steps, the first of
which is warmth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from _fio import Fio
from _memory_group import group_peak, memory_group, within_group
from _peers import ROOT, deepspeed_env, deepspeed_missing_reason, python_for, remove_deepspeed_shm
from _report import Row, compare, format_machine, make_result, publish_runs, rows_table

WORKER = Path(__file__).with_name("_offload_worker.py")
CASES = ("equality", "nvme", "host", "gpt2-1.5b", "hf-1.5b")
_DEEPSPEED_PORT = "29533"


def train(
    case: str,
    folder: str,
    *,
    engine: str = "thalweg",
    timeout: float = 3600,
    group: Path | None = None,
    **options: Any,
) -> Any:
    """Run the worker, in a memory cgroup if one is given; its JSON, or a text that says why there is none."""
    command = [python_for(engine), "-u", str(WORKER), "--engine", engine, "--case", case, "--folder", folder]
    for key, value in options.items():
        command += [f"--{key}"] if value is True else [f"--{key}", str(value)] if value is not False else []
    # Huge pages for large blocks, as `thalweg run` sets it; for every contestant.
    environment = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    if engine == "deepspeed":
        store = tempfile.mktemp(dir=folder)
        command += ["--store", store]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _DEEPSPEED_PORT, "RANK": "0", "WORLD_SIZE": "1"}
        environment |= {**deepspeed_env(), **address, "LOCAL_RANK": "0"}
    try:
        command = within_group(group, command)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:.0f} s"
    finally:
        if engine == "deepspeed":
            remove_deepspeed_shm(_DEEPSPEED_PORT)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return (done.stderr.strip().splitlines() or ["no output"])[-1][:300]


def typical(found: dict[str, Any], key: str = "seconds") -> float:
    """The median over steps after the first."""
    return statistics.median(found[key][1:] or found[key])


def bandwidth(folder: str, megabytes: int) -> tuple[float, float]:
    """Bytes a second of reading and writing ``megabytes`` through a swap file's threads."""
    sys.path.insert(0, str(ROOT))
    from thalweg.storage_io.evictable_memory import BufferRing
    from thalweg.storage_io.swap_file import SwapFile

    nbytes = megabytes << 20
    with closing(SwapFile(folder, nbytes)) as swap:
        ring = BufferRing(4, 32 << 20)
        rates = []
        for move in (swap.write, swap.read):
            start, tickets = time.perf_counter(), []
            for turn, offset in enumerate(range(0, nbytes, 32 << 20)):
                if turn >= 4:
                    tickets[turn - 4].wait()
                tickets.append(move(offset, ring[turn][: min(32 << 20, nbytes - offset)]))
            for ticket in tickets:
                ticket.wait()
            rates.append(nbytes / (time.perf_counter() - start))
    return rates[1], rates[0]


def fio(folder: str, megabytes: int) -> tuple[float, float] | None:
    """The same by fio, if it is there."""
    if not Fio.is_installed():
        return None
    found = Fio(Path(folder), megabytes << 20)
    found.close()
    return found.rates["read"], found.rates["write"]


def equality(folder: str, quick: bool) -> list[Row]:
    """Losses with tiers minus those without."""
    size, steps = ("tiny", 3) if quick else ("50m", 4)
    none = train(size, folder, steps=steps)
    rows = []
    for param, optimizer in (("none", "cpu"), ("none", "nvme"), ("nvme", "none"), ("nvme", "nvme")):
        found = train(size, folder, steps=steps, param=param, optimizer=optimizer)
        case = f"equality, {size}, parameters {param}, state {optimizer}"
        if isinstance(found, str) or isinstance(none, str):
            rows.append(compare(case, "no tiers", "largest loss difference", None, None, note=str(found)))
            continue
        worst = max(abs(a - b) for a, b in zip(found["losses"], none["losses"], strict=True))
        rows.append(compare(case, "no tiers", "largest loss difference", worst, 0.0, ratio=float(worst == 0)))
    return rows


def nvme(folder: str, quick: bool) -> list[Row]:
    """The step with everything on NVMe against its bound and DeepSpeed."""
    size, steps, rounds = ("tiny", 3, 1) if quick else ("100m", 6, 3)
    megabytes = 64 if quick else 1024
    case = f"nvme, {size}"
    ours, computes, disks, theirs = [], [], [], []
    missing = deepspeed_missing_reason()
    for _ in range(rounds):  # in turns, since the disk's pace changes by the minute
        none, tiers = (train(size, folder, steps=steps, param=t, optimizer=t) for t in ("none", "nvme"))
        if isinstance(none, str) or isinstance(tiers, str):
            return [compare(case, "bound", "step s", None, None, note=f"{none} {tiers}"[:300])]
        read, write = fio(folder, megabytes) or bandwidth(folder, megabytes)
        ours.append(tiers)
        computes.append(typical(none))
        disks.append(typical(tiers, "read_bytes") / read + typical(tiers, "written_bytes") / write)
        if not theirs:  # once: its set-up takes minutes
            missing = missing or _deepspeed_turn(size, folder, steps, theirs)
    steps_s = [typical(found) for found in ours]
    bounds = [max(pair) for pair in zip(computes, disks, strict=True)]
    compute, disk, step = (statistics.median(values) for values in (computes, disks, steps_s))
    ratio = statistics.median(b / s for b, s in zip(bounds, steps_s, strict=True))
    bound = f"bound: max(compute {compute:.2f} s, disk {disk:.2f} s)"
    peak = max(found["peak_mib"] for found in ours)
    rows = [
        compare(case, bound, "step s", step, statistics.median(bounds), ratio=ratio),
        compare(case, "no tiers", "peak MiB", peak, none["peak_mib"]),
    ]
    if missing is not None:
        return [*rows, compare(case, "deepspeed", "step s", step, None, note=missing)]
    slow, high = typical(theirs[0]), theirs[0]["peak_mib"]
    rows.append(compare(case, "deepspeed", "step s", step, slow))
    return [*rows, compare(case, "deepspeed", "peak MiB", peak, high)]


def _deepspeed_turn(size: str, folder: str, steps: int, found: list[dict[str, Any]]) -> str | None:
    """Add DeepSpeed's run to ``found``, or return why there is none."""
    theirs = train(size, folder, engine="deepspeed", steps=steps, param="nvme", optimizer="nvme")
    if isinstance(theirs, str):
        return theirs
    found.append(theirs)
    return None


def host(folder: str, quick: bool) -> list[Row]:
    """Host offload against none, alternating."""
    size, rounds = ("tiny", 1) if quick else ("100m", 3)
    pairs = []
    for _ in range(rounds):
        pair = [train(size, folder, steps=4, optimizer=tier) for tier in ("cpu", "none")]
        if any(isinstance(found, str) for found in pair):
            return [compare(f"host, {size}", "no tiers", "step s", None, None, note=str(pair)[:300])]
        pairs.append(pair)
    case = f"host, {size}"
    rows = []
    for key, metric in (("seconds", "step s"), ("cpu_seconds", "step CPU s")):
        ours, theirs = (statistics.median(typical(pair[i], key) for pair in pairs) for i in (0, 1))
        ratio = statistics.median(typical(b, key) / typical(a, key) for a, b in pairs)
        rows.append(compare(case, "no tiers", metric, ours, theirs, ratio=ratio))
    peaks = [max(pair[i]["peak_mib"] for pair in pairs) for i in (0, 1)]
    return [*rows, compare(case, "no tiers", "peak MiB", *peaks)]


GROUP_BYTES, DISK_BYTES = 4 << 30, 43 << 30


def largest(folder: str, quick: bool, model: str = "gpt") -> list[Row]:
    """GPT-2 of 1.5 billion parameters; Hugging Face's ("hf") in bf16 and in a cgroup."""
    size, megabytes = ("50m", 64) if quick else ("gpt2-1.5b", 2048)
    case = "gpt2-1.5b" if model == "gpt" else "hf-1.5b"
    case += f", 5 steps, sequence 256{f' (quick: {size})' if quick else ''}"
    if not quick and (free := shutil.disk_usage(folder).free) < DISK_BYTES:
        note = f"needs {DISK_BYTES >> 30} GiB of disk, and {folder} has {free >> 30}"
        return [compare(case, "bound", "step s", None, None, note=note)]
    options: dict[str, Any] = {"param": "nvme", "optimizer": "nvme", "recompute": True, "timeout": 14400}
    rates = [fio(folder, megabytes) or bandwidth(folder, megabytes)]
    with memory_group(GROUP_BYTES) if model == "hf" else contextlib.nullcontext() as group:
        if model == "hf" and group is None:
            return [compare(case, "bound", "step s", None, None, note="this user cannot make a memory cgroup")]
        found = train(size, folder, steps=5, group=group, model=model, bf16=model == "hf", **options)
        in_group = group_peak(group) / 2**30 if group else None
    if isinstance(found, str):
        return [compare(case, "bound", "step s", None, None, note=found)]
    rates.append(fio(folder, megabytes) or bandwidth(folder, megabytes))  # the disk's pace changes by the minute
    print("losses " + ", ".join(f"{loss:.6f}" for loss in found["losses"]), file=sys.stderr)
    read, write = (statistics.mean(pair) for pair in zip(*rates, strict=True))
    moved = typical(found, "read_bytes"), typical(found, "written_bytes")
    bound = moved[0] / read + moved[1] / write
    seconds = typical(found)
    which = (
        f"bound: {moved[0] / 2**30:.1f} GiB read at {read / 1e9:.2f} GB/s, "
        f"{moved[1] / 2**30:.1f} written at {write / 1e9:.2f}"
    )
    first, last = (found["peaks_mib"][i] / 1024 for i in (0, -1))
    rows = [
        compare(case, which, "step s", seconds, bound),
        compare(case, "goal: twice the bound", "step s", seconds, 2 * bound),
        compare(case, "goal", "peak GiB", last, 4.0),
        compare(case, "after the first step", "peak GiB", last, first),
        compare(case, "set-up", "s", found["setup_seconds"], None),
        compare(case, "CPU", "s a step", typical(found, "cpu_seconds"), None),
        compare(case, "page faults without the disk", "a step", typical(found, "minor_faults"), None),
        compare(case, "page faults that read", "a step", typical(found, "major_faults"), None),
    ]
    if found["disk_busy_seconds"]:  # what else the machine reads and writes is in it
        rows.append(compare(case, "disk busy", "s a step", typical(found, "disk_busy_seconds"), None))
    if in_group is not None:
        rows.append(compare(case, "of the cgroup, with page cache", "peak GiB", in_group, GROUP_BYTES / 2**30))
    return rows


def largest_of_hugging_face(folder: str, quick: bool) -> list[Row]:
    """The same of Hugging Face's GPT-2 in bf16, in a cgroup."""
    return largest(folder, quick, "hf")


def render(run: dict[str, Any]) -> str:
    """One run as Markdown."""
    head = f"{run['date']}, {run['commit']}, {format_machine(run['machine'])}"
    return f"## {run['run']}\n\n{head}\n\n{rows_table(run['rows'])}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", default=str(ROOT), help="where swap files go: on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--write", action="store_true", help="write results/offload.{json,md}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    run = {"equality": equality, "nvme": nvme, "host": host, "gpt2-1.5b": largest}
    run["hf-1.5b"] = largest_of_hugging_face
    runs = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="thalweg-bench-") as folder:
        for case in args.case:
            runs.append(make_result("offload", run[case](folder, args.quick), run=case))
    title = "Parameters and optimiser state outside of memory"
    publish_runs("offload", title, runs, render, write=args.write, as_json=args.json)


if __name__ == "__main__":
    main()
