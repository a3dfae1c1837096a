"""Run a benchmark of the checkout; what follows NAME goes to it (try NAME --help).

examples:
  thalweg bench                          # what there is
  thalweg bench train_step --quick
  thalweg bench train_step --model 69m --ranks 2 4 --json
"""

# The benchmarks are scripts of the repository's ``bench/`` folder, not part of the installed package: they
# compare with other systems and need those installed.  This subcommand finds them beside the package and
# starts the one that is asked for with this interpreter; whatever follows NAME goes to the script.

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import thalweg
from thalweg.utils.env import DEVICE_VARIABLE
from thalweg.utils.formatting import did_you_mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the benchmark; without it, the list of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda, ... (%(default)s: the accelerator)"
    )
    parser.add_argument("--quick", action="store_true", help="a run of less than a minute")


def split_passthrough(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Set apart what follows NAME: it is the script's."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-") and arguments[index - 1 : index] != ["--device"]:
            return list(arguments[: index + 1]), list(arguments[index + 1 :])
    return list(arguments), []


def list_benchmarks(folder: Path) -> dict[str, str]:
    """Return the benchmarks of a ``bench/`` folder by name, each with the first line of its docstring."""
    descriptions = {}
    for path in sorted(folder.glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        descriptions[path.stem] = text.partition("\n")[0]
    return descriptions


def find_bench_folder() -> Path:
    """Return the checkout's ``bench/`` folder; FileNotFoundError when the package runs without a checkout."""
    root = Path(thalweg.__file__).resolve().parent.parent
    if not ((root / "bench").is_dir() and (root / "pyproject.toml").is_file()):
        raise FileNotFoundError(
            f"the benchmarks are in the repository, and {root} is no checkout of it: clone the repository, "
            "install it with `pip install -e .`, and run `thalweg bench` from that environment"
        )
    return root / "bench"


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return its exit code; ValueError for a name that is none."""
    folder = find_bench_folder()
    known = list_benchmarks(folder)
    if args.name is None:
        listing = "\n".join(f"{name:<14} {text}" for name, text in known.items())
        print(json.dumps({"benchmarks": known}) if args.json else listing)
        return 0
    if args.name not in known:
        raise ValueError(f"no benchmark {args.name!r}{did_you_mean(args.name, known)}: there are {', '.join(known)}")
    options = [option for option in ("--json", "--quick") if getattr(args, option[2:])]
    command = [sys.executable, str(folder / f"{args.name}.py"), *options, *args.passthrough]
    environ = os.environ if args.device == "auto" else {**os.environ, DEVICE_VARIABLE: args.device}
    return subprocess.run(command, check=False, env=environ).returncode
