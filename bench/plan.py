"""Predicted against measured: the peak of each rank, for runs of every kind, each in fresh processes.

A case is measured by ranks that train three steps and report VmHWM; what the process holds
before the model is there is read by the rank itself, as the preflight does, and the plan
predicts the rest.  One case at a time; a rank has one thread.

    python bench/plan.py --quick
    python bench/plan.py --write
    python bench/plan.py --only gpt2 --json
    python bench/plan.py --write --part 1/6      # then 2/6 and so on: rows are merged by case
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _peers import ROOT
from _plan_cases import CASES, HELD_OUT, case_name, draw_cases
from _report import Row, commit, format_machine, make_result, markdown_table, now, write_result

WORKER = Path(__file__).resolve().parent / "_plan_worker.py"


def measure(case: dict[str, Any], timeout: float = 600.0) -> list[dict[str, Any]]:
    """Train the case in fresh processes; returns each rank's report."""
    world = case["world"]
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-plan-") as folder:
        ranks, logs = [], []
        for rank in range(world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            command = [sys.executable, str(WORKER), "--case", json.dumps(case), "--rank", str(rank)]
            log = (Path(folder) / f"rank{rank}.log").open("w+")
            logs.append(log)
            ranks.append(
                subprocess.Popen(
                    [*command, "--store", str(Path(folder) / "store")],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    text=True,
                )
            )
        try:
            deadline = time.monotonic() + timeout
            answers = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(process.returncode for process in ranks):
            for log in logs:
                log.seek(0)
            raise RuntimeError(f"{case_name(case)}: " + "\n".join(log.read()[-1500:] for log in logs))
    return [json.loads(answer.strip().splitlines()[-1]) for answer in answers]


def predict(case: dict[str, Any], process_bytes: int) -> dict[str, Any]:
    """Return the plan's answer for the case, as JSON."""
    from _plan_cases import build_model, make_config

    from thalweg.plan import plan
    from thalweg.plan.spec.cluster import local_cluster

    found = plan(
        build_model(case, "meta"),
        make_config(case),
        cluster=local_cluster(case["world"]),
        sequence_length=case.get("sequence"),
        process_bytes=process_bytes,
        suggest=False,
    )
    return found.to_dict()


def compare(case: dict[str, Any], reports: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Measure and predict one case; `reports`: what the ranks said, if they have run already."""
    reports = reports or measure(case)
    worst = max(reports, key=lambda report: report["peak_mib"])
    answer = predict(case, int(worst["import_mib"] * 2**20))
    predicted = answer["per_rank"]["total"] / 2**20
    return {
        "case": case_name(case),
        "predicted_mib": predicted,
        "measured_mib": worst["peak_mib"],
        "of_ranks_mib": [report["peak_mib"] for report in reports],
        "import_mib": worst["import_mib"],
        "error": predicted / worst["peak_mib"] - 1,
        "per_rank": answer["per_rank"],
        "step_predicted": answer["step_seconds"],
        "step_measured": min(max(r["seconds"][i] for r in reports) for i in range(1, len(worst["seconds"]))),
        "bottleneck": answer["bottleneck"],
        "traffic": answer["traffic"],
        "ledger": worst["ledger"],
        "heap_mib": worst["steps"][-1]["arena"] - worst["import_malloc"]["arena"],
        "end": worst["end"],
        "held_out": case["model"] in HELD_OUT or "spec" in case,
    }


def added(one: dict[str, Any]) -> float:
    """Return the MiB that the run adds to what the process held before the model."""
    return one["measured_mib"] - one["import_mib"]


def show(found: list[dict[str, Any]]) -> str:
    """Return the table and how many cases lie within 5 and 10%."""
    lines = [
        [
            one["case"] + (" *" if one["held_out"] else ""),
            f"{one['predicted_mib']:.0f}",
            f"{one['measured_mib']:.0f}",
            f"{100 * one['error']:+.1f}%",
            f"{100 * (one['predicted_mib'] - one['measured_mib']) / added(one):+.1f}%",
            f"{one['step_predicted']:.2f}",
            f"{one['step_measured']:.2f}",
            f"{one['step_predicted'] / one['step_measured']:.2f}",
        ]
        for one in found
    ]
    close = [sum(abs(one["error"]) <= bound for one in found) for bound in (0.05, 0.10)]
    worst = max((abs(one["error"]) for one in found), default=0.0)
    held = [one for one in found if one["held_out"]]
    close_held = [sum(abs(one["error"]) <= bound for one in held) for bound in (0.05, 0.10)]
    times = sorted(one["step_predicted"] / one["step_measured"] for one in found) or [0.0]
    within = sum(0.5 <= ratio <= 2 for ratio in times)
    headers = ["case", "predicted MiB", "measured MiB", "error", "error of what the run adds"]
    return "\n".join(
        [
            markdown_table([*headers, "predicted s", "measured s", "ratio"], lines),
            "",
            f"{len(found)} cases: {close[0]} within 5%, {close[1]} within 10%, the worst {100 * worst:.1f}%. "
            f"* held out: families, or shapes drawn by a seed, that the model of memory was not made on; "
            f"{len(held)} of them, {close_held[0]} within 5%, {close_held[1]} within 10%.",
            "",
            f"Seconds of a step: {within} of {len(found)} within a factor of 2; predicted over measured from "
            f"{times[0]:.2f} by {times[len(times) // 2]:.2f} in the median to {times[-1]:.2f}.",
        ]
    )


def _read_kept(path: str | None) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Return, by case, when it was measured and what its ranks reported."""
    if path is None:
        return {}
    lines = (json.loads(line) for line in Path(path).read_text().splitlines())
    return {line["name"]: (line["measured_at"], line["ranks"]) for line in lines}


def _merged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what results/plan.json holds with these cases in the place of earlier ones, in CASES' order."""
    path = ROOT / "results" / "plan.json"
    old = json.loads(path.read_text())["cases"] if path.exists() else []
    by_name = {one["case"]: one for one in [*old, *found]}
    order = [name for name in map(case_name, CASES) if name in by_name]
    return [by_name[name] for name in [*order, *(name for name in by_name if name not in order)]]


def _about_runs(found: list[dict[str, Any]]) -> str:
    """Return when, and with which commits, the cases were measured."""
    times = sorted({one["measured_at"] for one in found})
    return times[0] if len(times) == 1 else f"{times[0]}, to {times[-1]}"


def main() -> int:
    """Run the cases and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five cases, under a minute")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name holds one of these")
    parser.add_argument("--draw", type=int, metavar="SEED", help="15 more cases that a seed draws, held out")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N equal parts of the cases")
    parser.add_argument(
        "--measured", metavar="FILE", help="predict anew what --keep has written, instead of running it"
    )
    parser.add_argument("--keep", metavar="FILE", help="append what the ranks report, a line a case")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write results/plan.md and .json")
    args = parser.parse_args()
    every = [*CASES, *(draw_cases(args.draw, 15) if args.draw else [])]
    cases = [case for case in every if not args.only or any(word in case_name(case) for word in args.only)]
    if args.quick:
        cases = cases[:: max(1, len(cases) // 5)][:5]
    part, parts = (int(number) for number in args.part.split("/"))
    cases = cases[part - 1 :: parts]
    kept = _read_kept(args.measured)
    if kept:
        cases = [case for case in cases if case_name(case) in kept]
    found = []
    for case in cases:
        try:
            at, reports = kept.get(case_name(case)) or (f"{now()}, commit {commit()}", measure(case))
            found.append({**compare(case, reports), "measured_at": at})
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{case_name(case)} failed: {error}", file=sys.stderr)
            continue
        if args.keep:
            with Path(args.keep).open("a") as file:
                kept_line = {"name": case_name(case), "measured_at": at, "case": case, "ranks": reports}
                file.write(json.dumps(kept_line) + "\n")
        one = found[-1]
        print(
            f"{one['case']}: {100 * one['error']:+.1f}% of {one['measured_mib']:.0f}",
            file=sys.stderr,
            flush=True,
        )
    if args.write:
        found = _merged(found)
    rows = [
        Row(one["case"], "measured", "peak_mib", one["predicted_mib"], one["measured_mib"], one["error"] + 1)
        for one in found
    ]
    data = make_result("plan", rows, cases=found)
    text = show(found)
    if args.write:
        head = f"# The plan: predicted and measured peaks\n\n{data['date']}, commit {data['commit']}, "
        head += f"of runs measured {_about_runs(found)}, {format_machine(data['machine'])}."
        write_result("plan", data, f"{head}\n\n{text}")
    print(json.dumps(data) if args.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
