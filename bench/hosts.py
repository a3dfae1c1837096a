"""Two hosts: Thalweg's stages against DDP and raw FSDP2 over one cable between network namespaces.

The hosts are network namespaces of this machine with a virtual cable between them, unlimited or held to a
rate (`_namespaces.py`); everything stays inside them.  Needs root and iproute2, and says so without.
Clock as in train_step.py; `link_mib` is what the first host sends over the cable in one step.

    python bench/hosts.py --model 69m --ranks-per-host 1 2 --rate none 1gbit
    python bench/hosts.py --quick --json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from typing import Any

from _contestants import JOBS
from _groups import exit_on_terminate
from _interleaved import InterleavedRun, RunSettings
from _namespaces import NamespaceError, NamespaceHosts, missing_reason
from _report import Row, add_output_options, compare, format_cell, make_result, publish_runs, render_section

ANCHOR = "ddp_fused"
DEFAULT = [ANCHOR, *(f"thalweg_torch_{stage}" for stage in range(4)), "fsdp2_2", "fsdp2_3"]
QUICK = [ANCHOR, "thalweg_torch_1", "thalweg_torch_3"]


def rows_of(interleaved: InterleavedRun, head: str, asked: list[str]) -> list[Row]:
    """Return the rows of Thalweg's contestants against every other one."""
    rows = []
    for name in (n for n in asked if n.startswith("thalweg")):
        for peer in (n for n in asked if not n.startswith("thalweg")):
            case = f"{head}, {name}"
            lost = next((n for n in (name, peer) if not interleaved.succeeded(n)), None)
            if lost:
                note = f"{lost}: {interleaved.outcomes[lost].error}"
                rows.append(compare(case, peer, "clock_ms_median", None, None, note=note))
                continue
            a, b = interleaved.outcomes[name], interleaved.outcomes[peer]
            clocks = [statistics.median(o.clock_ms()) for o in (a, b)]
            rows.append(compare(case, peer, "clock_ms_median", *clocks, ratio=interleaved.time_ratio(name, peer)))
            rows.append(compare(case, peer, "clock_ms_min", min(a.clock_ms()), min(b.clock_ms())))
            sent = [statistics.median(o.metered_per_step) for o in (a, b)]
            rows.append(compare(case, peer, "link_mib", *sent))
    return rows


def measure(model: str, ranks: int, rate: str | None, plan: RunSettings, asked: list[str]) -> dict[str, Any]:
    """Run the contestants over a fresh pair of hosts and return its JSON object."""
    job = JOBS[model]
    head = f"{model} {job.dtype}, 2 hosts x {ranks} ranks, cable {rate or 'unlimited'}"
    with NamespaceHosts(rate) as hosts:
        interleaved = InterleavedRun(job, 2 * ranks, plan, ANCHOR, meter=hosts.sent_mib)
        interleaved.run(asked, hosts.placements(ranks))
    lines = []
    for name in asked:
        outcome = interleaved.outcomes[name]
        line: dict[str, Any] = {"contestant": name, "note": outcome.error}
        if not outcome.error:
            line |= {
                **outcome.summary(1),
                "loss_difference": float(f"{interleaved.loss_difference(name):.2g}")
                if interleaved.succeeded(ANCHOR)
                else None,
            }
        lines.append(line)
    rows = rows_of(interleaved, head, asked)
    return make_result("hosts", rows, run=head, plan=dataclasses.asdict(plan), contestants=lines)


def render(run: dict[str, Any]) -> str:
    """Return one run as Markdown."""
    keys = ("clock_ms_min", "clock_ms_median", "cpu_ms_median", "link_mib", "loss_difference")
    lines = [
        [c["contestant"], *(format_cell(c.get(k), 6 if k == keys[-1] else 0) for k in keys)] for c in run["contestants"]
    ]
    headers = ["contestant", "min ms", "median ms", "CPU ms", "MiB sent a step", "loss differs by"]
    return render_section(run, headers, lines)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print one object or the tables; exit code 2 where hosts cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(JOBS), default=["69m"])
    parser.add_argument("--ranks-per-host", nargs="+", type=int, default=[1])
    parser.add_argument("--rate", nargs="+", default=["none"], help='of the cable: "none", or as tc writes it, 1gbit')
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants, as in train_step.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    add_output_options(parser, "hosts", "the small model, three contestants, under a minute")
    args = parser.parse_args(argv)
    exit_on_terminate()
    reason = missing_reason()
    if reason:
        print(f"hosts: {reason}", file=sys.stderr)
        return 2
    plan = RunSettings(args.rounds, args.steps, warmup=2)
    asked = list(dict.fromkeys([ANCHOR, *args.only])) if args.only else DEFAULT
    if args.quick:
        args.model, args.ranks_per_host, args.rate = ["small"], [1], ["none"]
        plan, asked = dataclasses.replace(plan, steps=2, warmup=1), asked if args.only else QUICK
    rates = [None if rate == "none" else rate for rate in args.rate]
    try:
        runs = [measure(m, r, rate, plan, asked) for rate in rates for r in args.ranks_per_host for m in args.model]
    except NamespaceError as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 1
    publish_runs("hosts", "Two hosts", runs, render, write=args.write, as_json=args.json)
    return 1 if any(c["note"] for run in runs for c in run["contestants"] if "deepspeed" not in c["contestant"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
