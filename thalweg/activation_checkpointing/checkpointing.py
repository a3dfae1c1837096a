"""``thalweg.checkpointing``: recompute what a function computes in its backward pass.

For models that say themselves what is recomputed.  The config's ``activation_checkpointing`` block does it for a model
that does not, and more: by unit, by operator, with inputs that leave the device.
"""

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


class CheckpointFunction:
    """``CheckpointFunction.apply(function, *args)``, the older form of :func:`checkpoint`."""

    apply = staticmethod(checkpoint)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generators; tensor ranks are seeded alike by the engine."""
    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Whether saved inputs are split over tensor ranks is ``activation_checkpointing.partition_activations``.

    Raises:
        ValueError: it is asked for here.
    """
    if partition_activation:
        raise ValueError('set "activation_checkpointing": {"partition_activations": true} in the config instead')


def set_num_layers(num_layers: int) -> None:
    """Nothing to do: no buffer is sized by it."""
