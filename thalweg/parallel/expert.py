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
what ZeRO does with copies is in :mod:`thalweg.zero.spread`.  Who spreads them: our own layer
(:mod:`thalweg.nn.moe`) and the layers of Hugging Face models (:mod:`.containers`, :mod:`.lists`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from thalweg.mesh import Axes, group_of
from thalweg.ops.grouped import Groups, put_back, sort_choices
from thalweg.ops.subclass import Disguised, subclass_of
from thalweg.parallel.cuts import Cut, even
from thalweg.parallel.team import Team
from thalweg.zero.pending import is_pending, value_of
from thalweg.zero.spread import SpreadParameters
from thalweg.zero.states import States

Back = Callable[[Tensor], Tensor]


class Exchange(Protocol):
    """What takes sorted rows to the ranks of their experts, and back."""

    def to_experts(self, rows: Tensor, groups: Groups) -> tuple[Tensor, Groups, Back]:
        """Rows of own experts, which expert each is for, and the way back for their results."""
        ...

    def own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """What this rank computes with where ``parameter`` stands, after :meth:`to_experts`."""
        ...


class ExpertTeam:
    """Takes sorted rows to the ranks of their experts; ``team`` is the group of ``ep`` ranks.

    ``spread``: where rows are that copies have divided among them.
    """

    def __init__(self, team: Team, num_experts: int) -> None:
        self.team = team
        self.spread: SpreadParameters | None = None
        self.owned = [stop - start for start, stop in even(num_experts, team.size)]

    def to_experts(self, rows: Tensor, groups: Groups) -> tuple[Tensor, Groups, Back]:
        """``rows`` (M, D) by expert -> rows of own experts, sorted, their groups, the way back."""
        team, width = self.team, rows.shape[1]
        own = self.owned[team.rank]
        if self.spread is not None:
            self.spread.refresh()
        theirs = team.all_to_all(groups.counts, self.owned, [own] * team.size, "expert counts")
        by_source = theirs.view(team.size, own)  # (source rank, own expert)
        sent = [int(part.sum()) for part in groups.counts.split(self.owned)]
        came = by_source.sum(1).tolist()
        received = _exchange(rows, sent, came, width, team)
        # Rows came by source and, within, by expert: bring those of one expert together.
        expert = (
            torch.arange(own, device=rows.device).repeat(team.size).repeat_interleave(by_source.flatten())
        )
        order = sort_choices(expert[:, None], own)

        def back(results: Tensor) -> Tensor:
            return _exchange(put_back(results, order), came, sent, width, team)

        return order.take(received), order.groups, back

    def own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """All rows that this rank has of ``parameter``."""
        rows = None if self.spread is None else self.spread.rows_of(parameter)
        return local_rows(parameter if rows is None else rows, dtype)


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


class Spread(Disguised):
    """Mixin of every module whose forward goes to experts elsewhere."""


def give_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let this one module compute by ``forward(self, ...)``."""
    module.__class__ = subclass_of(type(module), Spread, forward=forward)


# Spreading


@dataclass(frozen=True)
class Share:
    """A parameter to spread: its name within the layer, the module and key that hold it, who has what."""

    name: str
    module: nn.Module
    key: str
    cut: Cut


class ExpertLayer(Protocol):
    """What is asked of a layer of experts."""

    @property
    def num_experts(self) -> int:
        """Of the whole layer."""
        ...

    @property
    def ep_size(self) -> int:
        """Ranks that the layer itself asks to be spread over; 1 leaves it to the config."""
        ...

    def shares(self, ranks: int) -> Iterator[Share]:
        """The experts' parameters and how ``ranks`` divide them."""
        ...

    def spread(self, exchange: Exchange) -> None:
        """Take the exchange that brings tokens to their experts; the parameters are own ones by now."""
        ...


def by_rows(num_experts: int, ranks: int) -> Cut:
    """How ranks divide a parameter that has a row for each expert."""
    return Cut(0, num_experts, tuple((span,) for span in even(num_experts, ranks)))


def spread_experts(
    layers: Mapping[str, ExpertLayer], axes: Axes, size: int = 1, states: States | None = None
) -> list[ExpertTeam]:
    """Spread the experts of each layer over ``size`` data ranks, or over its own ``ep_size``; collective.

    Returns the team of each layer.  Rank 0's values count.  The parameters become DTensors of the
    model's logical shapes.  ``states``: how tensor ranks have cut them before.

    Raises:
        ValueError: the number of ranks does not divide the data-parallel ones, or a layer has
            fewer experts than ranks.
    """
    places: dict[int, _Place] = {}
    teams: list[ExpertTeam] = []
    for name, layer in layers.items():
        ranks = layer.ep_size if layer.ep_size > 1 else size
        if ranks == 1:
            continue
        _check(name, layer, ranks, axes.data.size())
        if ranks not in places:
            places[ranks] = _Place.of(axes, ranks, states)
        place = places[ranks]
        for share in layer.shares(ranks):
            parameter = share.module._parameters[share.key]
            assert parameter is not None
            cut_before = None if states is None else states.cuts.get(f"{name}.{share.name}")
            share.module._parameters[share.key] = place.own(parameter, share.cut, cut_before)
        teams.append(ExpertTeam(place.team, layer.num_experts))
        layer.spread(teams[-1])
    return teams


def _check(name: str, layer: ExpertLayer, ranks: int, data_ranks: int) -> None:
    if data_ranks % ranks:
        fitting = [number for number in range(1, data_ranks + 1) if data_ranks % number == 0]
        raise ValueError(
            f"the experts of {name} are to be spread over {ranks} ranks, which does not divide the "
            f"{data_ranks} data-parallel ranks: set expert_parallel.autoep_size (or the layer's ep_size) to "
            f"one of {fitting}"
        )
    if ranks > layer.num_experts:
        raise ValueError(
            f"the {layer.num_experts} experts of {name} cannot be spread over {ranks} ranks: set "
            f"expert_parallel.autoep_size (or the layer's ep_size) to at most {layer.num_experts}"
        )


@dataclass(frozen=True)
class _Place:
    """Where spread parameters lie: ``mesh`` ends in the axes ("ep", "copies")."""

    team: Team
    mesh: DeviceMesh
    data: dist.ProcessGroup

    @classmethod
    def of(cls, axes: Axes, size: int, states: States | None) -> _Place:
        """Groups of ``size`` neighbours on the data axis; collective over its ranks."""
        data = axes.data
        ranks, own = data.mesh.flatten().tolist(), data.get_local_rank()
        first = own // size * size
        # Only this data axis takes part, so that others of the job need not do the same.
        parts = (ranks[first : first + size], ranks[own % size :: size])
        groups = [group_of(members, data.get_group()) for members in parts]
        team, names = groups[0], ("ep", "copies")
        grid = torch.tensor(ranks).view(-1, size).T
        if states is not None:
            groups, names = [states.mesh.get_group(0), *groups], ("tp", *names)
            grid = states.mesh.mesh.view(states.mesh.size(0), -1, size).transpose(1, 2)
        mesh = DeviceMesh.from_group(groups, data.device_type, mesh=grid.contiguous(), mesh_dim_names=names)
        return cls(Team(team, "expert"), mesh, data.get_group())

    def own(
        self, parameter: nn.Parameter, cut: Cut, before: tuple[torch.Size, Placement] | None
    ) -> nn.Parameter:
        """This rank's part of rank 0's values, under the logical shape; collective over the data ranks."""
        value = value_of(parameter) if is_pending(parameter) else parameter.detach()
        if value.is_meta:
            raise ValueError(
                "experts on the meta device have no values to spread: build the model under "
                "thalweg.zero.Init(), or on the CPU"
            )
        full = value.clone(memory_format=torch.contiguous_format)
        dist.broadcast(full, src=dist.get_global_rank(self.data, 0), group=self.data)
        shape, tensor_axis = before if before is not None else (full.shape, Replicate())
        placements: list[Placement] = [cut.placement(), Replicate()]
        if self.mesh.ndim == 3:
            placements.insert(0, tensor_axis)
        spread = DTensor.from_local(
            cut.take(full, self.team.rank),
            self.mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return nn.Parameter(spread, parameter.requires_grad)


def local_rows(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's part of a parameter as a plain tensor; floating ones in ``dtype``."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.to(dtype) if local.is_floating_point() else local
