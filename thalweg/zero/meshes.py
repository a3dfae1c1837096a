"""The meshes that sharding works with, and the layout that parameters show."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from thalweg.comm.topology import HostTopology
from thalweg.parallel_dims import new_submesh, split_data_mesh
from thalweg.zero.tp_layout import DTensorLayout, TensorParallelLayout


def single_rank_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of this rank alone: FSDP2's shape for parameters that are not sharded."""
    if mesh.size() == 1 and mesh.ndim == 1:
        return mesh
    return new_submesh(torch.tensor([dist.get_rank()]), ("alone",), mesh.device_type)


def build_mics_mesh(mesh: DeviceMesh, group_size: int, sharded: bool) -> DeviceMesh | None:
    """Copies x ranks where groups of ``group_size`` ranks shard by themselves (MiCS) or, if nothing is ``sharded``, are
    one worker, also a lone one; else None."""
    return None if group_size <= 1 or (sharded and group_size == mesh.size()) else split_data_mesh(mesh, group_size)


def build_site_mesh(mesh: DeviceMesh, site_size: int | str | None, device: torch.device) -> DeviceMesh | None:
    """Sites x ranks of a site ("auto": of a host) where sites reduce by themselves, else None; collective."""
    if site_size is None:
        return None
    size = count_ranks_of_a_host(mesh, device) if isinstance(site_size, str) else site_size
    return split_data_mesh(mesh, size, "outer_optimizer.site_size")


def count_ranks_of_a_host(mesh: DeviceMesh, device: torch.device) -> int:
    """The most consecutive ranks of ``mesh`` that share a host, whichever of its equal parts one takes; collective."""
    hosts = HostTopology.discover(mesh.get_group(), device).host_ids
    sizes = [size for size in range(1, len(hosts) + 1) if len(hosts) % size == 0]
    parts = {size: [set(hosts[start : start + size]) for start in range(0, len(hosts), size)] for size in sizes}
    return max(size for size in sizes if all(len(part) == 1 for part in parts[size]))


def make_layout_fn(
    mesh: DeviceMesh, outer_mesh: DeviceMesh | None, tp_layout: TensorParallelLayout | None, replicate: bool
) -> Callable[[str, torch.Size], DTensorLayout | None]:
    """By name and shape: the layout that a parameter shows, where FSDP2 works with another one; ``outer_mesh``: of
    copies x shards, if there is one."""
    if tp_layout is not None:
        return lambda name, shape: tp_layout.get_layout(name, shape, replicate)
    if replicate:
        whole_mesh = outer_mesh or mesh
        return lambda name, shape: DTensorLayout(whole_mesh, (Replicate(),) * whole_mesh.ndim, shape)
    if outer_mesh is not None:
        return lambda name, shape: DTensorLayout(outer_mesh, (Replicate(), Shard(0)), shape)
    return lambda name, shape: None
