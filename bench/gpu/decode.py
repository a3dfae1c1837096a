"""A decoding step of a 1.1B Llama in bf16: milliseconds with and without CUDA graphs, beside Hugging Face's generate.

Under a minute on a GPU:

    python bench/gpu/decode.py            # a table, then where the host's time goes in a step without graphs
    python bench/gpu/decode.py --small    # through the same motions with a tiny model, on the CPU too

Prompts have 128 tokens.  Kernels are what the device ran in a step, launches what the host asked for (a graph is one).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import time
from typing import Any

import torch

from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

PAST = 128


def build(small: bool, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, hidden, layers, heads = (64, 128, 2, 4) if small else (2048, 5632, 22, 32)
    config = LlamaConfig(
        vocab_size=512 if small else 32000, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 8), max_position_embeddings=1024,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def prompts(batch: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(1, vocab_size, (batch, PAST), generator=generator).tolist()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def hugging_face(model: Any, batch: int, device: torch.device, new: int) -> float:
    """Milliseconds a token of each sequence, without the prompts' pass."""
    ids = torch.tensor(prompts(batch, model.config.vocab_size), device=device)

    def seconds(count: int) -> float:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        begin = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        synchronize(device)
        return time.perf_counter() - begin

    seconds(2)
    return 1e3 * (seconds(new + 1) - seconds(1)) / new


def begin_decoding(engine: Any, batch: int, vocab_size: int) -> None:
    """Have ``batch`` sequences of like lengths decode, with what is made once made."""
    for number, prompt in enumerate(prompts(batch, vocab_size)):
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=115, ignore_eos=True)))
    for _ in range(16):
        engine.step()
    assert engine.stats().running == batch


def end(engine: Any, batch: int) -> None:
    for number in range(batch):
        engine.abort(str(number))


def step_ms(engine: Any, device: torch.device, steps: int) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / steps


def count(engine: Any, device: torch.device, steps: int = 3) -> dict[str, Any]:
    """Of a step: kernels, their milliseconds, and launches by the host."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = profiler.events() or []
    on_device = [x for x in events if x.device_type.name == "CUDA"]
    kernels = [x for x in on_device if not x.name.lower().startswith(("memcpy", "memset"))]
    launches = sum("launch" in x.name.lower() for x in events if x.device_type.name == "CPU")
    busiest: dict[str, float] = {}
    for x in kernels:
        busiest[x.name[:70]] = busiest.get(x.name[:70], 0.0) + x.time_range.elapsed_us() / 1e3 / steps
    return {
        "kernels": len(kernels) / steps,
        "kernel_ms": sum(x.time_range.elapsed_us() for x in on_device) / 1e3 / steps,
        "launches": launches / steps,
        "top": {k: round(v, 3) for k, v in sorted(busiest.items(), key=lambda item: -item[1])[:5]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", help="write the figures to this file, too")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    began = time.perf_counter()
    model, steps = build(options.small, device), 8 if options.small else 40
    vocab_size = model.config.vocab_size
    found: dict[str, Any] = {"torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
    batches = (1, 8, 32)
    with torch.no_grad():
        for batch in batches:
            found[f"hf_{batch}"] = {"ms": hugging_face(model, batch, device, 4 if options.small else 24)}
    profile = cProfile.Profile()
    for name, eager in (("eager", True), ("graph", False)):
        config = EngineConfig(
            dtype="bf16", device=device.type, max_num_seqs=32, max_model_len=512, max_num_batched_tokens=4096,
            kv_cache_bytes=2 << 30 if not options.small else 64 << 20, enforce_eager=eager,
        )  # fmt: skip
        engine: Any = load_engine(model, config, runner="torch")
        for batch in batches:
            begin_decoding(engine, batch, vocab_size)
            found[f"{name}_{batch}"] = {"ms": step_ms(engine, device, steps), **count(engine, device)}
            if eager and batch == 32:
                profile.enable()
                step_ms(engine, device, 10)
                profile.disable()
            end(engine, batch)
        if not eager:
            found["graphs"] = [list(key) for key in engine.runner._graphs]
        engine.close()
    print(f"torch {found['torch']}, {found['device']}; graphs (sequences, keys): {found['graphs']}")
    print(f"{'':10}{'ms a step':>12}{'kernels':>10}{'their ms':>10}{'launches':>10}")
    for batch in batches:
        for name in ("hf", "eager", "graph"):
            row = found[f"{name}_{batch}"]
            cells = [
                f"{row[key]:>10.1f}" if key in row else f"{'-':>10}" for key in ("kernels", "kernel_ms", "launches")
            ]
            print(f"{f'{name} {batch}':10}{row['ms']:>12.2f}{''.join(cells)}")
    for name in ("eager_32", "graph_32"):
        print(f"longest kernels of {name}, ms a step: {found[name].get('top', '-')}")
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(15)
    lines = text.getvalue().splitlines()
    found["host_eager_32"] = [x.strip() for x in lines if x.strip()][-16:]
    print("ten steps without graphs at batch 32, by the host's own time:\n" + "\n".join(found["host_eager_32"]))
    found["seconds"] = time.perf_counter() - began
    print(f"{found['seconds']:.0f} s in all")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
