"""Ranks and the mesh they form; the names of its axes live here.

Axes, outermost first: ``pp`` pipeline, ``dp_outer`` and ``dp`` data (replicated, sharded),
``cp`` context (a ring), ``sp`` sequence (heads against tokens), ``tp`` tensor, ``ep`` expert.  ``tp``
varies fastest, so that a tensor group is a run of neighbouring ranks, which are on one host.  MiCS
cuts the data axis into ``dp_outer`` x ``dp``.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thalweg.device import communication_backend, current_accelerator, goes_through_host, pick_device, takes_tensors_of
from thalweg.utils.env import RankInfo, read_rank_info
from thalweg.utils.log import get_logger
from thalweg.utils.rendezvous import rendezvous

_log = get_logger(__name__)

DATA_AXIS = "dp"
_AXES = ("pp", DATA_AXIS, "cp", "sp", "tp")  # of ranks, in their order
# Once torch knows a job's device it makes the groups of a program's own meshes by splitting, which fails for others.
_SPLITTING_LIBRARIES = ("nccl", "xccl")


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis but the data axis, which takes the rest of the world."""

    sp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1


@dataclass(frozen=True)
class ParallelMeshes:
    """The job's ranks by axis.

    ``fsdp``: 1-D, the ranks that share this rank's batch rows or have others: ZeRO shards over
    them.  ``dp``: 1-D, those that have other rows.  ``sequence``, ``tp``: 1-D, the ranks
    that split a sequence, or each layer, with this one; None for a degree of 1.  ``cp`` and
    ``ulysses``: 1-D, the two ways in which those of ``sequence`` share attention.  ``tp_fsdp``: 2-D
    over ("tp", "dp"), where parameters lie, if there is a tensor axis.  ``pp``: 1-D, the ranks
    that have the other layers; all other axes then lie within one of its stages.  ``pp_reverse_group``: a second
    group of the same ranks, for messages to earlier stages, where the device's need one.
    """

    fsdp: DeviceMesh
    dp: DeviceMesh
    sequence: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    tp_fsdp: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    ulysses: DeviceMesh | None = None
    pp: DeviceMesh | None = None
    pp_reverse_group: dist.ProcessGroup | None = None

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks of the job."""
        if self.tp is None and self.sequence is None and self.pp is None:
            return self.fsdp.get_group()
        world = dist.group.WORLD
        assert world is not None
        return world

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return dist.get_world_size(self.world_group)


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
    device: str = "auto",
) -> RankInfo:
    """Join the job's process group, unless the caller has done so already; returns who we are.

    Rank and world size come from the launcher's variables (torchrun, SLURM, Open MPI) or
    the arguments; with neither this is a job of one rank, which needs no network.
    ``timeout`` is in seconds; ``device`` as in the config.  The other arguments are those of DeepSpeed's function.

    Raises:
        ValueError: the launcher's variables contradict each other; the message names them.  Or this rank has no
            device of its own.
    """
    if dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return RankInfo(dist.get_rank(), dist.get_world_size(), *local, None, None, "process group")
    if rank >= 0 and world_size > 0:
        named = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
        info = read_rank_info({**os.environ, **named})
    else:
        info = read_rank_info()
    own_device = pick_device(info.local_rank, device, info.local_world_size)
    kind = own_device.type
    backend = dist_backend or ("gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{communication_backend(kind)}")
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    if info.world_size == 1 and init_method is None:  # which meets nobody
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return info
    library = communication_backend(kind)
    # The library need not guess a rank's device then, and ranks that it cannot connect fail here.
    device_id = own_device if library in _SPLITTING_LIBRARIES and library in backend else None
    store = None
    if init_method is None and not dist.is_torchelastic_launched():
        seconds = 600.0 if timeout is None else timeout.total_seconds()
        store = rendezvous(info, *_rendezvous_address(info, distributed_port), seconds, _log.warning)
    ranks: dict[str, Any] = {"rank": info.rank, "world_size": info.world_size, "timeout": timeout}
    dist.init_process_group(backend, init_method=init_method, store=store, device_id=device_id, **ranks)
    return info


def _rendezvous_address(info: RankInfo, default_port: int) -> tuple[str, int]:
    """Where rank 0 listens, by the launcher's variables."""
    if info.master_addr is None and info.local_world_size != info.world_size:
        raise ValueError(
            f"MASTER_ADDR is not set, and {info.world_size - info.local_world_size} of the {info.world_size} ranks "
            "are on other hosts: export MASTER_ADDR, the address of rank 0's host, to all (`mpirun -x MASTER_ADDR`)"
        )
    return info.master_addr or "127.0.0.1", info.master_port or default_port


@contextmanager
def without_communicator_split() -> Iterator[None]:
    """Of a job whose device is known (``init_process_group(device_id=...)``) torch makes groups by splitting its
    communicator, for which NCCL waits for every rank of the job, members or not, and which other libraries cannot."""
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


@without_communicator_split()
def build_meshes(
    device: torch.device, mesh: DeviceMesh | None = None, dims: ParallelDims | None = None
) -> ParallelMeshes:
    """The job's axes: from the degrees, or those of the given mesh after a check; collective.

    Raises:
        ValueError: the degrees do not divide the world, contradict the given mesh, or the group cannot carry them.
    """
    dims = dims or ParallelDims()
    if max(dims.pp, dims.cp) > 1 and device.type != "cpu" and goes_through_host(device.type):
        raise ValueError(  # gloo would write from the device's addresses, which ends the process
            "stages of a pipeline and rings send messages between ranks, for which gloo takes no tensors of "
            f"{device.type}: call init_process_group() without a backend"
        )
    from torch.distributed.tensor import debug  # which loads DTensor; not every import of ours needs it

    # Meshes of the same ranks are equal to DTensor's caches, whatever groups they have: those of a job that this
    # process was in before would come back in its results, with groups that are gone.
    debug._clear_sharding_prop_cache()
    if mesh is not None and mesh.ndim == 1 and dims == ParallelDims():
        return ParallelMeshes(mesh, mesh)
    if mesh is not None:
        _check_user_mesh(mesh, dims)
    if dims == ParallelDims():
        world = (dist.get_world_size(),)
        dp = mesh[DATA_AXIS] if mesh is not None else init_device_mesh(device.type, world, mesh_dim_names=(DATA_AXIS,))
        return ParallelMeshes(dp, dp)
    degree_by_key = {
        "pipeline.stages": dims.pp,
        "context_parallel_size": dims.cp,
        "sequence_parallel_size": dims.sp,
        "tensor_parallel.autotp_size": dims.tp,
    }
    world_size, inner = dist.get_world_size(), prod(degree_by_key.values())
    if world_size % inner:
        text = " times ".join(f"{name} = {size}" for name, size in degree_by_key.items())
        raise ValueError(f"{world_size} ranks cannot be divided into groups of {inner}: {text}")
    ranks = torch.arange(world_size).view(dims.pp, -1, dims.cp, dims.sp, dims.tp)
    grid = new_submesh(ranks, _AXES, device.type, dist.group.WORLD)
    coords = grid.get_coordinate()
    assert coords is not None
    stage, tp_coord = ranks[coords[0]], coords[-1]

    def flat_mesh(axis_ranks: Tensor, name: str) -> DeviceMesh:
        return new_submesh(axis_ranks.flatten(), (name,), device.type, dist.group.WORLD)

    dp = grid[DATA_AXIS]
    cp = grid["cp"] if dims.cp > 1 else None
    ulysses = grid["sp"] if dims.sp > 1 else None
    fsdp, sequence = dp, cp or ulysses
    if sequence is not None:
        fsdp = flat_mesh(stage[..., tp_coord], "dp_cp_sp")
    if cp is not None and ulysses is not None:
        sequence = flat_mesh(stage[coords[1], ..., tp_coord], "cp_sp")
    tp = grid["tp"] if dims.tp > 1 else None
    tp_fsdp = None
    if tp is not None:
        groups = [tp.get_group(), fsdp.get_group()]
        mesh_ranks = stage.reshape(-1, dims.tp).T.contiguous()
        tp_fsdp = DeviceMesh.from_group(groups, device.type, mesh=mesh_ranks, mesh_dim_names=("tp", DATA_AXIS))
    pp = grid["pp"] if dims.pp > 1 else None
    pp_reverse_group: Any = None
    if pp is not None and device.type != "cpu":
        pp_reverse_group = new_subgroup(pp.mesh.tolist(), dist.group.WORLD, use="to earlier stages")
    return ParallelMeshes(fsdp, dp, sequence, tp, tp_fsdp, cp, ulysses, pp, pp_reverse_group)


def _check_user_mesh(mesh: DeviceMesh, dims: ParallelDims) -> None:
    names = mesh.mesh_dim_names or ()
    expected = {DATA_AXIS: None, "cp": dims.cp, "sp": dims.sp, "tp": dims.tp, "pp": dims.pp}
    for name in names:
        size = mesh[name].size()
        if name not in expected and size > 1:
            raise ValueError(f"the mesh has the axes {names}: {name!r} above one is not built yet")
        if expected.get(name) is not None and size != expected[name]:
            raise ValueError(
                f"the mesh has {size} ranks on its axis {name!r}, but the config asks for {expected[name]}"
            )
    if DATA_AXIS not in names:
        raise ValueError(f"the mesh has the axes {names}: one of them must be {DATA_AXIS!r}")
    ordered = [name for name in _AXES if name in names]
    if ordered != [name for name in names if name in _AXES] or mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise ValueError(f"the mesh has the axes {names}: give them in the order {ordered}, of ranks in their order")


_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_group(group: dist.ProcessGroup | None, device: torch.device | None = None) -> dist.ProcessGroup:
    """The ranks of ``group`` (None: of the job) as a group that takes tensors of ``device``, by default of the host.

    A group of the accelerator's library alone (a user's own ``init_process_group("nccl")``) refuses tensors in host
    memory.  Its ranks get a gloo group of their own for them, once; collective over the group then.
    """
    whole = group if group is not None else dist.group.WORLD
    assert isinstance(whole, dist.ProcessGroup)
    if takes_tensors_of(whole, device or torch.device("cpu")):
        return whole
    if whole not in _control_groups:
        _control_groups[whole] = new_subgroup(dist.get_process_group_ranks(whole), whole, "gloo", "control")
    return _control_groups[whole]


@dataclass
class _SubgroupCount:
    """Subgroups of this process and, as far as they agree on it, of its peers."""

    value: int = 0


_num_subgroups = _SubgroupCount()
# Torch has the references to them, until it destroys them.
_subgroups: WeakValueDictionary[tuple[object, ...], dist.ProcessGroup] = WeakValueDictionary()


def new_subgroup(
    ranks: Sequence[int], parent: dist.ProcessGroup | None = None, backend: str | None = None, use: str | None = None
) -> dist.ProcessGroup:
    """A process group of these ranks (of the job); only those of ``parent`` take part in making it, all at
    once, each for its own subgroup; it may be left out for a rank alone.  ``backend``: by default the job's.

    ``use``: what the group is for.  The one that was made for this is returned again, to the next engine of a
    process too: a group keeps threads, connections and, of NCCL, memory of the device until it is destroyed, and no
    engine can do that alone.  None: a group of its own, which the caller destroys.

    torch names such a group by its ranks and by how many groups this process has, or has made.  Ranks that have
    unequally many (experts on other stages, a group of the user's) would wait for each other for ever: here, and with
    torch 2.14 at the next group of the whole job.  So it gets a name of ours, and torch's count stays as it was.
    """
    assert parent is not None or len(ranks) == 1
    c10d: Any = distributed_c10d
    key = ("alone" if use and len(ranks) == 1 else use, backend, *ranks)
    found = _subgroups.get(key)
    if found not in c10d._world.pg_map:  # None, or destroyed
        found = None
    agreed = torch.tensor([_num_subgroups.value, found is None])
    if parent is not None:
        agreed = agreed if takes_tensors_of(parent, agreed.device) else agreed.to(current_accelerator())
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=parent)
    count, somebody_lacks_it = agreed.tolist()
    if found is not None and not somebody_lacks_it:
        return found
    _num_subgroups.value = count + 1
    name = hashlib.sha1(f"{count} {list(ranks)}".encode(), usedforsecurity=False).hexdigest()
    hash_ranks, torch_count = c10d._hash_ranks_to_str, c10d._world.group_count
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        with without_communicator_split():
            new_group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    finally:
        c10d._hash_ranks_to_str, c10d._world.group_count = hash_ranks, torch_count
    assert isinstance(new_group, dist.ProcessGroup)
    if use is not None:
        _subgroups[key] = new_group
    return new_group


def destroy_subgroup(group: dist.ProcessGroup) -> None:
    """End a group's threads and connections, unless the user has destroyed all groups before."""
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)


def new_submesh(
    ranks: Tensor,
    dim_names: tuple[str, ...],
    device_type: str,
    parent: dist.ProcessGroup | None = None,
    use: str = "axis",
) -> DeviceMesh:
    """A mesh over ``ranks``, this one among them, that only those of ``parent`` take part in making; ``use``, with an
    axis' name, as in :func:`new_subgroup`.

    A plain ``DeviceMesh`` of a part of the job would wait for everybody to make the same one.
    """
    coords = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for axis, name in enumerate(dim_names):
        axis_ranks = ranks[tuple(slice(None) if a == axis else i for a, i in enumerate(coords))]
        groups.append(new_subgroup(axis_ranks.tolist(), parent, use=f"{use} {name}"))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=dim_names)


def split_data_mesh(mesh: DeviceMesh, shard_size: int, key: str = "zero_optimization.mics_shard_size") -> DeviceMesh:
    """The 1-D ``mesh`` as ``dp_outer`` x ``dp``: copies of groups of ``shard_size`` consecutive ranks, by ``key``.

    Raises:
        ValueError: ``shard_size`` does not divide the number of ranks.
    """
    num_ranks = mesh.size()
    if num_ranks % shard_size:
        divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
        raise ValueError(
            f"{key} = {shard_size} does not divide the {num_ranks} data-parallel ranks: use one of {divisors}"
        )
    grid = mesh.mesh.flatten().view(-1, shard_size)
    return new_submesh(grid, ("dp_outer", DATA_AXIS), mesh.device_type, mesh.get_group(), key)
