"""Expert parallelism: the rows of each stack of experts spread over ranks, tokens sent to them.

The picture, for data ranks in groups of ``ep`` neighbours (GShard; DeepSpeed-MoE):

    rank r of its group     experts [r E/ep, (r+1) E/ep)      the stack's rows, on this rank alone
    its peers elsewhere     the same rows                     (data ranks / ep) copies

    forward    own tokens sorted by expert --all-to-all--> rows of own experts, from all ranks
               results --all-to-all--> back, in the order sent
    backward   the same two ways back

Experts stay outside of ZeRO's units: nobody gathers them, so a rank whose tokens choose other
experts than its peers' takes part in nothing that they do not.  At rest and at work the stack is
a DTensor over ("ep", "copies"); its gradient is averaged over all data ranks when a window ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from thalweg.mesh import Axes
from thalweg.parallel.team import Team


class ExpertTeam:
    """Takes sorted rows to the ranks of their experts; ``team`` is the group of ``ep`` ranks."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.size = team.size

    def to_experts(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """``rows`` (M, D) by expert, ``counts`` (E,) -> rows of own experts, their counts, the way back."""
        team, width = self.team, rows.shape[1]
        own = len(counts) // team.size
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=team.group)
        by_source = theirs.view(team.size, own)  # (source rank, own expert)
        sent, came = counts.view(team.size, own).sum(1).tolist(), by_source.sum(1).tolist()
        received = _exchange(rows, sent, came, width, team)
        # Rows came by source and, within, by expert: bring those of one expert together.
        expert = (
            torch.arange(own, device=rows.device).repeat(team.size).repeat_interleave(by_source.reshape(-1))
        )
        order = expert.argsort(stable=True)

        def back(results: Tensor) -> Tensor:
            unsorted = torch.empty_like(results).index_copy(0, order, results)
            return _exchange(unsorted, came, sent, width, team)

        return received[order], by_source.sum(0), back


def _exchange(rows: Tensor, sent: list[int], came: list[int], width: int, team: Team) -> Tensor:
    flat = _AllToAll.apply(rows.reshape(-1), [n * width for n in sent], [n * width for n in came], team)
    return flat.view(-1, width)  # type: ignore[union-attr]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, sent: Tensor, send_counts: list[int], counts: list[int], team: Team
    ) -> Tensor:
        ctx.send_counts, ctx.counts, ctx.team = send_counts, counts, team
        return team.all_to_all(sent.contiguous(), send_counts, counts, "experts")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.team.all_to_all(grads[0].contiguous(), ctx.counts, ctx.send_counts, "experts")
        return back, None, None, None


class ExpertLayer(Protocol):
    """What is asked of a layer of experts (``thalweg.nn.moe.MoE``)."""

    ep_size: int
    experts: Any

    def spread(self, exchange: Any) -> None:
        """Take the exchange that brings tokens to their experts."""
        ...


def spread_experts(layers: Mapping[str, ExpertLayer], axes: Axes) -> list[Team]:
    """Spread the experts of each layer with ``ep_size`` above 1 over the data ranks; collective.

    Rank 0's values count.  The parameters become DTensors of the stack's logical shape.

    Raises:
        ValueError: ``ep_size`` does not divide the data-parallel ranks, or there are tensor ranks too.
    """
    teams: dict[int, tuple[Team, DeviceMesh]] = {}
    data = axes.data
    for name, layer in layers.items():
        if layer.ep_size == 1:
            continue
        if axes.tensor is not None:
            raise ValueError(
                f"{name} has ep_size = {layer.ep_size}, and tensor_parallel.autotp_size is above 1: set one "
                "of the two to 1; they are not built together yet"
            )
        if data.size() % layer.ep_size:
            raise ValueError(
                f"{name} has ep_size = {layer.ep_size}, which does not divide the {data.size()} "
                "data-parallel ranks: set it to a divisor"
            )
        if layer.ep_size not in teams:
            teams[layer.ep_size] = _team(data, layer.ep_size)
        team, mesh = teams[layer.ep_size]
        for module in layer.experts.stack.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = _own_rows(parameter, mesh, data)
        layer.spread(ExpertTeam(team))
    return [team for team, _ in teams.values()]


def _team(data: DeviceMesh, size: int) -> tuple[Team, DeviceMesh]:
    ranks = data.mesh.flatten().view(-1, size).T.contiguous()
    mesh = DeviceMesh(data.device_type, ranks, mesh_dim_names=("ep", "copies"))
    return Team(mesh.get_group("ep"), "expert"), mesh


def _own_rows(parameter: nn.Parameter, mesh: DeviceMesh, data: DeviceMesh) -> nn.Parameter:
    full = parameter.detach().clone()
    dist.broadcast(full, src=dist.get_global_rank(data.get_group(), 0), group=data.get_group())
    local = full.chunk(mesh.size(0))[mesh.get_local_rank("ep")].clone()
    rows = DTensor.from_local(
        local, mesh, [Shard(0), Replicate()], run_check=False, shape=full.shape, stride=full.stride()
    )
    return nn.Parameter(rows, parameter.requires_grad)
