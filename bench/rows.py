"""Rows of one commit on one machine: benchmarks with the options that their pages in `results/` have, in turn.

What ended well stands in `results/rows.json` and is not run again for the same commit on the same machine (as far as
its processor, cores, memory, torch and Python tell), so that a run that was cut off, or one of `--minutes`, goes on
where it stopped: all of them take hours of a machine that does nothing else.  A peer that is not there would be a row
without figures, so that none begins before fio, iproute2, DeepSpeed and vLLM are there.  Left to themselves: what
needs a GPU or compiles its peers once more (`--isa`), and `plan.py`, whose cases are to be drawn unseen.

    python bench/rows.py --minutes 90
    python bench/rows.py --list
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from string import ascii_uppercase
from typing import Any

from _peers import ROOT, aio_missing_reason
from _report import commit, format_machine, machine_info, markdown_table, now, write_result
from _serve_peers import missing_reason

# The shorter ones first; what takes longest, last.
COMMANDS = (
    "start.py",
    "train_step.py --model small --ranks 2",
    "train_step.py --model 69m --ranks 2",
    "nvme.py",
    "pipeline_bubble.py --ranks 4 --micro-batches 8 --cost-ms 60 --steps 3",
    "moe.py --only cost",
    "infer.py --model flan-t5-small",
    "serve.py --rates 4",
    "serve.py --rates 8",
    "infer.py",
    "infer_offload.py",
    "hosts.py --model small --ranks-per-host 1 2 --rate none 1gbit",
    "hosts.py --model 69m --ranks-per-host 1 --rate none",
    "offload.py --case nvme",
    "offload.py --case host",
    "offload.py --case hf-1.5b",
    "train_step.py --model hf-small hf-69m --ranks 2",
    "train_step.py --model small --ranks 4",
    "train_step.py --model 69m --ranks 4",
    "zeropp.py --rate 1gbit",
    "parallel.py",
    "serve.py --rates 2",
    "optimizer_state.py",
    "quality.py",
    "offload.py --case equality",
    "offload.py --case gpt2-1.5b",
)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so many")
    scripts = list(dict.fromkeys(name.partition(".py")[0] for name in COMMANDS))
    parser.add_argument("--only", nargs="+", choices=scripts, default=scripts)
    parser.add_argument("--list", action="store_true", help="say what is there and what is missing")
    args = parser.parse_args()
    version, machine = commit(), format_machine(machine_info())
    path = ROOT / "results" / "rows.json"
    old: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = {run["command"]: run for run in old if run["command"] in COMMANDS}
    current = {name for name, run in runs.items() if (run["commit"], run["machine"]) == (version, machine)}
    names = [n for n in COMMANDS if n not in current and n.partition(".py")[0] in args.only]
    print(f"{version}: {len(current)} of {len(COMMANDS)} there", flush=True)
    if args.list:
        print("\n".join(names))
        return 0
    reasons = {"DeepSpeed": aio_missing_reason(), "vLLM": missing_reason("vllm")}
    reasons |= {tool: "not installed" for tool in ("fio", "ip") if shutil.which(tool) is None}
    if missing := [f"{name}: {reason}" for name, reason in reasons.items() if reason]:
        parser.error("; ".join(missing))
    started, failed = time.monotonic(), 0
    for name in names:
        if time.monotonic() - started > 60 * args.minutes:
            break
        print(name, flush=True)
        begun = time.monotonic()
        done = subprocess.run([sys.executable, *shlex.split(f"bench/{name}"), "--write"], cwd=ROOT)
        minutes = (time.monotonic() - begun) / 60
        failed += done.returncode != 0
        print(f"{name}: {minutes:.1f} min, exit {done.returncode}", flush=True)
        if done.returncode == 0:
            where = {"commit": version, "machine": machine, "date": now()}
            runs[name] = {"command": name, **where, "minutes": round(minutes, 1)}
            _write(list(runs.values()))
    return min(failed, 1)


def _write(runs: list[dict[str, Any]]) -> None:
    runs.sort(key=lambda run: COMMANDS.index(run["command"]))
    letters = dict(zip(dict.fromkeys(run["machine"] for run in runs), ascii_uppercase, strict=False))
    lines = [
        [*(str(run[key]) for key in ("command", "commit", "date", "minutes")), letters[run["machine"]]] for run in runs
    ]
    page = ["# Which rows are from which commit", "", "Made by `python bench/rows.py`.", ""]
    page += [f"- {letter}: {machine}" for machine, letter in letters.items()]
    page += ["", markdown_table(["benchmark", "commit", "date", "minutes", "machine"], lines)]
    write_result("rows", {"bench": "rows", "runs": runs}, "\n".join(page))


if __name__ == "__main__":
    sys.exit(main())
