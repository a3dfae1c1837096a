"""Train a model that does not fit into memory: parameters and optimiser state on a disk.

    python examples/train_bigger_than_memory.py                         # 50M parameters, a few seconds
    python examples/train_bigger_than_memory.py --layers 48 --width 1600 --heads 25 --vocabulary 50257

The second line is GPT-2's largest shape: 1.56 billion parameters, whose fp32 states are 25 GB; the disk of
``--folder`` needs 25 GB of them, and memory stays below 4 GiB (printed at the end, as the kernel counts it).
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

import thalweg
from thalweg.nn.transformer import GPT, GPTConfig


def settings(folder: str) -> dict:
    """Everything on the disk, activations recomputed."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "activation_checkpointing": {"policy": "full"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": folder, "buffer_count": 3, "max_in_cpu": 0},
            "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        },
    }


def peak_gib() -> float:
    """The highest resident memory of this process so far (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20


def main() -> None:
    """Build the model without memory, train it, say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", default=".", help="where the swap file goes: a folder on a fast disk")
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = GPTConfig(args.vocabulary, args.layers, args.heads, args.width, args.sequence)
    with thalweg.zero.Init():
        model = GPT(shape)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f}M parameters")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        engine, *_ = thalweg.initialize(model=model, config=settings(folder))
        print(f"values are on the disk, peak {peak_gib():.2f} GiB")
        for step in range(args.steps):
            start = time.perf_counter()
            tokens_BT = torch.randint(0, args.vocabulary, (1, args.sequence + 1))
            loss = engine(tokens_BT[:, :-1], tokens_BT[:, 1:])
            engine.backward(loss)
            engine.step()
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: loss {loss.item():.6f}, {seconds:.1f} s, peak {peak_gib():.2f} GiB")
        engine.close()


if __name__ == "__main__":
    main()
