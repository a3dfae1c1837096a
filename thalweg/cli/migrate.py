"""Say what changes for a DeepSpeed config or script: renamed, without effect, not offered.

examples:
  thalweg migrate ds_config.json
  thalweg migrate train.py
  thalweg migrate ds_config.json --json > report.json

A script runs unmodified with `thalweg run --as-deepspeed`; the names that are printed are for who changes the import.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("source", metavar="CONFIG_OR_SCRIPT", type=Path, help="JSON (Hjson too), or a .py file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from thalweg.compat import migrate

    if args.source.suffix == ".py" and not args.source.is_file():
        raise FileNotFoundError(f"there is no script {args.source}: check the path")
    is_script = args.source.suffix == ".py"
    report: Any = migrate.migrate_script(args.source) if is_script else migrate.migrate_config(args.source)
    if args.json:
        print(json.dumps({"kind": "script" if is_script else "config", **dataclasses.asdict(report)}, indent=2))
    else:
        print("\n".join(_script_lines(report) if is_script else _config_lines(report)))
    return 0


def _script_lines(report: Any) -> list[str]:
    lines = [report.label]
    width = max((len(use.name) for use in report.uses), default=0)
    for use in report.uses:
        becomes = use.problem or (use.becomes or "the same, with `thalweg run --as-deepspeed`")
        lines.append(f"  line {use.line:<4} {use.name:{width}}  {becomes}")
    lines += [f"  {note}" for note in report.notes]
    return [*lines, *(line for config in report.configs for line in _config_lines(config))]


def _config_lines(report: Any) -> list[str]:
    lines = [report.label]
    for title, rows in (
        ("older spellings", report.renamed),
        ("without effect: leave out", [f"{path}: {why}" for path, why in report.ignored.items()]),
        ("not offered, or wrong", report.not_offered),
        ("what DeepSpeed does unasked", [f"{path} = {json.dumps(v)}" for path, v in report.defaults.items()]),
    ):
        lines += [f"  {title}", *(f"    {row}" for row in rows)] if rows else []
    if report.config is None:
        return [*lines, "  mend what is wrong for the shortest config"]
    text = json.dumps(report.config, indent=2)
    return [*lines, "  the shortest config of the same job", *(f"    {line}" for line in text.splitlines())]
