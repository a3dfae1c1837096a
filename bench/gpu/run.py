"""Twenty checks of a machine with a GPU, the most telling first, in about ten minutes.

Those that compare numbers run several at a time, then those that measure run alone.  Each is a process of its own with
a limit and leaves one JSON line in `results/gpu/<machine>.jsonl`, whatever becomes of it; the next one starts all the
same.  What one that did not pass has printed is in `results/gpu/logs`.
A run that was cut off goes on where it was: what passed at this commit is not run again.  At the end one table,
`results/gpu/<machine>.md`, tells what held, what did not and the figures; `docs/devices.md` is made from these files.

Some checks are the project's own tests, which hold a device to what the CPU computes (`pytest --device cuda`); the
others are functions of `figures.py`.  Two ranks share one GPU, as if each were a host of its own: NCCL
takes no two ranks of a host on a device.

    make gpu                                  # all that has not passed at this commit
    python bench/gpu/run.py --only 3,14       # these two, again
    python bench/gpu/run.py --device sim      # through the same motions on a simulated device
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "results" / "gpu", ROOT / "docs" / "devices.md"


@dataclass(frozen=True)
class Check:
    """``tests``: what pytest is given; else ``figure``: a function of ``figures.py``.  ``seconds``: its limit alone.

    ``is_timed``: its figures are times or bytes of the machine, which has nothing else to do then.
    """

    number: int
    claim: str
    seconds: int
    tests: tuple[str, ...] = ()
    figure: str = ""
    is_timed: bool = False


_TRAINING, _INFERENCE, _MATRIX = (
    "tests/dist/test_devices.py",
    "tests/unit/test_infer_devices.py",
    "tests/dist/test_matrix.py",
)
CHECKS = (
    Check(
        1, "starts: versions, doctor, products and links as fast as the table says", 90, figure="start", is_timed=True
    ),
    Check(2, "the tests that need CUDA", 240, ("tests/gpu",)),
    Check(
        3,
        "offload to pinned and unpinned memory and NVMe learns as the CPU does",
        120,
        (_TRAINING, "-k", "trains_as_the_cpu and late"),
    ),
    Check(
        4,
        "stages 0 to 3, accumulation: gradients and updates of a plain loop",
        150,
        ("tests/dist/test_parity.py", "tests/dist/test_parity_sgd.py"),
    ),
    Check(
        5,
        "preflight takes a job with offload that is larger than the device, refuses one too large",
        90,
        (_TRAINING, "-k", "preflight or refused"),
    ),
    Check(6, "optimizer, parameters, both on NVMe, on every axis", 120, (_TRAINING, "-k", "every_axis")),
    Check(7, "recomputation with dropout, activations kept, on the host, on NVMe", 90, (_TRAINING, "-k", "dropout")),
    Check(8, "a resume goes on to the bit: AdamW, Muon", 120, (_TRAINING, "-k", "checkpoint_goes_on")),
    Check(9, "a group with NCCL alone: a step with a monitor, a save", 60, figure="device_group_alone"),
    Check(
        10,
        "inference: tokens a second at batch 1 and 32, int8, int4, streamed weights",
        180,
        figure="inference",
        is_timed=True,
    ),
    Check(11, "MFU of a 1B model in bf16 beside raw FSDP2", 240, figure="mfu", is_timed=True),
    Check(12, "parameters on the host: copies run beside products", 120, figure="offload_overlap", is_timed=True),
    Check(
        13,
        "gradients that are not finite, in fp16 too; clipping; whole loops as written for DeepSpeed",
        90,
        ("tests/dist/test_engine.py", "-k", "bad_gradient or row46 or row08"),
    ),
    Check(14, "host syncs and launches of a step, by optimizer", 120, figure="syncs"),
    Check(15, "compiled at stages 2 and 3; deterministic", 180, figure="compiled", is_timed=True),
    Check(16, "peak memory as planned", 120, figure="memory", is_timed=True),
    Check(17, "ring and blockwise attention, TFLOP/s", 60, figure="attention", is_timed=True),
    Check(18, "mixture of experts; tensor, sequence, pipeline ranks with them", 150, (_MATRIX, "-k", "accelerator")),
    Check(19, "inference: families, penalties, grammar, adapters, guessed tokens, ranks", 180, (_INFERENCE,)),
    Check(20, "a server with eight clients", 120, figure="serve", is_timed=True),
)


def main() -> int:
    """Run what is asked for; 0 when all of it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--only", metavar="N,N", help="numbers of checks; they run even if they have passed")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="start no check after this (600)")
    cores = len(os.sched_getaffinity(0))
    jobs = min(8, max(1, cores // 2))
    parser.add_argument(
        "--jobs", type=int, default=jobs, metavar="N", help=f"so many checks at a time first ({jobs} here)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the lines and the table go")
    args = parser.parse_args()
    chosen = {int(number) for number in args.only.split(",")} if args.only else None
    checks = [check for check in CHECKS if chosen is None or check.number in chosen]
    machine, commit = describe_machine(args.device), source_version()
    lines = args.out / f"{machine['file']}.jsonl"
    lines.parent.mkdir(parents=True, exist_ok=True)
    done = {line["check"] for line in read_lines(lines) if line["outcome"] == "passed" and line["commit"] == commit}
    passed = set() if chosen else done
    start = time.monotonic()

    compile_libraries()

    def run(check: Check) -> None:
        """Run one check and leave its line."""
        left = args.limit - (time.monotonic() - start)
        if check.number in passed:
            print(f"{check.number:2}  passed before at {commit}: {check.claim}", flush=True)
        elif left <= 0:
            print(f"{check.number:2}  not started: {args.limit:.0f} s are over", flush=True)
        else:
            found = run_check(check, args, left)
            line = {"check": check.number, "claim": check.claim, "commit": commit, **machine, **found}
            with lines.open("a") as out:
                out.write(json.dumps(line) + "\n")
            told = f"{check.number:2}  {found['outcome']:8} {found['seconds']:6.1f} s  {check.claim}: {found['found']}"
            print(told, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, [check for check in checks if not check.is_timed]))
    for check in checks:
        if check.is_timed:
            run(check)
    latest = latest_lines(lines)
    lines.with_suffix(".md").write_text(make_table(machine, latest))
    if args.out == RESULTS:
        write_page(PAGE, RESULTS)
    print(f"\n{lines.with_suffix('.md')}")
    return int(any(latest.get(check.number, {}).get("outcome") != "passed" for check in checks))


def run_check(check: Check, args: argparse.Namespace, left: float) -> dict[str, Any]:
    """One check in a process of its own: ``outcome`` (passed, failed, timeout), ``found``, ``seconds``, ``figures``."""
    if check.tests:
        names = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", args.device]
        names += ["-m", "not nightly", *check.tests, *(["-n", "2"] if args.jobs > 1 and find_spec("xdist") else [])]
    else:
        names = [sys.executable, str(Path(__file__).with_name("figures.py")), check.figure, "--device", args.device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = check.seconds * (1 if args.jobs == 1 or check.is_timed else 2)  # beside others it takes longer
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # what a check leaves running holds no pipe of ours
        process = subprocess.Popen(names, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            outcome = "passed" if process.wait(min(seconds, left)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "timeout"
        # The check's own group: ranks that outlive it would hold the device's memory from the next.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        output = log.read()
    figures = _last_json(output) if check.figure else {}
    if check.tests:
        found = next(
            (row for row in reversed(output.splitlines()) if re.search(r"\d+ (passed|failed|skipped)", row)), ""
        )
        if outcome == "passed" and "passed" not in found:  # everything was left out: nothing was shown
            outcome = "left out"
    else:
        found = ", ".join(f"{key} {_short(value)}" for key, value in figures.items() if not isinstance(value, dict))
    if outcome == "passed" and "left_out" in figures:
        outcome = "left out"
    if outcome != "passed":  # on a machine that is soon given back, the whole of what a check printed is worth a file
        (kept := args.out / "logs").mkdir(exist_ok=True)
        (kept / f"{check.number}.log").write_text(output)
    errors = [row for row in output.splitlines() if row.startswith(("FAILED", "E  ", "Traceback")) or "Error" in row]
    if outcome != "passed":
        found = found or "; ".join(errors[-3:]) or (output.splitlines() or ["no output"])[-1]
    line = {"outcome": outcome, "found": found.strip("= "), "seconds": round(time.monotonic() - start, 1)}
    return {**line, "figures": figures, **({"errors": errors[:40]} if outcome != "passed" else {})}


def compile_libraries() -> None:
    """Write torch's bytecode where an image has none: each of the hundreds of processes would compile it anew, which
    took more than the checks did."""
    for name in ("torch", "transformers", "numpy"):
        found = find_spec(name)
        if found is None or found.origin is None or found.cached is None or Path(found.cached).exists():
            continue
        command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(Path(found.origin).parent)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def describe_machine(device: str) -> dict[str, Any]:
    """What the results are known by: the device's name, torch's version, the day."""
    code = (
        "import torch, json; torch.cuda.is_available() or exit('there is no CUDA device here'); "
        "p = torch.cuda.get_device_properties(0); print(json.dumps({'name': p.name, 'memory': p.total_memory, "
        "'devices': torch.cuda.device_count(), 'cuda': torch.version.cuda or torch.version.hip}))"
    )
    found: dict[str, Any] = {"name": "simulated device", "devices": 2}
    if device == "cuda":
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if asked.returncode:
            sys.exit((asked.stderr.strip().splitlines() or [f"python ended with {asked.returncode}"])[-1])
        found = json.loads(asked.stdout)
    from importlib import metadata

    name = re.sub(r"[^a-z0-9]+", "-", found["name"].lower()).strip("-")
    found |= {"file": name, "torch": metadata.version("torch"), "python": platform.python_version()}
    return found | {"date": datetime.now(UTC).strftime("%Y-%m-%d")}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines that earlier runs left; one that was cut off in the middle is let be."""
    found = []
    for row in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(row))
        except ValueError:
            continue
    return found


def latest_lines(file: Path) -> dict[int, dict[str, Any]]:
    """The last line of each check."""
    return {line["check"]: line for line in read_lines(file)}


def make_table(machine: dict[str, Any], lines: dict[int, dict[str, Any]]) -> str:
    """One page for people."""
    rows = [f"# {machine['name']}", "", "Written by `bench/gpu/run.py` (`make gpu`).", ""]
    rows += [
        "| | what must hold | outcome | seconds | found | commit, torch, day |",
        "| ---: | --- | --- | ---: | --- | --- |",
    ]
    for check in CHECKS:
        line = lines.get(check.number)
        if line is None:
            rows.append(f"| {check.number} | {check.claim} | not run | | | |")
            continue
        found, when = line["found"].replace("|", "/"), f"{line['commit']}, {line['torch']}, {line['date']}"
        rows.append(f"| {check.number} | {check.claim} | {line['outcome']} | {line['seconds']} | {found} | {when} |")
    return "\n".join(rows) + "\n"


_BEGIN, _END = "<!-- from results/gpu -->", "<!-- end -->"


def write_page(page: Path, results: Path) -> None:
    """Put what has run where, as the result files say, between the two marks of the page."""
    machines = {file.stem: latest_lines(file) for file in sorted(results.glob("*.jsonl"))}
    if machines:
        names = [next(iter(lines.values()))["name"] for lines in machines.values()]
        rows = ["| | what must hold | " + " | ".join(names) + " |", "| ---: | --- |" + " --- |" * len(names)]
        for check in CHECKS:
            found = (lines.get(check.number, {}).get("outcome", "not run") for lines in machines.values())
            rows.append(f"| {check.number} | {check.claim} | {' | '.join(found)} |")
    else:
        rows = ["On no GPU yet: no run of these checks has been committed."]
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text("\n".join([before + _BEGIN, *rows, _END]) + rest.partition(_END)[2])


def _last_json(output: str) -> dict[str, Any]:
    for row in reversed(output.splitlines()):
        if row.startswith("{"):
            try:
                return json.loads(row)
            except ValueError:
                continue
    return {}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def source_version() -> str:
    """The commit; where the sources are not a commit's, or git knows nothing of them, with a hash of theirs.

    ``SOURCE_COMMIT`` says it of a copy of a commit's tree that has another history, or none.
    """
    if named := os.environ.get("SOURCE_COMMIT"):
        return named
    commit, rooms = _git("rev-parse", "--short", "HEAD"), ("thalweg", "tests", "bench")
    if commit and not _git("status", "--porcelain", "--", *rooms):
        return commit
    files = sorted(path for room in rooms for kind in ("py", "cpp", "h") for path in (ROOT / room).rglob(f"*.{kind}"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    return f"{commit}+{digest}"


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
    except OSError:  # a machine without git has a copy of the tree
        return ""


if __name__ == "__main__":
    sys.exit(main())
