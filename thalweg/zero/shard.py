"""ZeRO on FSDP2: one recipe for every stage.

``shard`` turns a plain model into an FSDP2 model in this order: choose the units; move
every parameter's value into its shard (:mod:`.homes`), so the full tensors are freed
one by one; wrap units and root on the meta device, where FSDP2 copies nothing; plant
the shards; give each unit its collectives.  The result, :class:`Sharded`, offers what
an engine needs and no more: which backward reduces, the end of a window, the loss scale.

States of a unit's parameters (FSDP2's words): *sharded*, the modules hold DTensors;
*unsharded*, the modules hold the homes or gathered copies.  Outside of forward and
backward they are sharded, except within an accumulation window below stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from thalweg.comm import Ledger
from thalweg.mesh import split_data_axis
from thalweg.zero import _fsdp2
from thalweg.zero.gather import track
from thalweg.zero.homes import Slot, Store, publish
from thalweg.zero.init import has_pending, materialize
from thalweg.zero.policy import Precision, TrafficPolicy, ZeroPolicy
from thalweg.zero.states import Layout, States
from thalweg.zero.units import UnitPolicy, find_units, with_stragglers
from thalweg.zero.wiring import Copies, Situation, Wiring, plan_wiring


@dataclass(frozen=True)
class ShardOptions:
    """How to shard: stage, dtypes, units, and how gradients are averaged."""

    policy: ZeroPolicy
    precision: Precision = field(default_factory=Precision)
    units: UnitPolicy = field(default_factory=UnitPolicy)
    sum_gradients: bool = False
    fp32_modules: tuple[str, ...] = ()
    timeout: float = 1800.0
    traffic: TrafficPolicy = field(default_factory=TrafficPolicy)


class Sharded:
    """A model under ZeRO; ``module`` is the same object that was given, now sharded."""

    def __init__(
        self,
        module: nn.Module,
        options: ShardOptions,
        mesh: DeviceMesh,
        stores: dict[str, Store],
        wiring: Wiring,
    ) -> None:
        self.module, self.options = module, options
        self.policy = options.policy
        self.placement = wiring.placement
        self.ledger: Ledger = wiring.ledger
        self._mesh, self._arena = mesh, wiring.arena
        self._crossing, self.notes = wiring.crossing, wiring.notes
        self._group = mesh.get_group()
        self._world_size = mesh.size()
        self.groups = _fsdp2.groups_of(module)
        self._stores = stores
        self._stores_of: dict[str, list[Store]] = {}
        self._reducers: list[Any] = []
        self.loss_scale = 1.0
        self._flags: tuple[bool, bool] | None = None
        self._entered_sharded = False
        self._handles: list[Any] = []
        self.loose: list[nn.Parameter] = []

    # Phases of a step

    def prepare_backward(self, last: bool, sync: bool = True) -> None:
        """Set what the coming backward does: ``last`` of its window, reducing (``sync``) or not."""
        reduce = sync and (last or self.policy.reduces_each_backward)
        reshard = last or self.policy.frees_parameters
        if self._flags != (reduce, reshard):
            self._flags = (reduce, reshard)
            for group in self.groups:
                group.set_reduce(reduce, reshard)

    def finish_window(self) -> None:
        """Reduce whatever is not reduced yet and leave every unit sharded; collective."""
        for group in self.groups:
            if group.flush():
                self._flags = None
            group.to_sharded()
        self._reduce_loose()
        if self._crossing is not None:
            self._crossing.note_update()
        if self._arena is not None:
            self._arena.fence("the end of an accumulation window")

    def set_loss_scale(self, scale: float) -> None:
        """Divide gradients by ``scale`` as they are reduced, so that nobody sees them scaled."""
        self.loss_scale = scale
        divisor = scale / (self._world_size if self.options.sum_gradients else 1)
        for reducer in self._reducers:
            reducer.divisor = divisor
        if not self._reducers:
            for group in self.groups:
                group.module.set_gradient_divide_factor(divisor * self._world_size)

    def drop_gradients(self) -> None:
        """Forget gradients that are still unsharded (``zero_grad`` in the middle of a window)."""
        for group in self.groups:
            group.drop_unsharded_grads()

    def abandon_iteration(self) -> None:
        """Return to rest after an exception in forward or backward."""
        if isinstance(self.module, FSDPModule):
            _fsdp2.abandon_iteration(self.module)
        self.drop_gradients()

    def close(self) -> None:
        """Take the hooks off and leave the arena."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._arena is not None:
            self._arena.close()

    # Homes: forward without a gather

    def _install_homes(self) -> None:
        units = {id(group.module): group for group in self.groups}
        for module in {id(group.module): group.module for group in self.groups}.values():
            is_root = module is self.module
            before = self._open_all if is_root else self._opener(units[id(module)])
            assert isinstance(module, nn.Module)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self.module.register_forward_hook(self._close_evaluation))
        if id(self.module) not in units:
            self._handles.append(self.module.register_forward_pre_hook(self._open_all, prepend=True))

    def _open_all(self, *_: object) -> None:
        self._entered_sharded = all(group.is_sharded for group in self.groups)
        if not any(group.is_sharded for group in self.groups):
            return
        self._publish(self._stores.values())
        self._fence_homes("the start of a forward pass")
        for group in self.groups:
            group.to_unsharded()

    def _opener(self, group: _fsdp2.Group) -> Callable[..., None]:
        stores = self._stores_of[group.name]

        def before(*_: object) -> None:
            if group.is_sharded:  # called by itself, not through the root
                self._publish(stores)
                self._fence_homes(f"the forward pass of {group.name!r}")
                group.to_unsharded()

        return before

    def _publish(self, stores: Iterable[Store]) -> None:
        (publish if self._crossing is None else self._crossing)(stores)

    def _close_evaluation(self, *_: object) -> None:
        if torch.is_grad_enabled() or not self._entered_sharded:
            return
        for group in self.groups:
            group.to_sharded()
        if self._arena is not None:
            self._arena.fence("the end of an evaluation")

    def _fence_homes(self, what: str) -> None:
        if self._arena is None:
            return
        if self._crossing is not None:  # which has counted what moved
            self._arena.fence(what)
            return
        home_bytes = sum(store.slot.home_bytes for store in self._stores.values())
        with self.ledger.timed(
            "all_gather", "parameters", "shared", full_bytes=home_bytes, world_size=self._world_size
        ):
            self._arena.fence(what)

    def _reduce_loose(self) -> None:
        grads = [parameter.grad for parameter in self.loose if parameter.requires_grad]
        if not grads:
            return
        present = [torch.zeros(()) if grad is None else grad.float() for grad in grads]
        flat = torch.stack([grad.reshape(()) for grad in present])
        if self._world_size > 1:
            dist.all_reduce(flat, group=self._group)
        divisor = self.loss_scale * (1 if self.options.sum_gradients else self._world_size)
        trained = [parameter for parameter in self.loose if parameter.requires_grad]
        for parameter, value in zip(trained, (flat / divisor).unbind(), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(value)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ShardOptions,
    device: torch.device,
    states: States | None = None,
) -> Sharded:
    """Shard ``model`` in place over the 1-D data-parallel ``mesh`` (MiCS: over groups of it); collective.

    ``states``: how tensor ranks have cut the parameters before, if they have.  Values are
    those of rank 0; a model built on the meta device (``zero.Init``) is materialised here,
    one full tensor at a time.

    Raises:
        ValueError: the model has no parameters.
    """
    named = dict(model.named_parameters())
    if not named:
        raise ValueError("the model has no parameters: there is nothing to train")
    grid = _grid(mesh, options)
    inner = mesh if grid is None else grid["dp"]
    replicate = not options.policy.shards_states or 1 in (inner.size(), options.traffic.group_size)
    slots = _slots(named, options, 1 if replicate else inner.size())
    blocks = find_units(model, options.units)
    units = with_stragglers(model, blocks)
    wiring = plan_wiring(
        Situation(
            inner,
            device,
            options.policy,
            options.traffic,
            slots,
            replicate=replicate,
            unit_bytes=_largest_unit(slots, units, options.precision.reduce),
            root_bytes=_largest_unit(slots, blocks, options.precision.reduce),
            output_dtype=options.precision.master,
            timeout=options.timeout,
            copies=None if grid is None else Copies.of(grid, device, options.traffic.quantised_gradients),
        )
    )
    if wiring.placement == "wire":
        units = blocks
    rank = 0 if replicate else inner.get_local_rank()
    stores = {
        name: Store(slot, rank, wiring.placement, wiring.arena, device, name in wiring.apart)
        for name, slot in slots.items()
    }
    places = _places(model)
    del named
    _fill(model, places, stores, mesh, options.precision, device)
    # A home costs nothing to keep: only gathered copies are worth freeing between uses.
    frees = options.policy.frees_parameters and wiring.placement == "wire"
    keeps = wiring.secondary if frees and wiring.secondary > 1 else frees
    alone = _mesh_of_one(mesh if states is None else states.mesh) if replicate else inner
    _wrap(model, units, alone, options, keeps)
    sharded = Sharded(model, options, mesh, stores, wiring)
    sharded.loose = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    _plant(sharded, places, _layouts(mesh, grid, states, replicate))
    assert isinstance(model, FSDPModule)
    _fsdp2.lazy_init(model)
    sharded._reducers = wiring.connect(sharded.groups)
    if wiring.placement != "wire":
        sharded._install_homes()
    track(model, wiring.ledger)
    sharded.set_loss_scale(1.0)
    sharded.prepare_backward(last=True)
    return sharded


def _slots(named: dict[str, nn.Parameter], options: ShardOptions, num_shards: int) -> dict[str, Slot]:
    precision, slots = options.precision, {}
    for name, parameter in named.items():
        if parameter.ndim == 0:
            continue  # FSDP2 cannot shard a scalar: it is kept whole and reduced by itself
        master = precision.master_of(parameter.dtype, parameter.requires_grad)
        compute = precision.compute_of(master)
        if any(name == key or name.startswith(f"{key}.") for key in options.fp32_modules):
            compute = master
        slots[name] = Slot(name, parameter.shape, master, compute, num_shards, trains=parameter.requires_grad)
    return slots


def _largest_unit(slots: dict[str, Slot], units: dict[str, nn.Module], reduce: torch.dtype) -> int:
    sizes: dict[str, int] = {}
    for name, slot in slots.items():
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        sizes[unit] = sizes.get(unit, 0) + slot.padded_numel * reduce.itemsize
    return max(sizes.values(), default=0)


Places = dict[str, list[tuple[nn.Module, str]]]


def _places(model: nn.Module) -> Places:
    """Every module attribute of each parameter, tied ones included, by its first name."""
    names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    places: Places = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, key))
    return places


def _put(places: list[tuple[nn.Module, str]], value: Tensor, requires_grad: bool) -> None:
    parameter = nn.Parameter(value, requires_grad=requires_grad)
    for module, key in places:
        module._parameters[key] = parameter


def _fill(
    model: nn.Module,
    places: Places,
    stores: dict[str, Store],
    mesh: DeviceMesh,
    precision: Precision,
    device: torch.device,
) -> None:
    """Bring rank 0's values into shards, loose parameters and buffers; free the full tensors."""
    agree = _agreement(mesh, device)
    held: dict[str, Tensor] = {}

    def sink(name: str, meta: Tensor, full: Tensor) -> None:
        if name in stores:
            stores[name].fill(agree(full))
        else:
            held[name] = agree(full).clone()

    if has_pending(model):
        materialize(model, sink, device=str(device))
    for name, where in places.items():
        parameter = where[0][0]._parameters[where[0][1]]
        assert parameter is not None
        shape, dtype, trains = parameter.shape, parameter.dtype, parameter.requires_grad
        if name in stores:
            if not parameter.is_meta:
                stores[name].fill(agree(parameter))
            del parameter  # the last reference, unless the user holds one
            _put(where, torch.empty(shape, dtype=dtype, device="meta"), trains)
        else:
            value = held[name] if parameter.is_meta else agree(parameter)
            _put(where, value.to(precision.master_of(dtype, trains), copy=True), trains)
    for module_name, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                name = f"{module_name}.{key}" if module_name else key
                value = held[name] if buffer.is_meta else agree(buffer)
                cast = precision.buffer if value.is_floating_point() else None
                module._buffers[key] = value.to(cast or value.dtype)


def _agreement(mesh: DeviceMesh, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that returns rank 0's value of a tensor on every rank."""
    group = mesh.get_group()
    root = dist.get_global_rank(group, 0)

    def agree(full: Tensor) -> Tensor:
        full = full.detach().to(device)
        if mesh.size() > 1:
            full = full.clone(memory_format=torch.contiguous_format)
            dist.broadcast(full, src=root, group=group)
        return full

    return agree


def _wrap(
    model: nn.Module,
    units: dict[str, nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions,
    frees: bool | int,
) -> None:
    precision = options.precision
    low = precision.compute if precision.compute != torch.float32 else None
    mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=precision.reduce)
    plain = MixedPrecisionPolicy(reduce_dtype=precision.reduce, cast_forward_inputs=False)
    ignored = {p for p in model.parameters() if p.ndim == 0} or None
    common: dict[str, Any] = {"mesh": mesh, "ignored_params": ignored}
    for name in options.fp32_modules:
        fully_shard(model.get_submodule(name), mp_policy=plain, reshard_after_forward=False, **common)
    for module in units.values():
        fully_shard(module, mp_policy=mixed, reshard_after_forward=frees, **common)
    fully_shard(model, mp_policy=mixed, reshard_after_forward=False, **common)


def _mesh_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of this rank alone: FSDP2's shape for parameters that are not sharded."""
    if mesh.size() == 1 and mesh.ndim == 1:
        return mesh
    ranks = mesh.mesh.flatten().tolist()
    grid = DeviceMesh(mesh.device_type, [[rank] for rank in ranks], mesh_dim_names=("replicate", "alone"))
    return grid["alone"]


def _grid(mesh: DeviceMesh, options: ShardOptions) -> DeviceMesh | None:
    """Copies x shards where groups of ranks shard by themselves (MiCS), else None."""
    size = options.traffic.group_size
    if not options.policy.shards_states or size in (0, 1, mesh.size()):
        return None
    return split_data_axis(mesh, size)


def _layouts(
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


def _plant(sharded: Sharded, places: Places, layout_of: Callable[[str, torch.Size], Layout | None]) -> None:
    names = {(id(module), key): name for name, where in places.items() for module, key in where}
    for group in sharded.groups:
        stores = []
        for param in group.params:
            module, key = param.places[0]
            store = sharded._stores[names[id(module), key]]
            assert tuple(param.padded_shape) == tuple(store.shard.shape), store.slot.name
            param.replant(store.shard, layout_of(store.slot.name, store.slot.shape))
            if store.home is not None:
                param.set_home(store.home)
            stores.append(store)
        sharded._stores_of[group.name] = stores
