"""ZeRO on FSDP2: one recipe for every stage.

:func:`shard_model` turns a plain model into an FSDP2 model in this order: choose the units; move
every parameter's value into its shard (:mod:`.storage.base`), so the full tensors are freed
one by one; wrap units and root on the meta device, where FSDP2 copies nothing; plant
the shards; give each unit its collectives.  The result, :class:`ShardedModel`, offers what
an engine needs and no more: which backward reduces, the end of a window, the loss scale.
Where parameters are between uses is the matter of its storages, which it goes through in each phase.

States of a unit's parameters (FSDP2's words): *sharded*, the modules hold DTensors;
*unsharded*, the modules hold full tensors.  Outside of forward and backward they are sharded at stage 3; below, they
stay unsharded, and the modules hold the same plain parameters at all times (:mod:`.whole_parameter`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from thalweg.comm import CommsLog
from thalweg.config.schema.zero import ZeroOptimization
from thalweg.device import synchronize
from thalweg.ops.dynamic_subclass import DynamicSubclass, make_subclass
from thalweg.utils.log import current_rank, get_logger
from thalweg.zero import meshes
from thalweg.zero.collectives import Collectives, CollectivesSpec, build_collectives, build_replica_sum
from thalweg.zero.expert_params import ScalarParams, ZeroExpertParams, is_expert_param
from thalweg.zero.fsdp2 import private_api
from thalweg.zero.fsdp2.async_reduce import AsyncReduction
from thalweg.zero.full_state_dict import all_gather_full, all_gather_into, make_dtensor
from thalweg.zero.gathered_parameters import register_sharded_model
from thalweg.zero.initial_values import get_param_locations, load_initial_values
from thalweg.zero.offload_states import FORWARD_STATES, STATES, StatesOnHost
from thalweg.zero.policy import Precision, ZeroPolicy
from thalweg.zero.storage import nvme
from thalweg.zero.storage.base import (
    FSDPStorage,
    ParameterStorage,
    ParamSpec,
    ResidentStorage,
    ShardStorage,
    WholeStorage,
    describe_uneven_shards,
    max_unit_grad_bytes,
)
from thalweg.zero.tp_layout import TensorParallelLayout
from thalweg.zero.units import UnitPolicy, find_units, with_large_leaves
from thalweg.zero.whole_parameter import get_shard
from thalweg.zero.whole_tensors import gather_master

_log = get_logger(__name__)
BeforeReduce = Callable[[list[nn.Parameter]], None]
AfterReduce = Callable[[str, list[nn.Parameter], bool], None]
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModel]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ShardOptions:
    """How to shard: stage, dtypes, units, and how gradients are averaged.

    ``within_hosts``: states are sharded over the ranks of a host alone, so that every host has all of them; gradients
    are reduced there, and between hosts as ``ReplicaSync`` says.
    ``site_size``: so many ranks ("auto": those of a host) shard and reduce by themselves; what crosses to others is not
    the reducers' affair.
    ``casts_inputs``: whether the model's floating-point inputs are cast to what it computes in; those of units are.
    """

    policy: ZeroPolicy
    zero: ZeroOptimization = field(default_factory=ZeroOptimization)
    precision: Precision = field(default_factory=Precision)
    unit_policy: UnitPolicy = field(default_factory=UnitPolicy)
    sum_gradients: bool = False
    within_hosts: bool = False
    site_size: int | str | None = None
    fp32_modules: tuple[str, ...] = ()
    casts_inputs: bool = True


class _RestsOnHost(DynamicSubclass):
    """Mixin of a module that says its ``device``, as Hugging Face's do, where its parameters rest on the host.

    It says where it computes.  What its parameters say changes as they are gathered, and ``generate`` of transformers
    puts ids there, on any module in the model (PEFT's on the one inside), while FSDP2 moves those of the root alone.
    """

    _thalweg_device: torch.device | None = None  # None: a new object of this class, which nobody has sharded

    @property
    def device(self) -> torch.device:
        return self._thalweg_device or super().device  # type: ignore[misc]


class BackwardTracker:
    """Notices when a backward pass has gone through a unit for the last time.

    A unit that the forward pass used twice is passed twice in the backward pass, and is reduced each time; only
    then are its gradients complete.  So uses with gradients are counted in the forward pass and taken off in the
    backward pass.  A count that is off (a forward pass without a backward pass) makes ``complete`` come later, not
    wrong: the caller looks again when the backward pass is over.  It calls ``before(parameters)`` and
    ``after(unit, parameters, complete)`` for each backward pass through it; ``handles`` remove its hooks.
    """

    def __init__(self, group: private_api.FSDPGroupHandle, before: BeforeReduce, after: AfterReduce) -> None:
        self._group, self._after, self._num_pending_uses = group, after, 0
        module: Any = group.module
        self.handles = [module.register_forward_hook(self._on_forward)]
        group.add_reduction_hooks(lambda: before(self._parameters), self._on_after_reduce)

    def reset(self) -> None:
        """Forget forward passes that had no backward pass."""
        self._num_pending_uses = 0

    def _on_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._num_pending_uses += 1

    def _on_after_reduce(self) -> None:
        self._num_pending_uses = max(0, self._num_pending_uses - 1)
        self._after(self._group.name, self._parameters, self._num_pending_uses == 0)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [param.sharded_param for param in self._group.params]


class ShardedModel:
    """A model under ZeRO; ``module`` is the same object that was given, now sharded.

    ``storages``: where its parameters are, unit by unit; ``other_params``: those outside of FSDP2's units;
    ``paging``: what of it rests on a disk; ``sites``: 2-D, those that reduce by themselves and their ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        options: ShardOptions,
        mesh: DeviceMesh,
        device: torch.device,
        groups: Sequence[private_api.FSDPGroupHandle],
        storages: Sequence[ParameterStorage],
        shard_storages: Mapping[str, ShardStorage],
        collectives: Collectives,
        other_params: Sequence[ScalarParams | ZeroExpertParams],
        paging: nvme.ParamPaging | None = None,
        sites: DeviceMesh | None = None,
    ) -> None:
        self.module, self.options, self.device, self.groups = module, options, device, groups
        self.ledger: CommsLog = collectives.spec.ledger
        self.paging, self.sites = paging, sites
        self.swap = None if paging is None else paging.swap  # where masters lie that are not in memory
        self.replica_sync = collectives.spec.sync
        self.option_messages = collectives.option_messages | nvme.get_offload_messages(options.zero, device)
        self._policy, self._collectives, self._divisor = options.policy, collectives, collectives.spec.divisor
        self._world_size = mesh.size()
        self._storages, self._shard_storages, self._other_params = storages, shard_storages, other_params
        self._reducers = collectives.install(groups)
        # What reduces, or casts what has arrived, while the backward pass goes on.
        self._background: list[AsyncReduction | private_api.ArrivingGrads] = []
        if collectives.async_reduction is not None:
            self._background.append(collectives.async_reduction)
        is_alone = mesh.size() == 1
        if collectives.spec.shards_on_host and (is_alone or not self._reducers):  # which reduce to the master's dtype
            arriving = private_api.ArrivingGrads(device)
            self._background.append(arriving)
            for group in groups:
                group.send_grads_unwidened(is_alone, lambda: self._divisor.value == 1.0, arriving)
        self._backward_flags: tuple[bool, bool] | None = None
        self._reduces_last = False
        self._entered_sharded = False
        self.is_taken = False  # by another engine
        self._on_host: StatesOnHost | None = None
        _owners[module] = weakref.ref(self)
        self._backward_trackers: list[BackwardTracker] = []
        self._handles = [module.register_forward_pre_hook(private_api.untraced(self._before_forward), prepend=True)]
        self._handles.append(module.register_forward_hook(private_api.untraced(self._after_forward)))
        for storage in storages:
            for group in storage.groups:
                for part in _find_parts_called_alone(group, module, storage):
                    unshard = private_api.untraced(partial(storage.unshard, group))
                    self._handles.append(part.register_forward_pre_hook(lambda *_, f=unshard: f(), prepend=True))
        self.set_loss_scale(1.0)
        self.set_backward_flags(last=True)

    # Phases of a step

    def set_backward_flags(self, last: bool, sync: bool = True) -> None:
        """Set what the coming backward does: ``last`` of its window, reducing (``sync``) or not."""
        if self.is_taken:
            raise RuntimeError("a later initialize() was given this engine's model: go on with the engine it returned")
        self._reduces_last = sync and last
        reduce = sync and (last or self._policy.reduces_each_backward)
        reshard = last or self._policy.reshards_after_use
        if self._backward_flags != (reduce, reshard):
            self._backward_flags = (reduce, reshard)
            for group in self.groups:
                group.set_backward_flags(reduce, reshard)

    def defer_reduction(self) -> None:
        """Keep gradients and parameters whole until the window ends, whatever passes through them."""
        self._backward_flags = None
        if self._collectives.storage_kind == "wire":
            self.module.set_reshard_after_forward(False)  # type: ignore[operator]
        for group in self.groups:
            group.set_backward_flags(False, False)

    def finalize_grads(self) -> None:
        """Reduce whatever is not reduced yet and leave every unit sharded; collective."""
        self.reload_states()
        for work in self._background:
            work.drain()
        for group in self.groups:
            if group.reduce_unsharded_grads():
                self._backward_flags = None
        for params in self._other_params:
            params.reduce_grads(self._divisor.value * self._world_size)
        self._reset_backward_trackers()
        for storage in self._storages:
            storage.reshard("an accumulation window")
            storage.adopt_writes()

    def get_leaf(self, parameter: Tensor) -> Tensor:
        """What of ``parameter`` is in autograd's graph: of an expert's this rank's rows."""
        experts = (params for params in self._other_params if isinstance(params, ZeroExpertParams))
        rows = next((params.get_rows(parameter) for params in experts), None)
        return parameter if rows is None else rows

    def set_loss_scale(self, scale: float) -> None:
        """Divide gradients by ``scale`` as they are reduced, so that nobody sees them scaled."""
        self._divisor.value = scale / (self._world_size if self.options.sum_gradients else 1)
        if not self._reducers:
            for group in self.groups:
                group.module.set_gradient_divide_factor(self._divisor.value * self._collectives.spec.mesh.size())

    def reset_iteration_state(self) -> None:
        """Return to rest after an exception in forward or backward; gradients are left as they are."""
        assert isinstance(self.module, FSDPModule)
        private_api.reset_iteration_state(self.module)
        for reducer in self._reducers:
            reducer.reset()
        self._reset_backward_trackers()
        for storage in self._storages:
            storage.after_update()  # an update may have got half-way

    def add_reduction_callbacks(self, before_reduce: BeforeReduce, after_reduce: AfterReduce) -> None:
        """Call ``before_reduce(parameters)`` and ``after_reduce(unit, parameters, complete)`` for each unit that a
        backward pass has gone through, as its gradients are reduced.

        ``complete``: this backward adds no more to the unit's gradients.  They will not stay, so one pool of
        memory serves all units.
        """
        self._collectives.memory.share()
        self._backward_trackers = [BackwardTracker(group, before_reduce, after_reduce) for group in self.groups]
        self._handles += [handle for tracker in self._backward_trackers for handle in tracker.handles]

    def offload_states(
        self, states: Collection[str], optimizer_state: Mapping[Any, Any], *, pin_memory: bool, non_blocking: bool
    ) -> None:
        """These states rest on the host until they are needed, or :meth:`reload_states`."""
        if self._on_host is None:
            self._on_host = StatesOnHost(self.module, self._shard_storages.values(), optimizer_state)
        self._on_host.offload(states, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, states: Collection[str] = STATES, non_blocking: bool = False) -> None:
        """What of these states rests on the host is on the device again."""
        if self._on_host is not None:
            self._on_host.reload(states, non_blocking=non_blocking)
            self._on_host = None if states is STATES else self._on_host

    def get_compute_copies(self) -> dict[Tensor, Tensor]:
        """For each parameter whose compute copy is on NVMe beside its master: that copy, this rank's rows.
        Updates write them together with the master."""
        return {
            storage.param_handle.sharded_param: storage.compute_copy[: storage.num_rows]
            for storage in self._shard_storages.values()
            if storage.compute_copy is not None and storage.param_handle is not None
        }

    def reset_compression(self) -> None:
        """Forget what exchanges build on (differences, errors owed), like a process that has just loaded."""
        if self._collectives.cross_host_sync is not None:
            self._collectives.cross_host_sync.reset()
        for reducer in self._reducers:
            reducer.reset_error_feedback()

    def mark_params_updated(self, units: Iterable[str] | None = None) -> None:
        """The parameters of these units (None: of all) have new values."""
        for params in self._other_params:
            params.mark_updated()
        for storage in self._storages:
            storage.after_update(units)

    def publish_params(self) -> None:
        """The shards have new values, and programs see them; collective."""
        self.mark_params_updated()
        for storage in self._storages:
            storage.publish()

    def adopt_writes_early(self) -> None:
        """Updates come in the backward pass already."""
        for storage in self._storages:
            storage.adopt_early()

    def sync_params(self) -> None:
        """What programs have written to parameters since the last update enters the shards; collective."""
        self.reload_states()
        for storage in self._storages:
            storage.sync()

    @contextmanager
    def read_whole(self) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """Yield a function that copies parameters, whole and as a forward pass sees them, into tensors of their shapes.

        Over links they are gathered by themselves, straight into these tensors; where their values are those of a
        gather in few bits, or rest on a disk, a unit at a time.

        Every rank asks for the same parameters in the same order; collective.
        """
        self.reload_states(FORWARD_STATES)
        names = {id(module): f"{name}." if name else "" for name, module in self.module.named_modules()}
        located = {
            names[id(module)] + key: (storage, group, param)
            for storage in self._storages
            for group in storage.groups
            for param in group.params
            for module, key in param.locations
        }
        gathered: list[private_api.FSDPGroupHandle] = []
        zero = self.options.zero
        rounds = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights

        @torch.no_grad()
        def read(outs: Mapping[str, Tensor]) -> None:
            alone: list[tuple[Tensor, Tensor]] = []
            for name, out in outs.items():
                if name not in located:  # a scalar, or an expert's
                    alone.append((self.module.get_parameter(name), out))
                    continue
                storage, group, param = located[name]
                if group.is_sharded and isinstance(storage, FSDPStorage) and not rounds:
                    alone.append((param.sharded_param, out))
                    continue
                if group.is_sharded:
                    while gathered:
                        gathered.pop().to_sharded()
                    storage.unshard(group)
                    gathered.append(group)
                whole = param.unsharded_param
                assert whole is not None
                if whole.shape != out.shape:  # a tensor rank's piece: ``sharded`` says of what, over ("tp", "dp")
                    sharded: Any = param.sharded_param
                    whole = all_gather_full(make_dtensor(whole.detach(), (sharded.placements[0], Replicate()), sharded))
                out.copy_(whole)
            all_gather_into(alone)

        for storage in self._storages:
            storage.before_forward()
        try:
            yield read
        finally:
            while gathered:
                gathered.pop().to_sharded()
            for storage in self._storages:
                storage.reshard("an evaluation")

    # A listener of training steps (``optim/accumulation.py``)

    def before_backward(self) -> None:
        """Nothing to do."""

    def after_backward(self) -> None:
        """What FSDP2 does not reduce is reduced at the end of a window: programs may look at it before the step."""
        if self._reduces_last:
            for params in self._other_params:
                params.reduce_grads(self._divisor.value * self._world_size)

    def after_step(self, result: object) -> None:
        """All parameters may have new values."""
        self.publish_params()

    def discard(self) -> None:
        """Forget gradients that are still unsharded (``zero_grad`` in the middle of a window)."""
        for work in self._background:
            work.drain()
        for group in self.groups:
            group.clear_unsharded_grads()
        for params in self._other_params:
            params.clear_grads()

    def close(self) -> None:
        """Take the hooks off, give memory and disk back, and leave the arena."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for work in self._background:
            work.close()
        for storage in self._storages:
            storage.close()

    # Forward

    def _before_forward(self, *_: object) -> None:
        self.reload_states(FORWARD_STATES)
        self._collectives.memory.release()
        self._entered_sharded = all(group.is_sharded for group in self.groups)
        for storage in self._storages:
            storage.before_forward()

    def _after_forward(self, *_: object) -> None:
        if torch.is_grad_enabled() or not self._entered_sharded:
            return
        for storage in self._storages:
            storage.reshard("an evaluation")
        if self._collectives.spec.shards_on_host:  # an update, or the program, may write to what the device still reads
            synchronize(self.device)

    def _reset_backward_trackers(self) -> None:
        for tracker in self._backward_trackers:
            tracker.reset()


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ShardOptions,
    device: torch.device,
    tp_layout: TensorParallelLayout | None = None,
    *,
    ledger: CommsLog | None = None,
    expert_params: ZeroExpertParams | None = None,
) -> ShardedModel:
    """Shard ``model`` in place over the 1-D data-parallel ``mesh`` (MiCS: over groups of it); collective.

    ``tp_layout``: how tensor-parallel ranks have sharded the parameters before, if they have.  Values are
    those of rank 0; a model built on the meta device (``zero.Init``) is materialised here,
    one full tensor at a time.

    Raises:
        ValueError: the model has no parameters.
    """
    named_params = dict(model.named_parameters())
    if not named_params:
        raise ValueError("the model has no parameters: there is nothing to train")
    zero, sharded = options.zero, options.policy.shards_optimizer_states
    pages_params, mics_size = zero.offload_param.device == "nvme", zero.mics_shard_size
    if options.within_hosts and (mics_size <= 0 or not sharded):
        mics_size = meshes.count_ranks_of_a_host(mesh, device)
    sites = meshes.build_site_mesh(mesh, options.site_size, device)
    mics_mesh = meshes.build_mics_mesh(mesh, mics_size, sharded) if sharded or options.within_hosts else None
    outer_mesh = sites or mics_mesh
    shard_mesh = mesh if outer_mesh is None else outer_mesh["dp"]
    replicate = not sharded or 1 in (shard_mesh.size(), mics_size)
    param_specs = make_param_specs(
        {name: parameter for name, parameter in named_params.items() if not is_expert_param(parameter)},
        options.precision,
        options.fp32_modules,
        1 if replicate else shard_mesh.size(),
    )
    uneven_shards = describe_uneven_shards(param_specs.values())
    if uneven_shards and current_rank() == 0:
        _log.warning("%s.", uneven_shards)
    blocks = find_units(model, options.unit_policy)
    # Pieces of tensor ranks differ in size, and a head's logits stay in pieces: neither makes a unit.
    units = blocks if pages_params or tp_layout is not None else with_large_leaves(model, blocks)
    on_host = nvme.shards_on_host(zero, device.type == "cpu")
    pin_shard = on_host and nvme.pins_grads(zero)
    reduce_dtype = options.precision.reduce_dtype
    spec = CollectivesSpec(
        shard_mesh,
        device,
        options.policy,
        zero,
        param_specs,
        replicate=replicate,
        unit_bytes=max_unit_grad_bytes(param_specs, units, reduce_dtype),
        root_bytes=max_unit_grad_bytes(param_specs, blocks, reduce_dtype),
        output_dtype=options.precision.master_dtype,
        replicas=None if mics_mesh is None else build_replica_sum(mics_mesh, device, zero.zero_quantized_gradients),
        ledger=ledger or CommsLog(),
        shards_on_host=on_host,
        overlaps=not pages_params,  # units are read while a gather would begin early
    )
    collectives = build_collectives(spec)
    kind, arena = collectives.storage_kind, collectives.arena
    if kind == "wire":
        units = blocks
    rank = 0 if replicate else shard_mesh.get_local_rank()
    paging = nvme.build_param_paging(
        param_specs,
        units,
        zero,
        options.fp32_modules,
        rank,
        kind,
        arena,
        several_hosts=collectives.cross_host_sync is not None,
        group=mesh.get_group() if mesh.size() > 1 else None,
    )
    shard_device = torch.device("cpu") if on_host else device
    # Tensor ranks have pieces, which only a DTensor can tell from whole parameters.
    shows_whole = not options.policy.reshards_after_use and tp_layout is None and not on_host
    storages: dict[str, ShardStorage] = {} if paging is None else dict(paging.storages)
    for name, param_spec in param_specs.items():
        if name not in storages:
            separate_master = name in collectives.separate_masters
            storages[name] = ShardStorage.create(
                param_spec, rank, kind, arena, shard_device, separate_master, pin_shard, shows_whole, on_host
            )
    locations = get_param_locations(model)
    del named_params
    load_initial_values(model, locations, storages, mesh, options.precision, device)
    # Only gathered copies and paged units are worth freeing between uses.
    reshards = options.policy.reshards_after_use and kind == "wire"
    reshard_after_forward = collectives.hpz_group_size if reshards and collectives.hpz_group_size > 1 else reshards
    paged_units = set() if paging is None else set(paging.pager.units)
    fsdp_mesh = meshes.single_rank_mesh(mesh) if replicate else shard_mesh
    reshard_by_unit = {name: reshard_after_forward or name in paged_units for name in units}
    if expert_params is None:
        expert_params = ZeroExpertParams(collectives.spec.ledger, options.policy.shards_optimizer_states)
    expert_params.adopt(model)
    for module in model.modules() if on_host else ():
        if isinstance(getattr(type(module), "device", None), property):
            module.__class__ = make_subclass(type(module), _RestsOnHost)
            module._thalweg_device = device  # type: ignore[assignment]
    param_dtype = options.precision.compute_dtype if options.precision.compute_dtype != torch.float32 else None
    ignored = {p for p in model.parameters() if p.ndim == 0 or is_expert_param(p)} or None
    common_kwargs: dict[str, Any] = {"mesh": fsdp_mesh, "ignored_params": ignored}
    if on_host:
        common_kwargs["offload_policy"] = CPUOffloadPolicy(nvme.pins_grads(zero))
    with private_api.sharding_any_dtype():
        fp32_mp_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for name in options.fp32_modules:
            module = model.get_submodule(name)
            fully_shard(module, mp_policy=fp32_mp_policy, reshard_after_forward=False, **common_kwargs)
        common_kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        for name, module in units.items():
            if name not in options.fp32_modules:
                fully_shard(module, reshard_after_forward=reshard_by_unit[name], **common_kwargs)
        common_kwargs["mp_policy"] = replace(common_kwargs["mp_policy"], cast_forward_inputs=options.casts_inputs)
        fully_shard(model, reshard_after_forward=False, **common_kwargs)
    groups = private_api.get_fsdp_groups(model)
    private_api.check_private_names(groups)
    layout_fn = meshes.make_layout_fn(mesh, outer_mesh, tp_layout, replicate)
    names = {(id(module), key): name for name, where in locations.items() for module, key in where}
    storages_by_group: dict[str, list[ShardStorage]] = {}
    for group in groups:
        storages_by_group[group.name] = in_group = []
        for param in group.params:
            module, key = param.locations[0]
            storage = storages[names[id(module), key]]
            assert tuple(param.padded_shape) == tuple(storage.shard.shape), storage.spec.name
            param.set_shard_storage(storage.shard, layout_fn(storage.spec.name, storage.spec.shape))
            if storage.unsharded is not None:
                param.set_unsharded_storage(storage.unsharded)
            storage.param_handle = param
            in_group.append(storage)
    assert isinstance(model, FSDPModule)
    private_api.lazy_init(model, (options.precision.master_dtype, options.precision.reduce_dtype))
    if on_host:
        for group in groups:
            group.copy_in_early()
    if collectives.async_reduction is not None and kind == "wire":
        for group, next_group in pairwise(groups):
            group.prefetch(next_group)
    private_api.read_partial_scalars()
    private_api.mark_collective_forward(model, not shows_whole or bool(expert_params))
    if not shows_whole:
        for param in (param for group in groups for param in group.params):
            param.forward_hooks_to_unsharded()
    scalars = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    # Where each unit's parameters are, in the order in which they are made ready and given back.
    unit_storages: list[ParameterStorage] = []
    if paging is not None:
        paged = [group for group in groups if group.name in paged_units]
        unit_storages.append(nvme.NvmeStorage(paged, storages_by_group, paging))
    resident, sync = [group for group in groups if group.name not in paged_units], collectives.cross_host_sync
    storage_type = WholeStorage if shows_whole else ResidentStorage
    if kind == "wire" and not shows_whole:
        unit_storages.append(FSDPStorage(resident, storages_by_group))
    elif kind == "wire":
        unit_storages.append(WholeStorage(resident, storages_by_group, None))
    elif sync is not None:  # which logs what moves
        on_update = sync.mark_updated
        unit_storages.append(storage_type(resident, storages_by_group, sync, arena, on_update=on_update))
    else:
        in_units = [storage.spec for group in resident for storage in storages_by_group[group.name]]
        full_bytes = sum(one.unsharded_bytes for one in in_units) if kind == "shared" else 0
        size = shard_mesh.size()  # of a site, or a MiCS group
        log_gather = partial(collectives.spec.ledger.timed, "all_gather", "parameters", "shared", full_bytes, size)
        unit_storages.append(storage_type(resident, storages_by_group, arena=arena, log_gather=log_gather))
    sharded_model = ShardedModel(
        model,
        options,
        mesh,
        device,
        groups,
        unit_storages,
        storages,
        collectives,
        [params for params in (ScalarParams(scalars, mesh.get_group()), expert_params) if params],
        paging,
        sites,
    )
    register_sharded_model(model, collectives.spec.ledger)
    return sharded_model


def unshard_model(model: nn.Module) -> dict[Tensor, nn.Parameter]:
    """Make a sharded model the plain one that it was, in place, whole parameters in the masters' dtypes; collective.

    Whoever trained it has it no longer.  Returns what has taken the place of each parameter.

    Raises:
        ValueError: tensor, expert or pipeline parallelism has cut it, which is not undone.
    """
    for group in private_api.get_fsdp_groups(model):
        group.to_sharded()
    slots = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    held = {shard.device_mesh for *_, p in slots if isinstance(shard := get_shard(p), DTensor)}
    if any(mesh.size() != dist.get_world_size() or {"tp", "ep"} & {*(mesh.mesh_dim_names or ())} for mesh in held):
        raise ValueError(
            f"this {type(model).__name__} is cut already, by the parallelism of another engine: give initialize() a "
            "model as it was built, and load_checkpoint() what the other one has learnt"
        )
    whole: dict[Tensor, nn.Parameter] = {}
    for module, key, param in slots:
        if param not in whole:
            whole[param] = nn.Parameter(gather_master(param), param.requires_grad)
        module._parameters[key] = whole[param]
    if (owner := _owners.get(model, lambda: None)()) is not None:
        owner.is_taken = True
    private_api.undo_fully_shard(model)
    return whole


def _find_parts_called_alone(
    group: private_api.FSDPGroupHandle, root: nn.Module, storage: ParameterStorage
) -> list[nn.Module]:
    """The modules before which ``group`` must be unsharded, as they may be called by themselves: a unit, where FSDP2
    does not see to it; of the root's own group every module that has its parameters (``generate`` calls an encoder)."""
    if group.module is not root:
        return [group.module] if isinstance(storage, ResidentStorage) else []  # type: ignore[list-item]
    owners = [module for param in group.params for module, _ in param.locations]
    return [] if isinstance(storage, WholeStorage) else [owner for owner in dict.fromkeys(owners) if owner is not root]


def make_param_specs(
    named_params: Mapping[str, nn.Parameter], precision: Precision, fp32_modules: Sequence[str], num_shards: int
) -> dict[str, ParamSpec]:
    """Shape and dtypes of every parameter's shard, by name."""
    param_specs = {}
    for name, parameter in named_params.items():
        if parameter.ndim == 0:
            continue  # FSDP2 cannot shard a scalar: it is kept whole and reduced by itself
        master_dtype = precision.get_master_dtype(parameter.dtype, parameter.requires_grad)
        compute_dtype = precision.get_compute_dtype(master_dtype)
        if any(name == key or name.startswith(f"{key}.") for key in fp32_modules):
            compute_dtype = master_dtype
        param_specs[name] = ParamSpec(
            name, parameter.shape, master_dtype, compute_dtype, num_shards, requires_grad=parameter.requires_grad
        )
    return param_specs
