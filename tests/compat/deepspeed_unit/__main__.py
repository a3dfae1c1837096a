"""Run the unit tests of a DeepSpeed checkout on Thalweg.

    python -m tests.compat.deepspeed_unit CHECKOUT [--files runtime/test_ds_initialize.py ...] [--results FILE]
    python -m tests.compat.deepspeed_unit CHECKOUT --real      with the DeepSpeed of this environment

The checkout is the user's own and is no part of this repository.  pytest must be older than 8.4, as those tests say;
they want `hjson` too.  ``--results`` keeps a line of JSON for each test, written as it ends, and ``--resume`` goes on
there.

Three lists lie beside this file.  ``real_passing.txt`` has the tests that a real DeepSpeed passes on a CPU, of at most
two sets of parameters of each test (``--real --sample 2 --passed FILE --page`` writes it; `make bench-peers` builds the
environment).  ``passing.txt`` has those of them that pass on Thalweg, and ``left_out.tsv`` patterns for all others,
each with its reason.  A test of ``passing.txt`` that fails now makes the exit status 1.
``--tests tests/compat/deepspeed_unit/real_passing.txt --page`` runs them all on Thalweg and writes
`results/deepspeed_unit.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.compat.deepspeed_unit.lists import FILES, file_of, read_passing, reason_of
from tests.compat.deepspeed_unit.page import record_run

NO_TESTS_COLLECTED = 5  # pytest's exit status
ROOT = Path(__file__).resolve().parents[3]


def run_file(
    checkout: Path,
    file: str,
    real: bool,
    sample: int,
    options: list[str],
    results: Path,
    named: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Run the tests of one file that `results` does not have yet, all or those that are named; add a line of JSON for
    each to `results` as soon as it has ended, and return what became of each."""
    done = read_outcomes(results)
    with tempfile.TemporaryDirectory(prefix="thalweg-unit-") as folder:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {
            **os.environ,
            "PYTHONPATH": path,
            "THALWEG_UNIT_RESULTS": str(results.resolve()),
            "THALWEG_UNIT_TESTS_OF": "deepspeed" if real else "thalweg",
            "THALWEG_UNIT_SAMPLE": str(sample),
            "THALWEG_UNIT_NAMED": json.dumps(named),
            "THALWEG_UNIT_DONE": json.dumps([test for test in done if file_of(test) == file]),
            "LOCAL_SIZE": os.environ.get("LOCAL_SIZE", "2"),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        environ.pop("THALWEG_AS_DEEPSPEED", None)
        tests = checkout / "tests"
        command = [sys.executable, "-m", "pytest", "-p", "tests.compat.deepspeed_unit.plugin", "-p", "no:cacheprovider"]
        command += ["-c", str(tests / "pytest.ini"), "--rootdir", str(tests), "-q", "--basetemp", f"{folder}/tmp"]
        command += [*options, str(tests / "unit" / file)]
        ended = subprocess.run(command, env=environ, cwd=tests, capture_output=True, text=True)
    lines = [line for test, line in read_outcomes(results).items() if test not in done]
    if not lines and ended.returncode != NO_TESTS_COLLECTED:
        text = (ended.stdout + ended.stderr)[-4000:]
        lines = [{"test": f"unit/{file}", "outcome": "not collected", "text": text, "seconds": 0}]
        with results.open("a") as out:
            out.write(json.dumps(lines[0]) + "\n")
    return lines


def read_outcomes(results: Path) -> dict[str, dict[str, Any]]:
    """What became of each test, by its name; a teardown does not hide a failure."""
    lines: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, results.read_text().splitlines() if results.exists() else ()):
        if lines.get(line["test"], {}).get("outcome") != "failed":
            lines[line["test"]] = line
    return lines


def report_lost(lines: list[dict[str, Any]]) -> int:
    """Say what passed once and does not now, and what fails without a reason; 1 if anything was lost."""
    passing = read_passing()
    failed = [line["test"] for line in lines if line["outcome"] in ("failed", "not collected")]
    lost = [test for test in failed if test in passing]
    for test in failed:
        print("lost" if test in passing else f"left out: {reason_of(test) or 'no reason is known'}", test)
    return int(bool(lost))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat.deepspeed_unit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, help="a folder with DeepSpeed's tests/")
    parser.add_argument("--files", nargs="+", default=FILES, help="test files below tests/unit")
    parser.add_argument("--real", action="store_true", help="use the DeepSpeed that is installed")
    parser.add_argument("--sample", type=int, default=0, help="sets of parameters of a test that are run; 0 for all")
    parser.add_argument("--tests", type=Path, help="a file with the names of the tests to run, one a line")
    parser.add_argument("--results", type=Path, help="write a line of JSON for each test")
    parser.add_argument("--resume", action="store_true", help="leave out the tests that --results has already")
    parser.add_argument("--passed", type=Path, help="add the names of the tests that pass to this sorted list")
    parser.add_argument("--page", action="store_true", help="put the counts into results/deepspeed_unit.md and .json")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="options for pytest")
    args = parser.parse_args()
    if args.resume and not args.results:
        parser.error("--resume needs --results")
    named = args.tests.read_text().splitlines() if args.tests else None
    status = 0
    with tempfile.TemporaryDirectory(prefix="thalweg-unit-") as folder:
        results = args.results or Path(folder) / "results"
        if not args.resume:
            results.unlink(missing_ok=True)
        for file in args.files:
            done = read_outcomes(results)
            tests = named and [test for test in named if file_of(test) == file and test not in done]
            if tests == []:
                continue
            lines = run_file(args.checkout.resolve(), file, args.real, args.sample, args.pytest, results, tests)
            print(file, dict(Counter(line["outcome"] for line in lines)), flush=True)
            if not args.real:
                status |= report_lost(lines)
        outcomes = read_outcomes(results)
    print("all", dict(Counter(line["outcome"] for line in outcomes.values())))
    if args.passed:
        names = set(args.passed.read_text().splitlines()) if args.passed.exists() else set()
        names |= {test for test, line in outcomes.items() if line["outcome"] == "passed"}
        args.passed.write_text("".join(f"{name}\n" for name in sorted(names)))
    if args.page:
        record_run(outcomes, args.real, set(named or ()))
    return status


if __name__ == "__main__":
    sys.exit(main())
