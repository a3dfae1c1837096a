"""Tensor parallelism: each layer's matrices cut over the ranks of a team.

The picture, for one transformer block on a team of two:

    x ──enter──> q, k, v | gate, up     each rank: its heads, its features    (column)
                 attention | activation
                 out | down ──leave──>  a partial sum each, then their sum   (row)

so forward and backward communicate twice each (Megatron-LM).  Embedding, head and loss
are cut by vocabulary.  Everything between ``leave`` and ``enter`` is computed by all ranks
alike, to the bit.

Phases of :func:`apply_tensor_parallel`: take rank 0's values everywhere; find the plan and see that all ranks
found the same; run the whole model once on
a small random input; replace each parameter by this rank's piece, and each
module's forward by the split one; run again and compare.  What ``shard`` then sees is a plain,
smaller model; the :class:`TensorParallelLayout` returned say which logical tensor each piece belongs to.

A model built under ``zero.Init`` is never whole anywhere: the plan comes from its shapes, rank 0's values arrive one
full tensor at a time, and each rank keeps its piece.  Such a model cannot be run whole, so nothing is compared, and a
plan that only a run would show is refused.

Invariants: parameters keep their names; every element has one owner (see :mod:`thalweg.parallel.shard_spec`) or
is whole on all ranks and gets the same gradient there.
"""

import copy
import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.comm.error_agreement import all_ranks_or_raise
from thalweg.comm.topology import HostTopology
from thalweg.config.schema.parallel import TPPartition
from thalweg.deferred_init.context import has_meta_tensors, materialize_module
from thalweg.deferred_init.op_graph import is_meta
from thalweg.device import get_rng_state, set_rng_state
from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.shard_spec import ShardSpec
from thalweg.parallel.tensor import layers
from thalweg.parallel.tensor.auto_plan.infer_plan import infer_plan
from thalweg.parallel.tensor.dummy_inputs import make_dummy_inputs
from thalweg.parallel.tensor.layers import replace_forward
from thalweg.parallel.tensor.parity_check import check_parity, run_for_parity
from thalweg.parallel.tensor.plan import TpPlan, UnshardableModelError, apply_layer_specs, build_tp_plan
from thalweg.parallel_dims import control_group
from thalweg.utils.log import get_logger
from thalweg.zero.tp_layout import TensorParallelLayout

_log = get_logger(__name__)

_tp_size_by_model: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None) -> nn.Module:
    """Split the model's layers over ``tp_size`` ranks when it is initialized; returns the model, as ``dtype``.

    ``tensor_parallel.autotp_size`` in the config does the same.
    """
    _tp_size_by_model[model] = tp_size
    return model if dtype is None else model.to(dtype)


def requested_tp_size(model: nn.Module) -> int | None:
    """What :func:`tp_model_init` was told of a model."""
    return _tp_size_by_model.get(model)


def apply_tensor_parallel(
    model: nn.Module,
    tp_group: ParallelGroup,
    tp_fsdp_mesh: DeviceMesh,
    world_group: dist.ProcessGroup,
    *,
    kernels: str = "torch",
    check: bool = True,
    partition: TPPartition | None = None,
) -> TensorParallelLayout:
    """Cut ``model`` in place over ``tp_group``; collective over ``world_group``, whose rank 0's values count.

    ``tp_fsdp_mesh`` has the axes ("tp", "dp"); ``partition`` is the user's own table of splits.  Returns what
    ``shard`` needs to know.

    Raises:
        ValueError: no plan fits, or the cut model computes something else: the message names
            the module.
    """
    broadcast_model(model, world_group)
    plan = _agree_on_plan(model, tp_group, world_group, partition)
    check = check and not has_meta_tensors(model)
    inputs = make_dummy_inputs(model) if check else None
    expected = run_for_parity(model, plan, inputs) if check else None
    placements = _replace_parameters(model, plan, tp_group, world_group)
    _replace_forwards(model, plan, tp_group, kernels)
    tp_group.has_dropout = has_dropout(model)
    model.register_forward_pre_hook(lambda *_: tp_group.reset(), prepend=True)
    if expected is not None:
        check_parity(model, plan, inputs, expected, tp_group.size)
    model.register_forward_pre_hook(partial(_verify_same_batch, tp_group), with_kwargs=True)
    _log.info("tensor parallelism over %d ranks by %s: %d layers", tp_group.size, plan.source, len(plan.layers))
    return TensorParallelLayout(tp_fsdp_mesh, placements)


def _verify_same_batch(tp_group: ParallelGroup, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if tensors := [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.numel()]:
        tp_group.verify_same_batch(tensors[0], "layer")


def apply_tp_offline(model: nn.Module, tp_group: ParallelGroup, partition: TPPartition | None = None) -> None:
    """Cut ``model`` in place as ``tp_group.rank``'s, without a word to the others and without comparing anything.

    Raises:
        ValueError: no plan fits.
    """
    plan = _build_plan(model, tp_group, partition)
    _replace_parameters(model, plan, tp_group)
    _replace_forwards(model, plan, tp_group, "torch")
    model.register_forward_pre_hook(lambda *_: tp_group.reset(), prepend=True)


def _build_plan(model: nn.Module, tp_group: ParallelGroup, partition: TPPartition | None = None) -> TpPlan:
    reason = "no tensor-parallel plan is known for it"
    partition, plan = partition or TPPartition(), None
    has_values = not has_meta_tensors(model)
    if not partition.layer_specs or partition.use_default_specs:
        try:
            plan = build_tp_plan(model, tp_group.size, tp_group.rank)
        except UnshardableModelError as error:
            reason = str(error)
        if plan is None or not plan.layers:
            plan = infer_plan(model, tp_group.size, tp_group.rank) if has_values else None
    if partition.layer_specs:
        plan = plan or TpPlan("tensor_parallel.partition_config")
        return apply_layer_specs(plan, model, partition.layer_specs, tp_group.size, tp_group.rank)
    if plan is None:
        cure = "running it shows none; set tensor_parallel.autotp_size to 1"
        if not has_values:
            cure = "it cannot be run before it has values; build it outside of zero.Init and of the meta device"
        raise UnshardableModelError(f"{type(model).__name__} cannot be cut over tensor ranks: {reason}, and {cure}")
    return plan


def _agree_on_plan(
    model: nn.Module, tp_group: ParallelGroup, world_group: dist.ProcessGroup, partition: TPPartition | None
) -> TpPlan:
    """The plan, which every rank finds for itself; collective over ``world_group``.

    Ranks with other software, or one that ran out of memory, may find another one than rank 0: they would cut
    other layers and wait for each other in collectives that the others do not enter.

    Raises:
        ValueError: a rank found no plan, or another one; the message names the rank and the first such layer.
    """
    build = partial(_build_plan, model, tp_group, partition)
    plan = all_ranks_or_raise(build, "a tensor-parallel plan", world_group)
    found: Any = plan.describe()
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    gathered = [own.clone() for _ in range(dist.get_world_size(world_group))]
    dist.all_gather(gathered, own, group=control_group(world_group))
    by_rank: list[Any] = [found] * len(gathered)
    if not all(torch.equal(gathered[0], other) for other in gathered):
        dist.all_gather_object(by_rank, found, group=world_group)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            first = by_rank[0]
            name = next(name for name in sorted(first | other) if first.get(name) != other.get(name))
            raise UnshardableModelError(
                f"the ranks found different tensor-parallel plans for {type(model).__name__}: {name or 'the plan'} is "
                f"{other.get(name, 'whole')} on rank {rank}, {first.get(name, 'whole')} on rank 0; run the same "
                "versions on all ranks, or set tensor_parallel.autotp_size to 1"
            )
    return plan


def broadcast_model(model: nn.Module, world_group: dist.ProcessGroup) -> None:
    """Give every rank rank 0's parameters and buffers, tensor by tensor, but for those without memory."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_meta(tensor):
                _broadcast(tensor.detach(), world_group)


def _broadcast(tensor: Tensor, world_group: dist.ProcessGroup | None) -> None:
    """Overwrite ``tensor`` with that of rank 0 of ``world_group`` (None: of the job)."""
    group, value = control_group(world_group, tensor.device), tensor.contiguous()
    dist.broadcast(value.view(-1).view(torch.uint8), group_src=0, group=group)  # gloo knows few dtypes
    if value is not tensor:
        tensor.copy_(value)


def _replace_parameters(
    model: nn.Module, plan: TpPlan, tp_group: ParallelGroup, world_group: dist.ProcessGroup | None = None
) -> dict[str, tuple[torch.Size, Any]]:
    """Put pieces in place of whole parameters, wherever they are held; shape and placement by name.

    ``world_group``: whose rank 0 has the values of tensors without memory; None: they stay without.
    """
    names: dict[int, list[str]] = {}  # a stage of a pipeline may know a shared weight by its second name only
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    specs: dict[int, tuple[nn.Parameter, ShardSpec]] = {}
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        for key, spec in layer.shard_specs.items():
            parameter = module.get_parameter(key)
            registered = specs.setdefault(id(parameter), (parameter, spec))
            if registered[1] != spec:
                raise UnshardableModelError(f"{name}.{key} is shared with a layer that cuts it otherwise")
    deferred = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers()) if world_group and is_meta(t)}
    received = torch.empty(max(deferred.values(), default=0), dtype=torch.uint8)
    new_tensors: dict[int, Any] = {}
    placements: dict[str, tuple[torch.Size, Any]] = {}
    for key, (parameter, spec) in specs.items():
        if key in deferred:  # room comes before values: pieces among full tensors would keep the heap's holes apart
            shape = [*parameter.shape]
            shape[spec.dim] = spec.local_size(tp_group.rank)
            local = torch.empty(shape, dtype=parameter.dtype)
        else:
            local = spec.local_slice(parameter.detach(), tp_group.rank)
        new_tensors[key] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        placements |= dict.fromkeys(names[key], (parameter.shape, spec.placement()))

    def load(name: str, tensor: Tensor, full: Tensor) -> None:
        value = received[: full.nbytes].view(full.dtype).view(full.shape).copy_(full)
        _broadcast(value, world_group)
        if id(tensor) in specs:
            new_tensors[id(tensor)].detach().copy_(specs[id(tensor)][1].local_slice(value, tp_group.rank))
        else:
            whole = value.clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            new_tensors[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole

    if deferred:
        materialize_module(model, load)
    for module in model.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            held.update({key: new_tensors[id(old)] for key, old in held.items() if id(old) in new_tensors})
    return placements


def _replace_forwards(model: nn.Module, plan: TpPlan, tp_group: ParallelGroup, kernels: str) -> None:
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        own_kernels = "torch" if hasattr(module, "parametrizations") else kernels  # a weight in few bits is F.linear's
        forward: layers.ForwardFn | None = None
        match layer.kind:
            case "column":
                forward = layers.column_parallel(tp_group, name, own_kernels, layer.shared_rows)
            case "row":
                forward = layers.row_parallel(tp_group, name, own_kernels)
            case "embedding":
                forward = layers.vocab_parallel_embedding(tp_group, name, layer.shard_specs["weight"])
            case "head":
                forward = layers.vocab_parallel_head(tp_group, name, own_kernels, layer.shard_specs["weight"])
            case "grad_all_reduce":
                forward = layers.with_grad_all_reduce(module, tp_group, name)
            case "whole_dropout" | "part_dropout":
                forward = layers.adapter_dropout(tp_group, layer.kind == "part_dropout")
            case "experts":
                forward = layers.expert_tensor_parallel(module, tp_group, name)
        if forward is not None:
            replace_forward(module, forward)
    for name, values in plan.local_attributes.items():
        module = model.get_submodule(name)
        for key, value in values.items():
            prefix, _, last = key.rpartition(".")
            if prefix:  # shared with the whole model, so that this module gets one of its own
                setattr(module, prefix, copy.copy(getattr(module, prefix)))
            setattr(getattr(module, prefix) if prefix else module, last, value)
    for name, arg_names in plan.per_head_args.items():
        module = model.get_submodule(name)
        assert plan.head_assignment is not None
        span, num_heads = (plan.head_assignment.query_spans[tp_group.rank], plan.head_assignment.heads.num_heads)
        replace_forward(module, layers.slice_head_args(module, arg_names, span, num_heads))


def warn_cross_host_groups(
    group: dist.ProcessGroup, world_group: dist.ProcessGroup, num_blocks: int, hidden_size: int, device: torch.device
) -> int:
    """The most hosts that any tensor group lies on; rank 0 warns above one, with the traffic; collective.

    A tensor group adds up one activation four times a block and step (Megatron-LM): the densest traffic there is.  The
    mesh makes neighbours of its ranks, which a launcher puts on one host; where the ranks of a host are no multiple of
    the group's size, some group lies on two.

    ``hidden_size``: elements of an activation a token; ``num_blocks``: blocks that are split.
    """
    max_hosts = torch.tensor([HostTopology.discover(group, device).num_hosts], device=device)
    dist.all_reduce(max_hosts, op=dist.ReduceOp.MAX, group=world_group)
    num_hosts, size = int(max_hosts), dist.get_world_size(group)
    if num_hosts > 1 and dist.get_rank(world_group) == 0:
        # By the ring form of an all-reduce: 2(n-1)/n of it from each rank.
        kib = 4 * num_blocks * hidden_size * 4 * 2 * (size - 1) / size / 1024
        _log.warning(
            f"tensor_parallel.autotp_size = {size}: a group of ranks that split each layer lies on {num_hosts} hosts, "
            f"so each rank sends {kib:.1f} KiB a token and step (fp32, {num_blocks} blocks) over the network; "
            f"ranks a host in multiples of {size}, or a size that divides them, keep it inside"
        )
    return num_hosts


def has_dropout(model: nn.Module) -> bool:
    """Whether split layers may draw random numbers: some dropout probability is above zero."""
    for module in model.modules():
        for key, value in vars(module).items():
            is_dropout_p = key == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
            if (is_dropout_p or "dropout" in key or "drop_p" in key) and isinstance(value, float) and value > 0:
                return True
    return False


def sync_rng(team: dist.ProcessGroup) -> None:
    """Go on with the first rank's stream of random numbers on all ranks of the team."""
    host, accelerator = get_rng_state()
    for state in (host, accelerator):
        if state is not None:
            dist.broadcast(state, group_src=0, group=control_group(team))
    set_rng_state((host, accelerator))
