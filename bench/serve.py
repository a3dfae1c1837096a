"""Serving under load: goodput at a stated latency, time to first token; and the long tiers of R23 to R25.

Each server in turn takes the same open-loop load (`_serve_load.py`); a round takes all of them, in changing
order.  Goodput counts the requests that were whole and within both latencies, by the second.  Clients give up
after `--limit` seconds, so that a server that is overwhelmed still ends in time.  `--write` keeps the rows of
other rates.

    python bench/serve.py --rates 4 --write     # a rate at a time: less than 10 minutes
    python bench/serve.py --quick --json
    python bench/serve.py --fuzz 1000000        # R23: bad requests, on the toy engine
    python bench/serve.py --soak 500000         # R24: requests of which 30% are cancelled
    python bench/serve.py --residue 1000        # R25: ends of any kind
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import (
    Row,
    compare,
    format_machine,
    make_result,
    merge_runs,
    publish_runs,
    rows_for,
    rows_table,
    write_result,
)
from _serve_load import median_of_runs, poisson_arrivals, run_load, summary
from _serve_peers import SERVERS, PeerServer, missing_reason

Runs = dict[tuple[str, float], list[dict[str, float]]]


def measure(args: argparse.Namespace, folder: Path) -> tuple[Runs, dict[str, str]]:
    """Return the summaries by (server, rate), and why a server has none."""
    found: Runs = {}
    absent = {name: reason for name in args.servers if (reason := missing_reason(name))}
    for turn in range(args.rounds):
        for rate in args.rates:
            names = [name for name in args.servers if name not in absent]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                try:  # a server of its own for each rate: none inherits what another load left in its queue
                    run = _measure_one(args, folder, name, rate, args.seed + turn)
                except RuntimeError as error:
                    absent[name] = str(error)
                    say(str(error))
                else:
                    found.setdefault((name, rate), []).append(run)
                    say(f"{name} at {rate:g}/s: {describe(run)}")
    return found, absent


def _measure_one(args: argparse.Namespace, folder: Path, name: str, rate: float, seed: int) -> dict[str, float]:
    with PeerServer(name, folder, args.dtype, args.threads, args.extra) as server:
        asyncio.run(run_load(server.port, str(folder), poisson_arrivals(8, 4.0, 99), args.limit))  # warm
        arrivals = poisson_arrivals(args.requests, rate, seed)
        records, seconds = asyncio.run(run_load(server.port, str(folder), arrivals, args.limit))
    return summary(records, arrivals, seconds, args.ttft, args.tpot)


def rows(args: argparse.Namespace, found: Runs, absent: dict[str, str]) -> list[Row]:
    """Return ours against each other server, by rate."""
    result: list[Row] = []
    metrics = [("goodput", False), ("tokens_per_s", False), ("ttft_p50", True), ("ttft_p99", True),
               ("itl_p50", True), ("itl_p99", True)]  # fmt: skip
    for rate in args.rates:
        case = f"{run_name(args, rate)}, {args.requests} requests"
        ours = found.get(("thalweg", rate))
        for name in args.servers:
            if name == "thalweg" or ours is None:
                continue
            theirs = found.get((name, rate))
            for metric, lower in metrics:
                if theirs is None:
                    note = absent.get(name, "no answer")
                    result.append(compare(case, name, metric, median_of_runs(ours, metric), None, note=note))
                    continue
                mine, others = (finite(median_of_runs(runs, metric)) for runs in (ours, theirs))
                note = "" if others is not None else "some requests had no token in time"
                result.append(compare(case, name, metric, mine, others, lower_is_better=lower, note=note))
    return result


def run_name(args: argparse.Namespace, rate: float) -> str:
    """Return what the rows of a rate begin with."""
    return f"{args.size} {args.dtype} at {rate:g}/s"


def finite(value: float) -> float | None:
    """Return the number, None for infinity: some request never had what is measured."""
    return value if math.isfinite(value) else None


def describe(run: dict[str, float]) -> str:
    """Return one run on a line."""
    counts = f"{run['good']:.0f} of {run['requests']:.0f} good, {run['refused']:.0f} refused"
    first = f"first token p50 {run['ttft_p50']:.2f} p99 {run['ttft_p99']:.2f} s"
    between = f"between p50 {run['itl_p50'] * 1e3:.0f} p99 {run['itl_p99'] * 1e3:.0f} ms"
    rate = f"goodput {run['goodput']:.2f}/s ({counts}, {run['failed']:.0f} failed)"
    return f"{rate}, {run['tokens_per_s']:.0f} tok/s, {first}, {between}"


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def compare_servers(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as name:
        folder = Path(name) / f"llama-{args.size}"
        script = [sys.executable, str(ROOT / "bench" / "_serve_model.py"), str(folder), args.size]
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found, absent = measure(args, folder)
    table = rows(args, found, absent)
    data = make_result("serve", table)
    runs = []
    for rate in args.rates:
        name = run_name(args, rate)
        servers = {who: several for (who, r), several in found.items() if r == rate}
        lines = [f"{who}: {describe(each)}" for who, several in servers.items() for each in several]
        good = (
            f"{args.requests} requests a round, {args.rounds} rounds, {args.threads} threads; good: first "
            f"token within {args.ttft:g} s and {args.tpot * 1e3:g} ms a token"
        )
        about = {key: data[key] for key in ("date", "commit", "machine")}
        runs.append({"run": name, **about, "good": good, "lines": lines, "rows": rows_for(name, data["rows"])})
    if args.write:
        data = merge_runs("serve", runs)
        text = page(data["runs"], data["rows"])
        write_result("serve", data, text)
    else:
        text = page(runs, data["rows"])
    print(json.dumps(data) if args.json else text)


def page(runs: list[dict[str, Any]], table: list[dict[str, Any]]) -> str:
    """Return the result as Markdown."""
    parts = ["# Serving under load", *(part for run in runs for part in _section(run, table))]
    return "\n\n".join(parts) + "\n"


def long_section(run: dict[str, Any]) -> str:
    """Return one of the long tiers as Markdown."""
    head = f"{format_machine(run['machine'])}; commit {run['commit']}, {run['date']}. {run['note']}"
    return f"## {run['run']}\n\n{head}\n\n{rows_table(run['rows'])}\n"


def _section(run: dict[str, Any], table: list[dict[str, Any]]) -> list[str]:
    head = f"{format_machine(run['machine'])}; commit {run['commit']}, {run['date']}. {run['good']}."
    lines = "\n".join(f"- {line}" for line in run["lines"])
    return [f"## {run['run']}", head, rows_table(rows_for(run["run"], table)), lines]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, 24 requests, one round, no vLLM")
    add("--json", action="store_true")
    add("--write", action="store_true")
    add("--servers", default=",".join(SERVERS), type=lambda text: text.split(","), metavar="A,B")
    add("--size", choices=("tiny", "110m"), default="110m")
    add("--dtype", choices=("fp32", "bf16"), default="bf16")
    add("--requests", type=int, default=200)
    add(
        "--rates",
        type=lambda text: [float(x) for x in text.split(",")],
        default=[2.0, 4.0, 8.0],
        metavar="R,R",
    )
    add("--rounds", type=int, default=1)
    add("--seed", type=int, default=1)
    add("--threads", type=int, default=2)
    add("--ttft", type=float, default=1.0, help="seconds within which a good request has its first token")
    add("--tpot", type=float, default=0.1, help="seconds between tokens, the mean of a good request")
    add("--limit", type=float, default=60.0,
        help="seconds after which a client gives up; none that takes so long is good")  # fmt: skip
    add(
        "--extra",
        type=lambda text: text.split(),
        default=[],
        metavar="'OPTIONS'",
        help="more for thalweg serve",
    )
    add("--fuzz", type=int, metavar="N")
    add("--soak", type=int, metavar="N")
    add("--residue", type=int, metavar="N")
    args = parser.parse_args(argv)
    if args.quick:
        args.size, args.requests, args.rates, args.rounds = "tiny", 24, [8.0], 1
        args.servers = [name for name in args.servers if name in ("thalweg", "transformers")]
    return args


def main() -> None:
    """Run what is asked for."""
    args = parse()
    if args.fuzz or args.soak or args.residue:
        from _serve_soak import run_long_tiers

        parts = run_long_tiers(args.fuzz or 0, args.soak or 0, args.residue or 0, args.seed)
        runs = [make_result("serve_long", **part) for part in parts]
        title = "The server's long tiers (R23 to R25)"
        publish_runs("serve_long", title, runs, long_section, write=args.write, as_json=args.json)
        return
    compare_servers(args)


if __name__ == "__main__":
    main()
