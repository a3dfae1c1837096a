"""A small model, data and a `ds_config.json` for Hugging Face's Trainer and Accelerate, with and without DeepSpeed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VOCAB, LENGTH, NUM_STEPS, MICRO_BATCH, ACCUMULATION = 48, 12, 20, 2, 2


def ds_config(stage: int, **sections: Any) -> dict[str, Any]:
    """The config of Hugging Face's documentation: everything that its arguments know is "auto"."""
    zero = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    } | sections


OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}


def write_config(folder: str, stage: int, **sections: Any) -> str:
    """The config as a file; its path."""
    path = Path(folder) / f"ds_config_{stage}_{os.getpid()}.json"
    path.write_text(json.dumps(ds_config(stage, **sections)))
    return str(path)


def make_model(seed: int = 0) -> Any:
    """A GPT-2 with tied weights and without dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **none, **ids)
    )


def make_dataset(size: int = 64, seed: int = 1, masked: bool = True) -> Any:
    """Sequences whose labels, where ``masked``, leave out unequally many tokens."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(size):
        tokens = torch.randint(0, VOCAB, (LENGTH,), generator=draw)
        labels = tokens.clone()
        if masked:
            labels[: int(torch.randint(0, 6, (1,), generator=draw))] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def import_alias() -> None:
    """Opt in as a user's program does, in which no library of Hugging Face's is loaded yet."""
    if "thalweg.compat.deepspeed" not in sys.modules:
        # The fork server has loaded transformers, which found no DeepSpeed then.
        for name in list(sys.modules):
            if name.partition(".")[0] in ("transformers", "accelerate", "peft"):
                del sys.modules[name]
    import thalweg.compat.deepspeed  # noqa: F401


def prepare_rank() -> None:
    """What Hugging Face needs on processors: DeepSpeed's path, over gloo."""
    import_alias()
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", OMP_NUM_THREADS="1")
    from accelerate import PartialState

    reset_accelerate()
    PartialState(backend="gloo")


def reset_accelerate() -> None:
    """Forget the state that accelerate shares among all its objects."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
