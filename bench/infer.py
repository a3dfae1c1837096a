"""Tokens a second and first token of the inference engine against Hugging Face, and against memory.

All contestants are alive in one process and take turns, round after round, on the same random prompts; a
row compares the medians. Before and after each turn the memory's read speed is measured with as many
threads; each cell of ours also says which part of it the weights and the KV cache, at its mean length, make
up: the fraction of the roofline, by the best reading of the run and by the readings beside its own turns,
which differ where a machine is shared. The model is a Llama of 110 million parameters with random weights:
12 layers, 768 wide, inner width 2,048, 12 heads, vocabulary 32,000; prompts of 128 tokens, 64 new ones,
greedy, every feature of the engine on. `thalweg torch` is the same engine on torch's operators alone,
without the extra `use_cpu_kernels`.

`--model flan-t5-small` takes that shape instead, which listens to 128 tokens and speaks 64: 8 layers each of
encoder and decoder, 512 wide, 6 heads of 64, inner width 1,024, vocabulary 32,128.

    python bench/infer.py --write
    python bench/infer.py --write --model flan-t5-small
    python bench/infer.py --write --model flan-t5-small --threads 1 --forms int8
    python bench/infer.py --write --isa avx2
    python bench/infer.py --quick --json

`--isa avx2` keeps the contestants within what a processor with AVX2 alone has, as far as each can be kept: torch's
kernels, MKL, oneDNN, ctranslate2 and Thalweg's own by their variables, llama.cpp by the build that
`_infer_peers.py install --isa avx2` makes. onnxruntime and vLLM have no switch; their rows say so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from _infer_peers import PEER_SPECS, start_peers
from _isa import ISAS, WITHOUT_SWITCH, asked_isa, start_within, with_isa
from _peak_macs import multiply_adds_per_second
from _peers import ROOT
from _report import (
    Row,
    compare,
    format_cell,
    format_machine,
    make_result,
    markdown_table,
    rows_table,
    write_result,
)

sys.path.insert(0, str(ROOT))

import torch

from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.engine.engine import LLMEngine

SHAPE = {
    "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048, "num_attention_heads": 12,
    "vocab_size": 32000, "max_position_embeddings": 1024,
}  # fmt: skip
T5 = {
    "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
}  # fmt: skip
GOALS = {  # issue 6: tokens a second at batch 1 and 8
    "fp32": (125, 500), "bf16": (190, 650), "int8": (300, 1100), "int4": (340, 1100),
}  # fmt: skip
OF_HUGGING_FACE = {1: 1.5, 8: 2.0}  # issue 15: fp32 within AVX2, tokens a second by batch
PEERS_OF = {
    "fp32": ("hugging face fp32", "ctranslate2 fp32", "onnxruntime fp32", "llama.cpp f32"),
    "bf16": ("hugging face bf16", "vllm bf16"),
    "int8": ("hugging face fp32", "ctranslate2 int8", "onnxruntime int8", "llama.cpp q8_0"),
    "int4": ("hugging face fp32", "onnxruntime int4", "llama.cpp q4_0"),
}
Turn = Callable[[list[list[int]], int], tuple[float, float]]
# Seconds until all first tokens, seconds in all, and the bytes a second that memory gave beside the turn.
Times = tuple[float, float, float]


def build(args: argparse.Namespace) -> Any:
    """Return the model, fp32, in eval mode."""
    torch.manual_seed(0)
    if args.model != "llama":
        from transformers import T5Config, T5ForConditionalGeneration

        made = T5ForConditionalGeneration(T5Config(**{**T5, "num_layers": args.layers})).eval()
        made.generation_config.eos_token_id = made.config.eos_token_id = None
        return made
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {**SHAPE, "num_hidden_layers": args.layers}
    config = LlamaConfig(**fields)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return LlamaForCausalLM(config).eval()


def hugging_face(model: Any) -> Turn:
    """Return a turn of ``generate``: seconds to the first token, seconds in all."""

    def turn(prompts: list[list[int]], new: int) -> tuple[float, float]:
        tokens = torch.tensor(prompts)
        times = []
        for count in (1, new):
            start = time.perf_counter()
            model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            times.append(time.perf_counter() - start)
        return times[0], times[1]

    return turn


def thalweg(engine: LLMEngine) -> Turn:
    """Return a turn of the engine: seconds until every sequence has its first token, seconds in all."""

    def turn(prompts: list[list[int]], new: int) -> tuple[float, float]:
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=new)))
        waiting = set(range(len(prompts)))
        first = 0.0
        while engine.has_work():
            for output in engine.step():
                waiting.discard(int(output.request_id))
            if not waiting and not first:
                first = time.perf_counter() - start
        return first, time.perf_counter() - start

    return turn


def engine_for(model: Any, form: str, runner: str | None) -> LLMEngine:
    """Return an engine with weights in a form."""
    options = EngineConfig(
        dtype="fp32" if form == "fp32" else "bf16",
        quantization=form if form.startswith("int") else None,
        max_num_seqs=8, max_model_len=256, max_num_batched_tokens=1024,
    )  # fmt: skip
    engine = load_engine(model, options, runner=runner)
    assert isinstance(engine, LLMEngine)
    return engine


def read_speed(buffer: torch.Tensor) -> float:
    """Return how many bytes a second all threads together read."""
    start = time.perf_counter()
    buffer.sum()
    return buffer.numel() * buffer.element_size() / (time.perf_counter() - start)


def contestants(args: argparse.Namespace, model: Any) -> tuple[dict[str, Turn], dict[str, LLMEngine]]:
    """Return the turns of this process by name, our engines among them."""
    turns: dict[str, Turn] = {"hugging face fp32": hugging_face(model)}
    engines: dict[str, LLMEngine] = {}
    for form in args.forms:
        engines[f"thalweg {form}"] = engine_for(model, form, None)
        if not args.quick:
            engines[f"thalweg torch {form}"] = engine_for(model, form, "torch")
    turns |= {name: thalweg(engine) for name, engine in engines.items()}
    if "bf16" in args.forms:
        import copy

        turns["hugging face bf16"] = hugging_face(copy.deepcopy(model).bfloat16())
    return turns, engines


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take every measurement and return the JSON object."""
    torch.set_num_threads(args.threads)
    model = build(args)
    turns, engines = contestants(args, model)
    buffer = torch.ones(2**27)
    speeds: list[float] = []
    taken: dict[tuple[str, int], list[Times]] = {}
    generator = torch.Generator().manual_seed(1)
    listens = args.model != "llama"
    engines_of_others = ("ctranslate2",) if listens else ()
    with (
        contextlib.nullcontext([])
        if args.quick
        else start_peers(model, args.threads, engines=engines_of_others) as others
    ):
        turns |= {peer.name: peer.run_turn for peer in others}
        missing = [] if args.quick else missing_peers(args.forms, turns)
        for number in range(args.rounds + 1):  # the first round warms up
            for batch in args.batches:
                prompts = torch.randint(3, SHAPE["vocab_size"], (batch, args.prompt), generator=generator)
                names = list(turns)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    before = read_speed(buffer)
                    first, whole = turns[name](prompts.tolist(), args.new)
                    after = read_speed(buffer)
                    speeds += before, after
                    if number:
                        taken.setdefault((name, batch), []).append((first, whole, (before + after) / 2))
    speed = max(speeds)
    cells = {key: summary(args, key, times, engines, speed) for key, times in taken.items()}
    return make_result(
        "infer",
        rows(args, cells),
        threads=args.threads, rounds=args.rounds, prompt=args.prompt, new=args.new, layers=args.layers,
        model=args.model, absent=missing,
        read_gb_s=round(speed / 1e9, 1), read_gb_s_median=round(statistics.median(speeds) / 1e9, 1),
        cells=[{"name": n, "batch": b, **c} for (n, b), c in cells.items()],
    )  # fmt: skip


def summary(
    args: argparse.Namespace,
    key: tuple[str, int],
    times: list[Times],
    engines: dict[str, LLMEngine],
    speed: float,
) -> dict[str, Any]:
    """Return medians of one contestant at one batch size, and for ours the part of the roofline."""
    name, batch = key
    made: dict[str, Any] = {
        "tok_s": statistics.median(batch * args.new / whole for _, whole, _ in times),
        "decode_tok_s": statistics.median(batch * (args.new - 1) / (whole - first) for first, whole, _ in times),
        "first_ms": statistics.median(1e3 * first for first, _, _ in times),
    }
    weight_bytes = getattr(getattr(engines.get(name), "runner", None), "weight_bytes", None)
    if weight_bytes:
        itemsize = 4 if name.endswith("fp32") else 2
        width = SHAPE["hidden_size"] if args.model == "llama" else T5["num_heads"] * T5["d_kv"]
        held = batch * (args.prompt + args.new / 2) * 2 * width * itemsize * args.layers
        bound = batch * speed / (weight_bytes + held)
        made |= {"bound_tok_s": bound, "roofline": made["decode_tok_s"] / bound}
        moved = [(weight_bytes + held) * (args.new - 1) / (whole - first) for first, whole, _ in times]
        made["roofline_beside"] = statistics.median(b / beside for b, (_, _, beside) in zip(moved, times, strict=True))
        if args.model == "llama" and (products := multiply_adds_per_second(name.split()[-1])):
            # Attention's products are a hundredth of the layers' here.
            made["multiplied_tok_s"] = products / products_of(args)
    return made


def products_of(args: argparse.Namespace) -> int:
    """Return the products of a token: the weights of all layers and the head."""
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    return args.layers * (4 * hidden * hidden + 3 * hidden * inner) + hidden * SHAPE["vocab_size"]


def label_of(peer: str) -> str:
    """Return what a peer is called in rows: one that cannot be kept within an instruction set says so."""
    return (
        f"{peer} (no switch: all that the processor has)" if asked_isa() and peer.startswith(WITHOUT_SWITCH) else peer
    )


def missing_peers(forms: list[str], turns: dict[str, Turn]) -> list[str]:
    """Return the peers that have no rows, and why."""
    wanted = dict.fromkeys(peer for form in forms for peer in PEERS_OF[form] if peer not in turns)
    installed = {spec.name for spec in PEER_SPECS if spec.installed}
    return [f"{peer} ({'did not start' if peer in installed else 'not installed'})" for peer in wanted]


def rows(args: argparse.Namespace, cells: dict[tuple[str, int], dict[str, Any]]) -> list[Row]:
    """Return the comparisons: with every peer at the same bits of weight, and with the goals."""
    found = []
    for (name, batch), mine in cells.items():
        if not name.startswith("thalweg") or name.startswith("thalweg torch"):
            continue
        form = name.split()[-1]
        case = f"{form}, batch {batch}" if args.model == "llama" else f"{args.model} {form}, batch {batch}"
        case += ", 1 thread" * (args.threads == 1)
        for peer in (*PEERS_OF[form], f"thalweg torch {form}"):
            theirs = cells.get((peer, batch))
            if theirs is None:
                continue
            label = label_of(peer)
            found.append(compare(case, label, "tok/s", mine["tok_s"], theirs["tok_s"], lower_is_better=False))
            found.append(compare(case, label, "first token ms", mine["first_ms"], theirs["first_ms"]))
        if asked_isa() and args.model == "llama":
            theirs = cells.get(("hugging face fp32", batch))
            if form == "fp32" and batch in OF_HUGGING_FACE and theirs is not None:
                least = OF_HUGGING_FACE[batch]
                label, goal = f"goal: {least:g} times hugging face", least * theirs["tok_s"]
                found.append(compare(case, label, "tok/s", mine["tok_s"], goal, lower_is_better=False))
        elif args.model == "llama" and args.layers == SHAPE["num_hidden_layers"] and batch in (1, 8):
            goal = float(GOALS[form][batch == 8])
            found.append(compare(case, "goal", "tok/s", mine["tok_s"], goal, lower_is_better=False))
            if form == "int8":
                first = 60.0 if batch == 1 else 250.0
                found.append(compare(case, "goal", "first token ms", mine["first_ms"], first))
    return found


def render(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    keys = ("tok_s", "decode_tok_s", "first_ms", "multiplied_tok_s", "bound_tok_s")
    lines = [
        [
            f"{label_of(c['name'])}, batch {c['batch']}",
            *(format_cell(c.get(k)) for k in keys),
            *(format_cell(c.get(k), 2) for k in ("roofline", "roofline_beside")),
        ]
        for c in data["cells"]
    ]
    heads = ["contestant", "tok/s", "decoding tok/s", "first token ms", "bound of the multipliers tok/s",
             "memory bound tok/s", "of the memory bound", "of memory's speed beside it"]  # fmt: skip
    return "\n".join(
        [
            "# Inference",
            "",
            f"{data['date']}, commit {data['commit']}, {format_machine(data['machine'])}.",
            "",
            f"Shape of {data['model']}, {data['layers']} layers, {data['threads']} threads, "
            f"prompt {data['prompt']}, "
            f"{data['new']} new tokens, medians of {data['rounds']} rounds in turns; memory read at "
            f"{data['read_gb_s']} GB/s at best in the same run, at {data['read_gb_s_median']} in the median.",
            "",
            markdown_table(heads, lines),
            "",
            *([f"No rows of {', '.join(data['absent'])}.", ""] if data.get("absent") else []),
            rows_table(data["rows"]),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, print one object or the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=("llama", "flan-t5-small"), default="llama")
    parser.add_argument("--layers", type=int, help="by default those of the shape")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--forms", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--isa", choices=ISAS, help="keep the contestants within this instruction set")
    parser.add_argument("--quick", action="store_true", help="2 layers, int8 alone, 2 rounds: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--write", action="store_true", help="write results/infer.md and .json")
    args = parser.parse_args(argv)
    start_within(args.isa)
    if args.layers is None:
        args.layers = int(SHAPE["num_hidden_layers"] if args.model == "llama" else T5["num_layers"])
    if args.quick:
        args.rounds, args.layers, args.forms, args.new = 2, 2, ["int8"], 16
    data = measure(args)
    if args.write:
        name = "infer" if args.model == "llama" else "infer_t5"
        write_result(with_isa(name + "_1_thread" * (args.threads == 1)), data, render(data))
    print(json.dumps(data) if args.json else render(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
