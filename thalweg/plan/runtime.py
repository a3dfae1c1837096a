"""The plan's view of a job that is about to run: its ranks, what they may use, and its open options."""

import os
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.config import Config
from thalweg.plan.inputs.input_spec import infer_input_spec
from thalweg.plan.inputs.model_loader import MetaModel, load_meta_model
from thalweg.plan.planner import Planner
from thalweg.plan.search.search import auto_keys, choose_auto_values, with_auto_values
from thalweg.plan.spec.cluster import Cluster, accelerator_cluster, local_cluster
from thalweg.plan.spec.devices import library_bytes, local_device
from thalweg.plan.spec.run_spec import RankTopology, choose_max_in_cpu, get_tp_size, with_optimizer
from thalweg.utils.formatting import parse_bytes
from thalweg.utils.log import get_logger
from thalweg.utils.procfs import available_host_memory, read_fields, resident_bytes

_log = get_logger(__name__)
_RESIDENT_REASON = "an eighth of this host's memory"


def fill_auto_for_job(
    config: Config,
    model: nn.Module,
    mesh: DeviceMesh,
    world_group: dist.ProcessGroup,
    device: torch.device,
    optimizer: Any = None,
) -> Config:
    """``config`` with what is left to the plan filled in, the same on every rank; collective.

    ``mesh``: the data-parallel ranks; ``world_group``: all ranks of the job, whose rank 0 decides;
    ``optimizer``: the one that the program has built, if any.
    """

    def choose(choose_values: Callable[[], tuple[dict[str, Any], str]]) -> Config:
        chosen: list[Any] = [choose_values() if dist.get_rank() == root else None]
        if dist.get_world_size(world_group) > 1:
            dist.broadcast_object_list(chosen, src=root, group=world_group)
        return with_auto_values(config, *chosen[0])

    root = dist.get_global_rank(world_group, 0)
    if keys := auto_keys(config):
        config = choose(lambda: _choose_for_job(with_optimizer(config, optimizer), model, mesh, device, keys))
    if choose_max_in_cpu(config, 0):
        config = choose(lambda: _choose_resident(config, mesh, device))
    return config


def _choose_resident(config: Config, mesh: DeviceMesh, device: torch.device) -> tuple[dict[str, Any], str]:
    topology = get_topology(mesh, device, get_tp_size(config))
    on_host = find_memory_limit(config, torch.device("cpu"), topology.ranks_per_node, resident_bytes())
    return choose_max_in_cpu(config, None if on_host is None else on_host // topology.ranks_per_node), _RESIDENT_REASON


def _choose_for_job(
    config: Config, model: nn.Module, mesh: DeviceMesh, device: torch.device, keys: list[str]
) -> tuple[dict[str, Any], str]:
    meta_model, topology = try_meta_copy(model), get_topology(mesh, device, get_tp_size(config))
    if meta_model is None:
        return {}, ""
    num_local_ranks = topology.ranks_per_node if device.type == "cpu" else 1
    limit = find_memory_limit(config, device, num_local_ranks, resident_bytes())
    cluster = build_job_cluster(topology, device, limit, config)
    process_bytes = measure_process_bytes(model, device, [mesh.size(), get_tp_size(config)])
    planner = Planner(meta_model, cluster, None, None, process_bytes)
    try:
        infer_input_spec(meta_model.model, 1)
    except ValueError:
        planner = replace(planner, without_activations=True)
    return choose_auto_values(config, planner, keys)


def get_topology(mesh: DeviceMesh, device: torch.device, tp_size: int = 1) -> RankTopology:
    """The ranks of ``mesh``, and the ``tp_size`` ranks behind each, by host, as the launcher says."""
    world_size = mesh.size() * tp_size
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if not 0 < local_world_size <= world_size or world_size % local_world_size:
        local_world_size = world_size
    kind = "cpu" if device.type == "cpu" else "accelerator"
    return RankTopology(world_size // local_world_size, local_world_size, kind)


def measure_process_bytes(model: nn.Module, device: torch.device, group_sizes: list[int] | None = None) -> int:
    """What this process holds on ``device`` but for ``model``: on the host what is resident; on an accelerator what its
    libraries are going to take, with groups of these sizes (its context is gone from the free memory already)."""
    if device.type != "cpu":
        return library_bytes(group_sizes or [])
    model_bytes = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    return max(0, resident_bytes() - model_bytes)


def find_memory_limit(config: Config, device: torch.device, num_local_ranks: int, resident_bytes: int) -> int | None:
    """Bytes that the ranks of this host (or this device) may hold together, from the first byte on.

    ``resident_bytes``: what this rank holds already.
    """
    memory = config.memory
    if device.type != "cpu":
        if memory.device_limit is not None:
            return parse_bytes(memory.device_limit, "memory.device_limit")
        # A model that is there already is counted with the job.
        return torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device)
    if memory.host_limit is not None:
        return parse_bytes(memory.host_limit, "memory.host_limit")
    limits = []
    available = available_host_memory()
    if available is not None:
        limits.append(available + num_local_ranks * resident_bytes)
    virtual_bytes = int(read_fields("/proc/self/status").get("VmSize", "0 kB").split()[0]) * 1024
    for kind, used in ((resource.RLIMIT_AS, virtual_bytes), (resource.RLIMIT_DATA, resident_bytes)):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            limits.append(num_local_ranks * (soft - used + resident_bytes))
    return min(limits) if limits else None


def build_job_cluster(topology: RankTopology, device: torch.device, limit: int | None, config: Config) -> Cluster:
    """The job's machines: this one's speed, and ``limit`` in place of its memory."""
    if device.type == "cpu":
        machine = local_cluster(topology.ranks_per_node)
        return replace(machine, num_nodes=topology.num_nodes, host_memory=limit, disk_bytes=None)
    base = accelerator_cluster(local_device(device), tf32=torch.get_float32_matmul_precision() != "highest")
    host = config.memory.host_limit
    host_memory = available_host_memory() if host is None else parse_bytes(host, "memory.host_limit")
    machines: dict[str, int] = {"num_nodes": topology.num_nodes, "devices_per_node": topology.ranks_per_node}
    return replace(base, device_memory=limit, host_memory=host_memory, **machines)


def try_meta_copy(model: nn.Module) -> MetaModel | None:
    """The model on meta, or None for one that cannot be copied: what asks is a help, not a duty."""
    try:
        return load_meta_model(model)
    except Exception as error:  # whatever a module's own __deepcopy__ raises
        skip_memory_check(f"{type(model).__name__} cannot be copied to the meta device", error)
        return None


def skip_memory_check(reason: str, error: Exception | None = None) -> None:
    """Say, on rank 0, that nobody checks whether the job fits, and why."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        cause = "" if error is None else f" ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        _log.warning("Memory check skipped: %s%s.", reason, cause)
