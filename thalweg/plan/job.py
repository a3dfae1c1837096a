"""The plan's view of a job that is about to run: its ranks, what they may use, and its open options."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.config import Config
from thalweg.observe import resident_mib
from thalweg.plan.auto import choose, fill, open_paths
from thalweg.plan.batch import batch_of
from thalweg.plan.cluster import DEVICES, Cluster, host_memory_available, this_machine
from thalweg.plan.core import Question
from thalweg.plan.setting import Ranks, tensor_ranks, with_optimizer
from thalweg.plan.sizes import parse_bytes
from thalweg.plan.source import Source, open_source
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


def settle_job(
    config: Config,
    model: nn.Module,
    mesh: DeviceMesh,
    everyone: dist.ProcessGroup,
    device: torch.device,
    optimizer: Any = None,
) -> Config:
    """``config`` with what is left to the plan filled in, the same on every rank; collective.

    ``mesh``: the data-parallel ranks; ``everyone``: all ranks of the job, whose rank 0 decides;
    ``optimizer``: the one that the program has built, if any.
    """
    names = open_paths(config)
    if not names:
        return config
    found: list[Any] = [None]
    root = dist.get_global_rank(everyone, 0)
    if dist.get_rank() == root:
        found = [_decide(with_optimizer(config, optimizer), model, mesh, device, names)]
    if dist.get_world_size(everyone) > 1:
        dist.broadcast_object_list(found, src=root, group=everyone)
    return fill(config, *found[0])


def _decide(
    config: Config, model: nn.Module, mesh: DeviceMesh, device: torch.device, names: list[str]
) -> tuple[dict[str, Any], str]:
    source, ranks = twin(model), ranks_of(mesh, device, tensor_ranks(config))
    if source is None:
        return {}, ""
    resident, local = int(resident_mib() * 2**20), ranks.per_node if device.type == "cpu" else 1
    cluster = cluster_of_job(ranks, device, find_limit(config, device, local, resident), config)
    question = Question(source, cluster, None, None, process_bytes(model, device))
    try:
        batch_of(source.model, 1)
    except ValueError:
        question = replace(question, states_only=True)
    return choose(config, question, names)


def ranks_of(mesh: DeviceMesh, device: torch.device, tensor: int = 1) -> Ranks:
    """The ranks of ``mesh``, and the ``tensor`` ranks in the place of each, by host, as the launcher says."""
    world = mesh.size() * tensor
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    local = local if 0 < local <= world and world % local == 0 else world
    return Ranks(world // local, local, "cpu" if device.type == "cpu" else "cuda")


def process_bytes(model: nn.Module, device: torch.device) -> int:
    """What this process holds but for ``model``; 0 for ranks that compute elsewhere."""
    held = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    return max(0, int(resident_mib() * 2**20) - held) if device.type == "cpu" else 0


def find_limit(config: Config, device: torch.device, num_local: int, resident: int) -> int | None:
    """Bytes that the ranks of this host (or this device) may hold together, from the first byte on.

    ``resident``: what this rank holds already.
    """
    memory = config.memory
    if device.type != "cpu":
        if memory.device_limit is not None:
            return parse_bytes(memory.device_limit, "memory.device_limit")
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if memory.host_limit is not None:
        return parse_bytes(memory.host_limit, "memory.host_limit")
    found = []
    available = host_memory_available()
    if available is not None:
        found.append(available + num_local * resident)
    for kind, used in ((resource.RLIMIT_AS, _virtual_bytes()), (resource.RLIMIT_DATA, resident)):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            found.append(num_local * (soft - used + resident))
    return min(found) if found else None


def cluster_of_job(ranks: Ranks, device: torch.device, limit: int | None, config: Config) -> Cluster:
    """The job's machines: this one's speed, and ``limit`` in place of its memory."""
    if device.type == "cpu":
        found = this_machine(ranks.per_node)
        return replace(found, num_nodes=ranks.num_nodes, host_memory=limit, disk_bytes=None)
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    base = next((cluster for key, cluster in DEVICES.items() if key in name), DEVICES["h100"])
    host = config.memory.host_limit
    return replace(
        base,
        num_nodes=ranks.num_nodes,
        devices_per_node=ranks.per_node,
        device_memory=limit,
        host_memory=host_memory_available() if host is None else parse_bytes(host, "memory.host_limit"),
    )


def twin(model: nn.Module) -> Source | None:
    """The model on meta, or None for one that cannot be copied: what asks is a help, not a duty."""
    try:
        return open_source(model)
    except Exception as error:
        _log.debug("the plan cannot copy the model: %s", error)
        return None


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
