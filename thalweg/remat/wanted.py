"""Activation checkpointing as a config asks for it: which inputs are kept, where, and by which ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from thalweg.config import Config
from thalweg.mesh import Axes
from thalweg.remat.offload import DiskSaver, PartitionedSaver, make_saver
from thalweg.remat.units import RematPolicy, apply_activation_checkpointing


def recompute(
    model: nn.Module, units: list[nn.Module], axes: Axes, config: Config, device: torch.device
) -> Callable[[], None]:
    """Checkpoint ``units`` as the config says; returns what gives back the room that it takes on a disk."""
    section = config.activation_checkpointing
    policy = RematPolicy(policy=section.policy, every=section.every)
    where = "cpu" if section.cpu_checkpointing and not config.compile.enabled else section.offload
    saver = make_saver(where, device, nvme_folder(config)) if section.policy != "none" else None
    kept = saver
    if section.partition_activations and section.policy != "none":
        if axes.tensor is not None:
            kept = PartitionedSaver(axes.tensor.get_group(), saver)
        else:
            config.note("activation_checkpointing.partition_activations", "idle: there is one tensor rank")
    apply_activation_checkpointing(model, units, policy, kept)
    return saver.close if isinstance(saver, DiskSaver) else _nothing


def nvme_folder(config: Config) -> str | None:
    """The folder for what has no ``nvme_path`` of its own."""
    zero = config.zero_optimization
    paths = (config.memory.nvme_path, zero.offload_param.nvme_path, zero.offload_optimizer.nvme_path)
    return next((path for path in paths if path), None)


def _nothing() -> None:
    return None
