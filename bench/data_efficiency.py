"""Curriculum learning and random-LTD against training on everything: the loss they reach, and for how much less.

GPTs of one size learn the bytes of the Python standard library's sources, by the same optimizer and schedule of the
learning rate, from the same samples in the same order, with several seeds.  What differs:

    full               every token of every sequence in every layer
    full, 60%          the same with 60% of the steps: what the budget alone comes to
    curriculum         sequences cut short at first (`curriculum_learning`, fixed_linear), as many steps
    curriculum, 1.5 x  shorter for longer (fixed_root, a degree of 1/2), and half as many steps again
    random-LTD         the layers between first and last see some of the tokens (`random_ltd`), as many steps
    both               the two together

Held-out loss after the last step is over whole sequences through whole models.  Tokens are those that a layer sees,
summed over layers, so both ways to save are counted alike; time is of the processor (one thread), which the load of
the machine changes little.  A run gains where its loss is at most that of full training, for at most 60% of its tokens
or time.

With ``--positions rotary`` the models are of Llama's kind, in which a position that comes late has nothing of its own
to learn; curricula alone then, as a table of its own.

    python bench/data_efficiency.py --write
    python bench/data_efficiency.py --positions rotary --write
    python bench/data_efficiency.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from _peers import ROOT
from _report import Row, compare, format_machine, make_result, markdown_table, rows_table, write_result

sys.path.insert(0, str(ROOT))

import numpy as np
import torch

import thalweg
from bench._llama import Llama
from thalweg.data.corpus import split_held_out, stdlib_documents
from thalweg.data.packing import PackedDataset, concatenate_sequences
from thalweg.nn.transformer import GPT, GPTConfig

T, LAYERS = 128, 6
BUDGET = 0.6


def read_text() -> tuple[PackedDataset, PackedDataset]:
    """Bytes in blocks of T: training and held-out."""
    blocks = []
    for documents in split_held_out(stdlib_documents(tests=False), 40):
        stream, _ = concatenate_sequences([list(document.text.encode()) for document in documents], end_id=0)
        blocks.append(PackedDataset(stream, T, tail="drop"))
    return blocks[0], blocks[1]


def features(steps: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """The steps of each way, and its config."""
    longer = 3 * steps // 2

    def curriculum(low: int, kind: str, **pace: Any) -> dict[str, Any]:
        bounds = {"min_difficulty": low, "max_difficulty": T}
        schedule = {"schedule_type": kind, "schedule_config": {"difficulty_step": 8, **pace}}
        return {"curriculum_learning": {"enabled": True, **bounds, **schedule}}

    as_long = curriculum(16, "fixed_linear", total_curriculum_step=int(0.95 * steps))

    def routing(low: int, high: int) -> dict[str, Any]:
        schedule = {"min_value": low, "max_value": high, "schedule_config": {"require_steps": steps, "seq_per_step": 8}}
        ltd = {"enabled": True, "random_ltd_layer_id": list(range(1, LAYERS - 1)), "random_ltd_schedule": schedule}
        return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}}

    return {
        "full": (steps, {}),
        "full, 60%": (int(BUDGET * steps), {}),
        "curriculum": (steps, as_long),
        "curriculum, 1.5 x": (longer, curriculum(8, "fixed_root", total_curriculum_step=longer, root_degree=0.5)),
        "random-LTD": (steps, routing(16, 88)),
        "both": (steps, {**as_long, **routing(64, T)}),
    }


def build_model(positions: str) -> Any:
    """A decoder of 6 x 64 over bytes, with learned or rotary positions."""
    if positions == "rotary":
        return Llama(layers=LAYERS, heads=4, kv_heads=4, width=64, hidden=172, vocabulary=256)
    return GPT(GPTConfig(vocab_size=256, n_layer=LAYERS, n_head=4, n_embd=64, block_size=T))


def train(
    case: str,
    seed: int,
    steps: int,
    batch_size: int,
    lr: float,
    text: tuple[PackedDataset, PackedDataset],
    positions: str = "learned",
) -> dict[str, Any]:
    """One run: its tokens, seconds and held-out loss."""
    steps, own = features(steps)[case]
    torch.manual_seed(seed)
    model = build_model(positions)
    num_seen = 0

    def count(module: torch.nn.Module, args: Any) -> None:
        nonlocal num_seen
        num_seen += args[0].shape[0] * args[0].shape[1]

    for block in model.blocks:
        block.attention.register_forward_pre_hook(count)
    schedule = {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 20), "cos_min_ratio": 0.05}
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "gradient_clipping": 1.0,
        "seed": seed,
        "log_level": "error",
    }
    training, held_out = text
    engine = thalweg.initialize(model=model, config={**config, **own}, training_data=training)[0]
    batches = iter(engine.training_dataloader)
    start = time.process_time()
    for _ in range(steps):
        batch = next(batches)
        engine.backward(engine(batch["input_ids"], batch["labels"]))
        engine.step()
    seconds, tokens = time.process_time() - start, num_seen
    engine.eval()
    chosen = np.linspace(0, len(held_out) - 1, 256).astype(int)
    rows = [held_out[int(index)] for index in chosen]
    with torch.no_grad():
        losses = [
            float(engine(*(torch.stack([row[name] for row in rows[i : i + 32]]) for name in ("input_ids", "labels"))))
            for i in range(0, 256, 32)
        ]
    engine.close()
    found = {"seconds": round(seconds, 2), "loss": round(statistics.fmean(losses), 4)}
    return {"case": case, "seed": seed, "steps": steps, "tokens": tokens, **found}


def rows_of(runs: list[dict[str, Any]]) -> list[Row]:
    """Each run against full training of its seed."""
    rows: list[Row] = []
    full = {run["seed"]: run for run in runs if run["case"] == "full"}
    for run in runs:
        if run["case"] != "full" and run["seed"] in full:
            whole, case = full[run["seed"]], f"{run['case']}, seed {run['seed']}"
            rows.append(compare(case, "full", "held-out loss", run["loss"], whole["loss"]))
            rows.append(compare(case, "full", "layer tokens, M", run["tokens"] / 1e6, whole["tokens"] / 1e6))
            rows.append(compare(case, "full", "CPU s", run["seconds"], whole["seconds"]))
    return rows


def render(data: dict[str, Any]) -> str:
    """The table of runs, and of their comparison."""
    runs = data["runs"]
    full = {run["seed"]: run for run in runs if run["case"] == "full"}
    cells = []
    for run in runs:
        whole = full[run["seed"]]
        shares = [run[key] / whole[key] for key in ("tokens", "seconds")]
        gained = run["loss"] <= whole["loss"] and min(shares) <= BUDGET
        verdict = "" if run["case"].startswith("full") else "yes" if gained else "no"
        cells.append(
            [run["case"], run["seed"], run["steps"], f"{run['loss']:.4f}", f"{run['loss'] - whole['loss']:+.4f}",
             *(f"{share:.0%}" for share in shares), verdict]
        )  # fmt: skip
    head = ["run", "seed", "steps", "held-out loss", "against full", "layer tokens", "CPU time", "gained"]
    lines = [
        "# Data efficiency",
        f"{format_machine(data['machine'])}",
        f"{data['date']}, commit {data['commit']}.",
        f"{data.get('model', 'GPT')} {LAYERS} x 64 on bytes of the standard library, {data['batch']} sequences of {T} "
        f"a step, AdamW, {data['lr']:g}, "
        "one thread, beside other work. A run gained where its loss is at most that of full training of its seed, for "
        "at most 60% of its tokens or time.",
        markdown_table(head, cells),
        rows_table(data["rows"]),
    ]
    return "\n\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences a step (8)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--cases", nargs="+", default=list(features(1)), help="full training is always among them")
    parser.add_argument("--positions", choices=("learned", "rotary"), default="learned")
    parser.add_argument("--quick", action="store_true", help="few steps and one seed, under a minute; not written")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/data_efficiency.*, after each run")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.seeds, args.write = 20, 1, False
    name, kind = "data_efficiency", "GPT"
    if args.positions == "rotary":
        name, kind = "data_efficiency_rotary", "Llama"
        args.cases = [case for case in args.cases if case.startswith(("full", "curriculum"))]
    torch.set_num_threads(1)
    text, runs, data = read_text(), [], {}
    for seed in range(args.seeds):
        for case in dict.fromkeys(["full", *args.cases]):
            runs.append(train(case, seed, args.steps, args.batch, args.lr, text, args.positions))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            data = make_result(name, rows_of(runs), runs=runs, batch=args.batch, lr=args.lr, model=kind)
            if args.write:
                write_result(name, data, render(data))
    print(json.dumps(data) if args.json else render(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
