"""One training process of `offload.py`: a GPT with given tiers, its losses, seconds, bytes and peak as JSON.

Runs in Thalweg's environment or, for `--engine deepspeed`, in that of the peers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

# layers, width, heads, vocabulary
SHAPES = {
    "tiny": (2, 128, 2, 512),
    "50m": (6, 768, 12, 8192),
    "100m": (11, 768, 12, 32768),
    "200m": (16, 960, 15, 16384),
    "gpt2-1.5b": (48, 1600, 25, 50257),
}


def memory_mib(key: str = "VmHWM") -> float:
    """This process's resident memory in MiB: its peak (VmHWM) or its present value (VmRSS)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) / 1024


def disk_busy_seconds(folder: str) -> float | None:
    """Seconds that the disk of a folder has had something to do, since the machine started; None where unknown."""
    number = os.stat(folder).st_dev
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    return int(path.read_text().split()[9]) / 1000 if path.exists() else None


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    """The ds_config, the same for both engines."""
    zero: dict[str, Any] = {"stage": 3}
    if args.param != "none":
        zero["offload_param"] = {
            "device": args.param,
            "nvme_path": args.folder,
            "buffer_count": args.buffers,
            "max_in_cpu": 0,
            "pin_memory": False,
        }
    if args.optimizer != "none":
        zero["offload_optimizer"] = {"device": args.optimizer, "nvme_path": args.folder, "pin_memory": False}
    if args.engine == "deepspeed":
        if args.param != "none":
            # Each parameter in flight takes a buffer, and its prefetching asks for dozens at once.
            zero["offload_param"] |= {"buffer_size": 26_000_000, "buffer_count": 80}
        if args.optimizer == "nvme":
            zero["offload_optimizer"] |= {"buffer_count": 5, "pipeline_read": True, "pipeline_write": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": args.clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "zero_optimization": zero,
    }
    if args.bf16:
        config["bf16"] = {"enabled": True}
    if args.engine == "deepspeed":
        config["steps_per_print"] = 10**9
        config["aio"] = {"block_size": 8 << 20, "queue_depth": 8, "thread_count": 4}
    else:
        config["cpu_kernels"] = "torch"
        config["activation_checkpointing"] = {"policy": "full" if args.recompute else "none"}
        config["log_level"] = "error"
    return config


def build_model(args: argparse.Namespace) -> Any:
    """The reference GPT, or Hugging Face's GPT-2 without dropout."""
    layers, width, heads, vocabulary = SHAPES[args.case]
    if args.model == "hf":
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"vocab_size": vocabulary, "n_layer": layers, "n_head": heads, "n_embd": width}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**shape, **dropout, n_positions=max(1024, args.sequence)))
    from thalweg.nn.transformer import GPT, GPTConfig

    return GPT(GPTConfig(vocabulary, layers, heads, width, args.sequence))


def build_engine(args: argparse.Namespace) -> Any:
    """The engine around a freshly initialised model."""
    import torch

    torch.manual_seed(0)
    if args.engine == "deepspeed":
        deepspeed: Any = importlib.import_module("deepspeed")
        deepspeed.init_distributed("gloo", init_method=f"file://{args.store}", rank=0, world_size=1)
        # Built in its context: `initialize` alone would make paged parameters 16-bit under fp32 on CPU.
        with deepspeed.zero.Init(config_dict_or_path=make_config(args)):
            model = build_model(args)
        return deepspeed.initialize(model=model, config=make_config(args))[0]
    import thalweg

    with thalweg.zero.Init():
        model = build_model(args)
    return thalweg.initialize(model=model, config=make_config(args))[0]


def main() -> None:
    """Train and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("thalweg", "deepspeed"), default="thalweg")
    parser.add_argument("--case", choices=SHAPES, default="50m")
    parser.add_argument("--param", choices=("none", "cpu", "nvme"), default="none")
    parser.add_argument("--optimizer", choices=("none", "cpu", "nvme"), default="none")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--store", default="")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--buffers", type=int, default=3)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--model", choices=("gpt", "hf"), default="gpt")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(2)
    imported = memory_mib()
    start = time.perf_counter()
    engine = build_engine(args)
    result: dict[str, Any] = {"imported_mib": imported, "setup_seconds": time.perf_counter() - start}
    result["setup_mib"] = memory_mib()
    result["losses"], result["seconds"], result["cpu_seconds"] = [], [], []
    result["read_bytes"], result["written_bytes"], result["peaks_mib"] = [], [], []
    result["minor_faults"], result["major_faults"], result["disk_busy_seconds"] = [], [], []
    components = getattr(engine, "_components", None)  # DeepSpeed's engine has none
    swap = components.sharded.swap if components is not None else None
    vocabulary = SHAPES[args.case][3]
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        tokens_BT = torch.randint(0, vocabulary, (1, args.sequence + 1), generator=generator)
        reads, writes = (swap.reads.nbytes, swap.writes.nbytes) if swap else (0, 0)
        usage, busy = resource.getrusage(resource.RUSAGE_SELF), disk_busy_seconds(args.folder)
        clock, cpu = time.perf_counter(), time.process_time()
        if args.model == "hf":  # which shifts the labels itself
            loss = engine(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        else:
            loss = engine(tokens_BT[:, :-1], tokens_BT[:, 1:])
        engine.backward(loss)
        engine.step()
        result["seconds"].append(time.perf_counter() - clock)
        result["cpu_seconds"].append(time.process_time() - cpu)
        result["losses"].append(loss.item())
        result["read_bytes"].append(swap.reads.nbytes - reads if swap else 0)
        result["written_bytes"].append(swap.writes.nbytes - writes if swap else 0)
        after = resource.getrusage(resource.RUSAGE_SELF)
        result["minor_faults"].append(after.ru_minflt - usage.ru_minflt)
        result["major_faults"].append(after.ru_majflt - usage.ru_majflt)
        if busy is not None:
            result["disk_busy_seconds"].append((disk_busy_seconds(args.folder) or 0.0) - busy)
        result["peak_mib"] = memory_mib()
        result["peaks_mib"].append(result["peak_mib"])
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
