"""Progressive layer drop: processor time for the same samples, and the loss that they lead to.

Two GPTs of 12 layers on the same batches of the Python standard library's sources, one of them with
`"progressive_layer_drop"`; they train one after the other in pieces, in turns.  Time is the processor's; the loss is
held-out text's, all layers at work.  Each trains at several rates, as the paper gives dropped layers a larger one
(arXiv 2010.13369, section 5), and the best of each are compared; the seconds are those of all rates together.

    python bench/layer_drop.py --write
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import add_output_options, compare, make_result, publish_runs, render_section

sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor

import thalweg
from thalweg.cli.demo.corpus import prepare_corpus
from thalweg.nn.transformer import GPT, GPTConfig

NAME, TITLE = "layer_drop", "Progressive layer drop"
VOCABULARY, LENGTH, ROWS, LAYERS, PIECE = 1024, 128, 8, 12, 25
DROP = {"enabled": True, "theta": 0.4, "gamma": 0.1}


def sample(tokens: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of text and the tokens that follow."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1, ROWS)
    rows = torch.from_numpy(np.stack([tokens[s : s + LENGTH + 1] for s in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def build(drop: bool, steps: int, rate: float) -> Any:
    """An engine of the one or the other."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, n_layer=LAYERS, n_head=4, n_embd=96, block_size=LENGTH))
    schedule = {"warmup_num_steps": steps // 10, "total_num_steps": steps}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        **({"progressive_layer_drop": DROP} if drop else {}),
        "log_level": "error",
    }
    return thalweg.initialize(model=model, config=config)[0]


def measure(steps: int, rates: list[float]) -> dict[str, Any]:
    """All runs, in turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as folder:
        prepare_corpus(Path(folder), VOCABULARY, lambda line: None)
        text, held_out = np.load(Path(folder) / "tokens.npy"), np.load(Path(folder) / "held_out.npy")
    names = ("all layers", "dropped")
    engines = {(name, rate): build(name == "dropped", steps, rate) for rate in rates for name in names}
    seconds = dict.fromkeys(names, 0.0)
    for start in range(0, steps, PIECE):
        for (name, _), engine in engines.items():
            begin = time.process_time()
            for step in range(start, min(start + PIECE, steps)):
                engine.backward(engine(*sample(text, step)))
                engine.step()
            seconds[name] += time.process_time() - begin
    losses = {}
    for key, engine in engines.items():
        engine.eval()
        with torch.no_grad():
            losses[key] = sum(float(engine(*sample(held_out, 10_000 + i))) for i in range(40)) / 40
        engine.close()
    best = {name: min(losses[name, rate] for rate in rates) for name in names}
    case = f"layer drop, {LAYERS} x 96, {steps} steps of {ROWS * LENGTH} tokens, theta 0.4, gamma 0.1"
    rows = [
        compare(case, "all layers", "CPU s", seconds["dropped"], seconds["all layers"]),
        compare(case, "all layers", "held-out loss, nats", best["dropped"], best["all layers"]),
    ]
    table = [[f"{rate:g}", *(f"{losses[name, rate]:.4f}" for name in names)] for rate in rates]
    return {**make_result(NAME, rows), "run": "layer drop", "steps": steps, "table": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    add_output_options(parser, NAME, "20 steps")
    args = parser.parse_args()
    run = measure(20 if args.quick else args.steps, args.rates)
    publish_runs(
        NAME,
        TITLE,
        [run],
        lambda one: render_section(one, ["rate", "all layers", "dropped"], one["table"]),
        write=args.write,
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
