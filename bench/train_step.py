"""One training step: Thalweg's stages against DDP, ZeroRedundancyOptimizer, raw FSDP2 and DeepSpeed.

All contestants train the same GPT, the reference one or Hugging Face's (`hf-`), from the same seed on the same batches
with the same AdamW, on gloo ranks of this host.  They are alive at once, as many as fit into memory, and take turns of
a few steps (`_interleaved.py`), so that their ratios hold on a machine that is not quiet.  Clock is the slowest rank's;
CPU time is the mean over ranks; the peak is VmHWM of the rank's own process, which has imported nothing but torch and
the contestant.  Steps before the timed ones, start and compilation are not counted.

    python bench/train_step.py --quick
    python bench/train_step.py --model small 69m --ranks 2 4 --write
    python bench/train_step.py --model 69m --only thalweg_3 deepspeed_3 --json
    python bench/train_step.py --model hf-small hf-69m --isa avx2 --write

`--isa avx2` keeps all contestants alike within what a processor with AVX2 alone has: torch's kernels, MKL, oneDNN,
Thalweg's own, and DeepSpeed's operators, which `make bench-peers-avx2` compiles for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from typing import Any

from _contestants import JOBS
from _goals import check_goals
from _groups import exit_on_terminate
from _interleaved import InterleavedRun, RunSettings
from _isa import ISAS, isa_variables, with_isa
from _report import (
    Row,
    compare,
    format_cell,
    format_machine,
    make_result,
    markdown_table,
    merge_runs,
    rows_table,
    write_result,
)

ANCHOR = "ddp_fused"
BY_STAGE = [
    name
    for stage in range(4)
    for name in (
        f"thalweg_{stage}",
        f"thalweg_torch_{stage}",
        f"deepspeed_{stage}",
        *([f"fsdp2_{stage}", f"fsdp2_comm_{stage}"] if stage >= 2 else []),
    )
]
ALL = [ANCHOR, *BY_STAGE, "ddp", "ddp_zero_redundancy"]
QUICK = [ANCHOR, "thalweg_1", "thalweg_3", "fsdp2_3", "deepspeed_3"]


def peers_of(name: str) -> list[str]:
    """Return the contestants that one of Thalweg's stages is compared with."""
    stage = int(name[-1])
    peers = [ANCHOR, "ddp", "ddp_zero_redundancy", f"deepspeed_{stage}"]
    if stage:
        peers.append(f"fsdp2_{max(stage, 2)}")
    if stage >= 2 and "torch" in name:
        peers.append(f"fsdp2_comm_{stage}")
    return peers


def run_name(model: str, dtype: str, world: int) -> str:
    """Return what a run and its rows are called."""
    return with_isa(f"{model} {dtype} {world} ranks", " ")


def rows_of(interleaved: InterleavedRun, asked: list[str]) -> list[Row]:
    """Return the comparison rows of every stage of Thalweg that was asked for."""
    rows = []
    head = run_name(interleaved.job.name, interleaved.job.dtype, interleaved.world)
    for name in (n for n in asked if n.startswith("thalweg")):
        kernels = "torch" if "torch" in name else "auto"
        case = f"{head}, stage {name[-1]}, cpu_kernels {kernels}"
        for peer in peers_of(name):
            if peer not in asked:
                continue
            lost = next((n for n in (name, peer) if not interleaved.succeeded(n)), None)
            if lost is not None:
                rows.append(
                    compare(
                        case, peer, "clock_ms_median", None, None, note=f"{lost} {interleaved.outcomes[lost].error}"
                    )
                )
                continue
            ours, theirs = interleaved.outcomes[name], interleaved.outcomes[peer]
            a, b = ours.clock_ms(), theirs.clock_ms()
            paired = interleaved.time_ratio(name, peer)
            rows += [
                compare(case, peer, "clock_ms_median", statistics.median(a), statistics.median(b), ratio=paired),
                compare(case, peer, "clock_ms_min", min(a), min(b)),
                compare(
                    case,
                    peer,
                    "cpu_ms_median",
                    statistics.median(ours.cpu_ms()),
                    statistics.median(theirs.cpu_ms()),
                ),
                compare(case, peer, "peak_mib", ours.peak_mib(), theirs.peak_mib()),
            ]
    return rows


def contestants_of(interleaved: InterleavedRun, asked: list[str]) -> list[dict[str, Any]]:
    """Return one line of measurements for each contestant."""
    lines = []
    for name in asked:
        outcome = interleaved.outcomes[name]
        line: dict[str, Any] = {"contestant": name, "note": outcome.error}
        if not outcome.error:
            clock = outcome.clock_ms()
            line |= {
                "clock_ms_min": round(min(clock), 1),
                "clock_ms_median": round(statistics.median(clock), 1),
                "cpu_ms_median": round(statistics.median(outcome.cpu_ms()), 1),
                "of_ddp_fused": round(interleaved.time_ratio(ANCHOR, name), 3) if name != ANCHOR else 1.0,
                "peak_mib": round(outcome.peak_mib()),
                "peak_over_import_mib": round(outcome.peak_mib(over_import=True)),
                "loss_last": outcome.losses()[-1],
                "loss_difference": float(f"{interleaved.loss_difference(name):.2g}"),
                "imports": outcome.reports[0]["imports"],
            }
        lines.append(line)
    return lines


def measure(model: str, world: int, dtype: str, plan: RunSettings, asked: list[str]) -> dict[str, Any]:
    """Run the contestants in turns and return the JSON object."""
    job = dataclasses.replace(JOBS[model], dtype=dtype)
    interleaved = InterleavedRun(job, world, plan, ANCHOR)
    interleaved.run(asked)
    return make_result(
        "train_step",
        rows_of(interleaved, asked) if interleaved.succeeded(ANCHOR) else [],
        run=run_name(model, dtype, world),
        job=job.to_dict(),
        plan=dataclasses.asdict(plan),
        contestants=contestants_of(interleaved, asked) if interleaved.succeeded(ANCHOR) else [],
        goals=check_goals(interleaved) if interleaved.succeeded(ANCHOR) else [],
        error=interleaved.outcomes[ANCHOR].error,
    )


def failures(run: dict[str, Any]) -> list[str]:
    """Return what must not pass for a result: an anchor or a stage of Thalweg that failed to run."""
    ours = [c for c in run["contestants"] if c["contestant"].startswith("thalweg")]
    return [text for text in (run["error"], *(c["note"] for c in ours)) if text]


def render(run: dict[str, Any], with_rows: bool = True) -> str:
    """Return one run as Markdown: the contestants, the goals, then (optionally) all comparisons."""
    plan, job = run["plan"], run["job"]
    shape = f"{job['layers']} layers x {job['width']}, {job['heads']} heads, vocabulary {job['vocabulary']}"
    turns = f"{plan['rounds']} rounds of {plan['steps']} steps for each, interleaved"
    text = [
        f"## {run['run']}",
        "",
        f"{run['date']}, commit {run['commit']}, {format_machine(run['machine'])}.",
        f"{'GPT-2 of Hugging Face' if job.get('family') == 'gpt2' else 'GPT'} of {shape}, "
        f"sequence {job['sequence']}, micro-batch {job['micro_batch']} a rank.",
        f"{turns}, {plan['threads']} thread a rank. Clock and CPU in ms a step; peak resident MiB of a rank.",
        "",
    ]
    headers = ["contestant", "min", "median", "CPU", "/ ddp_fused", "peak", "over import", "loss differs by"]
    keys = (
        "clock_ms_min",
        "clock_ms_median",
        "cpu_ms_median",
        "of_ddp_fused",
        "peak_mib",
        "peak_over_import_mib",
    )
    lines = []
    for c in run["contestants"]:
        values = ["-"] * 7 if c["note"] else [format_cell(c[key], 2 if key == "of_ddp_fused" else 0) for key in keys]
        lines.append([c["contestant"], *values, *([] if c["note"] else [f"{c['loss_difference']:.1e}"])])
    text += [markdown_table(headers, lines), ""]
    text += [f"{c['contestant']}: {c['note']}\n" for c in run["contestants"] if c["note"]]
    if run["goals"]:
        goals = [
            [
                f"{g['ours']} against {g['peer']}, {g['metric']}",
                f"{g['least']:.2f}",
                f"{g['ratio']:.2f}",
                "yes" if g["met"] else "NO",
            ]
            for g in run["goals"]
        ]
        text += [markdown_table(["promise", "at least", "ratio", "met"], goals), ""]
    if with_rows:
        text += [rows_table(run["rows"]), ""]
    return "\n".join(text)


def write(runs: list[dict[str, Any]]) -> None:
    """Put the runs into results/train_step, in the place of earlier ones of the same name."""
    data = merge_runs("train_step", runs)
    data["runs"].sort(key=lambda run: (run["run"].split()[1:3], not run["run"].startswith(("small", "hf-small"))))
    head = (
        "# One training step\n\nWritten by `python bench/train_step.py --write`; "
        "the ratios of every pair are in the JSON file.\n"
    )
    texts = [render(run, with_rows=False) for run in data["runs"]]
    write_result("train_step", data, "\n".join([head, *texts]))


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the contestants, print one object or the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(JOBS), default=["small"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="NAME", help=f"of {', '.join(ALL)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (5)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn (5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (1)")
    parser.add_argument("--isa", choices=ISAS, help="keep all contestants within this instruction set")
    parser.add_argument("--quick", action="store_true", help="five contestants, the small model, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/train_step.md and .json")
    args = parser.parse_args(argv)
    exit_on_terminate()
    os.environ.update(isa_variables(args.isa))
    plan = RunSettings(args.rounds, args.steps, warmup=3, threads=args.threads)
    asked = list(dict.fromkeys([ANCHOR, *args.only])) if args.only else ALL
    if args.quick:
        plan, asked = dataclasses.replace(plan, rounds=5, steps=2, warmup=1), asked if args.only else QUICK
    runs = [measure(m, w, d, plan, asked) for d in args.dtype for w in args.ranks for m in args.model]
    if args.write:
        write(runs)
    if args.json:
        one = runs[0] if len(runs) == 1 else {**runs[0], "rows": [r for run in runs for r in run["rows"]], "runs": runs}
        print(json.dumps(one))
    else:
        print("\n".join(render(run) for run in runs))
    return 1 if any(failures(run) for run in runs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
