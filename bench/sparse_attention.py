"""Sparse attention: what blocks save in time and memory, and what they cost in loss.

**speed**: forward and backward of attention alone, over blocks and dense (`scaled_dot_product_attention`), in turns in
one process, by its processor time, which other work on the machine disturbs least; causal layouts against causal dense
attention, the others against the whole square.  What a layout keeps
of dense attention's products bounds what it can save, and stands beside each ratio.

**memory**: one training step of attention in a process of its own, its peak over that of the imports.  Dense attention
as a formula (scores and their softmax in memory, which is what 10 times longer sequences were once claimed
against), dense attention in torch's fused kernel, and blocks.

**quality**: GPTs on spans of 8,192 tokens of the Python standard library's sources, on the same batches for the same
number of steps; held-out loss after the last, dense and sparse through `"sparse_attention"` of the config.

    python bench/sparse_attention.py --part speed --write
    python bench/sparse_attention.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare, make_result, publish_runs, render_section

sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.device import configure_malloc
from thalweg.nn.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from thalweg.nn.sparse_attention.sparse_self_attention import get_attention

NAME, TITLE = "sparse_attention", "Sparse attention"
UNI = "unidirectional"
HEADS, WIDTH = 2, 64
# The defaults of DeepSpeed's configs and tutorial, and the same with coarser blocks or wider windows.
LAYOUTS: dict[str, tuple[SparsityConfig, bool]] = {
    "fixed, block 16, 4 local, 1 global": (FixedSparsityConfig(HEADS), False),
    "fixed, block 64, 16 local, 1 global": (FixedSparsityConfig(HEADS, 64, num_local_blocks=16), False),
    "variable, block 16, windows of 4, 8, 16": (VariableSparsityConfig(HEADS, 16, False, 0, (4, 8, 16)), False),
    "bigbird, block 16": (BigBirdSparsityConfig(HEADS), False),
    "bigbird, block 64": (BigBirdSparsityConfig(HEADS, 64), False),
    "bslongformer, block 16": (BSLongformerSparsityConfig(HEADS), False),
    "bslongformer, block 64": (BSLongformerSparsityConfig(HEADS, 64), False),
    "fixed, block 16, 4 local, 1 global, causal": (FixedSparsityConfig(HEADS, attention=UNI), True),
    "fixed, block 16, 4 local, 2 patterns, causal": (FixedSparsityConfig(HEADS, 16, True, 4, 1, UNI, False, 2), True),
    "fixed, block 64, 16 local, 1 global, causal": (
        FixedSparsityConfig(HEADS, 64, num_local_blocks=16, attention=UNI),
        True,
    ),
    "bigbird, block 64, causal": (BigBirdSparsityConfig(HEADS, 64, attention=UNI), True),
    "bslongformer, block 16, causal": (BSLongformerSparsityConfig(HEADS, attention=UNI), True),
}


def inputs(length: int, heads: int = HEADS) -> list[Tensor]:
    """q, k, v of one sequence as a model makes them: (1, T, H, D), transposed."""
    return [torch.randn(1, length, heads, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3)]


def kept_share(config: SparsityConfig, causal: bool, length: int) -> float:
    """Which part of dense attention's blocks a layout keeps."""
    layout = config.make_layout(length)
    if not causal:
        return float(layout.float().mean())
    return float(layout.tril().sum() / torch.ones_like(layout).tril().sum())


def step_of(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], None]:
    """One forward and backward pass."""
    grad = torch.randn_like(tensors[0])
    return lambda: torch.autograd.backward(attend(*tensors), grad, inputs=tensors)


def measure_speed(args: argparse.Namespace) -> dict[str, Any]:
    """All contestants of a kind take turns, in an order that rotates; ratios are medians over rounds."""
    torch.set_num_threads(args.threads)
    configure_malloc(low_memory=False)  # as an engine does
    rows: list[Row] = []
    for causal in (True, False):
        layouts = {name: config for name, (config, one) in LAYOUTS.items() if one == causal}
        tensors = inputs(args.length)
        steps = {"dense": step_of(partial(F.scaled_dot_product_attention, is_causal=causal), tensors)}
        for name, config in layouts.items():
            attention = get_attention(config, args.length)
            steps[name] = step_of(partial(attention, causal=causal), tensors)
        spent: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(-1, args.rounds):
            names = list(steps)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                begin = time.process_time()
                steps[name]()
                if turn >= 0:
                    spent[name].append(time.process_time() - begin)
                for tensor in tensors:
                    tensor.grad = None
        for name, config in layouts.items():
            ratio = statistics.median(a / b for a, b in zip(spent["dense"], spent[name], strict=True))
            share = kept_share(config, causal, args.length)
            ours, theirs = (1e3 * statistics.median(spent[one]) for one in (name, "dense"))
            case = f"speed, {args.length} tokens, {name}: {share:.1%} kept"
            rows.append(compare(case, "causal SDPA" if causal else "SDPA", "step, CPU ms", ours, theirs, ratio=ratio))
    return {**make_result(NAME, rows), "run": "speed", "threads": args.threads, "rounds": args.rounds}


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as a formula: the scores and their softmax are tensors."""
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return torch.softmax((q @ k.mT / math.sqrt(WIDTH)).masked_fill(mask, -torch.inf), -1) @ v


def peak_mib() -> float:
    """Highest resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_worker(kind: str, length: int) -> None:
    """In a process of its own: the peak of one step over that of the imports, in MiB, on standard output."""
    contestants: dict[str, Callable[..., Tensor]] = {
        "formula": formula,
        "SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    warm = inputs(256)
    before = peak_mib()
    if kind in LAYOUTS:
        attention = get_attention(LAYOUTS[kind][0], length)
        attend = lambda q, k, v: attention(q, k, v, causal=True)
    else:
        attend = contestants[kind]
    step_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), warm)()
    step_of(attend, inputs(length))()
    print(json.dumps(peak_mib() - before))


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak of one step of 4 heads: blocks over 10 times the tokens against the formula; fused dense attention too."""
    ours = "bslongformer, block 16, causal"

    def peak(kind: str, length: int) -> float:
        command = [sys.executable, __file__, "--worker", kind, "--length", str(length)]
        return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    rows = []
    long, short = 10 * args.short, args.short
    blocks = peak(ours, long)
    for kind, length in (("formula", short), ("SDPA", short), ("SDPA", long)):
        case = f"memory, {ours}, {long} tokens against {length}"
        rows.append(compare(case, f"dense, {kind}", "peak of a step, MiB", blocks, peak(kind, length)))
    return {**make_result(NAME, rows), "run": "memory"}


# Quality

VOCABULARY, LENGTH = 1024, 8192
QUALITY = {
    "dense": None,
    "bslongformer, block 64": {"mode": "bslongformer", "block": 64, "num_sliding_window_blocks": 7, "attention": UNI},
}


def train(section: dict[str, Any] | None, args: argparse.Namespace, text: np.ndarray, held_out: np.ndarray) -> Any:
    """Held-out loss in nats a token and seconds of the clock, after so many steps."""
    import thalweg
    from thalweg.nn.transformer import GPT, GPTConfig

    def sample(tokens: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
        start = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1)
        row = torch.from_numpy(tokens[start : start + LENGTH + 1].astype(np.int64))[None]
        return row[:, :-1], row[:, 1:]

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=64, block_size=LENGTH))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": args.steps // 10, "total_num_steps": args.steps},
        },
        **({} if section is None else {"sparse_attention": section}),
    }
    engine, *_ = thalweg.initialize(model=model, config=config)
    begin = time.perf_counter()
    for step in range(args.steps):
        engine.backward(engine(*sample(text, step)))
        engine.step()
    seconds = time.perf_counter() - begin
    engine.eval()
    with torch.no_grad():
        loss = sum(float(engine(*sample(held_out, 10_000 + i))) for i in range(8)) / 8
    engine.close()
    return loss, seconds


def measure_quality(args: argparse.Namespace) -> dict[str, Any]:
    """Dense and sparse GPTs on the same text."""
    from thalweg.cli.demo.corpus import prepare_corpus

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as folder:
        prepare_corpus(Path(folder), VOCABULARY, lambda line: None)
        text, held_out = np.load(Path(folder) / "tokens.npy"), np.load(Path(folder) / "held_out.npy")
    found = {}
    for name, section in QUALITY.items():
        found[name] = train(section, args, text, held_out)
        print(name, *found[name], file=sys.stderr, flush=True)
    rows = []
    for name, (loss, seconds) in found.items():
        if name != "dense":
            case = f"quality, {name}, {args.steps} steps of {LENGTH} tokens"
            rows.append(compare(case, "dense", "held-out loss, nats", loss, found["dense"][0]))
            rows.append(compare(case, "dense", "training, s", seconds, found["dense"][1]))
    return {**make_result(NAME, rows), "run": "quality", "threads": args.threads}


def render(run: dict[str, Any]) -> str:
    """One part as Markdown."""
    facts = [[key, str(run[key])] for key in ("threads", "rounds") if key in run]
    return render_section(run, ["fact", "value"], facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "memory", "quality"), action="append")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--short", type=int, default=4096, help="tokens of the formula in the memory part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2,048 tokens, 2 rounds, no quality")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/sparse_attention.{md,json}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        memory_worker(args.worker, args.length)
        return
    if args.quick:
        args.length, args.short, args.rounds = 2048, 1024, 2
    parts = args.part or (["speed", "memory"] if args.quick else ["speed", "memory", "quality"])
    measures = {"speed": measure_speed, "memory": measure_memory, "quality": measure_quality}
    publish_runs(NAME, TITLE, [measures[one](args) for one in parts], render, write=args.write, as_json=args.json)


if __name__ == "__main__":
    main()
