"""Perplexity of quantised weights and caches, on real text, of a model that is trained here.

A byte-level Llama learns the standard library's sources for a few minutes; pieces of modules that it has not
seen are then scored by the engine, in each form of weights and of the KV cache.  The first row is Hugging
Face's own fp32; the negative control has weights of three values.

    python bench/quality.py --write
    python bench/quality.py --quick --json
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare, format_machine, make_result, rows_table, write_result

sys.path.insert(0, str(ROOT))

import torch

from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

FORMS: dict[str, tuple[dict[str, Any], float]] = {
    # what, and how much more perplexity the goal allows
    "bf16": ({"dtype": "bf16"}, 0.005),
    "int8": ({"quantize": "int8"}, 0.005),
    "int4": ({"quantize": "int4"}, 0.03),
    "fp32, cache int8": ({"dtype": "fp32", "kv_cache_dtype": "int8"}, 0.005),
    "int8, cache int8": ({"quantize": "int8", "kv_cache_dtype": "int8"}, 0.005),
    "int4, cache int8": ({"quantize": "int4", "kv_cache_dtype": "int8"}, 0.03),
}
LENGTH = 256


def text(limit: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Return bytes to learn from, and pieces of every twentieth module, which are not among them."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    learn, held = bytearray(), []
    for number, file in enumerate(files):
        data = bytes(b if b < 128 else 63 for b in file.read_bytes())
        if number % 20 == 0:
            held += [list(data[at : at + LENGTH]) for at in range(0, len(data) - LENGTH, 4 * LENGTH)]
        else:
            learn += data
    return torch.tensor(list(learn[:limit]), dtype=torch.int64), held


def train(args: argparse.Namespace, data: torch.Tensor) -> Any:
    """Train a model and return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": args.width, "intermediate_size": 5 * args.width // 2 // 16 * 16,
        "num_hidden_layers": args.layers, "num_attention_heads": args.width // 32,
        "max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**fields))
    rate = 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    end = time.monotonic() + args.seconds
    for step in range(args.steps):
        left = min(1 - step / args.steps, max(end - time.monotonic(), 0) / args.seconds)
        if left <= 0:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(left, (step + 1) / 50)
        starts = torch.randint(len(data) - LENGTH, (args.batch,)).tolist()
        batch = torch.stack([data[s : s + LENGTH] for s in starts])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def perplexity(model: Any, pieces: list[list[int]], options: dict[str, Any]) -> float:
    """Score the pieces through the engine."""
    engine = load_engine(model, EngineConfig(max_num_seqs=8, max_model_len=LENGTH + 1, **options))
    scores: list[float] = []
    for number, piece in enumerate(pieces):
        engine.add(Request(str(number), piece[: LENGTH - 1], SamplingParams(max_tokens=1, prompt_logprobs=0)))
    while engine.has_work():
        for output in engine.step():
            scores += [x.logprob for x in output.prompt_logprobs or () if x is not None]
    engine.close()
    return math.exp(-sum(scores) / len(scores))


def coarse(model: Any) -> Any:
    """Return a copy whose linear weights have three values."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, torch.nn.Linear):
                step = module.weight.abs().amax(1, keepdim=True)
                module.weight.copy_((module.weight / step).round() * step)
    return made


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train, score, compare."""
    torch.set_num_threads(args.threads)
    data, held = text(args.bytes)
    model = train(args, data)
    held = held[: args.pieces]
    exact = perplexity(model, held, {"dtype": "fp32"})
    rows: list[Row] = []
    for name, (options, allowed) in FORMS.items():
        got = perplexity(model, held, options)
        rows.append(compare(name, "thalweg fp32", "perplexity", got, exact))
        worse, goal = max(got / exact - 1, 1e-9), f"goal, {100 * allowed:g}% more"
        rows.append(compare(name, goal, "% more perplexity", 100 * worse, 100 * allowed))
    rows.append(compare("control, three values", "thalweg fp32", "perplexity",
                        perplexity(coarse(model), held, {"dtype": "fp32"}), exact))  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters())
    return make_result("quality", rows, parameters=parameters, scored=len(held) * (LENGTH - 2), exact=exact)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="of training, at most")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=4_000_000)
    parser.add_argument("--pieces", type=int, default=120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="20 s of training")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/quality.md and .json")
    args = parser.parse_args(argv)
    if args.quick:
        args.seconds, args.steps, args.width, args.layers, args.pieces = 20, 200, 128, 2, 40
    measured = measure(args)
    lines = "\n".join([
        "# Quantisation", "",
        f"{measured['date']}, commit {measured['commit']}, {format_machine(measured['machine'])}.", "",
        f"A byte-level Llama of {measured['parameters']:,} parameters, perplexity {measured['exact']:.4f} of"
        f" {measured['scored']:,} held-out bytes in fp32.", "",
        rows_table(measured["rows"]),
    ])  # fmt: skip
    if args.write:
        write_result("quality", measured, lines)
    print(json.dumps(measured) if args.json else lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
