"""Tensor parallelism: each layer's matrices cut over the ranks of a team.

The picture, for one transformer block on a team of two:

    x ──enter──> q, k, v | gate, up     each rank: its heads, its features    (column)
                 attention | activation
                 out | down ──leave──>  a partial sum each, then their sum   (row)

so forward and backward communicate twice each (Megatron-LM).  Embedding, head and loss
are cut by vocabulary.  Everything between ``leave`` and ``enter`` is computed by all ranks
alike, to the bit.

Phases of :func:`parallelise`: take rank 0's values everywhere; find the plan; run the whole model once on
a small random input; replace each parameter by this rank's piece, and each
module's forward by the split one; run again and compare.  What ``shard`` then sees is a plain,
smaller model; the :class:`States` returned say which logical tensor each piece belongs to.

Invariants: parameters keep their names; every element has one owner (see :mod:`.cuts`) or
is whole on all ranks and gets the same gradient there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.parallel import layers
from thalweg.parallel.check import Probe
from thalweg.parallel.cuts import Cut
from thalweg.parallel.derive import derive
from thalweg.parallel.layers import Flow, give_forward
from thalweg.parallel.plans import Layer, Plan, Refused, plan_of
from thalweg.parallel.team import Team
from thalweg.utils.log import get_logger
from thalweg.zero.states import States

_log = get_logger(__name__)


def parallelise(
    model: nn.Module,
    team: Team,
    states_mesh: DeviceMesh,
    everyone: dist.ProcessGroup,
    *,
    kernels: str = "torch",
    check: bool = True,
) -> States:
    """Cut ``model`` in place over ``team``; collective over ``everyone``, whose rank 0's values count.

    ``states_mesh`` has the axes ("tp", "dp").  Returns what ``shard`` needs to know.

    Raises:
        ValueError: no plan fits, or the cut model computes something else: the message names
            the module.
    """
    agree_on_values(model, everyone)
    plan = _plan(model, team)
    probe = Probe.of(model, plan) if check else None
    expected = probe.run(model) if probe else None
    cuts = _replace_parameters(model, plan, team)
    _replace_forwards(model, plan, team, kernels)
    team.draws = draws_inside(model)
    model.register_forward_pre_hook(lambda *_: team.forget(), prepend=True)
    if probe and expected is not None:
        probe.compare(model, expected, plan, team)
    _log.info("tensor parallelism over %d ranks by %s: %d layers", team.size, plan.source, len(plan.layers))
    return States(states_mesh, cuts)


def cut_layers(model: nn.Module, team: Team) -> None:
    """Cut ``model`` in place as ``team.rank``'s, without a word to the others and without comparing anything.

    Raises:
        ValueError: no plan fits.
    """
    plan = _plan(model, team)
    _replace_parameters(model, plan, team)
    _replace_forwards(model, plan, team, "torch")
    model.register_forward_pre_hook(lambda *_: team.forget(), prepend=True)


def _plan(model: nn.Module, team: Team) -> Plan:
    why = "no tensor-parallel plan is known for it"
    try:
        plan = plan_of(model, team.size, team.rank)
    except Refused as error:
        plan, why = None, str(error)
    if plan is None or not plan.layers:
        plan = derive(model, team.size, team.rank)
    if plan is None:
        raise Refused(
            f"{type(model).__name__} cannot be cut over tensor ranks: {why}, and running it shows none; "
            "set tensor_parallel.autotp_size to 1"
        )
    return plan


def agree_on_values(model: nn.Module, everyone: dist.ProcessGroup) -> None:
    """Give every rank rank 0's parameters and buffers, tensor by tensor."""
    root = dist.get_global_rank(everyone, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                raise Refused(
                    "a model on the meta device or under zero.Init cannot be cut over tensor ranks yet: "
                    "build it outside of the context"
                )
            if tensor.is_contiguous():
                dist.broadcast(tensor.data, src=root, group=everyone)
            else:
                value = tensor.detach().contiguous()
                dist.broadcast(value, src=root, group=everyone)
                tensor.copy_(value)


def _replace_parameters(model: nn.Module, plan: Plan, team: Team) -> dict[str, tuple[torch.Size, Any]]:
    """Put pieces in place of whole parameters, wherever they are held; shape and placement by name."""
    names: dict[int, list[str]] = {}  # a stage of a pipeline may know a shared weight by its second name only
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    wanted: dict[int, tuple[nn.Parameter, Cut]] = {}
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        for key, cut in layer.cuts.items():
            parameter = module._parameters[key]
            assert parameter is not None
            known = wanted.setdefault(id(parameter), (parameter, cut))
            if known[1] != cut:
                raise Refused(f"{name}.{key} is shared with a layer that cuts it otherwise")
    made: dict[int, nn.Parameter] = {}
    found: dict[str, tuple[torch.Size, Any]] = {}
    for key, (parameter, cut) in wanted.items():
        with torch.no_grad():
            piece = cut.take(parameter, team.rank)
        made[key] = nn.Parameter(piece, requires_grad=parameter.requires_grad)
        found |= dict.fromkeys(names[key], (parameter.shape, cut.placement()))
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]
    return found


def _replace_forwards(model: nn.Module, plan: Plan, team: Team, kernels: str) -> None:
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        forward = _forward(module, layer, Flow(team, name), kernels)
        if forward is not None:
            give_forward(module, forward)
    for name, values in plan.attributes.items():
        module = model.get_submodule(name)
        for key, value in values.items():
            owner, _, last = key.rpartition(".")
            if owner:  # shared with the whole model, so that this module gets one of its own
                setattr(module, owner, copy.copy(getattr(module, owner)))
            setattr(getattr(module, owner) if owner else module, last, value)
    for name, arguments in plan.by_head.items():
        module = model.get_submodule(name)
        assert plan.deal is not None
        span, total = plan.deal.query[team.rank], plan.deal.heads.num_query
        give_forward(module, layers.own_heads(module, arguments, span, total))


def _forward(module: nn.Module, layer: Layer, flow: Flow, kernels: str) -> layers.Forward | None:
    match layer.kind:
        case "column":
            return layers.column(flow, kernels, layer.shared)
        case "row":
            return layers.row(flow, kernels)
        case "embedding":
            return layers.embedding(flow, layer.cuts["weight"])
        case "head":
            return layers.head(flow, kernels, layer.cuts["weight"])
        case "partial":
            return layers.partial(module, flow.team, flow.name)
        case "experts":
            return layers.experts(module, flow)
    return None


def draws_inside(model: nn.Module) -> bool:
    """Whether split layers may draw random numbers: some dropout probability is above zero."""
    return any(probability > 0 for probability in _probabilities(model))


def _probabilities(model: nn.Module) -> Iterator[float]:
    for module in model.modules():
        for key, value in vars(module).items():
            named = key == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
            if (named or "dropout" in key or "drop_p" in key) and isinstance(value, float):
                yield value


def synchronise_generators(team: Team) -> None:
    """Start the common stream of random numbers alike on all ranks of the team."""
    state: Tensor = torch.get_rng_state()
    dist.broadcast(state, src=dist.get_global_rank(team.group, 0), group=team.group)
    torch.set_rng_state(state)
