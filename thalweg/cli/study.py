"""Measure what techniques of inference and training give for models and datasets, and explain it on a page.

examples:
  thalweg study run report --out report
  thalweg study run study.yaml --out results/mine
  thalweg study report report

`run` goes on where it was when the same command is given again, and ends with the report. `report`, `training`,
`training_text`, `decode`, `llama2_7b` and `finetuning` are in the package; docs/study.md describes the file. Exit code
0 also where cells have failed: their rows say why.
"""

import argparse
import json
from pathlib import Path

from thalweg.cli.arguments import log_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_parser = actions.add_parser("run", help="measure what is missing of a study, then write its report")
    run_parser.add_argument("study", metavar="STUDY", help="a YAML file, or one of the package such as `report`")
    run_parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the study's results")
    report_parser = actions.add_parser("report", help="write report.html, report.md and report.json again")
    report_parser.add_argument("folder", type=Path, metavar="DIR", help="what `run` was given as --out")
    for one in (run_parser, report_parser):
        one.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Run or report; returns the exit code."""
    from thalweg.study.config import load_study
    from thalweg.study.report import write_report
    from thalweg.study.run import run_study

    folder = args.out if args.action == "run" else args.folder
    done = {}
    if args.action == "run":
        done = run_study(load_study(args.study), folder, log_stderr)
    elif not (folder / "study.json").is_file():
        raise FileNotFoundError(f"{folder} holds no study: `thalweg study run STUDY --out {folder}` makes one")
    report = write_report(folder)
    if args.json:
        print(json.dumps({**done, **report}))
    else:
        print("\n".join(f"{folder / name}" for name in ("report.html", "report.md", "report.json")))
    return 0
