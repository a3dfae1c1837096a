"""Activation checkpointing as a config asks for it: which inputs are kept, where, and by which ranks."""

from collections.abc import Callable

import torch
from torch import nn

from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)
from thalweg.activation_checkpointing.offload import PartitionedActivationOffloader, build_activation_offloader
from thalweg.config import Config
from thalweg.parallel_dims import ParallelMeshes


def setup_activation_checkpointing(
    model: nn.Module, units: list[nn.Module], axes: ParallelMeshes, config: Config, device: torch.device
) -> Callable[[], None]:
    """Checkpoint ``units`` as the config says; returns what gives back the room that it takes on a disk."""
    section = config.activation_checkpointing
    policy = ActivationCheckpointPolicy(policy=section.policy, every=section.every)
    target = "cpu" if section.cpu_checkpointing and not config.compile.enabled else section.offload
    if section.policy == "none":
        return lambda: None
    offloader = base_offloader = build_activation_offloader(target, device, default_nvme_path(config))
    if section.partition_activations:
        if axes.tp is not None:
            offloader = PartitionedActivationOffloader(axes.tp.get_group(), base_offloader)
        else:
            config.add_note("activation_checkpointing.partition_activations", "idle: there is one tensor rank")
    apply_activation_checkpointing(model, units, policy, offloader)
    return getattr(base_offloader, "close", lambda: None)


def default_nvme_path(config: Config) -> str | None:
    """The folder that the config names for what goes to a disk and has no ``nvme_path`` of its own."""
    zero = config.zero_optimization
    tiers = sorted((zero.offload_param, zero.offload_optimizer), key=lambda tier: tier.device != "nvme")
    paths = (config.memory.nvme_path, *(tier.nvme_path for tier in tiers))
    return next((path for path in paths if path and path != "auto"), None)
