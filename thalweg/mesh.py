"""Ranks and the mesh they form; the names of its axes live here.

Axes, outermost first: ``pp`` pipeline, ``dp_outer`` and ``dp`` data (replicated, sharded),
``cp`` context, ``tp`` tensor, ``ep`` expert.  Today ``dp`` alone may exceed one,
unless MiCS cuts it into ``dp_outer`` x ``dp``.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thalweg.device import pick_device
from thalweg.utils.env import RankInfo, read_ranks

AXES = ("pp", "dp_outer", "dp", "cp", "tp", "ep")
DATA_AXIS = "dp"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = False,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> RankInfo:
    """Join the job's process group, unless the caller has done so already; returns who we are.

    Rank and world size come from the launcher's variables (torchrun, SLURM, Open MPI) or
    the arguments; with neither this is a job of one rank, which needs no network.
    ``timeout`` is in seconds.  The other arguments are those of DeepSpeed's function.

    Raises:
        ValueError: the launcher's variables contradict each other; the message names them.
    """
    if dist.is_initialized():
        info = read_ranks({})
        return RankInfo(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=int(os.environ.get("LOCAL_RANK", info.local_rank)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", info.local_world_size)),
            master_addr=None,
            master_port=None,
            source="process group",
        )
    if rank >= 0 and world_size > 0:
        named = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
        }
        info = read_ranks({**os.environ, **named})
    else:
        info = read_ranks()
    device = pick_device(info.local_rank)
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    if info.world_size == 1 and init_method is None:
        dist.init_process_group(backend, store=_in_memory_store(), rank=0, world_size=1, timeout=timeout)
        return info
    if init_method is None and info.source != "torchrun":
        port = info.master_port or distributed_port
        init_method = f"tcp://{info.master_addr or '127.0.0.1'}:{port}"
    dist.init_process_group(
        backend, init_method=init_method, rank=info.rank, world_size=info.world_size, timeout=timeout
    )
    return info


def _in_memory_store() -> Any:
    """A store for a job of one rank, which meets nobody."""
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def build_mesh(device: torch.device, mesh: DeviceMesh | None = None) -> DeviceMesh:
    """The 1-D data-parallel mesh of the job, or the given one after a check of its shape.

    Raises:
        ValueError: a given mesh has other axes than ``dp``.
    """
    if mesh is None:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DATA_AXIS,))
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names or ()
    others = [name for name in names if name != DATA_AXIS and mesh[name].size() > 1]
    if DATA_AXIS not in names or others:
        raise ValueError(
            f"the mesh has the axes {names}: today only a mesh whose single axis above one is "
            f"{DATA_AXIS!r} can be used"
        )
    return mesh[DATA_AXIS]


def split_data_axis(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """The 1-D ``mesh`` as ``dp_outer`` x ``dp``: replicas of groups of ``size`` consecutive ranks.

    Raises:
        ValueError: ``size`` does not divide the number of ranks.
    """
    world = mesh.size()
    if world % size:
        fitting = [number for number in range(1, world + 1) if world % number == 0]
        raise ValueError(
            f"zero_optimization.mics_shard_size = {size} does not divide the {world} data-parallel ranks: "
            f"use one of {fitting}, or -1 to shard over all of them"
        )
    grid = mesh.mesh.flatten().view(-1, size)
    return DeviceMesh(mesh.device_type, grid, mesh_dim_names=("dp_outer", DATA_AXIS))
