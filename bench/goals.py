"""Each goal beside the row that decides it, reached or not, as one page.

The goals stand in `goals.toml`, the rows in `results/*.json`.  Of several rows the worst decides; a goal with a
`share` is reached when that share of them is within the bound.

    python bench/goals.py            print the page
    python bench/goals.py --write    put it into results/goals.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import format_cell, markdown_table

RESULTS = ROOT / "results"
HEADERS = ["goal", "reached", "worst row", "figure", "bound", "rows within", "result, date, commit"]


def load_goals() -> list[dict[str, Any]]:
    """Return the goals in the order of the file."""
    return tomllib.loads((Path(__file__).parent / "goals.toml").read_text())["goal"]


def find_rows(goal: dict[str, Any], data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that a goal is about and that have its figure."""
    fields = ("case", "peer", "metric")
    return [
        row
        for row in data.get("rows", [])
        if all(re.fullmatch(goal[field], row[field]) for field in fields) and row[goal.get("of", "ratio")] is not None
    ]


def get_miss(goal: dict[str, Any], figure: float) -> float:
    """Return how far a figure is out of the goal's bounds, as a share of the bound; at most 0 if it is within."""
    misses = [goal["least"] / figure - 1 if figure else 1.0] if "least" in goal else []
    misses += [figure / goal["most"] - 1] if "most" in goal else []
    return max(misses)


def describe_origin(name: str, data: dict[str, Any], case: str) -> str:
    """Return the result's page, and the date and commit of the run that has the case."""
    runs = [run for run in data.get("runs") or [] if run.get("commit") and case.startswith(f"{run['run']},")]
    run = runs[0] if runs else data
    return ", ".join([f"[{name}]({name}.md)", *(str(run[key])[:12] for key in ("date", "commit") if run.get(key))])


def make_line(goal: dict[str, Any]) -> list[str]:
    """Return a goal's line of the page."""
    bounds = [f"{word} {goal[key]:g}" for key, word in (("least", "≥"), ("most", "≤")) if key in goal]
    name, bound = goal["result"], " and ".join(bounds)
    if goal.get("page"):
        figures = [float(text) for text in goal["said"].split(",")]
        reached = all(get_miss(goal, figure) <= 0 for figure in figures)
        return [goal["promise"], verdict(reached), "", goal["said"], bound, "", f"[{name}]({name}.md)"]
    path = RESULTS / f"{name}.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    rows = find_rows(goal, data)
    if not rows:
        return [goal["promise"], "not measured", "", "", bound, "", ""]
    key = goal.get("of", "ratio")
    worst = max(rows, key=lambda row: get_miss(goal, row[key]))
    within = sum(get_miss(goal, row[key]) <= 0 for row in rows)
    case = f"{worst['case']}, {worst['metric']}, beside {worst['peer']}"
    figures = [format_cell(worst[key], 3), bound, f"{within} of {len(rows)}"]
    reached = within >= goal.get("share", 1.0) * len(rows)
    return [goal["promise"], verdict(reached), case, *figures, describe_origin(name, data, worst["case"])]


def verdict(reached: bool) -> str:
    """Return the word that readers look for."""
    return "yes" if reached else "**NO**"


def make_page() -> str:
    """Return the page."""
    lines = [make_line(goal) for goal in load_goals()]
    count = {word: sum(line[1] == word for line in lines) for word in ("yes", "**NO**", "not measured")}
    return "\n".join(
        [
            "# Goals",
            "",
            "Made by `python bench/goals.py --write` from [goals.toml](../bench/goals.toml) and the rows beside this",
            "page. Ratios are above 1 where Thalweg is better; of several rows the worst one stands here and decides.",
            "Results of different commits and machines stand side by side: each row says which.",
            "",
            f"{count['yes']} reached, {count['**NO**']} not reached, {count['not measured']} not measured.",
            "",
            markdown_table(HEADERS, lines),
            "",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results/goals.md")
    args = parser.parse_args(argv)
    page = make_page()
    if args.write:
        (RESULTS / "goals.md").write_text(page)
    else:
        sys.stdout.write(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
