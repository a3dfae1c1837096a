"""What techniques give, by studies of the package (`thalweg study`): runs each, and puts its rows into results/.

A study's folder is its state: the same command goes on where it was stopped. What a technique needs of another
environment is given by its name; DeepSpeed is found in `.venv-peers`. A ratio is the baseline's time over the
technique's, with its interval in the table; the null comparison has a row too.

    python bench/study.py report --write
    python bench/study.py report training training_text --folder build/study --write
    python bench/study.py llama2_7b --python 'hugging face int8=/opt/int8/bin/python' --write
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from _peers import PEERS_PYTHON, ROOT, deepspeed_env, deepspeed_missing_reason
from _report import Row, add_output_options, compare, publish_runs

sys.path.insert(0, str(ROOT))

from thalweg.study.config import StudyConfig, load_study
from thalweg.study.report import ReportFigure, build_blocks, to_markdown, write_report
from thalweg.study.run import run_study


def prepare(name: str, pythons: dict[str, str], quick: bool) -> StudyConfig:
    """Return a study with interpreters for the techniques that need one; `quick`: one cell of each, once."""
    config = load_study(name)
    changes: dict[str, Any] = {}
    if quick:
        changes = {"rounds": 1, "turns": 1, "steps": 2, "models": config.models[:1], "datasets": config.datasets[:1]}
    techniques = []
    for one in config.techniques:
        if one.name in pythons:
            one = one.model_copy(update={"python": pythons[one.name]})
        elif one.options.get("library") == "deepspeed" and not one.python and deepspeed_missing_reason() is None:
            one = one.model_copy(update={"python": str(PEERS_PYTHON), "env": deepspeed_env()})
        techniques.append(one)
    if unknown := set(pythons) - {one.name for one in techniques}:
        raise ValueError(f"{name} has no technique {', '.join(sorted(unknown))}")
    return config.model_copy(update={**changes, "techniques": tuple(techniques)})


def make_rows(found: dict[str, Any]) -> list[Row]:
    """Return a row for each technique but the baseline, for what failed with its reason, and for each null."""
    rows, baselines = [], {}
    for row in found["rows"]:
        place = (row["hardware"], row["model"], row["dataset"], row["task"])
        baseline = baselines.setdefault(place, row)
        case = ", ".join((found["name"], *place[:3], row["technique"]))
        if row["status"] != "ok":
            rows.append(compare(case, baseline["technique"], "s a sample", None, None, note=row["reason"]))
        elif row is not baseline:
            ours, ratio = row["seconds_per_sample"][0], row.get("ratio")
            theirs = baseline["seconds_per_sample"][0] if ratio else None
            note = "" if ratio else f"no baseline: {baseline['reason']}"
            ratio = ratio and ratio[0]
            rows.append(compare(case, baseline["technique"], "s a sample", ours, theirs, ratio=ratio, note=note))
    for null in found["noise"]:
        case = ", ".join((found["name"], null["hardware"], null["model"], null["dataset"], f"{null['task']} again"))
        ratio = null["ratio"] and null["ratio"][0]
        rows.append(
            compare(case, "itself", "s a sample", None, None, ratio=ratio, note="" if ratio else null["status"])
        )
    return rows


def make_run(found: dict[str, Any]) -> dict[str, Any]:
    """Return a study's report as a run of results/study.json: of the machine and the commit that it was measured with,
    which may not be those of now."""
    facts = found["provenance"]
    machine = {key: facts[key] for key in ("processor", "features", "cores", "torch", "python")}
    machine["memory_gib"] = round(facts["memory"] / 2**30, 1)
    kept = {key: found[key] for key in ("provenance", "config", "rows", "planned", "noise", "recommended", "notes")}
    return {
        "run": found["name"], "bench": "study", "date": facts["date"], "commit": facts["commit"] or "unknown",
        "machine": machine, "load": facts["load"], "rows": [row.to_dict() for row in make_rows(found)],
        "report": {**kept, "explored": found["explored"]},
    }  # fmt: skip


def render(run: dict[str, Any]) -> str:
    """Return the study's own report a heading deeper, without its figures."""
    found = {**run["report"], "name": run["run"]}
    blocks = [one for one in build_blocks(found) if not isinstance(one, ReportFigure)]
    return to_markdown([f"#{one}" if isinstance(one, str) and one.startswith("#") else one for one in blocks])


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run what is missing, print one object or the reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", default=["report"], metavar="STUDY", help="of the package, or a file")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "study", help="of the studies' own folders")
    parser.add_argument("--python", action="append", default=[], metavar="TECHNIQUE=PYTHON", help="its interpreter")
    add_output_options(parser, "study", "one model, dataset and round: numbers that mean nothing")
    args = parser.parse_args(argv)
    pythons = dict(one.rsplit("=", 1) for one in args.python)
    runs = []
    for name in args.studies:
        config = prepare(name, pythons, args.quick)
        folder = args.folder / (f"{config.name}-quick" if args.quick else config.name)
        run_study(config, folder, lambda line: print(line, file=sys.stderr, flush=True))
        runs.append(make_run(write_report(folder)))
    write = args.write and not args.quick
    publish_runs("study", "What techniques give", runs, render, write=write, as_json=args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
