"""Accuracy, size and speed of compressed classifiers, on real text, of a model that is trained here.

A small BERT learns which module of the standard library a line is from; held-out lines are then classified by
what compression makes of it.  Lines that occur twice are left out, so that none is both learnt and asked.  Two
controls must lose: weights of two bits without training, and half of the weights taken by chance.

    python bench/compress.py --write
    python bench/compress.py --quick --json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

from _peers import ROOT
from _report import add_output_options, format_machine, make_result, markdown_table, write_result

sys.path.insert(0, str(ROOT))

import torch

import thalweg
from thalweg.compression import init_compression, redundancy_clean
from thalweg.compression.layers import keep_largest
from thalweg.compression.quantize import fake_quantize
from thalweg.infer.quantization.zeroquant import save_quantized, zeroquant

LENGTH, VOCABULARY = 24, 1024
_LAYERS = ["self.query", "self.key", "self.value", "dense"]


def lines(num_modules: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Lines of the largest modules as hashed words (N, 24), 0 where they end, and their modules: to learn, and every
    fifth."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda f: -f.stat().st_size)[:num_modules]
    texts = [[line.strip() for line in file.read_text(errors="ignore").splitlines()] for file in files]
    seen = Counter(line for text in texts for line in text)
    learn: list[tuple[list[int], int]] = []
    held: list[tuple[list[int], int]] = []
    for label, text in enumerate(texts):
        kept = [line for line in text if len(line) >= 20 and seen[line] == 1]
        for number, line in enumerate(kept):
            words = re.findall(r"\w+|[^\w\s]", line)[:LENGTH]
            codes = [1 + crc32(word.encode()) % (VOCABULARY - 1) for word in words]
            (held if number % 5 == 0 else learn).append((codes + [0] * (LENGTH - len(codes)), label))
    return tuple((torch.tensor([x for x, _ in part]), torch.tensor([y for _, y in part])) for part in (learn, held))  # type: ignore[return-value]


def build(width: int, layers: int, num_modules: int) -> Any:
    """A BERT over hashed words."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 32}
    config = BertConfig(vocab_size=VOCABULARY, intermediate_size=4 * width, max_position_embeddings=LENGTH, **sizes,
                        num_labels=num_modules, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)  # fmt: skip
    return BertForSequenceClassification(config)


def train(model: Any, data: tuple[torch.Tensor, torch.Tensor], steps: int, rate: float, config: dict[str, Any]) -> Any:
    """Train by the engine; returns the engine."""
    schedule = {"warmup_num_steps": steps // 10, "total_num_steps": steps, "warmup_max_lr": rate}
    engine, *_ = thalweg.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 64, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule}, **config,
    })  # fmt: skip
    engine.train()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        index = torch.randint(len(data[0]), (64,), generator=generator)
        loss = engine(input_ids=data[0][index], attention_mask=(data[0][index] > 0).long(), labels=data[1][index]).loss
        engine.backward(loss)
        engine.step()
    return engine


@torch.no_grad()
def score(model: Any, held: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Accuracy in percent, and ms for a batch of 64 lines (the least of all batches)."""
    model.eval()
    hits, times = 0, []
    for start in range(0, len(held[0]), 64):
        x = held[0][start : start + 64]
        begin = time.perf_counter()
        out = model(input_ids=x, attention_mask=(x > 0).long()).logits
        if len(x) == 64:
            times.append(time.perf_counter() - begin)
        hits += int((out.argmax(1) == held[1][start : start + 64]).sum())
    return 100 * hits / len(held[0]), 1000 * min(times)


def size(model: Any, bits: int = 0, group_size: int = 0) -> int:
    """Bytes of the saved weights, plain or quantised."""
    with tempfile.TemporaryDirectory() as folder:
        save_quantized(model, folder, bits, group_size) if bits else model.save_pretrained(folder)
        return (Path(folder) / "model.safetensors").stat().st_size


def _section(name: str, params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any) -> Any:
    group = {"params": params, "modules": modules} | ({"related_modules": related} if related else {})
    return {name: {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}}


def configs(width: int) -> dict[str, dict[str, Any]]:
    """What is trained on, from the model that has learnt."""
    bits = {"start_bits": 8, "target_bits": 8}
    int8 = _section("weight_quantization", bits, _LAYERS, quantize_groups=width)
    int8 |= _section("activation_quantization", {"bits": 8}, _LAYERS)
    sparse = _section("sparse_pruning", {"dense_ratio": 0.5}, _LAYERS, method="topk")
    rows = _section("row_pruning", {"dense_ratio": 0.5}, ["intermediate.dense"], [[r"\d\.output.dense"]], method="topk")
    return {"int8, trained": int8, "half of the weights, trained": sparse, "half of the MLPs' rows, trained": rows}


@torch.no_grad()
def spoil(model: Any, how: str) -> Any:
    """The controls: a copy with weights of two bits, or with half of them taken by chance."""
    made = copy.deepcopy(model)
    for name, module in made.bert.encoder.named_modules():
        if isinstance(module, torch.nn.Linear):
            noise = torch.rand(module.weight.shape, generator=torch.Generator().manual_seed(len(name)))
            kept = keep_largest(noise, 0.5)
            module.weight.copy_(fake_quantize(module.weight, 2) if how == "bits" else module.weight * kept)
    return made


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train, compress, score."""
    torch.set_num_threads(args.threads)
    learn, held = lines(args.modules)
    engine = train(build(args.width, args.layers, args.modules), learn, args.steps, 1e-3, {})
    whole = copy.deepcopy(engine.module)
    engine.close()
    table: list[list[Any]] = []

    def add(name: str, model: Any, num_bytes: int) -> None:
        accuracy, ms = score(model, held)
        first = table[0] if table else [name, accuracy, 0, num_bytes, ms]
        table.append([name, accuracy, accuracy - first[1], num_bytes, ms])
        print(table[-1], file=sys.stderr, flush=True)

    add("fp32", whole, size(whole))
    add("int8 after training", zeroquant(copy.deepcopy(whole)), size(whole, 8))
    add("int4 in groups of 32 after training",
        zeroquant(copy.deepcopy(whole), 4, 32, quantize_activations=False), size(whole, 4, 32))  # fmt: skip
    engine = train(copy.deepcopy(whole), learn, args.tune_steps, 3e-4, {})
    add("fp32, trained as long", copy.deepcopy(engine.module), table[0][3])
    engine.close()
    for name, section in configs(args.width).items():
        config = {"compression_training": section}
        engine = train(init_compression(copy.deepcopy(whole), config), learn, args.tune_steps, 3e-4, config)
        small = redundancy_clean(engine, config)
        engine.close()
        if name.startswith("int8"):
            add(name, zeroquant(copy.deepcopy(small)), size(small, 8))
        else:
            add(name, small, size(small))
            add(f"{name}, then int8", zeroquant(copy.deepcopy(small)), size(small, 8))
    for name, how in (("control: two bits after training", "bits"), ("control: half by chance", "chance")):
        add(name, spoil(whole, how), size(whole))
    parameters = sum(p.numel() for p in whole.parameters())
    facts = {
        "table": table,
        "parameters": parameters,
        "learnt": len(learn[0]),
        "held": len(held[0]),
        "load": os.getloadavg()[1],
    }
    return make_result("compression", [], modules=args.modules, steps=[args.steps, args.tune_steps], **facts)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--tune-steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--modules", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    add_output_options(parser, "compression", "a narrow model and 60 steps")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.tune_steps, args.width, args.layers, args.modules = 60, 20, 64, 1, 4
    found = measure(args)
    rows = [
        [name, f"{accuracy:.1f}", f"{change:+.1f}", f"{num_bytes / 2**20:.2f}", f"{ms:.1f}"]
        for name, accuracy, change, num_bytes, ms in found["table"]
    ]
    text = "\n".join([
        "# Compression", "",
        f"{found['date']}, commit {found['commit']}, {format_machine(found['machine'])}.", "",
        f"A BERT of {found['parameters']:,} parameters tells which of {found['modules']} modules a line is"
        f" from: {found['steps'][0]} steps of 64 of {found['learnt']:,} lines, {found['steps'][1]} more to compress;"
        f" {found['held']:,} other lines are asked. ms of a batch of 64 on {args.threads} thread(s), the least."
        " Weights that are zero are stored as zeros."
        f" Load average {found['load']:.0f}: above 1, times are those of a shared machine.", "",
        markdown_table(["model", "accuracy, %", "points", "MiB on disk", "ms"], rows),
    ])  # fmt: skip
    if args.write:
        write_result("compression", found, text)
    print(json.dumps(found) if args.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
