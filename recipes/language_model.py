"""Configurations for training language models."""

from __future__ import annotations

from typing import Any, Literal

from thalweg.cli.demo.settings import build_engine_config as demo

Precision = Literal["fp32", "bf16", "fp16"]

__all__ = ["demo", "zero", "zero3_bf16"]


def zero(
    stage: int,
    *,
    precision: Precision = "fp32",
    micro_batch: int = 4,
    accumulation: int = 1,
    optimizer: str = "AdamW",
    lr: float = 3e-4,
    weight_decay: float = 0.01,
    total_steps: int | None = None,
    warmup_steps: int = 10,
    clipping: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Return a configuration for ZeRO ``stage`` (0 to 3).

    ``total_steps`` adds a linear warm-up and a cosine decay over that many updates;
    ``clipping`` is the largest global gradient norm, 0 for none.  fp16 scales the loss
    dynamically from 2**16.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "seed": seed,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": optimizer, "params": {"lr": lr, "weight_decay": weight_decay}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if total_steps is not None:
        config["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": total_steps,
                "warmup_num_steps": warmup_steps,
                "warmup_type": "linear",
            },
        }
    return config


def zero3_bf16(*, micro_batch: int = 4, total_steps: int | None = None, lr: float = 3e-4) -> dict[str, Any]:
    """Return the usual one for a model that does not fit: stage 3, bf16 compute, fp32 masters."""
    return zero(3, precision="bf16", micro_batch=micro_batch, total_steps=total_steps, lr=lr)
