"""ZeRO-Inference: weights in a file against weights in memory, against the disk, and against accelerate.

- *page cache*: a Llama of 110 million parameters, batch 8, weights read where the page cache has them,
  against the same engine with weights in memory.
- *cold disk*: the same model in fp32 with a quarter of its weights' memory, direct reads, against what fio
  reads from the same folder between the turns; greedy tokens are compared with those of the engine in memory.
- *accelerate*: ``disk_offload`` of the same files, warm, fp32, against ours from the page cache.
- *large*, *quarter*: GPT-2 XL with random weights (bf16 on disk) in a cgroup: int8 in 1 GiB, bf16 in a
  quarter of its weights' bytes.

Contestants are processes that take turns, round after round; a row compares medians.

    python bench/infer_offload.py --folder /a/disk --write
    python bench/infer_offload.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _memory_group import group_peak, memory_group, within_group
from _peers import ROOT
from _report import Row, compare, format_machine, make_result, publish_runs, rows_table

LLAMA = {
    "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048, "num_attention_heads": 12,
    "vocab_size": 32000, "max_position_embeddings": 1024,
}  # fmt: skip
_LARGE = {"large", "quarter"}
_RUNS = {  # what the rows of a case begin with
    "page": "page cache", "cold": "cold disk", "accelerate": "disk_offload", "large": "GPT-2 1.5B int8",
    "quarter": "GPT-2 1.5B bf16",
}  # fmt: skip
XL = {"vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024}


def run(group: Path | None = None, **case: Any) -> dict[str, Any]:
    """Run one case in a process (of a memory cgroup) and return what it printed."""
    command = [sys.executable, str(ROOT / "bench" / "_infer_offload_worker.py"), json.dumps(case)]
    done = subprocess.run(within_group(group, command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def fio(folder: Path, seconds: int) -> float | None:
    """Return the bytes a second that fio reads directly, or None without fio."""
    if shutil.which("fio") is None:
        return None
    command = [
        "fio", "--name=read", f"--directory={folder}", "--size=1g", "--rw=read", "--bs=4m", "--direct=1",
        "--ioengine=libaio", "--iodepth=4", "--time_based", f"--runtime={seconds}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def turns(args: argparse.Namespace, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Let the cases take turns; returns the last result of each with medians of its numbers."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for number in range(args.turns):
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken[name].append(run(threads=args.threads, rounds=args.rounds, **cases[name]))
    return {name: {**found[-1], "tok_s": statistics.median(x["tok_s"] for x in found)} for name, found in taken.items()}


def page_cache(args: argparse.Namespace, base: dict[str, Any], forms: list[str]) -> list[Row]:
    """Weights in the page cache against weights in memory, batch 8."""
    rows = []
    for form in forms:
        case = {**base, "who": "thalweg", "form": form, "batch": 8}
        found = turns(args, {"file": {**case, "stream": "cpu"}, "memory": {**case, "stream": None}})
        ours, theirs = found["file"], found["memory"]
        equal = "greedy tokens equal" if ours["tokens"] == theirs["tokens"] else "TOKENS DIFFER"
        rows.append(compare(f"page cache, {form}, batch 8, {equal}", "thalweg in memory", "decoding tok/s",
                            ours["tok_s"], theirs["tok_s"], lower_is_better=False))  # fmt: skip
    return rows


def cold(args: argparse.Namespace, base: dict[str, Any]) -> list[Row]:
    """A quarter of the weights' memory, direct reads."""
    case = {**base, "who": "thalweg", "form": "fp32", "batch": 1, "new": args.cold_new}
    plain = run(threads=args.threads, rounds=1, **case, stream=None)
    memory = plain["weight_bytes"] // 4
    found, speeds = [], []
    for _ in range(args.turns):
        speeds.append(fio(Path(base["folder"]), args.fio_seconds))
        found.append(run(threads=args.threads, rounds=1, **case, stream="nvme", memory=memory))
    rate = statistics.median(r for x in found for r in x["read_rate"])
    best = statistics.median(s for s in speeds if s) if any(speeds) else None
    equal = "greedy tokens equal" if found[-1]["tokens"] == plain["tokens"] else "TOKENS DIFFER"
    name = f"cold disk, weights of {plain['weight_bytes'] >> 20} MiB in {memory >> 20} MiB, {equal}"
    return [
        compare(name, "fio", "bytes read/s", rate, best, lower_is_better=False),
        compare(name, "thalweg in memory", "peak anonymous bytes", found[-1]["peak_anonymous"],
                plain["peak_anonymous"]),
    ]  # fmt: skip


def against_accelerate(args: argparse.Namespace, base: dict[str, Any]) -> list[Row]:
    """accelerate's disk_offload, the files in the page cache."""
    rows = []
    offload = Path(base["folder"]) / "accelerate"
    for batch in (1,) if args.quick else (1, 8):
        case = {**base, "batch": batch, "new": args.cold_new}
        contestants = {
            "ours": {**case, "who": "thalweg", "form": "fp32", "stream": "cpu"},
            "direct": {**case, "who": "thalweg", "form": "fp32", "stream": "nvme", "memory": 1 << 27},
            "theirs": {**case, "who": "accelerate", "stream": "disk", "folder": str(offload)},
        }
        if args.quick:
            del contestants["direct"]
        found = turns(args, contestants)
        theirs = found.pop("theirs")
        for name in found:
            ours = found[name]
            equal = "greedy tokens equal" if ours["tokens"] == theirs["tokens"] else "tokens differ"
            label = "page cache" if name == "ours" else "direct reads into 128 MiB"
            case_name = f"disk_offload, fp32, batch {batch}, {label}, {equal}"
            rows.append(compare(case_name, "accelerate disk_offload", "decoding tok/s", ours["tok_s"],
                                theirs["tok_s"], lower_is_better=False))  # fmt: skip
    return rows


def limited(args: argparse.Namespace, folder: Path, kind: str) -> list[Row]:
    """GPT-2 XL where a process may have so much memory and no more, page cache and all.

    ``large``: int8 in 1 GiB.  ``quarter``: bf16 in a quarter of the weights' bytes.  Packed in one process,
    run again in another; tokens are compared with those of the same weights in memory without a limit.
    """
    model, form = folder / "gpt2-xl", "int8" if kind == "large" else "bf16"
    run(who="write", model=str(model), kind="GPT2", sizes=XL, dtype="bfloat16")
    case = {
        "who": "thalweg", "model": str(model), "folder": str(folder), "form": form, "batch": 1, "prompt": 32,
        "new": 8, "kv_memory": 32 << 20, "max_step_tokens": 64, "threads": args.threads, "rounds": 1,
    }  # fmt: skip
    plain = run(**case, stream=None)
    limit = 2**30 if kind == "large" else plain["weight_bytes"] // 4
    rows = []
    for label in ("packed at load", "packed before"):
        name = f"GPT-2 1.5B {form}, weights of {plain['weight_bytes'] >> 20} MiB, {label}"
        with memory_group(limit) as group:
            got = run(group, **case, stream="nvme", memory=(128 if kind == "large" else 192) << 20)
            if group is not None:
                rows.append(compare(f"{name}, killed beyond {limit >> 20} MiB", "the limit",
                                    "bytes with page cache", group_peak(group), limit))  # fmt: skip
        equal = "greedy tokens equal" if got["tokens"] == plain["tokens"] else "TOKENS DIFFER"
        for key in ("peak_anonymous", "peak_resident"):
            rows.append(compare(f"{name}, {equal}", "the limit", f"{key} bytes", got[key], limit))
        rows.append(compare(name, "in memory", "decoding tok/s", got["tok_s"], plain["tok_s"],
                            lower_is_better=False))  # fmt: skip
        rows.append(compare(name, "in memory", "seconds to load", got["load_s"], plain["load_s"]))
    shutil.rmtree(model)
    return rows


def render(run: dict[str, Any]) -> str:
    """Return a run as Markdown."""
    about = f"{run['date']}, commit {run['commit']}, {format_machine(run['machine'])}."
    return f"## {run['run']}\n\n{about}\n\n{rows_table(run['rows'])}\n"


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold-new", type=int, default=16)
    parser.add_argument("--fio-seconds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=["page", "cold", "accelerate", "large", "quarter"])
    parser.add_argument("--quick", action="store_true", help="4 layers, one turn, no large model")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/stream.md and .json")
    args = parser.parse_args(argv)
    sizes, forms = dict(LLAMA), ["fp32", "bf16", "int8", "int4"]
    if args.quick:
        args.turns, args.rounds, args.fio_seconds, args.cold_new = 1, 1, 2, 8
        sizes["num_hidden_layers"], forms = 4, ["int8"]
        args.cases = [case for case in args.cases if case not in _LARGE]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="thalweg-stream-", dir=args.folder) as home:
        folder = Path(home)
        base: dict[str, Any] = {
            "model": str(folder / "llama"),
            "folder": str(folder),
            "prompt": 128,
            "new": 64,
        }
        if set(args.cases) - _LARGE:
            run(who="write", model=base["model"], kind="Llama", sizes=sizes, dtype="float32")
        measures: dict[str, Callable[[], list[Row]]] = {
            "page": lambda: page_cache(args, base, forms),
            "cold": lambda: cold(args, base),
            "accelerate": lambda: against_accelerate(args, base),
            "large": lambda: limited(args, folder, "large"),
            "quarter": lambda: limited(args, folder, "quarter"),
        }
        for name in args.cases:
            try:
                rows = measures[name]()
            except RuntimeError as error:  # the others' rows are not lost
                print(error, file=sys.stderr)
                note = f"failed: {str(error).strip().splitlines()[-1][:200]}"
                rows = [compare(f"{_RUNS[name]}, {name}", "-", "-", None, None, note=note)]
            about = {"run": _RUNS[name], "threads": args.threads, "turns": args.turns, "rounds": args.rounds}
            runs.append(make_result("stream", rows, **about))
    title = "Streamed weights (ZeRO-Inference)"
    publish_runs("stream", title, runs, render, write=args.write, as_json=args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
