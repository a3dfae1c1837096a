"""The meshes that sharding works with, and the layout that parameters show."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from thalweg.mesh import grid_of, split_data_axis
from thalweg.zero.states import Layout, States


def mesh_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of this rank alone: FSDP2's shape for parameters that are not sharded."""
    if mesh.size() == 1 and mesh.ndim == 1:
        return mesh
    return grid_of(torch.tensor([dist.get_rank()]), ("alone",), mesh.device_type)


def copies_of_shards(mesh: DeviceMesh, size: int) -> DeviceMesh | None:
    """Copies x shards where groups of ``size`` ranks shard by themselves (MiCS), else None."""
    return None if size in (0, 1, mesh.size()) else split_data_axis(mesh, size)


def shown_layouts(
    mesh: DeviceMesh, grid: DeviceMesh | None, states: States | None, replicate: bool
) -> Callable[[str, torch.Size], Layout | None]:
    """By name and shape: the layout that a parameter shows, where FSDP2 works with another one."""
    if states is not None:
        return lambda name, shape: states.layout(name, shape, replicate)
    if replicate:
        return lambda name, shape: Layout(mesh, (Replicate(),), shape)
    if grid is not None:
        return lambda name, shape: Layout(grid, (Replicate(), Shard(0)), shape)
    return lambda name, shape: None
