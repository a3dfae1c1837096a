"""The page of the lists: of the tests that DeepSpeed passes, how many pass on Thalweg, file by file.

``results/deepspeed_unit.json`` holds the counts of the lists and the last run of a real DeepSpeed and of Thalweg, each
with its date, commit and machine, and how many tests of the lists it ran; ``results/deepspeed_unit.md`` is made of it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from tests.compat.deepspeed_unit.lists import FILES, file_of, read_passing, read_real_passing, reason_of

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))
_report: Any = import_module("_report")

RESULT = ROOT / "results" / "deepspeed_unit"
COLUMNS = ["DeepSpeed passes", "Thalweg passes", "left out with a reason", "without a reason"]


def record_run(outcomes: dict[str, dict[str, Any]], real: bool, named: set[str]) -> None:
    """Put a run of the named tests (empty for all) into the results in the place of the one before it, count the lists,
    and make the page anew."""
    path = RESULT.with_suffix(".json")
    data = json.loads(path.read_text()) if path.exists() else {}
    names, listed = read_real_passing(), read_real_passing() if real else read_passing()
    found = {test: line["outcome"] for test, line in outcomes.items() if real or test in names}
    data["deepspeed" if real else "thalweg"] = {
        "date": _report.make_result("", ())["date"],
        "commit": _report.commit(),
        "machine": _report.machine_info(),
        "name": f"DeepSpeed {metadata.version('deepspeed')}" if real else "Thalweg",
        "outcomes": dict(Counter(found.values())),
        "listed": len(listed),
        "confirmed": sum(found.get(test) == "passed" for test in listed),
        "not run": len(listed - set(found)),
        "unknown": len(named - set(found) - names) if real else 0,
    }
    data.update(count_lists(names, read_passing()))
    data["rows"] = [row.to_dict() for row in _make_rows(data)]
    _report.write_result(RESULT.name, data, make_page(data))


def count_lists(real: set[str], passing: set[str]) -> dict[str, Any]:
    """Return the counts of each file, in the order of COLUMNS, and how many tests each reason leaves out."""
    left_out = {test: reason_of(test) for test in real - passing}
    groups = [real, real & passing, {t for t in left_out if left_out[t]}, {t for t in left_out if not left_out[t]}]
    counts = [Counter(map(file_of, group)) for group in groups]
    return {
        "files": {file: [count[file] for count in counts] for file in FILES},
        "reasons": dict(sorted(Counter(filter(None, left_out.values())).items())),
    }


def _make_rows(data: dict[str, Any]) -> list[Any]:
    """What the goals read: the tests that pass, and those that pass or have a reason, as shares of DeepSpeed's."""
    total, passing, reasons, _ = map(sum, zip(*data["files"].values(), strict=True))
    unknown = data.get("deepspeed", {"unknown": 0})["unknown"]
    case = f"all files, {unknown} tests never run" if unknown else "all files"  # which the goals take as not measured
    return [
        _report.compare(case, "DeepSpeed", metric, count, total, lower_is_better=False)
        for metric, count in (("tests passed", passing), ("tests passed or with a reason", passing + reasons))
    ]


def make_page(data: dict[str, Any]) -> str:
    """Return the page."""
    row = data["rows"][0]
    lines = [[file, *map(str, counts)] for file, counts in data["files"].items()]
    lines.append(["all", *(str(sum(column)) for column in zip(*data["files"].values(), strict=True))])
    reasons = sorted(data["reasons"].items(), key=lambda item: -item[1])
    parts = [
        "# DeepSpeed's own unit tests on Thalweg",
        f"**{row['ours']:.0f} of the {row['theirs']:.0f} tests that DeepSpeed passes pass: {row['ratio']:.1%}.**",
        "They are of the files worth most to a user: at most two sets of parameters of each test, at most two ranks "
        "(`LOCAL_SIZE=2`), on a processor. What DeepSpeed itself fails or skips there does not count. Made by "
        "`python -m tests.compat.deepspeed_unit CHECKOUT --page`, with `--real --sample 2` and with `--tests "
        "tests/compat/deepspeed_unit/real_passing.txt`.",
        *(_describe_run(data[run]) for run in ("deepspeed", "thalweg") if run in data),
        _report.markdown_table(["file", *COLUMNS], lines),
        "Why tests are left out, by the patterns of [left_out.tsv](../tests/compat/deepspeed_unit/left_out.tsv):",
        _report.markdown_table(["reason", "tests"], [[reason, str(count)] for reason, count in reasons]),
    ]
    return "\n\n".join(parts) + "\n"


def _describe_run(run: dict[str, Any]) -> str:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(run["outcomes"].items()))
    rest = f"; {run['not run']} were not run again and stand as an earlier run left them" if run["not run"] else ""
    return (
        f"{run['name']}, {run['date']}, commit {run['commit']}, {_report.format_machine(run['machine'])}: {outcomes}. "
        f"It confirms {run['confirmed']} of the {run['listed']} listed as passing{rest}."
        + (f" **{run['unknown']} others of the sample were never run.**" if run["unknown"] else "")
    )
