"""RLHF: generation by the hybrid engine against `model.generate` under stage 3, and a run that learns.

    thalweg run --nproc 2 bench/rlhf.py generation       turns of the contestants, weights changed between them
    thalweg run --nproc 2 bench/rlhf.py memory           how far a sync rises above the shards
    python bench/rlhf.py learning --seeds 0 1 2 --out DIR
    python bench/rlhf.py trl                             SFT, DPO and GRPO against TRL, two ranks each, in turns

Each prints one JSON object on rank 0; `learning` draws `DIR/curves.png` beside it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import compare, format_machine, make_result, rows_table, write_result

sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from _rlhf_learning import draw_curves, run_learning
from _trl_job import prepare
from torch.distributed.fsdp import fully_shard

import thalweg
from thalweg.infer import EngineConfig, SamplingParams, load_engine
from thalweg.infer.engine.engine import LLMEngine
from thalweg.rlhf.rollout import generate_rollout
from thalweg.rlhf.weight_sync import HybridEngine

TRL = ROOT / ".venv-trl"  # `make bench-trl`
WARM_UP = 3  # steps of a job that are left out


def make_actor(width: int, num_layers: int, vocab_size: int = 8192) -> thalweg.Engine:
    """Return an engine at stage 3 of GPT-2's shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": width, "n_layer": num_layers, "n_head": width // 64, "n_positions": 256}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, eos_token_id=None, bos_token_id=None, **shape))
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "log_level": "error",
    }  # fmt: skip
    return thalweg.initialize(model=model, config=config)[0]


def train(engine: thalweg.Engine) -> None:
    """Change the weights."""
    engine.train()
    ids = torch.randint(8192, (1, 64))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.eval()


def measure_generation(width: int, num_layers: int, num_prompts: int, length: int, rounds: int) -> dict[str, Any]:
    """Seconds of a rollout in turns: the hybrid engine with its sync, `model.generate` under this stage 3 and under raw
    FSDP2, and the stand-alone engine of a plain copy."""
    actor = make_actor(width, num_layers)
    draw = torch.Generator().manual_seed(dist.get_rank())
    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    options = EngineConfig(dtype="fp32", max_num_seqs=num_prompts, max_model_len=256)
    hybrid = HybridEngine(actor, options)
    plain = type(actor.module).__mro__[2](copy.deepcopy(actor.module.config))
    plain.load_state_dict(actor.state_dict())
    alone = load_engine(plain, options)
    raw = copy.deepcopy(plain).eval()
    for block in raw.transformer.h:
        fully_shard(block)
    fully_shard(raw)
    seconds: dict[str, list[float]] = {name: [] for name in ("hybrid", "sync", "generate", "raw", "alone")}
    cpu: dict[str, list[float]] = {name: [] for name in ("hybrid", "sync", "alone")}  # of this process
    for round_ in range(rounds + 1):
        train(actor)
        # New to the stand-alone engine's prefix cache; `generate` would take a 0 for padding.
        prompts = torch.randint(1, 8192, (num_prompts, 32), generator=draw)
        dist.barrier()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        with hybrid.generation() as core:
            synced, cpu_synced = time.perf_counter(), time.process_time()
            rollout = generate_rollout(core, prompts.tolist(), params, seed=0, pad_id=0)
        cpu_took = {"hybrid": time.process_time() - cpu_begun, "sync": cpu_synced - cpu_begun}
        dist.barrier()
        ended = time.perf_counter()
        took = {"hybrid": ended - begun, "sync": synced - begun}
        for name, model in (("generate", actor.module), ("raw", raw)):
            begun = time.perf_counter()
            with torch.no_grad():
                made = model.generate(prompts, max_new_tokens=length, do_sample=False, pad_token_id=0, synced_gpus=True)
            dist.barrier()
            took[name] = time.perf_counter() - begun
            same = torch.equal(made, rollout.input_ids)
            assert same or name == "raw", "greedy tokens are those of the weights as they are now"
        begun, cpu_begun = time.perf_counter(), time.process_time()
        generate_rollout(alone, prompts.tolist(), params, seed=0, pad_id=0)
        cpu_took["alone"] = time.process_time() - cpu_begun
        dist.barrier()
        took["alone"] = time.perf_counter() - begun
        if round_:  # the first compiles
            for name, value in took.items():
                seconds[name].append(value)
            for name, value in cpu_took.items():
                cpu[name].append(value)
    least = {name: min(values) for name, values in seconds.items()}

    def ratio(name: str, table: dict[str, list[float]] = seconds) -> float:
        return statistics.median(x / h for x, h in zip(table[name], table["hybrid"], strict=True))

    return {
        "parameters": sum(p.numel() for p in plain.parameters()), "prompts": num_prompts, "new_tokens": length,
        "seconds": seconds, "least": least, "cpu": cpu, "times_alone_cpu": ratio("alone", cpu),
        "times_generate": ratio("generate"), "times_raw": ratio("raw"), "times_alone": ratio("alone"),
    }  # fmt: skip


def write_generation(found: dict[str, Any], world: int) -> None:
    """Write results/rlhf_generation.json and its page."""
    case = f"GPT-2, {found['parameters'] / 1e6:.1f}M, stage 3, {world} ranks"
    case += f", {found['prompts']} prompts of 32 tokens a rank, {found['new_tokens']} new ones"
    least, cpu = found["least"], {name: min(values) for name, values in found["cpu"].items()}
    peers = {
        "model.generate, this stage 3": ("generate", "times_generate"),
        "model.generate, raw stage 3": ("raw", "times_raw"),
        "stand-alone engine": ("alone", "times_alone"),
    }
    rows = [
        compare(case, peer, "s a rollout with its sync", least["hybrid"], least[name], ratio=found[key])
        for peer, (name, key) in peers.items()
    ]
    alone = found["times_alone_cpu"]
    rows.append(compare(case, "stand-alone engine", "CPU s of rank 0", cpu["hybrid"], cpu["alone"], ratio=alone))
    data = make_result("rlhf_generation", rows, **found)
    head = f"# Rollouts of an actor at stage 3\n\n{data['date']}, commit {data['commit']}, "
    note = (
        "Least of the turns; ratios are the median of ratios within a turn. Weights change between turns, so each "
        f"rollout begins with a sync of them ({least['sync']:.3f} s of it)."
    )
    write_result("rlhf_generation", data, f"{head}{format_machine(data['machine'])}.\n\n{rows_table(rows)}\n\n{note}")


def measure_trl(rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a step by this package and by TRL, jobs of two ranks in turns; of each job the median step counts."""
    python = {"thalweg": sys.executable, "trl": str(TRL / "bin" / "python")}
    methods = ("sft", "dpo", "grpo")
    seconds, cpu = ({m: {side: [] for side in python} for m in methods} for _ in range(2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for round_ in range(rounds):
            for method, sides in seconds.items():
                for side in sorted(sides, reverse=bool(round_ % 2)):
                    ends = _run_job(python[side], side, method, folder, steps)
                    for kind, table in enumerate((sides, cpu[method])):
                        took = [after[kind] - before[kind] for before, after in pairwise(ends)]
                        table[side].append(statistics.median(took[WARM_UP - 1 :]))

    def ratios(table: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
        return {m: [trl / own for own, trl in zip(x["thalweg"], x["trl"], strict=True)] for m, x in table.items()}

    return {"seconds": seconds, "cpu": cpu, "times_trl": ratios(seconds), "times_trl_cpu": ratios(cpu)}


def _run_job(python: str, side: str, method: str, folder: Path, steps: int) -> list[list[float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    command = [python, str(ROOT / "bench" / "_trl_job.py"), side, method, str(folder), str(steps)]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    (out, errors), _ = [rank.communicate() for rank in ranks]
    if ranks[0].returncode:
        raise RuntimeError(f"{side} {method} failed: {errors[-2000:]}")
    return json.loads(out.strip().splitlines()[-1])


def measure_memory(width: int, num_layers: int) -> dict[str, Any]:
    """MiB that a second sync rises above the shards, what the inference engine then owns, and how far the peak is above
    what was there when all that it reads in place had been gathered (its packed weights' pages are then at hand)."""
    actor = make_actor(width, num_layers)
    options = EngineConfig(dtype="fp32", max_num_seqs=1, max_model_len=32, max_num_batched_tokens=16)
    hybrid = HybridEngine(actor, options)
    with hybrid.generation():
        pass
    train(actor)
    rest, described, describe = _resident(), 0, hybrid.weights.describe

    def marking_describe() -> Any:
        nonlocal described
        spec = describe()
        described = _status("VmRSS")
        return spec

    hybrid.weights.describe = marking_describe  # type: ignore[method-assign]
    Path("/proc/self/clear_refs").write_text("5")
    with hybrid.generation() as core:
        peak, own = _peak(), _resident()
        assert isinstance(core, LLMEngine) and core.runner.num_blocks
    layer = sum(p.numel() * 4 for p in actor.module.transformer.h[0].parameters())
    mib = {"own": own - rest, "above_described": peak - described, "bucket": hybrid.weights._bucket_bytes}
    return {name: value / 2**20 for name, value in mib.items()} | {
        "layer": layer / 2**20,
        "model": sum(p.numel() for p in actor.module.parameters()) * 4 / 2**20,
        "after": (_resident() - rest) / 2**20,
    }  # fmt: skip


def _resident() -> int:
    """Without what the system may take at any time."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return _status("VmRSS") - next(int(line.split()[1]) for line in lines if line.startswith("LazyFree")) * 1024


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("generation", "memory", "learning", "trl"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", default=["grpo", "ppo", "shuffled"])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("rlhf-learning"))
    parser.add_argument("--write", action="store_true", help="write results/rlhf_generation.{json,md}")
    args = parser.parse_args()
    if args.part == "trl":
        print(json.dumps(measure_trl(args.rounds, args.iterations), indent=1))
        return
    thalweg.init_distributed()
    if args.part == "generation":
        found = measure_generation(args.width, args.layers, args.prompts, args.length, args.rounds)
    elif args.part == "learning":
        found = run_learning(args.out, args.seeds, args.iterations, args.runs)
        draw_curves(args.out, args.seeds, args.runs, args.out / "curves.png")
    else:
        found = measure_memory(args.width, args.layers)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        if args.part == "generation" and args.write:
            write_generation(found, dist.get_world_size())
    dist.barrier()


if __name__ == "__main__":
    main()
