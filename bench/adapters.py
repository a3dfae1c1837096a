"""Parameters trained and time of inference of adapters, LoRA and full fine-tuning, by batch and sequence.

The tables of the lectures, as in Hu et al. 2021, table 1: a forward pass of a model of GPT-2's shape, and beside it
one more token behind a KV cache, where an adapter's small products weigh most.  LoRA and bottleneck adapters (Houlsby
et al. 2019) have the same inner width, so about equally many parameters are trained.  All contestants are alive
together and take turns; ratios are medians over rounds of quotients within a round.

    python bench/adapters.py --write
    python bench/adapters.py --quick --json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from _peers import ROOT
from _report import Row, add_output_options, compare, format_machine, make_result, markdown_table, write_result

sys.path.insert(0, str(ROOT))

import peft
import torch

from thalweg.infer.bottleneck import BottleneckAdapter, add_bottleneck_adapters

VOCAB_SIZE, LONGEST = 8192, 512
ANCHOR = "full fine-tuning"


def build_base(width: int, num_layers: int) -> Any:
    """Return a model of GPT-2's shape with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": num_layers, "n_head": width // 64, "n_positions": LONGEST}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=None, **sizes)).eval()


def add_lora(base: Any, inner: int, targets: list[str]) -> Any:
    """Return a copy with LoRA that is not zero."""
    config = peft.LoraConfig(r=inner, target_modules=targets, fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(base), config).eval()


def add_bottlenecks(base: Any, inner: int) -> Any:
    """Return a copy with adapters behind attention and MLP that are not zero."""
    model = copy.deepcopy(base)
    add_bottleneck_adapters(model, inner)
    for module in model.modules():
        if isinstance(module, BottleneckAdapter):
            torch.nn.init.normal_(module.up.weight, std=1e-2)
    return model.eval()


def count_trained(model: torch.nn.Module) -> int:
    """Return how many numbers the optimizer would have."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def build_contestants(width: int, num_layers: int, inner: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the models by name, and how many parameters of each are trained.

    Merged LoRA gives the logits of unmerged LoRA, and each but full fine-tuning (here the base itself: what is trained
    does not change its time) gives others than the base; raises ValueError where that is not so.
    """
    base = build_base(width, num_layers)
    attention, everywhere = ["c_attn"], ["c_attn", "c_proj", "c_fc"]
    models = {
        ANCHOR: base,
        "LoRA": add_lora(base, inner, attention),
        "LoRA on all layers": add_lora(base, inner, everywhere),
        "bottleneck adapters": add_bottlenecks(base, inner),
    }
    trained = {name: count_trained(model) for name, model in models.items()}
    merged = copy.deepcopy(models["LoRA"]).merge_and_unload()
    models["LoRA, merged"], trained["LoRA, merged"] = merged.eval(), trained["LoRA"]
    ids = torch.arange(2, 34)[None]
    with torch.inference_mode():
        logits = {name: model(input_ids=ids).logits for name, model in models.items()}
    if not torch.allclose(logits["LoRA"], logits["LoRA, merged"], atol=1e-3):
        raise ValueError("merged LoRA computes something else than LoRA")
    for name, found in logits.items():
        if name != ANCHOR and torch.allclose(found, logits[ANCHOR], atol=1e-3):
            raise ValueError(f"{name} computes what the base computes")
    return models, trained


def forward_pass(model: Any, batch: int, length: int) -> Callable[[], None]:
    """Return what runs a batch through a model."""
    ids = torch.randint(VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))

    def run() -> None:
        model(input_ids=ids, use_cache=False)

    return run


def next_token(model: Any, batch: int, length: int) -> Callable[[], None]:
    """Return what computes one more token behind a cache of ``length``, again and again the same one."""
    ids = torch.randint(VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values

    def run() -> None:
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return run


KINDS = {"forward pass": forward_pass, "next token": next_token}


def time_in_turns(actions: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return ms of one call of each action, by round; each round has some ``seconds`` for each, and another order."""
    repeats: dict[str, int] = {}
    for name, action in actions.items():
        action()
        begun = time.perf_counter()
        action()
        repeats[name] = max(1, round(seconds / (time.perf_counter() - begun)))
    names, found = list(actions), {name: list[float]() for name in actions}
    for round_ in range(rounds):
        start = round_ % len(names)
        for name in names[start:] + names[:start]:
            begun = time.perf_counter()
            for _ in range(repeats[name]):
                actions[name]()
            found[name].append(1e3 * (time.perf_counter() - begun) / repeats[name])
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time every model at every batch and sequence."""
    torch.set_num_threads(args.threads)
    models, trained = build_contestants(args.width, args.layers, args.inner)
    rows: list[Row] = []
    times: dict[str, dict[str, list[float]]] = {}
    load = os.getloadavg()[0]
    with torch.inference_mode():
        for kind, make in KINDS.items():
            for batch, length in args.shapes:
                case = f"{kind}, {batch} x {length}"
                actions = {name: make(model, batch, length) for name, model in models.items()}
                found = times[case] = time_in_turns(actions, args.rounds, args.seconds)
                for name, own in found.items():
                    if name != ANCHOR:
                        ratio = statistics.median(x / y for x, y in zip(found[ANCHOR], own, strict=True))
                        medians = statistics.median(own), statistics.median(found[ANCHOR])
                        rows.append(compare(f"{case}, {name}", ANCHOR, "ms", *medians, ratio=ratio))
                print(case, {name: round(statistics.median(own), 2) for name, own in found.items()}, file=sys.stderr)
    sizes = {"width": args.width, "layers": args.layers, "inner": args.inner, "threads": args.threads}
    total = sum(p.numel() for p in models[ANCHOR].parameters())
    return make_result("adapters", rows, trained=trained, parameters=total, times=times, load=load, **sizes)


def render(found: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    names = list(found["trained"])
    trained = [[n, f"{k:,}", f"{100 * k / found['parameters']:.2f}"] for n, k in found["trained"].items()]
    slower = {row["case"]: 100 * (1 / row["ratio"] - 1) for row in found["rows"]}
    lines = []
    for case, by_name in found["times"].items():
        kind, _, shape = case.partition(", ")
        cells = [f"{statistics.median(by_name[ANCHOR]):.2f}"]
        for name in names[1:]:
            cells.append(f"{statistics.median(by_name[name]):.2f} ({slower[f'{case}, {name}']:+.0f}%)")
        lines.append([f"{kind}, {shape}", *cells])
    return "\n".join([
        "# Adapters: what is trained, and what it costs at inference", "",
        f"{found['date']}, commit {found['commit']}, {format_machine(found['machine'])}.", "",
        f"A model of GPT-2's shape, {found['layers']} layers of {found['width']}, {found['parameters']:,} parameters;"
        f" inner width {found['inner']} of LoRA and of the adapters. LoRA is on the attention's inputs (`c_attn`), or"
        " on all linear layers of the blocks; adapters are behind attention and MLP.", "",
        markdown_table(["", "parameters trained", "% of the model"], trained), "",
        f"ms on {found['threads']} thread(s), batch x sequence; in brackets how much longer than {ANCHOR}, the median"
        " of quotients within a round. A next token is computed behind a cache of the sequence."
        f" Load average {found['load']:.0f}: above the machine's cores, only what is in brackets means something.", "",
        markdown_table(["", *names], lines),
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--inner", type=int, default=16, help="the rank of LoRA and the width of the bottlenecks")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each contestant in each round, about")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_output_options(parser, "adapters", "a small model, three rounds")
    args = parser.parse_args(argv)
    args.shapes = [(16, 256), (4, 256), (1, 128), (1, 16)]
    if args.quick:
        args.width, args.layers, args.rounds, args.seconds = 128, 2, 3, 0.02
        args.shapes = [(4, 32), (1, 16)]
    found = measure(args)
    text = render(found)
    if args.write:
        write_result("adapters", found, text)
    print(json.dumps(found) if args.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
