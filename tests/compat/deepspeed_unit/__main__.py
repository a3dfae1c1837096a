"""Run the unit tests of a DeepSpeed checkout on Thalweg.

    python -m tests.compat.deepspeed_unit CHECKOUT [--files runtime/test_ds_initialize.py ...] [--results FILE]
    python -m tests.compat.deepspeed_unit CHECKOUT --real      with the DeepSpeed of this environment

The checkout is the user's own and is no part of this repository.  pytest must be older than 8.4, as those tests say;
they want `hjson` too.  ``--results`` keeps a line of JSON for each test.

Three lists lie beside this file.  ``real_passing.txt`` has the tests that a real DeepSpeed passes on a CPU, of at most
two sets of parameters of each test (``--real --sample 2 --passed FILE`` writes it; `make bench-peers` builds the
environment).  ``passing.txt`` has those of them that pass on Thalweg, and ``left_out.tsv`` patterns for all others,
each with its reason.  A test of ``passing.txt`` that fails now makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# The files worth most to a user; all others can be named by --files.
FILES = [
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_no_sync_ctxt.py",
    "comm/test_dist.py",
    "pipe/test_pipe_module.py",
    "launcher/test_ds_arguments.py",
    "launcher/test_run.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_config.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_leaf_module.py",
    "v1/half_precision/test_gradient_clipping_default.py",
    "runtime/pipe/test_topology.py",
    "checkpoint/test_tag_validation.py",
    "runtime/test_lr_schedulers.py",
    "v1/zero/test_zero.py",
    "v1/zero/test_zero_user_backward.py",
    "checkpoint/test_zero_optimizer.py",
    "v1/moe/test_moe.py",
    "checkpoint/test_universal_checkpoint.py",
    "model_parallelism/test_autotp_training.py",
]


def run_file(
    checkout: Path, file: str, real: bool, sample: int, options: list[str], named: list[str] | None = None
) -> list[dict[str, Any]]:
    """What became of each test of one file, or of those of it that are named."""
    with tempfile.TemporaryDirectory(prefix="thalweg-unit-") as folder:
        results = Path(folder) / "results"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {
            **os.environ,
            "PYTHONPATH": path,
            "THALWEG_UNIT_RESULTS": str(results),
            "THALWEG_UNIT_TESTS_OF": "deepspeed" if real else "thalweg",
            "THALWEG_UNIT_SAMPLE": str(sample),
            "THALWEG_UNIT_NAMED": json.dumps(named),
            "LOCAL_SIZE": os.environ.get("LOCAL_SIZE", "2"),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        environ.pop("THALWEG_AS_DEEPSPEED", None)
        tests = checkout / "tests"
        command = [sys.executable, "-m", "pytest", "-p", "tests.compat.deepspeed_unit.plugin", "-p", "no:cacheprovider"]
        command += ["-c", str(tests / "pytest.ini"), "--rootdir", str(tests), "-q", "--basetemp", f"{folder}/tmp"]
        command += [*options, str(tests / "unit" / file)]
        done = subprocess.run(command, env=environ, cwd=tests, capture_output=True, text=True)
        if not results.exists():
            text = (done.stdout + done.stderr)[-4000:]
            return [{"test": f"unit/{file}", "outcome": "not collected", "text": text, "seconds": 0}]
        lines: dict[str, dict[str, Any]] = {}
        for line in map(json.loads, results.read_text().splitlines()):
            if lines.get(line["test"], {}).get("outcome") != "failed":  # a teardown does not hide a failure
                lines[line["test"]] = line
        return list(lines.values())


def read_passing() -> set[str]:
    """The tests that pass."""
    return set((HERE / "passing.txt").read_text().splitlines())


def read_real_passing() -> set[str]:
    """The tests that DeepSpeed itself passes."""
    return set((HERE / "real_passing.txt").read_text().splitlines())


def read_left_out() -> list[tuple[str, str]]:
    """Patterns of tests that do not, each with its reason; the first that fits counts."""
    lines = (HERE / "left_out.tsv").read_text().splitlines()
    return [(pattern, reason) for pattern, _, reason in (line.partition("\t") for line in lines)]


def reason_of(test: str) -> str:
    """Why a test is left out; empty where nothing says so."""
    return next((reason for pattern, reason in read_left_out() if fnmatchcase(test.replace("[", "("), pattern)), "")


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
    parser = argparse.ArgumentParser(prog="python -m tests.compat.deepspeed_unit", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a folder with DeepSpeed's tests/")
    parser.add_argument("--files", nargs="+", default=FILES, help="test files below tests/unit")
    parser.add_argument("--real", action="store_true", help="use the DeepSpeed that is installed")
    parser.add_argument("--sample", type=int, default=0, help="sets of parameters of a test that are run; 0 for all")
    parser.add_argument("--tests", type=Path, help="a file with the names of the tests to run, one a line")
    parser.add_argument("--results", type=Path, help="write a line of JSON for each test")
    parser.add_argument("--resume", action="store_true", help="leave out the tests that --results has already")
    parser.add_argument("--passed", type=Path, help="add the names of the tests that pass to this sorted list")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="options for pytest")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    status = 0
    named = args.tests.read_text().split("\n") if args.tests else None
    done = set()
    if args.resume and args.results.exists():
        done = {json.loads(line)["test"] for line in args.results.read_text().splitlines()}
    for file in args.files:
        tests = named and [test for test in named if test.startswith(f"unit/{file}::") and test not in done]
        if tests == []:
            continue
        lines = run_file(args.checkout.resolve(), file, args.real, args.sample, args.pytest, tests)
        counts = Counter(line["outcome"] for line in lines)
        total += counts
        print(file, dict(counts), flush=True)
        if not args.real:
            status |= report_lost(lines)
        if args.results:
            with args.results.open("a") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines)
        if args.passed:
            names = set(args.passed.read_text().splitlines()) if args.passed.exists() else set()
            names |= {line["test"] for line in lines if line["outcome"] == "passed"}
            args.passed.write_text("".join(f"{name}\n" for name in sorted(names)))
    print("all", dict(total))
    return status


if __name__ == "__main__":
    sys.exit(main())
