"""Start: what `import thalweg` adds to `import torch`, and how long `initialize` takes; DeepSpeed warm.

Every measurement is taken in fresh processes, the contestants in turns.  `initialize` is timed on the
small model after imports, process group and model are there, and so is the first step, to which a lazy
set-up may put its work off.  DeepSpeed's C++ operators are compiled beforehand (`make bench-peers`).

    python bench/start.py
    python bench/start.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from typing import Any

from _contestants import JOBS
from _groups import RankGroup, RankGroupError, exit_on_terminate
from _interleaved import log_stderr, missing_reason
from _peers import ROOT, deepspeed_env, python_for
from _report import Row, compare, format_machine, make_result, rows_table, write_result

# Prints the clock and the CPU seconds of the statement after its ground, as the last line on standard error.
_PROBE = """
import sys, time
{ground}
clock, cpu = time.perf_counter(), time.process_time()
{statement}
sys.stderr.write("\\n%r %r" % (time.perf_counter() - clock, time.process_time() - cpu))
"""

_TORCH, _FSDP2 = "import torch", "import torch; from torch.distributed.fsdp import fully_shard"
# What is imported: on which interpreter, what was there before, the statement.  The package resolves its
# names on first use, so the second and third rows say what that use costs, with and without torch's part.
IMPORTS = {
    "import thalweg": ("thalweg", _TORCH, "import thalweg"),
    "thalweg.initialize": ("thalweg", _TORCH, "import thalweg; thalweg.initialize"),
    "thalweg.initialize after FSDP2": ("thalweg", _FSDP2, "import thalweg; thalweg.initialize"),
    "import deepspeed": ("deepspeed", _TORCH, "import deepspeed"),
}


def time_import(peer: str, ground: str, statement: str) -> dict[str, float]:
    """Return the seconds of `statement` after `ground`, and the bytes printed, of one fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if peer == "deepspeed":
        environment |= deepspeed_env()
    done = subprocess.run(
        [python_for(peer), "-c", _PROBE.format(ground=ground, statement=statement)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise RankGroupError(f"{statement}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    printed, _, answer = done.stderr.rpartition("\n")
    clock, cpu = map(float, answer.split())
    return {"import_s": clock, "import_cpu_s": cpu, "printed_bytes": len(printed) + len(done.stdout)}


def time_start(name: str, world: int) -> dict[str, float]:
    """Return the seconds of `initialize` and of the first step, the slowest rank's, on the small model."""
    with RankGroup(name, JOBS["small"], world) as group:
        group.wait_ready()
        first = group.run(1).clock()[0]
        reports = group.report()
    clock, cpu = (max(report[key] for report in reports) for key in ("setup_seconds", "setup_cpu_seconds"))
    return {"initialize_s": clock, "initialize_cpu_s": cpu, "first_step_s": first}


class Samples:
    """Values by (what, metric), and why something has none."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[float]] = {}
        self.errors: dict[str, str] = {}

    def collect(self, what: str, measure: Any) -> None:
        """Add what `measure()` returns; a failure is recorded and not tried again."""
        if what in self.errors:
            return
        try:
            found = measure()
        except RankGroupError as error:
            log_stderr(str(error))
            self.errors[what] = str(error).splitlines()[0]
            return
        for metric, value in found.items():
            self.values.setdefault((what, metric), []).append(value)

    def median(self, what: str, metric: str) -> float | None:
        """Return the median of what was collected, or None."""
        values = self.values.get((what, metric))
        return statistics.median(values) if values else None

    def row(self, case: str, ours: str, theirs: str, metric: str) -> Row:
        """Return the comparison of two things in one metric."""
        note = "; ".join(f"{what}: {self.errors[what]}" for what in (ours, theirs) if what in self.errors)
        return compare(case, theirs, metric, self.median(ours, metric), self.median(theirs, metric), note=note)


def measure(repeats: int, worlds: list[int]) -> dict[str, Any]:
    """Take every measurement `repeats` times, in turns, and return the JSON object."""
    samples = Samples()
    contestants = ["thalweg_1", "thalweg_3", "deepspeed_1", "deepspeed_3"]
    for what in [*IMPORTS, *contestants]:
        reason = missing_reason(IMPORTS[what][0] if what in IMPORTS else what)
        if reason:
            samples.errors.update({what: reason} | {f"{what}, {world} ranks": reason for world in worlds})
    for _ in range(repeats):
        for what, probe in IMPORTS.items():
            samples.collect(what, lambda p=probe: time_import(*p))
        for world in worlds:
            for name in contestants:
                samples.collect(f"{name}, {world} ranks", lambda n=name, w=world: time_start(n, w))
    rows = [
        samples.row(what, what, "import deepspeed", metric)
        for what in list(IMPORTS)[:3]
        for metric in ("import_s", "import_cpu_s", "printed_bytes")
    ]
    rows += [
        samples.row(f"small model, stage {stage}, {world} ranks", *names, metric)
        for world in worlds
        for stage in (1, 3)
        for names in [(f"thalweg_{stage}, {world} ranks", f"deepspeed_{stage}, {world} ranks")]
        for metric in ("initialize_s", "initialize_cpu_s", "first_step_s")
    ]
    goals = []
    for what, metric, most in (
        ("import thalweg", "import_s", 0.3),
        ("import thalweg", "printed_bytes", 0),
        *((f"thalweg_{stage}, {world} ranks", "initialize_s", 1.0) for world in worlds for stage in (1, 3)),
    ):
        value = samples.median(what, metric)
        if value is not None:
            goals.append({"what": what, "metric": metric, "at_most": most, "measured": value, "met": value <= most})
    errors = {what: text for what, text in samples.errors.items() if "thalweg" in what}
    return make_result("start", rows, repeats=repeats, goals=goals, errors=errors)


def render(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Start",
        "",
        f"{data['date']}, commit {data['commit']}, {format_machine(data['machine'])}.",
        "",
    ]
    lines += [f"Medians of {data['repeats']} fresh starts, in turns.", "", rows_table(data["rows"]), ""]
    for goal in data["goals"]:
        verdict = "met" if goal["met"] else "NOT MET"
        lines.append(f"- {goal['what']}, {goal['metric']}: {goal['measured']:.3g}, {verdict} ({goal['at_most']})")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="one repeat, one rank: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/start.md and .json")
    args = parser.parse_args(argv)
    exit_on_terminate()
    data = measure(1, [1]) if args.quick else measure(args.repeats, args.ranks)
    if args.write:
        write_result("start", data, render(data))
    print(json.dumps(data) if args.json else render(data))
    return 1 if data["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
