"""``deepspeed.checkpointing``: recompute what a function computes in its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

# What configure() was called with; the config's own block is what initialize() acts on.
_configured: dict[str, Any] = {}


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Remember that activation checkpointing is wanted; ``activation_checkpointing`` in the config does more."""
    _configured.update(options, mpu=mpu_, config=deepspeed_config)


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Nothing is kept between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations are computed again in the backward pass."""
    return torch_checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generators; tensor ranks are seeded alike by the engine."""
    torch.manual_seed(seed)
