"""One GPU: MFU of a Llama-shaped 1B model in bf16, Thalweg's engine against a raw FSDP2 loop.

Both train the same model (`_llama.py`: 22 layers x 2,048, 1.1B parameters, sequence 2,048) with fp32
master weights, bf16 compute and fused AdamW, in processes of their own, one on the GPU at a time.  MFU is
the model's arithmetic (6 operations a weight and token, and attention; `_llama.flops_per_token`) over the
data sheet's dense bf16 peak; `share_of_matmul` is the same over what a large bf16 matrix product reaches on
this very GPU.  Needs CUDA, and nothing but torch and Thalweg.

    python bench/gpu_mfu.py
    python bench/gpu_mfu.py --micro-batch 8 --compile --write
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import torch
from _contestants import Job
from _groups import exit_on_terminate
from _interleaved import InterleavedRun, RunSettings
from _llama import flops_per_token
from _peers import ROOT
from _report import (
    Row,
    compare,
    format_cell,
    format_machine,
    make_result,
    markdown_table,
    rows_table,
    write_result,
)

sys.path.insert(0, str(ROOT))

from thalweg.plan.spec.devices import find_device

JOB = Job(
    "llama-1b",
    layers=22,
    heads=32,
    width=2048,
    vocabulary=32000,
    sequence=2048,
    micro_batch=4,
    tied=False,
    dtype="bf16",
    device="cuda",
    family="llama",
    kv_heads=4,
    hidden=5632,
)
PAIRS = {"thalweg_3": "fsdp2_3", "thalweg_2": "fsdp2_2", "thalweg_0": "fsdp2_2"}


def matmul_flops(size: int = 8192, repeats: int = 20) -> float:
    """Return the FLOP/s of a large bf16 matrix product on this GPU, the best of three bursts."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    best = 0.0
    for _ in range(4):  # the first burst warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ a
        torch.cuda.synchronize()
        best = max(best, 2 * size**3 * repeats / (time.perf_counter() - start))
    return best


def lines_of(interleaved: InterleavedRun, names: list[str], peak: float | None, matmul: float) -> list[dict[str, Any]]:
    """Return one line of measurements for each contestant."""
    job = interleaved.job
    tokens = job.micro_batch * job.sequence
    work = tokens * flops_per_token(job.llama_config(), job.sequence)
    causal = tokens * flops_per_token(job.llama_config(), job.sequence, causal=True)
    lines = []
    for name in names:
        outcome = interleaved.outcomes[name]
        line: dict[str, Any] = {"contestant": name, "note": outcome.error}
        if not outcome.error:
            seconds = statistics.median(outcome.clock_ms()) / 1e3
            line |= {
                "step_ms": 1e3 * seconds,
                "tokens_per_s": tokens / seconds,
                "tflops": work / seconds / 1e12,
                "mfu": work / seconds / peak if peak else None,
                "mfu_causal": causal / seconds / peak if peak else None,
                "share_of_matmul": work / seconds / matmul,
                "gpu_peak_mib": outcome.reports[0]["cuda_peak_mib"],
                "loss_difference": interleaved.loss_difference(name),
            }
        lines.append(line)
    return lines


def rows_of(interleaved: InterleavedRun, lines: list[dict[str, Any]]) -> list[Row]:
    """Return the rows of Thalweg's stages against the raw loops."""
    by_name = {line["contestant"]: line for line in lines}
    rows = []
    for ours, theirs in PAIRS.items():
        job, compiled = interleaved.job, ", compiled" if interleaved.job.compiled else ""
        case = f"{job.name} {job.dtype}, micro-batch {job.micro_batch}{compiled}, {ours}"
        a, b = by_name[ours], by_name[theirs]
        lost = next((line for line in (a, b) if line["note"]), None)
        if lost:
            rows.append(compare(case, theirs, "mfu", None, None, note=f"{lost['contestant']}: {lost['note']}"))
            continue
        ratio = interleaved.time_ratio(ours, theirs)
        rows.append(compare(case, theirs, "mfu", a["mfu"], b["mfu"], lower_is_better=False, ratio=ratio))
        rows.append(compare(case, theirs, "step_ms", a["step_ms"], b["step_ms"], ratio=ratio))
        rows.append(compare(case, theirs, "gpu_peak_mib", a["gpu_peak_mib"], b["gpu_peak_mib"]))
    return rows


def measure(job: Job, plan: RunSettings) -> dict[str, Any]:
    """Run the contestants on this GPU and return its JSON object."""
    name = torch.cuda.get_device_name()
    matmul, known = matmul_flops(), find_device(name)
    peak = None if known is None else known.peak_flops(torch.bfloat16)
    torch.cuda.empty_cache()
    names = ["fsdp2_3", "thalweg_3", "fsdp2_2", "thalweg_2", "thalweg_0"]
    interleaved = InterleavedRun(job, 1, plan, "fsdp2_3")
    interleaved.run(names)
    if not interleaved.succeeded("fsdp2_3"):
        raise RuntimeError(f"the raw FSDP2 loop failed: {interleaved.outcomes['fsdp2_3'].error}")
    lines = lines_of(interleaved, names, peak, matmul)
    gpu = {"name": name, "peak_tflops": peak and peak / 1e12, "matmul_tflops": round(matmul / 1e12, 1)}
    rows = rows_of(interleaved, lines)
    return make_result("gpu_mfu", rows, gpu=gpu, job=job.to_dict(), plan=dataclasses.asdict(plan), contestants=lines)


def render(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    gpu, job = data["gpu"], data["job"]
    keys = {
        "step_ms": 1,
        "tokens_per_s": 0,
        "mfu": 3,
        "mfu_causal": 3,
        "share_of_matmul": 3,
        "gpu_peak_mib": 0,
    }
    lines = [[c["contestant"], *(format_cell(c.get(k), d) for k, d in keys.items())] for c in data["contestants"]]
    return "\n".join(
        [
            "# MFU on one GPU",
            "",
            f"{data['date']}, commit {data['commit']}, {gpu['name']}, {format_machine(data['machine'])}.",
            f"TFLOP/s by the data sheet: {gpu['peak_tflops'] or 'unknown'}; of a large bf16 matrix product: "
            f"{gpu['matmul_tflops']}.",
            f"Llama shape, {job['layers']} layers x {job['width']}, sequence {job['sequence']}, micro-batch "
            f"{job['micro_batch']}, {job['dtype']}{', compiled' if job['compiled'] else ''}.",
            "",
            markdown_table(["contestant", *keys], lines),
            "",
            rows_table(data["rows"]),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the tables; exit code 2 without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=JOB.micro_batch)
    parser.add_argument("--sequence", type=int, default=JOB.sequence)
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks of both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a quarter of the layers, few steps")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/gpu_mfu.md and .json")
    args = parser.parse_args(argv)
    exit_on_terminate()
    if not torch.cuda.is_available():
        print(
            "gpu_mfu: needs an NVIDIA GPU and a CUDA build of torch, and this machine has none",
            file=sys.stderr,
        )
        return 2
    job = dataclasses.replace(JOB, micro_batch=args.micro_batch, sequence=args.sequence, compiled=args.compile)
    plan = RunSettings(args.rounds, args.steps, warmup=2)
    if args.quick:
        job, plan = dataclasses.replace(job, layers=job.layers // 4), RunSettings(3, 4, warmup=1)
    data = measure(job, plan)
    if args.write:
        write_result("gpu_mfu", data, render(data))
    print(json.dumps(data) if args.json else render(data))
    return 1 if any(line["note"] for line in data["contestants"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
