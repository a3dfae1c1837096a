"""Experts against dense layers: what a step costs, and what it is worth.

**cost**: two models on one rank of Thalweg, alike but for the feed-forward layers: in one of them 8 experts
of the dense layer's size stand in each place, of which each token is sent to one.  So the parameters at work
for a token are the same.  The models take turns, step by step; the ratios are medians over turns.  What
experts cost beside the same products: the gate, sorting tokens and putting them back, narrower products,
and the optimiser's update of eight times the feed-forward parameters, which more tokens a step spread
thinner; hence several numbers of tokens.

**quality**: models trained on the sources of the Python standard library (byte-pair tokens) on the same
batches for the same number of steps; held-out loss after the last.  The dense models grow in width, so
that one can read off the size and the arithmetic of the dense model that reaches the experts' loss.  Losses
do not depend on the load of the machine.  With --write each trained model is kept at once, and a second call
goes on from there.

    python bench/moe.py --only cost --write
    python bench/moe.py --only quality --write
    python bench/moe.py --quick --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare, format_machine, make_result, markdown_table, rows_table, write_result

sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor, nn

import thalweg
from thalweg.cli.demo.corpus import prepare_corpus
from thalweg.moe import MoE
from thalweg.nn.transformer import GPT, GPTConfig

BALANCE = 0.01
GOAL = 1.3


@dataclass(frozen=True)
class Layer:
    """Experts in a feed-forward layer's place: ``k`` of ``experts`` a token, each ``inner`` times as wide
    inside as the model, and a shared one of ``shared`` times."""

    experts: int
    k: int = 1
    inner: int = 4
    shared: int = 0


class Sparse(nn.Module):
    """A layer of experts in the place of a block's feed-forward layer; its balance loss is kept."""

    def __init__(self, config: GPTConfig, layer: Layer) -> None:
        super().__init__()
        width = config.n_embd

        def mlp(inner: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(width, inner * width), nn.GELU(approximate="tanh"), nn.Linear(inner * width, width)
            )

        self.layer = MoE(
            width,
            mlp(layer.inner),
            layer.experts,
            k=layer.k,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
            shared_expert=mlp(layer.shared) if layer.shared else None,
        )
        for name, parameter in self.layer.named_parameters():
            name = name.rpartition("stack.")[2].rpartition("shared.")[2]
            std = 0.02 / (2 * config.n_layer) ** 0.5 if name.startswith("2") else 0.02
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.zeros_(parameter)
        nn.init.normal_(self.layer.gate.weight, std=0.02)
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.balance, _ = self.layer(x)
        return y


class Model(nn.Module):
    """The reference GPT, dense or with experts; returns the loss to minimise."""

    _no_split_modules = ("Block",)

    def __init__(self, config: GPTConfig, layer: Layer | None = None) -> None:
        super().__init__()
        self.gpt = GPT(config)
        self.sparse: list[Sparse] = []
        if layer is not None:
            for block in self.gpt.blocks:
                self.sparse.append(Sparse(config, layer))
                block.mlp = self.sparse[-1]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = self.gpt(tokens, labels)
        if not self.training:
            return loss
        return loss + BALANCE * sum(layer.balance for layer in self.sparse if layer.balance is not None)


def engine_for(model: nn.Module, rows: int, lr: float = 1e-3) -> Any:
    """Thalweg on one rank."""
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
        "log_level": "error",
    }
    return thalweg.initialize(model=model, config=config)[0]


def active_parameters(model: Model, k: int = 1) -> int:
    """Parameters at work for a token."""
    total = sum(p.numel() for p in model.parameters())
    for layer in model.sparse:
        stack = sum(p.numel() for p in layer.layer.experts.parameters())
        total -= stack - k * stack // layer.layer.num_experts
    return total


# Cost


@dataclass
class Turns:
    """Seconds on the clock and of CPU, one entry a turn."""

    clock: list[float]
    cpu: list[float]


def cost(config: GPTConfig, tokens: int, experts: int, k: int, turns: int) -> dict[str, Turns]:
    """Let the dense model and the one with experts take turns."""
    rows = tokens // config.block_size
    torch.manual_seed(0)
    engines = {
        "dense": engine_for(Model(config), rows),
        "experts": engine_for(Model(config, Layer(experts, k)), rows),
    }
    found = {name: Turns([], []) for name in engines}
    generator = torch.Generator().manual_seed(1)
    for turn in range(-2, turns):
        batch = torch.randint(0, config.vocab_size, (rows, config.block_size + 1), generator=generator)
        for name, engine in engines.items():
            clock, cpu = time.perf_counter(), time.process_time()
            loss = engine(batch[:, :-1], batch[:, 1:])
            engine.backward(loss)
            engine.step()
            if turn >= 0:
                found[name].clock.append(time.perf_counter() - clock)
                found[name].cpu.append(time.process_time() - cpu)
    for engine in engines.values():
        engine.close()
    return found


def cost_rows(args: argparse.Namespace) -> list[Row]:
    """Compare experts with the dense model for each number of tokens; ratio = dense / experts."""
    rows = []
    for shape, width, layers in (("4 x 256", 256, 4), ("2 x 512", 512, 2)):
        for tokens in args.tokens:
            config = GPTConfig(vocab_size=8192, n_layer=layers, n_head=4, n_embd=width, block_size=256)
            found = cost(config, tokens, args.experts, 1, args.turns)
            case = f"cost, {shape}, {args.experts} experts, top 1, {tokens} tokens a step"
            for metric, key in (("step, ms", "clock"), ("step, CPU ms", "cpu")):
                dense, sparse = getattr(found["dense"], key), getattr(found["experts"], key)
                ratio = statistics.median(a / b for a, b in zip(dense, sparse, strict=True))
                medians = statistics.median(sparse) * 1e3, statistics.median(dense) * 1e3
                rows.append(compare(case, "dense", metric, *medians, ratio=ratio))
        if args.quick:
            break
    return rows


# Quality


@dataclass(frozen=True)
class Contestant:
    """A model of the quality table."""

    name: str
    width: int
    layer: Layer | None = None


BASE = Contestant("dense, 64", 64)
CONTESTANTS = (
    BASE,
    Contestant("shared and 2 of 16, 64", 64, Layer(16, 2, 1, 2)),
    Contestant("dense, 96", 96),
    Contestant("dense, 80", 80),
    Contestant("shared and 2 of 64, 64", 64, Layer(64, 2, 1, 2)),
    Contestant("dense, 128", 128),
    Contestant("2 of 8 of half size, 64", 64, Layer(8, 2, 2)),
    Contestant("1 of 8, 64", 64, Layer(8)),
)
LAYERS, LENGTH, ROWS, VOCABULARY = 2, 128, 8, 1024


def sample(tokens: np.ndarray, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows of text and the tokens that follow."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1, size)
    rows = torch.from_numpy(np.stack([tokens[s : s + LENGTH + 1] for s in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def train(who: Contestant, run: dict[str, Any], text: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    """Train one contestant as ``run`` (steps, rate, seed) says; its held-out loss and arithmetic."""
    torch.manual_seed(run["seed"])
    config = GPTConfig(vocab_size=VOCABULARY, n_layer=LAYERS, n_head=4, n_embd=who.width, block_size=LENGTH, tied=True)
    model = Model(config, who.layer)
    k = 1 if who.layer is None else who.layer.k
    total, active = sum(p.numel() for p in model.parameters()), active_parameters(model, k)
    engine = engine_for(model, ROWS, run["rate"])
    begin = time.process_time()
    for step in range(run["steps"]):
        share = min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / run["steps"]))
        for group in engine.optimizer.param_groups:
            group["lr"] = run["rate"] * share
        engine.backward(engine(*sample(text, 1_000_000 * run["seed"] + step, ROWS)))
        engine.step()
    seconds = time.process_time() - begin
    engine.eval()
    with torch.no_grad():
        loss = sum(float(engine(*sample(held_out, 10_000 + i, 32))) for i in range(16)) / 16
    engine.close()
    # The embedding is looked up, not multiplied; its weight works once, as the head.
    flops = 6 * active + 6 * config.n_layer * LENGTH * who.width
    return {**run, "loss": loss, "total": total, "active": active, "flops": flops, "cpu_seconds": seconds}


def quality(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Train every contestant on the same batches, seed by seed; all runs so far after each, ``done`` first.

    A run that is done is not repeated.
    """
    chosen = CONTESTANTS[:2] if args.quick else CONTESTANTS
    wanted = [
        (who, {"name": who.name, "steps": args.steps, "rate": rate, "seed": seed})
        for seed in range(args.seeds)
        for who in chosen
        for rate in args.rates
    ]
    runs = [one for one in done if any(run.items() <= one.items() for _, run in wanted)]
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as folder:
        prepare_corpus(Path(folder), VOCABULARY, lambda line: None)
        text, held_out = np.load(Path(folder) / "tokens.npy"), np.load(Path(folder) / "held_out.npy")
        yield runs
        for who, run in wanted:
            if not any(run.items() <= one.items() for one in runs):
                runs.append(train(who, run, text, held_out))
                yield runs


def best(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By contestant: of each seed the best of the rates, and the mean of the seeds' losses."""
    found: dict[str, dict[str, Any]] = {}
    for who in CONTESTANTS:
        by_seed: dict[int, dict[str, Any]] = {}
        for run in (one for one in runs if one["name"] == who.name):
            by_seed[run["seed"]] = min(run, by_seed.get(run["seed"], run), key=lambda one: one["loss"])
        if by_seed:
            losses = [one["loss"] for one in by_seed.values()]
            found[who.name] = {**by_seed[min(by_seed)], "loss": statistics.mean(losses), "losses": losses}
    return found


def dense_flops_for(loss: float, found: dict[str, dict[str, Any]]) -> float | None:
    """Arithmetic a token of the dense model that would reach ``loss``: between neighbours, by logarithms."""
    dense = sorted((r["flops"], r["loss"]) for name, r in found.items() if name.startswith("dense"))
    for (low, worse), (high, better) in itertools.pairwise(dense):
        if better <= loss <= worse:
            share = (worse - loss) / (worse - better)
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return None


def quality_rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    """Experts against the dense model of the same arithmetic, and of the same loss."""
    rows: list[Row] = []
    if BASE.name not in found:
        return rows
    for name, result in found.items():
        if name.startswith("dense"):
            continue
        case = f"quality, {name}"
        loss = found[BASE.name]["loss"]
        rows.append(compare(case, BASE.name, "held-out loss, nats", result["loss"], loss))
        flops = dense_flops_for(result["loss"], found)
        note = "" if flops else "no dense model of the table reaches this loss"
        peer = "dense model of that loss"
        rows.append(compare(case, peer, "MFLOP a token", result["flops"] / 1e6, flops and flops / 1e6, note=note))
    return rows


# Report


def render(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = ["# Mixture of experts", "", f"{format_machine(data['machine'])}."]
    for part, facts in data["parts"].items():
        lines += ["", f"{part.capitalize()}: {facts['date']}, commit {facts['commit']}."]
    lines += [
        "",
        "Cost: ratio = dense / experts, medians over turns; the goal is a step of at most "
        f"{GOAL} times the dense one's, a ratio of {1 / GOAL:.2f}. AdamW, clipping, fp32, 1 thread.",
        "",
        rows_table(data["rows"]),
    ]
    if data["quality"]:
        cells = [
            [
                name,
                f"{r['total'] / 1e6:.2f}",
                f"{r['active'] / 1e6:.2f}",
                f"{r['flops'] / 1e6:.2f}",
                f"{r['rate']:g}",
                f"{r['cpu_seconds']:.0f}",
                ", ".join(f"{loss:.4f}" for loss in r["losses"]),
                f"{r['loss']:.4f}",
            ]
            for name, r in best(data["quality"]).items()
        ]
        head = ["model", "M parameters", "M at work", "MFLOP a token", "rate", "CPU s", "of each seed"]
        lines += [
            "",
            f"Quality: GPT of {LAYERS} layers, vocabulary {VOCABULARY}, {data['quality'][0]['steps']} steps "
            f"of {ROWS} x {LENGTH} tokens of the standard library's sources; held-out loss in nats a token, "
            "the mean of the seeds.",
            "",
            markdown_table([*head, "held-out loss"], cells),
        ]
    return "\n".join(lines)


def collect(part: str, rows: list[Row], quality: list[dict[str, Any]] | None, write: bool) -> dict[str, Any]:
    """The result with ``part`` measured anew; what results/moe.json has of the other one stays."""
    path = ROOT / "results" / "moe.json"
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() and write else {}
    data = make_result("moe", rows)
    kept = [row for row in old.get("rows", []) if not row["case"].startswith(f"{part},")]
    data["rows"] = sorted([*kept, *data["rows"]], key=lambda row: row["case"].split(",")[0])
    own = {"date": data.pop("date"), "commit": data.pop("commit")}
    data["parts"] = dict(sorted({**old.get("parts", {}), part: own}.items()))
    data["quality"] = old.get("quality", []) if quality is None else quality
    if write:
        write_result("moe", data, render(data))
    return data


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cost", "quality"), help="one of the two parts")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, steps and models, under a minute; not written"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write results/moe.md and .json, after each model that is trained",
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.turns, args.steps, args.seeds, args.write = [1024], 3, 100, 1, False
    torch.set_num_threads(args.threads)
    path = ROOT / "results" / "moe.json"
    done = json.loads(path.read_text()).get("quality") or [] if path.exists() and args.write else []
    data: dict[str, Any] = {}
    rows: list[Row] = []
    if args.only != "quality":
        rows = cost_rows(args)
        data = collect("cost", rows, None, args.write)
    if args.only != "cost":
        for runs in quality(args, done):
            data = collect("quality", [*([] if args.write else rows), *quality_rows(best(runs))], runs, args.write)
    print(json.dumps(data) if args.json else render(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
