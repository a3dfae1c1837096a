"""ZeRO on FSDP2: one recipe for every stage.

``shard`` turns a plain model into an FSDP2 model in this order: choose the units; move
every parameter's value into its shard (:mod:`.storage.base`), so the full tensors are freed
one by one; wrap units and root on the meta device, where FSDP2 copies nothing; plant
the shards; give each unit its collectives.  The result, :class:`ShardedModel`, offers what
an engine needs and no more: which backward reduces, the end of a window, the loss scale.

States of a unit's parameters (FSDP2's words): *sharded*, the modules hold DTensors;
*unsharded*, the modules hold full tensors.  Outside of forward and
backward they are sharded, except within an accumulation window below stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from thalweg.comm import CommsLog
from thalweg.comm.buffer_pool import BufferPool
from thalweg.storage_io import SwapFile
from thalweg.zero.collectives import Collectives, CollectivesSpec, ReplicaGroup, build_collectives
from thalweg.zero.expert_params import ZeroExpertParams, is_expert_param, reduce_scalar_grads
from thalweg.zero.fsdp2 import private_api
from thalweg.zero.fsdp2.backward_tracker import AfterReduce, BackwardTracker, BeforeReduce
from thalweg.zero.gathered_parameters import register_sharded_model
from thalweg.zero.initial_values import ParamLocations, get_param_locations, load_initial_values
from thalweg.zero.meshes import build_mics_mesh, make_layout_fn, single_rank_mesh
from thalweg.zero.policy import CommPolicy, Precision, ZeroPolicy
from thalweg.zero.storage.base import ParamSpec, ShardStorage, max_unit_grad_bytes, refresh_unsharded
from thalweg.zero.storage.nvme import NvmeStorage, PagedShardStorage, ParamOffloadPolicy
from thalweg.zero.storage.nvme_masters import build_nvme_storage
from thalweg.zero.tp_layout import DTensorLayout, TensorParallelLayout
from thalweg.zero.units import UnitPolicy, find_units, with_large_leaves


@dataclass(frozen=True)
class ShardOptions:
    """How to shard: stage, dtypes, units, and how gradients are averaged."""

    policy: ZeroPolicy
    precision: Precision = field(default_factory=Precision)
    unit_policy: UnitPolicy = field(default_factory=UnitPolicy)
    sum_gradients: bool = False
    fp32_modules: tuple[str, ...] = ()
    timeout: float = 1800.0
    comm_policy: CommPolicy = field(default_factory=CommPolicy)
    offload_policy: ParamOffloadPolicy = field(default_factory=ParamOffloadPolicy)


class ShardedModel:
    """A model under ZeRO; ``module`` is the same object that was given, now sharded."""

    def __init__(
        self,
        module: nn.Module,
        options: ShardOptions,
        mesh: DeviceMesh,
        device: torch.device,
        storages: dict[str, ShardStorage],
        collectives: Collectives,
        nvme_storage: NvmeStorage | None = None,
    ) -> None:
        self.module, self.options, self.device = module, options, device
        self.policy = options.policy
        self.storage_kind = collectives.storage_kind
        self.ledger: CommsLog = collectives.ledger
        self._mesh, self._arena = mesh, collectives.arena
        self._cross_host_sync, self.option_messages = (
            collectives.cross_host_sync,
            collectives.option_messages | options.offload_policy.get_option_messages(device),
        )
        self._async_reduction = collectives.async_reduction
        self._group = mesh.get_group()
        self._world_size = mesh.size()
        self.groups = private_api.get_fsdp_groups(module)
        self.nvme_storage = nvme_storage
        # Those that are in memory at all times.
        paged_units = nvme_storage.pager.units if nvme_storage else ()
        self._unpaged_groups = [group for group in self.groups if group.name not in paged_units]
        self._storages = storages
        self._storages_by_group: dict[str, list[ShardStorage]] = {}
        self._reducers: list[Any] = []
        self.loss_scale = 1.0
        self._backward_flags: tuple[bool, bool] | None = None
        self._entered_sharded = False
        self._handles: list[Any] = []
        self._backward_trackers: list[BackwardTracker] = []
        self._close_callbacks: list[Callable[[], None]] = []
        self.scalar_params: list[nn.Parameter] = []
        self.expert_params = ZeroExpertParams(nn.Module(), self.ledger, shard_replicas=False)

    # Phases of a step

    def set_backward_flags(self, last: bool, sync: bool = True) -> None:
        """Set what the coming backward does: ``last`` of its window, reducing (``sync``) or not."""
        reduce = sync and (last or self.policy.reduces_each_backward)
        reshard = last or self.policy.reshards_after_use
        if self._backward_flags != (reduce, reshard):
            self._backward_flags = (reduce, reshard)
            for group in self.groups:
                group.set_backward_flags(reduce, reshard)

    def defer_reduction(self) -> None:
        """Keep gradients and parameters whole until the window ends, whatever passes through them."""
        self._backward_flags = None
        if self.storage_kind == "wire":
            self.module.set_reshard_after_forward(False)  # type: ignore[operator]
        for group in self.groups:
            group.set_backward_flags(False, False)

    def finalize_grads(self) -> None:
        """Reduce whatever is not reduced yet and leave every unit sharded; collective."""
        self._wait_for_reductions()
        for group in self.groups:
            if group.reduce_unsharded_grads():
                self._backward_flags = None
            group.to_sharded()
        divisor = self.loss_scale * (1 if self.options.sum_gradients else self._world_size)
        reduce_scalar_grads(self.scalar_params, divisor, self._group)
        self.expert_params.reduce_grads(divisor)
        self._reset_backward_trackers()
        if self.nvme_storage is not None:
            self.nvme_storage.pager.end_pass()
        if self._cross_host_sync is not None:
            self._cross_host_sync.mark_updated()
        if self._arena is not None:
            self._arena.barrier("the end of an accumulation window")

    def _wait_for_reductions(self) -> None:
        if self._async_reduction is not None:
            self._async_reduction.drain()

    def set_loss_scale(self, scale: float) -> None:
        """Divide gradients by ``scale`` as they are reduced, so that nobody sees them scaled."""
        self.loss_scale = scale
        divisor = scale / (self._world_size if self.options.sum_gradients else 1)
        for reducer in self._reducers:
            reducer.divisor = divisor
        if not self._reducers:
            for group in self.groups:
                group.module.set_gradient_divide_factor(divisor * self._world_size)

    def clear_unreduced_grads(self) -> None:
        """Forget gradients that are still unsharded (``zero_grad`` in the middle of a window)."""
        self._wait_for_reductions()
        for group in self.groups:
            group.clear_unsharded_grads()
        self.expert_params.clear_grads()

    def reset_iteration_state(self) -> None:
        """Return to rest after an exception in forward or backward; gradients are left as they are."""
        assert isinstance(self.module, FSDPModule)
        private_api.reset_iteration_state(self.module)
        for reducer in self._reducers:
            reducer.reset()
        self._reset_backward_trackers()
        if self.nvme_storage is not None:
            self.nvme_storage.pager.end_pass()
            self.nvme_storage.pager.invalidate()  # an update may have got half-way

    def add_reduction_callbacks(self, before_reduce: BeforeReduce, after_reduce: AfterReduce) -> None:
        """Call ``before_reduce(parameters)`` and ``after_reduce(unit, parameters, complete)`` for each unit that a
        backward pass has gone through, as its gradients are reduced.

        ``complete``: this backward adds no more to the unit's gradients.  They will not stay, so one pool of
        memory serves all units.
        """
        outputs, inputs = BufferPool(), BufferPool()
        for reducer in self._reducers:
            reducer.output_buffers, reducer.input_buffers = outputs, inputs
        self._backward_trackers = [BackwardTracker(group, before_reduce, after_reduce) for group in self.groups]
        self._handles += [handle for tracker in self._backward_trackers for handle in tracker.handles]

    @property
    def swap(self) -> SwapFile | None:
        """Where masters lie that are not in memory."""
        return self.nvme_storage.swap if self.nvme_storage is not None else None

    def get_compute_copies(self) -> dict[Tensor, Tensor]:
        """For each parameter whose compute copy is on NVMe beside its master: that copy, this rank's rows.
        Whoever asks promises to write them with every update."""
        if self.nvme_storage is None:
            return {}
        self.nvme_storage.pager.updates_write_copies = True
        copies: dict[Tensor, Tensor] = {}
        for group in self.groups:
            for param, storage in zip(group.params, self._storages_by_group[group.name], strict=True):
                if isinstance(storage, PagedShardStorage) and storage.compute_copy is not None:
                    copies[param.sharded_param] = storage.compute_copy[: storage.num_rows]
        return copies

    def reset_compression(self) -> None:
        """Forget what exchanges build on (differences, errors owed), like a process that has just loaded."""
        if self._cross_host_sync is not None:
            self._cross_host_sync.reset()
        for reducer in self._reducers:
            if (all_to_all := getattr(reducer, "all_to_all", None)) is not None:
                all_to_all.reset_error_feedback()

    def add_close_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the engine is closed."""
        self._close_callbacks.append(callback)

    def mark_params_updated(self, units: Iterable[str] | None = None) -> None:
        """The parameters of these units (None: of all) have new values in the swap file."""
        self.expert_params.mark_updated()
        if self.nvme_storage is not None:
            self.nvme_storage.pager.invalidate(units)

    def _reset_backward_trackers(self) -> None:
        for tracker in self._backward_trackers:
            tracker.reset()

    def close(self) -> None:
        """Take the hooks off and leave the arena."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for callback in self._close_callbacks:
            callback()
        if self.nvme_storage is not None:
            self.nvme_storage.close()
        if self._async_reduction is not None:
            self._async_reduction.close()
        if self._arena is not None:
            self._arena.close()

    # Forward without a gather

    def _install_unsharded_hooks(self) -> None:
        units = {id(group.module): group for group in self._unpaged_groups}
        for module in {id(group.module): group.module for group in self._unpaged_groups}.values():
            is_root = module is self.module
            before = self._unshard_all if is_root else self._make_unshard_hook(units[id(module)])
            assert isinstance(module, nn.Module)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self.module.register_forward_hook(self._reshard_after_eval))
        if id(self.module) not in units:
            self._handles.append(self.module.register_forward_pre_hook(self._unshard_all, prepend=True))

    def _unshard_all(self, *_: object) -> None:
        self._entered_sharded = all(group.is_sharded for group in self.groups)
        if self.nvme_storage is not None:
            self.nvme_storage.pager.end_pass()
        if not any(group.is_sharded for group in self._unpaged_groups):
            return
        self._refresh_unsharded(self._unpaged_storages)
        self._barrier_unsharded("the start of a forward pass")
        for group in self._unpaged_groups:
            group.to_unsharded()

    def _make_unshard_hook(self, group: private_api.FSDPGroupHandle) -> Callable[..., None]:
        storages = self._storages_by_group[group.name]

        def before(*_: object) -> None:
            if group.is_sharded:  # called by itself, not through the root
                self._refresh_unsharded(storages)
                self._barrier_unsharded(f"the forward pass of {group.name!r}")
                group.to_unsharded()

        return before

    def _reshard_after_eval(self, *_: object) -> None:
        if torch.is_grad_enabled() or not self._entered_sharded:
            return
        for group in self.groups:
            group.to_sharded()
        if self._arena is not None:
            self._arena.barrier("the end of an evaluation")

    def _install_paging(self, nvme_storage: NvmeStorage) -> None:
        pager = nvme_storage.pager
        for group in self.groups:
            if (name := group.name) not in pager.units:
                continue
            storages = [nvme_storage.storages[store.spec.name] for store in self._storages_by_group[name]]
            if all(store.unsharded is None for store in storages):
                packed_shards = [store.packed_shard for store in storages]
                group.all_gather_from(packed_shards, partial(pager.acquire, name), partial(pager.release, name))
            else:
                prefetch, acquire, release = (partial(f, name) for f in (pager.prefetch, pager.acquire, pager.release))
                group.use_pager(prefetch, acquire, release)

    @property
    def _unpaged_storages(self) -> list[ShardStorage]:
        return [store for group in self._unpaged_groups for store in self._storages_by_group[group.name]]

    def _refresh_unsharded(self, storages: Iterable[ShardStorage]) -> None:
        (refresh_unsharded if self._cross_host_sync is None else self._cross_host_sync)(storages)

    def _barrier_unsharded(self, operation: str) -> None:
        if self._arena is None:
            return
        if self._cross_host_sync is not None:  # which has counted what moved
            self._arena.barrier(operation)
            return
        gathered_storages = self._unpaged_storages if self.storage_kind == "shared" else []
        unsharded_bytes = sum(store.spec.unsharded_bytes for store in gathered_storages)
        with self.ledger.timed(
            "all_gather", "parameters", "shared", full_bytes=unsharded_bytes, world_size=self._world_size
        ):
            self._arena.barrier(operation)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ShardOptions,
    device: torch.device,
    tp_layout: TensorParallelLayout | None = None,
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
    mics_mesh = (
        build_mics_mesh(mesh, options.comm_policy.mics_group_size) if options.policy.shards_optimizer_states else None
    )
    shard_mesh = mesh if mics_mesh is None else mics_mesh["dp"]
    replicate = not options.policy.shards_optimizer_states or 1 in (
        shard_mesh.size(),
        options.comm_policy.mics_group_size,
    )
    param_specs = _build_param_specs(named_params, options, 1 if replicate else shard_mesh.size())
    blocks = find_units(model, options.unit_policy)
    # Pieces of tensor ranks differ in size, and a head's logits stay in pieces: neither makes a unit.
    units = blocks if options.offload_policy.uses_nvme or tp_layout is not None else with_large_leaves(model, blocks)
    collectives = build_collectives(
        CollectivesSpec(
            shard_mesh,
            device,
            options.policy,
            options.comm_policy,
            param_specs,
            replicate=replicate,
            unit_bytes=max_unit_grad_bytes(param_specs, units, options.precision.reduce_dtype),
            root_bytes=max_unit_grad_bytes(param_specs, blocks, options.precision.reduce_dtype),
            output_dtype=options.precision.master_dtype,
            timeout=options.timeout,
            replicas=None
            if mics_mesh is None
            else ReplicaGroup.build(mics_mesh, device, options.comm_policy.quantized_gradients),
        )
    )
    if collectives.storage_kind == "wire":
        units = blocks
    rank = 0 if replicate else shard_mesh.get_local_rank()
    if on_host := options.offload_policy.shards_on_host(
        device
    ):  # FSDP2 copies to the device, also where one rank is alone
        collectives.storage_kind, units = "wire", blocks
    resident_modules = options.fp32_modules
    nvme_storage = build_nvme_storage(
        param_specs, units, options.offload_policy, resident_modules, rank, collectives, mesh
    )
    paged_storages = nvme_storage.storages if nvme_storage is not None else {}
    shard_device = torch.device("cpu") if on_host else device
    storages = {
        name: paged_storages.get(name)
        or ShardStorage.create(
            slot,
            rank,
            collectives.storage_kind,
            collectives.arena,
            shard_device,
            name in collectives.separate_masters,
        )
        for name, slot in param_specs.items()
    }
    locations = get_param_locations(model)
    del named_params
    load_initial_values(model, locations, storages, mesh, options.precision, device)
    # Only gathered copies and paged units are worth freeing between uses.
    reshards = options.policy.reshards_after_use and collectives.storage_kind == "wire"
    reshard_after_forward = collectives.hpz_group_size if reshards and collectives.hpz_group_size > 1 else reshards
    paged_units = set(nvme_storage.pager.units) if nvme_storage is not None else set()
    fsdp_mesh = single_rank_mesh(mesh) if replicate else shard_mesh
    reshard_by_unit = {name: reshard_after_forward or name in paged_units for name in units}
    expert_params = ZeroExpertParams(model, collectives.ledger, shard_replicas=options.policy.shards_optimizer_states)
    _apply_fully_shard(model, units, fsdp_mesh, options, reshard_by_unit, on_host)
    if options.offload_policy.uses_nvme:  # units are read while a gather would begin early
        collectives.async_reduction = None
    sharded_model = ShardedModel(model, options, mesh, device, storages, collectives, nvme_storage)
    sharded_model.expert_params = expert_params
    sharded_model.scalar_params = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    _install_storages(sharded_model, locations, make_layout_fn(mesh, mics_mesh, tp_layout, replicate))
    assert isinstance(model, FSDPModule)
    private_api.lazy_init(model, (options.precision.master_dtype, options.precision.reduce_dtype))
    sharded_model._reducers = collectives.install(sharded_model.groups, options.precision.master_dtype)
    if collectives.async_reduction is not None and collectives.storage_kind == "wire":
        for group, next_group in pairwise(sharded_model.groups):
            group.prefetch(next_group)
    if collectives.storage_kind != "wire":
        sharded_model._install_unsharded_hooks()
    if nvme_storage is not None:
        sharded_model._install_paging(nvme_storage)
    register_sharded_model(model, collectives.ledger)
    sharded_model.set_loss_scale(1.0)
    sharded_model.set_backward_flags(last=True)
    return sharded_model


def _build_param_specs(
    named_params: dict[str, nn.Parameter], options: ShardOptions, num_shards: int
) -> dict[str, ParamSpec]:
    precision, param_specs = options.precision, {}
    for name, parameter in named_params.items():
        if parameter.ndim == 0 or is_expert_param(parameter):
            continue  # FSDP2 cannot shard a scalar: it is kept whole and reduced by itself
        master_dtype = precision.get_master_dtype(parameter.dtype, parameter.requires_grad)
        compute_dtype = precision.get_compute_dtype(master_dtype)
        if any(name == key or name.startswith(f"{key}.") for key in options.fp32_modules):
            compute_dtype = master_dtype
        param_specs[name] = ParamSpec(
            name,
            parameter.shape,
            master_dtype,
            compute_dtype,
            num_shards,
            requires_grad=parameter.requires_grad,
        )
    return param_specs


def _apply_fully_shard(
    model: nn.Module,
    units: dict[str, nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions,
    reshard_by_unit: dict[str, bool | int],
    on_host: bool,
) -> None:
    precision = options.precision
    param_dtype = precision.compute_dtype if precision.compute_dtype != torch.float32 else None
    unit_mp_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=precision.reduce_dtype)
    fp32_mp_policy = MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)
    ignored = {p for p in model.parameters() if p.ndim == 0 or is_expert_param(p)} or None
    common_kwargs: dict[str, Any] = {"mesh": mesh, "ignored_params": ignored}
    if on_host:  # a mapped shard cannot be pinned, and need not: it is not what is copied
        offload_policy = options.offload_policy
        common_kwargs["offload_policy"] = CPUOffloadPolicy(
            pin_memory=offload_policy.pin_memory and not offload_policy.uses_nvme
        )
    for name in options.fp32_modules:
        fully_shard(model.get_submodule(name), mp_policy=fp32_mp_policy, reshard_after_forward=False, **common_kwargs)
    for name, module in units.items():
        fully_shard(module, mp_policy=unit_mp_policy, reshard_after_forward=reshard_by_unit[name], **common_kwargs)
    fully_shard(model, mp_policy=unit_mp_policy, reshard_after_forward=False, **common_kwargs)


def _install_storages(
    sharded_model: ShardedModel,
    locations: ParamLocations,
    layout_fn: Callable[[str, torch.Size], DTensorLayout | None],
) -> None:
    names = {(id(module), key): name for name, where in locations.items() for module, key in where}
    for group in sharded_model.groups:
        storages = []
        for param in group.params:
            module, key = param.locations[0]
            storage = sharded_model._storages[names[id(module), key]]
            assert tuple(param.padded_shape) == tuple(storage.shard.shape), storage.spec.name
            param.set_shard_storage(storage.shard, layout_fn(storage.spec.name, storage.spec.shape))
            if storage.unsharded is not None:
                param.set_unsharded_storage(storage.unsharded)
            storage.param_handle = param
            storages.append(storage)
        sharded_model._storages_by_group[group.name] = storages
