"""Two hosts on a slow link: Adam against those that send less or meet seldom, to the same loss.

The hosts are network namespaces with one cable between them, held to a rate on both ends by a token bucket, and longer
by `--delay` (`_namespaces.py`).  Each rank trains a GPT on the standard library's sources, byte by byte; every
contestant sees the same batches and the same schedule of rates.  Bytes are what the first host's interface counts; the
clock is that of the steps alone, loading left out.  Needs root and iproute2, and says so without.

    python bench/slow_network.py --write
    python bench/slow_network.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _groups import exit_on_terminate
from _namespaces import NamespaceError, NamespaceHosts, missing_reason
from _peers import ROOT
from _report import Row, add_output_options, compare, format_cell, make_result, publish_runs, render_section

SIZES = {"10m": (8, 320), "1m": (4, 128)}
SEQ_LEN, MICRO_BATCH_SIZE = 64, 4
ANCHOR, OUTER = "AdamW", "AdamW + outer"
COMPRESSIONS = {
    "AdamW + PowerSGD": {"type": "powersgd", "matrix_approximation_rank": 4},
    "AdamW + top-k": {"type": "topk", "compress_ratio": 0.01},
}
# Losses are means over so many steps.
WINDOW = 20
# Steps between meetings send nothing, so sites that meet seldom buy Adam's loss with a few more of them.
OUTER_STEPS = 1.25


def count_steps(contestant: str, steps: int) -> int:
    """Return how many steps a contestant trains where Adam trains ``steps``; its rates' schedule is as long."""
    return round(OUTER_STEPS * steps) if contestant == OUTER else steps


def get_contestants(steps: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the optimisers and what each is told beside the rate; a seventh of the steps are before the freeze."""
    freeze = steps // 7
    return {
        ANCHOR: ("AdamW", {}),
        OUTER: ("AdamW", {}),
        **dict.fromkeys(COMPRESSIONS, ("AdamW", {})),
        "OneBitAdam": ("OneBitAdam", {"freeze_step": freeze}),
        "ZeroOneAdam": (
            "ZeroOneAdam",
            {
                "var_freeze_step": steps // 5,
                "var_update_scaler": max(1, steps // 60),
                "local_step_scaler": max(1, steps // 4),
                "local_step_clipper": 4,
            },
        ),
    }


def get_outer_optimizer(steps: int) -> dict[str, Any]:
    """Return the config of hosts that meet every 25 steps; at this benchmark's rate 0.9 of momentum goes too far."""
    return {"sync_every": min(25, steps // 6), "momentum": 0.5, "quantized_deltas": True}


def get_compression(contestant: str, steps: int) -> dict[str, Any] | None:
    """Return how a contestant's gradients are compressed, which begins as the 1-bit optimisers freeze."""
    section = COMPRESSIONS.get(contestant)
    return None if section is None else {**section, "start_step": steps // 7}


def read_sent_bytes() -> int:
    """Return what this host has sent over its cable so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("cable0:"))
    return int(line.split(":")[1].split()[8])


def work(job: dict[str, Any]) -> None:
    """Train as one rank; rank 0 prints the losses, the seconds and the bytes after each step."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist
    from _text_worker import load_text

    import thalweg
    from thalweg.nn.transformer import GPT, GPTConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world, steps = dist.get_rank(), dist.get_world_size(), job["steps"]
    source = load_text()
    torch.manual_seed(job["seed"])
    num_layers, width = SIZES[job["model"]]
    model = GPT(GPTConfig(vocab_size=256, n_layer=num_layers, n_head=8, n_embd=width, block_size=SEQ_LEN, tied=True))
    name, options = get_contestants(steps)[job["contestant"]]
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "optimizer": {"type": name, "params": {"lr": job["lr"], "betas": [0.9, 0.98], **options}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": steps // 15, "cos_min_ratio": 0.1},
        },
        "zero_optimization": {"stage": job["stage"]},
        "outer_optimizer": get_outer_optimizer(steps) if job["contestant"] == OUTER else None,
        "gradient_compression": get_compression(job["contestant"], steps),
        "log_level": "error",
    }
    engine = thalweg.initialize(model=model, config=config)[0]
    losses, seconds, sent = [], [], []

    def compute_loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * job["seed"] + step)
        starts = torch.randint(0, len(source) - SEQ_LEN - 1, (world * MICRO_BATCH_SIZE,), generator=generator)
        rows = torch.stack([source[i : i + SEQ_LEN + 1] for i in starts[rank::world].tolist()])
        return engine(rows[:, :-1], rows[:, 1:])

    dist.barrier()
    first_bytes, start = read_sent_bytes(), time.perf_counter()
    for step in range(steps):
        loss = compute_loss(step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
        seconds.append(time.perf_counter() - start)
        sent.append(read_sent_bytes() - first_bytes)
    with torch.no_grad():  # on batches that nobody has trained on, of what hosts have in common if they have just met
        losses += [compute_loss(steps + batch) for batch in range(WINDOW)]
    means = torch.stack(losses)
    dist.all_reduce(means)
    if rank == 0:
        numel = sum(p.numel() for p in engine.module.parameters())
        means = (means / world).tolist()
        result = {"losses": means[:steps], "final_loss": sum(means[steps:]) / WINDOW, "seconds": seconds, "sent": sent}
        result["numel"] = numel
        print(json.dumps(result), flush=True)
    engine.close()
    dist.destroy_process_group()


def run_contestant(hosts: NamespaceHosts, job: dict[str, Any], port: int, limit: float) -> dict[str, Any]:
    """Run one contestant on fresh processes and return what rank 0 printed."""
    placements = hosts.placements(1)
    processes = []
    for rank, placement in enumerate(placements):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(placements)), "MASTER_PORT": str(port)}
        command = [*placement.prefix, sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
        environment = {**os.environ, **placement.environment, **ranks, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=limit)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{job['contestant']}: a rank ended with {[p.returncode for p in processes]}")
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return result


def smooth(losses: list[float], step: int) -> float:
    """Return the mean loss of the last steps up to ``step``."""
    window = losses[max(0, step + 1 - WINDOW) : step + 1]
    return sum(window) / len(window)


def summarize(name: str, outcome: dict[str, Any], target: float) -> dict[str, Any]:
    """Return a contestant's line: its last loss, and what it took to come within 1% of ``target``."""
    losses, sent = outcome["losses"], outcome["sent"]
    reached = [step for step in range(WINDOW, len(losses)) if smooth(losses, step) <= 1.01 * target]
    at = reached[0] if reached else None
    tail = len(sent) // 4
    return {
        "contestant": name,
        "steps": len(losses),
        "loss": round(smooth(losses, len(losses) - 1), 4),
        "final_loss": round(outcome["final_loss"], 4),
        "seconds": round(outcome["seconds"][-1], 1),
        "sent_mib": round(sent[-1] / 2**20, 2),
        "step_of_target": at,
        "seconds_to_target": None if at is None else round(outcome["seconds"][at], 1),
        "mib_to_target": None if at is None else round(sent[at] / 2**20, 2),
        "kib_a_step_at_the_end": round((sent[-1] - sent[-1 - tail]) / tail / 1024, 1),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants, one after another, and return the run's JSON object."""
    head = f"GPT {args.model}, 2 hosts, {args.rate}, stage {args.stage}, {args.steps} steps" + (
        "" if args.lr == 1e-3 else f", rate {args.lr:g}"
    )
    head += f", {args.delay} more a round trip" if args.delay else ""
    job = {"model": args.model, "steps": args.steps, "seed": args.seed, "lr": args.lr, "stage": args.stage}
    outcomes = {}
    load = os.getloadavg()[0]
    with NamespaceHosts(None if args.rate == "none" else args.rate, delay=args.delay) as hosts:
        head += f" ({hosts.delayed_by})" if args.delay else ""
        for number, name in enumerate(args.only or get_contestants(args.steps)):
            own = {**job, "contestant": name, "steps": count_steps(name, args.steps)}
            outcomes[name] = run_contestant(hosts, own, 29600 + number, args.limit)
            print(f"slow_network: {name}: {summarize(name, outcomes[name], 0.0)}", file=sys.stderr, flush=True)
    target = smooth(outcomes[ANCHOR]["losses"], args.steps - 1)
    lines = [summarize(name, outcome, target) for name, outcome in outcomes.items()]
    anchor = next(line for line in lines if line["contestant"] == ANCHOR)
    rows: list[Row] = []
    for line in lines:
        if line is anchor:
            continue
        case = f"{head}, {line['contestant']}"
        rows.append(compare(case, ANCHOR, "MiB sent, whole run", line["sent_mib"], anchor["sent_mib"]))
        rows.append(compare(case, ANCHOR, "seconds, whole run", line["seconds"], anchor["seconds"]))
        rows.append(compare(case, ANCHOR, "MiB to Adam's loss + 1%", line["mib_to_target"], anchor["mib_to_target"]))
        both = (line["seconds_to_target"], anchor["seconds_to_target"])
        rows.append(compare(case, ANCHOR, "seconds to Adam's loss + 1%", *both))
        rows.append(compare(case, ANCHOR, "last loss", line["loss"], anchor["loss"]))
        rows.append(compare(case, ANCHOR, "loss after the last step", line["final_loss"], anchor["final_loss"]))
        fp32_kib = 4 * outcomes[ANCHOR]["numel"] / 1024
        rows.append(compare(case, "fp32", "KiB sent a step at the end", line["kib_a_step_at_the_end"], fp32_kib))
    curves = {
        name: [
            [step, round(o["seconds"][step], 2), round(o["sent"][step] / 2**20, 3), round(smooth(o["losses"], step), 4)]
            for step in range(4, len(o["losses"]), 5)
        ]
        for name, o in outcomes.items()
    }
    return make_result("slow_network", rows, run=head, load=load, contestants=lines, curves=curves)


def render(run: dict[str, Any]) -> str:
    """Return one run as Markdown."""
    keys = {"steps": 0, "loss": 4, "final_loss": 4, "seconds": 0, "sent_mib": 1}
    keys |= {"seconds_to_target": 0, "mib_to_target": 1, "kib_a_step_at_the_end": 1}
    lines = [
        [c["contestant"], *(format_cell(c.get(key), digits) for key, digits in keys.items())]
        for c in run["contestants"]
    ]
    headers = [
        "optimizer",
        "steps",
        "last loss",
        "after it",
        "s",
        "MiB sent",
        "s to Adam's loss + 1%",
        "MiB to it",
        "KiB a step at the end",
    ]
    return render_section(run, headers, lines)


def draw(run: dict[str, Any], path: Path) -> None:
    """Draw the losses over steps, seconds and bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
    for axis, column, label in zip(axes, (0, 1, 2), ("step", "seconds", "MiB sent by a host"), strict=True):
        for name, points in run["curves"].items():
            axis.plot([point[column] for point in points], [point[3] for point in points], label=name)
        axis.set_xlabel(label)
        if column:
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"training loss (mean of {WINDOW} steps)")
    axes[0].legend()
    figure.suptitle(run["run"])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print one object or the tables; exit code 2 where hosts cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SIZES), default="10m")
    parser.add_argument("--rate", default="100mbit", help='of the cable: "none", or as tc writes it')
    parser.add_argument("--delay", help='by how much a round trip takes longer: "20ms"')
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one contestant")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"contestants; {ANCHOR} must be among them")
    parser.add_argument("--worker", metavar="JOB", help=argparse.SUPPRESS)
    add_output_options(parser, "slow_network", "a small model, 60 steps, under a minute")
    args = parser.parse_args(argv)
    if args.worker:
        work(json.loads(args.worker))
        return 0
    exit_on_terminate()
    reason = missing_reason()
    if reason:
        print(f"slow_network: {reason}", file=sys.stderr)
        return 2
    if args.quick:
        args.model, args.steps = "1m", 60
    try:
        run = measure(args)
    except NamespaceError as error:
        print(f"slow_network: {error}", file=sys.stderr)
        return 1
    if args.write:
        draw(run, ROOT / "results" / "slow_network.png")
    publish_runs("slow_network", "A slow network", [run], render, write=args.write, as_json=args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
