"""Expert parallelism: the experts of a layer spread over ranks, tokens sent to them.

The picture, for data ranks in groups of ``ep`` neighbours (GShard; DeepSpeed-MoE):

    rank r of its group     experts [r E/ep, (r+1) E/ep)      on this rank alone; the first have one
                                                              more where ep does not divide E
    its peers elsewhere     the same experts                  (data ranks / ep) copies

    forward    own tokens sorted by expert --all-to-all--> rows of own experts, from all ranks
               results --all-to-all--> back, in the order sent
    backward   the same two ways back

Experts stay outside of ZeRO's units: nobody gathers them, so a rank whose tokens choose other
experts than its peers' takes part in nothing that they do not.  At rest and at work an expert's
parameter is a DTensor over ("ep", "copies"), with ("tp",) before them if there are tensor ranks;
what ZeRO does with copies is in :mod:`thalweg.zero.expert_params`.  Who spreads them: our own layer
(:mod:`thalweg.nn.moe.layer`) and the layers of Hugging Face models (:mod:`.detect`, :mod:`.module_list`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from thalweg.comm import CommsLog
from thalweg.deferred_init.deferred_tensor import is_deferred, materialize_tensor
from thalweg.ops.grouped_mm import RowGroups, sort_by_expert, unpermute
from thalweg.parallel.comm_group import ParallelGroup, all_to_all
from thalweg.parallel.shard_spec import ShardSpec, split_evenly
from thalweg.parallel_dims import ParallelMeshes, control_group, new_subgroup
from thalweg.zero.expert_params import ZeroExpertParams
from thalweg.zero.tp_layout import TensorParallelLayout

CombineFn = Callable[[Tensor], Tensor]


class AllToAllDispatcher:
    """Takes sorted rows to the ranks of their experts; ``ep_group`` is the group of ``ep`` ranks.

    ``expert_params``: where rows are that copies have divided among them.
    """

    def __init__(self, ep_group: ParallelGroup, num_experts: int, expert_params: ZeroExpertParams) -> None:
        self.ep_group, self.expert_params = ep_group, expert_params
        self.experts_per_rank = [stop - start for start, stop in split_evenly(num_experts, ep_group.size)]

    def dispatch(self, rows: Tensor, groups: RowGroups) -> tuple[Tensor, RowGroups, CombineFn]:
        """``rows`` (M, D) by expert -> rows of own experts, sorted, their groups, the way back."""
        ep_group, width = self.ep_group, rows.shape[1]
        num_local = self.experts_per_rank[ep_group.rank]
        self.expert_params.refresh_rows()
        sizes = self.experts_per_rank, [num_local] * ep_group.size
        recv_expert_counts = ep_group.all_to_all(groups.counts, *sizes, "expert counts")
        # All sizes come to the host at once: an accelerator is waited for once a layer.
        counts = torch.cat([groups.counts, recv_expert_counts]).tolist()
        send_ends = [0, *accumulate(self.experts_per_rank)]
        send_counts = [sum(counts[start:stop]) for start, stop in pairwise(send_ends)]
        recv_by_source = [counts[i : i + num_local] for i in range(send_ends[-1], len(counts), num_local)]
        recv_counts = [sum(own) for own in recv_by_source]

        def exchange(rows: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
            send_numels, recv_numels = [n * width for n in send_counts], [n * width for n in recv_counts]
            return all_to_all(rows.reshape(-1), send_numels, recv_numels, ep_group, "experts").view(-1, width)

        received = exchange(rows, send_counts, recv_counts)
        # Rows came by source and, within, by expert: bring those of one expert together.
        experts = torch.arange(num_local, device=rows.device).repeat(ep_group.size)
        expert_index = experts.repeat_interleave(recv_expert_counts, output_size=sum(recv_counts))
        permutation = sort_by_expert(expert_index[:, None], num_local)
        local_counts = [sum(own) for own in zip(*recv_by_source, strict=True)]

        def combine(results: Tensor) -> Tensor:
            return exchange(unpermute(results, permutation), recv_counts, send_counts)

        return permutation.permute(received), replace(permutation.groups, known_counts=local_counts), combine

    def local_weight(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """All rows that this rank has of ``parameter``."""
        rows = self.expert_params.get_rows(parameter)
        return local_rows(parameter if rows is None else rows, dtype)


# Spreading


@dataclass(frozen=True)
class ExpertShardSpec:
    """A parameter to spread: its name within the layer, the module and key that hold it, who has what."""

    name: str
    module: nn.Module
    key: str
    spec: ShardSpec


class ExpertLayer(Protocol):
    """What is asked of a layer of experts."""

    num_experts: int  # of the whole layer
    ep_size: int  # ranks that the layer itself asks to be spread over; 1 leaves it to the config

    def shard_specs(self, num_ranks: int) -> Iterator[ExpertShardSpec]:
        """The experts' parameters and how ``num_ranks`` divide them."""
        ...

    def attach_dispatcher(self, dispatcher: AllToAllDispatcher) -> None:
        """Take the exchange that brings tokens to their experts; the parameters are own ones by now."""


def shard_experts(
    layers: Mapping[str, ExpertLayer],
    meshes: ParallelMeshes,
    ep_size: int,
    tp_layout: TensorParallelLayout | None,
    *,
    expert_params: ZeroExpertParams,
    ledger: CommsLog,
) -> None:
    """Spread the experts of each layer over ``ep_size`` data ranks, or over its own ``ep_size``; collective.

    Rank 0's values count; where a rank has built its own experts alone, those of the first copy.  The parameters
    become DTensors of the model's logical shapes.  ``tp_layout``: how tensor ranks have cut them before.

    Raises:
        ValueError: the number of ranks does not divide the data-parallel ones, or a layer has
            fewer experts than ranks.
    """
    meshes_by_size: dict[int, tuple[ParallelGroup, DeviceMesh]] = {}
    data_group = meshes.fsdp.get_group()
    for name, layer in layers.items():
        num_ranks = layer.ep_size if layer.ep_size > 1 else ep_size
        if num_ranks == 1:
            continue
        num_data_ranks = meshes.fsdp.size()
        if num_data_ranks % num_ranks:
            fitting = [number for number in range(1, num_data_ranks + 1) if num_data_ranks % number == 0]
            raise ValueError(
                f"the experts of {name} are to be spread over {num_ranks} ranks, which does not divide the "
                f"{num_data_ranks} data-parallel ranks: set expert_parallel.autoep_size (or the layer's ep_size) to "
                f"one of {fitting}"
            )
        if num_ranks > layer.num_experts:
            raise ValueError(
                f"the {layer.num_experts} experts of {name} cannot be spread over {num_ranks} ranks: set "
                f"expert_parallel.autoep_size (or the layer's ep_size) to at most {layer.num_experts}"
            )
        if num_ranks not in meshes_by_size:
            meshes_by_size[num_ranks] = _build_expert_mesh(meshes, num_ranks, tp_layout, ledger)
        ep_group, mesh = meshes_by_size[num_ranks]
        for shard_spec in layer.shard_specs(num_ranks):
            parameter = shard_spec.module.get_parameter(shard_spec.key)
            tp_placement = None if tp_layout is None else tp_layout.tp_placements.get(f"{name}.{shard_spec.name}")
            shard_spec.module._parameters[shard_spec.key] = _shard_parameter(
                parameter, shard_spec.spec, tp_placement, mesh, ep_group.rank, data_group
            )
        layer.attach_dispatcher(AllToAllDispatcher(ep_group, layer.num_experts, expert_params))


def _build_expert_mesh(
    meshes: ParallelMeshes, ep_size: int, tp_layout: TensorParallelLayout | None, ledger: CommsLog
) -> tuple[ParallelGroup, DeviceMesh]:
    """Groups of ``ep_size`` neighbours on the data axis, and the mesh where spread parameters lie, which ends in
    the axes ("ep", "copies"); collective over the data ranks."""
    data = meshes.fsdp
    ranks, rank = data.mesh.flatten().tolist(), data.get_local_rank()
    first = rank // ep_size * ep_size
    # Only this data axis takes part, so that others of the job need not do the same.
    rank_groups = (ranks[first : first + ep_size], ranks[rank % ep_size :: ep_size])
    names = ("ep", "copies")
    groups = [new_subgroup(m, data.get_group(), use=name) for m, name in zip(rank_groups, names, strict=True)]
    ep_group = groups[0]
    grid = torch.tensor(ranks).view(-1, ep_size).T
    if tp_layout is not None:
        groups, names = [tp_layout.mesh.get_group(0), *groups], ("tp", *names)
        grid = tp_layout.mesh.mesh.view(tp_layout.mesh.size(0), -1, ep_size).transpose(1, 2)
    mesh = DeviceMesh.from_group(groups, data.device_type, mesh=grid.contiguous(), mesh_dim_names=names)
    return ParallelGroup(ep_group, "expert", ledger), mesh


def _shard_parameter(
    parameter: nn.Parameter,
    spec: ShardSpec,
    tp_placement: tuple[torch.Size, Placement] | None,
    mesh: DeviceMesh,
    ep_rank: int,
    data_group: dist.ProcessGroup,
) -> nn.Parameter:
    """This rank's part of rank 0's values, under the logical shape; collective over the data ranks.

    A parameter that has this rank's rows alone is that part, as the first of its copies has it.
    """
    value = materialize_tensor(parameter) if is_deferred(parameter) else parameter.detach()
    if value.is_meta:
        raise ValueError(
            "experts on the meta device have no values to spread: build the model under "
            "thalweg.zero.Init(), or on the CPU"
        )
    full = value.clone(memory_format=torch.contiguous_format)
    is_own = len(full) == spec.local_size(ep_rank) < spec.size
    group = control_group(mesh.get_group("copies") if is_own else data_group, full.device)
    dist.broadcast(full, src=dist.get_global_rank(group, 0), group=group)
    shape, tensor_axis = tp_placement or (full.shape, Replicate())
    if is_own:
        shape = torch.Size([spec.size, *shape[1:]])
    placements = [tensor_axis, spec.placement(), Replicate()][-mesh.ndim :]
    stride = torch.empty(shape, device="meta").stride()
    local = full if is_own else spec.local_slice(full, ep_rank)
    sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(sharded, parameter.requires_grad)


def local_rows(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's part of a parameter as a plain tensor; floating ones in ``dtype``."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.to(dtype) if local.is_floating_point() else local
