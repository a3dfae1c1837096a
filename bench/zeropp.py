"""ZeRO++ and MiCS on two hosts: bytes between them, step time on a narrow cable, and what it costs in loss.

Traffic and time: network namespaces of this machine with a cable held to a rate (`_namespaces.py`; needs
root and iproute2).  `link_mib` is what the first host's interface sent in a step, headers and
acknowledgements included; `ledger_mib` what its ranks counted.  The peer is Thalweg's own stage 3 in bf16,
which sends parameters and gradients in 16 bits once a host, and raw FSDP2 with the same dtypes.

Loss: a small GPT on the standard library's sources (`_text_worker.py`), the same batches for every mix; the
control has 2 bits and one scale for a tensor, and has to fail.

    python bench/zeropp.py --rate 1gbit 100mbit --write
    python bench/zeropp.py --rate --learn "all three" --write      # losses alone, one mix more
    python bench/zeropp.py --quick --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _contestants import JOBS
from _groups import exit_on_terminate
from _interleaved import InterleavedRun, RunSettings, log_stderr
from _namespaces import NamespaceError, NamespaceHosts, missing_reason
from _peers import ROOT
from _report import (
    Row,
    add_output_options,
    compare,
    format_cell,
    load_run,
    make_result,
    publish_runs,
    render_section,
    write_runs,
)

RAW = "thalweg_torch_3+16"
PEERS = [RAW, "fsdp2_16_3"]
MIXES = {
    "qwZ": f"{RAW}+qwz",
    "hpZ": f"{RAW}+hpz",
    "qgZ": f"{RAW}+qgz",
    "qwZ hpZ": f"{RAW}+qwz+hpz",
    "all three": f"{RAW}+qwz+hpz+qgz",
    "all three, LoCo": f"{RAW}+qwz+hpz+qgz+loco",
    "MiCS": f"{RAW}+mics",
    "MiCS qgZ": f"{RAW}+mics+qgz",
}
QW, QG, HPZ = "zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"
ALL: dict[str, Any] = {QW: True, QG: True, HPZ: 2}
LEARNED: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "qwZ": {QW: True},
    "qgZ": {QG: True},
    "qwZ qgZ": {QW: True, QG: True},
    "all three": ALL,
    "all three, LoCo": {**ALL, "zeropp_loco_param": {}},
    "MiCS qgZ": {"mics_shard_size": 2, QG: True},
    "control": ALL,
}
RANKS_PER_HOST = 2
LAST = 20
CONTROL_IS_WORSE_BY = 0.1  # nats
TITLE = "ZeRO++ and MiCS on two hosts"


def traffic(model: str, rate: str | None, plan: RunSettings, mixes: dict[str, str]) -> dict[str, Any]:
    """Run the contestants over a fresh pair of hosts and return its JSON object."""
    job = dataclasses.replace(JOBS[model], dtype="bf16")
    head = f"{model} bf16, 2 hosts x {RANKS_PER_HOST} ranks, cable {rate or 'unlimited'}"
    names, load = [*PEERS, *mixes.values()], os.getloadavg()[0]
    with NamespaceHosts(rate) as hosts:
        interleaved = InterleavedRun(job, 2 * RANKS_PER_HOST, plan, RAW, meter=hosts.sent_mib)
        interleaved.run(names, hosts.placements(RANKS_PER_HOST))
    labels = {RAW: "stage 3 bf16", PEERS[1]: "FSDP2 bf16", **{v: k for k, v in mixes.items()}}
    lines = []
    for name in names:
        outcome = interleaved.outcomes[name]
        line: dict[str, Any] = {"contestant": labels[name], "note": outcome.error}
        if not outcome.error:
            counted = [r["inter_mib"] for r in outcome.reports[:RANKS_PER_HOST] if "inter_mib" in r]
            line |= {
                **outcome.summary(3),
                "ledger_mib": round(sum(counted), 3) if counted else None,
            }
        lines.append(line)
    rows = [row for mix, name in mixes.items() for row in _rows(interleaved, head, mix, name, labels)]
    return make_result("zeropp", rows, run=head, load=load, plan=dataclasses.asdict(plan), contestants=lines)


def _rows(interleaved: InterleavedRun, head: str, mix: str, name: str, labels: dict[str, str]) -> list[Row]:
    rows = []
    for peer in PEERS:
        case = f"{head}, {mix}"
        lost = next((n for n in (name, peer) if not interleaved.succeeded(n)), None)
        if lost:
            note = f"{lost}: {interleaved.outcomes[lost].error}"
            rows.append(compare(case, labels[peer], "link_mib", None, None, note=note))
            continue
        a, b = interleaved.outcomes[name], interleaved.outcomes[peer]
        sent = [statistics.median(o.metered_per_step) for o in (a, b)]
        clocks = [statistics.median(o.clock_ms()) for o in (a, b)]
        rows.append(compare(case, labels[peer], "link_mib", *sent))
        rows.append(compare(case, labels[peer], "clock_ms_median", *clocks, ratio=interleaved.time_ratio(name, peer)))
    return rows


def learn(name: str, steps: int, seed: int = 1) -> dict[str, Any]:
    """Train one mix on text on four ranks of two faked hosts; returns how its loss went."""
    job = {
        "zero": {"stage": 3, **LEARNED[name]},
        "steps": steps,
        "seed": seed,
        "crude": name == "control",
    }
    log_stderr(f"loss on text: {name}")
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-text-") as folder:
        ranks, world = [], 2 * RANKS_PER_HOST
        for rank in range(world):
            command = [sys.executable, str(Path(__file__).with_name("_text_worker.py"))]
            command += ["--job", json.dumps(job), "--rank", str(rank), "--world", str(world)]
            environment = {
                **os.environ,
                "THALWEG_HOST": f"host {rank // RANKS_PER_HOST}",
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % RANKS_PER_HOST),
                "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            ranks.append(
                subprocess.Popen(
                    [*command, "--store", f"{folder}/store"],
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
            )
        try:
            answers = [rank.communicate(timeout=3600)[0] for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
    if any(rank.returncode for rank in ranks):
        return {"mix": name, "note": "a rank failed"}
    outcome = json.loads(answers[0].splitlines()[-1])
    curve = outcome.pop("losses")
    last = statistics.fmean(curve[-LAST:])
    return {"mix": name, "first": curve[0], "last": last, **outcome}


def learn_mixes(names: list[str], steps: int, keep: bool) -> dict[str, Any]:
    """Train each mix, and stage 3 to compare with; `keep`: mix by mix into the results, with earlier ones."""
    head, load = f"loss on the standard library's sources after {steps} steps", os.getloadavg()[0]
    lines = {line["mix"]: line for line in load_run("zeropp", head).get("learned", ())} if keep else {}
    run: dict[str, Any] = {}
    for name in dict.fromkeys([*names] if "stage 3" in lines else ["stage 3", *names]):
        lines[name] = learn(name, steps)
        ordered = [lines[mix] for mix in LEARNED if mix in lines]
        run = make_result("zeropp", learned_rows(ordered, head), run=head, load=load, learned=ordered)
        if keep:
            write_runs("zeropp", TITLE, [run], render)
    return run


def learned_rows(lines: list[dict[str, Any]], head: str) -> list[Row]:
    """Loss of each mix against stage 3's: the mean of the last steps, and on held-out text."""
    rows = []
    plain = lines[0]
    for line in lines[1:]:
        case = f"{head}, {line['mix']}"
        for key, metric in (("last", f"loss_last_{LAST}"), ("held_out", "loss_held_out")):
            rows.append(compare(case, "stage 3 bf16", metric, line.get(key), plain.get(key)))
        rows.append(compare(case, "stage 3 bf16", "ledger_mib", line.get("inter_mib"), plain.get("inter_mib")))
    return rows


def render(run: dict[str, Any]) -> str:
    """Return one run as Markdown."""
    if "learned" in run:
        keys = ("first", "last", "held_out", "inter_mib")
        lines = [[line["mix"], *(format_cell(line.get(k), 4) for k in keys)] for line in run["learned"]]
        headers = ["mix", "first loss", f"last {LAST}", "held out", "MiB between hosts a step"]
    else:
        names = ("clock_ms_min", "clock_ms_median", "cpu_ms_median", "link_mib", "ledger_mib")
        lines = [
            [c["contestant"], *(format_cell(c.get(k), 2 if k.endswith("mib") else 0) for k in names)]
            for c in run["contestants"]
        ]
        headers = ["contestant", "min ms", "median ms", "CPU ms", "MiB on the cable", "MiB counted"]
    return render_section(run, headers, lines) + _doubt(run.get("learned", ()))


def _doubt(learned: list[dict[str, Any]]) -> str:
    """A line where the control learns as the others do: what it replaces is then somewhere else."""
    last = {line["mix"]: line.get("last") or math.inf for line in learned}
    if last.get("control", math.inf) > last.get("stage 3", 0.0) + CONTROL_IS_WORSE_BY:
        return ""
    return "\n**The control did not fail: these losses show nothing.**\n"


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print one object or the tables; exit code 2 where hosts cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(JOBS), default=["small"])
    parser.add_argument("--rate", nargs="*", default=["1gbit", "100mbit"], help='"none", or as tc writes it')
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--learn", nargs="*", choices=list(LEARNED), default=list(LEARNED), metavar="MIX")
    parser.add_argument("--text-steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--memory", type=float, metavar="GIB", help="for all contestants alive at once")
    add_output_options(parser, "zeropp", "one rate, all three, no text; under a minute")
    args = parser.parse_args(argv)
    exit_on_terminate()
    plan = RunSettings(args.rounds, args.steps, warmup=2, memory_mib=args.memory and args.memory * 1024)
    if args.quick:
        args.rate, args.mix, args.learn = ["1gbit"], ["all three"], []
        plan = dataclasses.replace(plan, rounds=2)
    reason = missing_reason() if args.rate else None
    if reason:
        print(f"zeropp: {reason}", file=sys.stderr)
        return 2
    mixes = {name: MIXES[name] for name in args.mix}
    try:
        runs = [
            traffic(model, None if rate == "none" else rate, plan, mixes) for rate in args.rate for model in args.model
        ]
    except NamespaceError as error:
        print(f"zeropp: {error}", file=sys.stderr)
        return 1
    if args.learn:
        runs.append(learn_mixes(args.learn, args.text_steps, keep=args.write))
    publish_runs("zeropp", TITLE, runs, render, write=args.write, as_json=args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
