"""What fewer bits of optimiser state, and delayed updates, cost and save: on real text, against fp32 state.

A small GPT is trained on the sources of the Python standard library, byte-pair tokens, 300 steps, the same
batches for every case; what is compared is the loss on held-out text after the last step, bytes of state for
a parameter, and process CPU time of a step of the optimiser.  ``bf16, to nearest`` is the negative control of
stochastic rounding; ``a tenth alone`` (the rest never updated) that of the delayed update.

    python bench/optimizer_state.py --write
    python bench/optimizer_state.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare, format_machine, make_result, rows_table, write_result

sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor

from thalweg.cli.demo.corpus import prepare_corpus
from thalweg.config.schema.zero import ZenFlow
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.optim.algorithms import moment_codec
from thalweg.optim.algorithms.zenflow import ZenFlowAdam
from thalweg.optim.build import build_optimizer

LENGTH, BATCH, VOCABULARY = 128, 8, 2048
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def nearest(values: Tensor, bf16: Tensor, noise: Tensor) -> None:
    """What stochastic rounding is compared with."""
    bf16.copy_(values)


def adam(kind: str, **extra: Any) -> Make:
    """AdamW with state of that dtype."""
    return lambda params: build_optimizer("AdamW", params, {"lr": 1e-3, "state_dtype": kind, **extra})


def lion(kind: str) -> Make:
    """Lion with state of that dtype."""
    return lambda params: build_optimizer("Lion", params, {"lr": 2e-4, "state_dtype": kind})


def delayed(**policy: Any) -> Make:
    """AdamW whose less important columns wait."""
    return lambda params: ZenFlowAdam(params, lr=1e-3, policy=ZenFlow(**policy))


CASES: dict[str, tuple[str, Make]] = {
    "AdamW, fp32": ("AdamW, fp32", adam("fp32")),
    "AdamW, bf16": ("AdamW, fp32", adam("bf16")),
    "AdamW, bf16, to nearest": ("AdamW, fp32", adam("bf16")),
    "AdamW, int8": ("AdamW, fp32", adam("int8")),
    "Lion, fp32": ("Lion, fp32", lion("fp32")),
    "Lion, bf16": ("Lion, fp32", lion("bf16")),
    "Lion, int8": ("Lion, fp32", lion("int8")),
    "delayed, a tenth at once, every 4": ("AdamW, fp32", delayed(topk_ratio=0.1, update_interval=4)),
    "delayed, overlapped": ("AdamW, fp32", delayed(topk_ratio=0.1, update_interval=4, overlap_step=True)),
    "delayed, adaptive": ("AdamW, fp32", delayed(topk_ratio=0.1, update_interval="auto")),
    "a tenth alone": (
        "AdamW, fp32",
        delayed(topk_ratio=0.1, update_interval=10**9, select_interval=10**9),
    ),
}


def corpus(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on and held out."""
    prepare_corpus(folder, VOCABULARY, lambda line: None)
    return np.load(folder / "tokens.npy"), np.load(folder / "held_out.npy")


def batch(tokens: np.ndarray, seed: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Rows of text and the tokens that follow."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1, size)
    rows = torch.from_numpy(np.stack([tokens[s : s + LENGTH + 1] for s in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def run(make: Make, steps: int, train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Loss on held-out text, bytes of state for a parameter, CPU milliseconds of an optimiser step."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=128, block_size=LENGTH))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(params)
    rates = [group["lr"] for group in optimizer.param_groups]
    spent = []
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        model(*batch(train, step)).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        start = time.process_time()
        optimizer.step()
        spent.append(time.process_time() - start)
    state = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
    with torch.no_grad():
        loss = sum(float(model(*batch(held_out, 10_000 + i, 16))) for i in range(8)) / 8
    return {
        "loss": loss,
        "bytes": sum(v.numel() * v.element_size() for v in state) / sum(p.numel() for p in params),
        "step_ms": 1e3 * sorted(spent)[len(spent) // 2],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the cases and compare each with fp32 state."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as folder:
        train, held_out = corpus(Path(folder))
        for case, (_, make) in CASES.items():
            if args.quick and case not in ("AdamW, fp32", "AdamW, bf16", "AdamW, int8"):
                continue
            stochastic = moment_codec.stochastic_round_into
            if case.endswith("to nearest"):
                moment_codec.stochastic_round_into = nearest
            try:
                found[case] = run(make, args.steps, train, held_out)
            finally:
                moment_codec.stochastic_round_into = stochastic
    rows: list[Row] = []
    for case, values in found.items():
        base = CASES[case][0]
        if case == base:
            continue
        for key, metric in (
            ("loss", "held-out loss, nats"),
            ("bytes", "bytes of state for a parameter"),
            ("step_ms", "optimiser step, CPU ms"),
        ):
            rows.append(compare(case, base, metric, values[key], found[base][key]))
    distances = {
        case: (values["loss"] / found[CASES[case][0]]["loss"] - 1) * 100
        for case, values in found.items()
        if case != CASES[case][0]
    }
    return make_result("optimizer_state", rows, steps=args.steps, distance_percent=distances)


def render(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    return "\n".join(
        [
            "# Optimiser state in fewer bits, and delayed updates",
            "",
            f"{data['date']}, commit {data['commit']}, {format_machine(data['machine'])}.",
            "",
            f"GPT 2 x 128, vocabulary {VOCABULARY}, sequence {LENGTH}, batch {BATCH}, {data['steps']} steps "
            "on the sources of the Python standard library; one thread.",
            "",
            rows_table(data["rows"]),
            "",
            "Held-out loss against fp32 state: "
            + "; ".join(f"{case} {value:+.2f}%" for case, value in data["distance_percent"].items())
            + ".",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="30 steps of three cases: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/optimizer_state.md and .json")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps = 30
    torch.set_num_threads(1)
    data = measure(args)
    if args.write:
        write_result("optimizer_state", data, render(data))
    print(json.dumps(data) if args.json else render(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
