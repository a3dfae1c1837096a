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
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from thalweg.comm import Ledger
from thalweg.comm.buffer import Pool
from thalweg.store import SwapFile
from thalweg.zero import _fsdp2
from thalweg.zero.fill import Places, fill, places_of
from thalweg.zero.gather import track
from thalweg.zero.grids import copies_of_shards, mesh_of_one, shown_layouts
from thalweg.zero.homes import Slot, Store, largest_unit, publish
from thalweg.zero.masters import rest_on_disk
from thalweg.zero.offload import Offload, PagedStore, Paging
from thalweg.zero.policy import Precision, TrafficPolicy, ZeroPolicy
from thalweg.zero.spread import SpreadParameters, is_spread, reduce_scalars
from thalweg.zero.states import Layout, States
from thalweg.zero.units import UnitPolicy, find_units, with_stragglers
from thalweg.zero.watch import Reduced, Reducing, Watch
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
    offload: Offload = field(default_factory=Offload)


class Sharded:
    """A model under ZeRO; ``module`` is the same object that was given, now sharded."""

    def __init__(
        self,
        module: nn.Module,
        options: ShardOptions,
        mesh: DeviceMesh,
        device: torch.device,
        stores: dict[str, Store],
        wiring: Wiring,
        paging: Paging | None = None,
    ) -> None:
        self.module, self.options, self.device = module, options, device
        self.policy = options.policy
        self.placement = wiring.placement
        self.ledger: Ledger = wiring.ledger
        self._mesh, self._arena = mesh, wiring.arena
        self._crossing, self.notes = wiring.crossing, wiring.notes | options.offload.notes(device)
        self._overlap = wiring.overlap
        self._group = mesh.get_group()
        self._world_size = mesh.size()
        self.groups = _fsdp2.groups_of(module)
        self.paging = paging
        # Those whose homes are there at all times, and what lies in them.
        paged = paging.pager.units if paging else ()
        self._constant = [group for group in self.groups if group.name not in paged]
        self._stores = stores
        self._stores_of: dict[str, list[Store]] = {}
        self._reducers: list[Any] = []
        self.loss_scale = 1.0
        self._flags: tuple[bool, bool] | None = None
        self._entered_sharded = False
        self._handles: list[Any] = []
        self._watches: list[Watch] = []
        self._at_close: list[Callable[[], None]] = []
        self.loose: list[nn.Parameter] = []
        self.spread = SpreadParameters(nn.Module(), self.ledger, divide=False)

    # Phases of a step

    def prepare_backward(self, last: bool, sync: bool = True) -> None:
        """Set what the coming backward does: ``last`` of its window, reducing (``sync``) or not."""
        reduce = sync and (last or self.policy.reduces_each_backward)
        reshard = last or self.policy.frees_parameters
        if self._flags != (reduce, reshard):
            self._flags = (reduce, reshard)
            for group in self.groups:
                group.set_reduce(reduce, reshard)

    def hold(self) -> None:
        """Keep gradients and parameters whole until the window ends, whatever passes through them."""
        self._flags = None
        if self.placement == "wire":
            self.module.set_reshard_after_forward(False)  # type: ignore[operator]
        for group in self.groups:
            group.set_reduce(False, False)

    def finish_window(self) -> None:
        """Reduce whatever is not reduced yet and leave every unit sharded; collective."""
        self._settle()
        for group in self.groups:
            if group.flush():
                self._flags = None
            group.to_sharded()
        divisor = self.loss_scale * (1 if self.options.sum_gradients else self._world_size)
        reduce_scalars(self.loose, divisor, self._group)
        self.spread.reduce(divisor)
        self._watches_rest()
        if self.paging is not None:
            self.paging.pager.end_pass()
        if self._crossing is not None:
            self._crossing.note_update()
        if self._arena is not None:
            self._arena.fence("the end of an accumulation window")

    def _settle(self) -> None:
        if self._overlap is not None:
            self._overlap.drain()

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
        self._settle()
        for group in self.groups:
            group.drop_unsharded_grads()
        self.spread.drop()

    def abandon_iteration(self) -> None:
        """Return to rest after an exception in forward or backward; gradients are left as they are."""
        assert isinstance(self.module, FSDPModule)
        _fsdp2.abandon_iteration(self.module)
        for reducer in self._reducers:
            reducer.reset()
        self._watches_rest()
        if self.paging is not None:
            self.paging.pager.end_pass()
            self.paging.pager.forget()  # an update may have got half-way

    def on_reduced(self, before: Reducing, after: Reduced) -> None:
        """Tell ``before(parameters)`` and ``after(unit, parameters, complete)`` of each unit that a backward
        pass has gone through, as its gradients are reduced.

        ``complete``: this backward adds no more to the unit's gradients.  They will not stay, so one pool of
        memory serves all units.
        """
        outputs, inputs = Pool(), Pool()
        for reducer in self._reducers:
            reducer.lender, reducer.inputs = outputs, inputs
        self._watches = [Watch(group, before, after) for group in self.groups]
        self._handles += [handle for one in self._watches for handle in one.handles]

    @property
    def swap(self) -> SwapFile | None:
        """Where masters lie that are not in memory."""
        return self.paging.swap if self.paging is not None else None

    def copies(self) -> dict[Tensor, Tensor]:
        """For each parameter whose compute copy is on NVMe beside its master: that copy, this rank's rows.
        Whoever asks promises to write them with every update."""
        if self.paging is None:
            return {}
        self.paging.pager.copies_are_kept = True
        found: dict[Tensor, Tensor] = {}
        for group in self.groups:
            for param, store in zip(group.params, self._stores_of[group.name], strict=True):
                if isinstance(store, PagedStore) and store.copy is not None:
                    found[param.sharded] = store.copy[: store.num_rows]
        return found

    def begin_anew(self) -> None:
        """Forget what exchanges build on (differences, errors owed), like a process that has just loaded."""
        if self._crossing is not None:
            self._crossing.begin_anew()
        for reducer in self._reducers:
            if (swap := getattr(reducer, "swap", None)) is not None:
                swap.begin_anew()

    def on_close(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the engine is closed."""
        self._at_close.append(call)

    def changed(self, units: Iterable[str] | None = None) -> None:
        """The parameters of these units (None: of all) have new values in the swap file."""
        self.spread.changed()
        if self.paging is not None:
            self.paging.pager.forget(units)

    def _watches_rest(self) -> None:
        for one in self._watches:
            one.rest()

    def close(self) -> None:
        """Take the hooks off and leave the arena."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for call in self._at_close:
            call()
        if self.paging is not None:
            self.paging.close()
        if self._overlap is not None:
            self._overlap.close()
        if self._arena is not None:
            self._arena.close()

    # Homes: forward without a gather

    def _install_homes(self) -> None:
        units = {id(group.module): group for group in self._constant}
        for module in {id(group.module): group.module for group in self._constant}.values():
            is_root = module is self.module
            before = self._open_all if is_root else self._opener(units[id(module)])
            assert isinstance(module, nn.Module)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self.module.register_forward_hook(self._close_evaluation))
        if id(self.module) not in units:
            self._handles.append(self.module.register_forward_pre_hook(self._open_all, prepend=True))

    def _open_all(self, *_: object) -> None:
        self._entered_sharded = all(group.is_sharded for group in self.groups)
        if self.paging is not None:
            self.paging.pager.end_pass()
        if not any(group.is_sharded for group in self._constant):
            return
        self._publish(self._constant_stores)
        self._fence_homes("the start of a forward pass")
        for group in self._constant:
            group.to_unsharded()

    def _opener(self, group: _fsdp2.Group) -> Callable[..., None]:
        stores = self._stores_of[group.name]

        def before(*_: object) -> None:
            if group.is_sharded:  # called by itself, not through the root
                self._publish(stores)
                self._fence_homes(f"the forward pass of {group.name!r}")
                group.to_unsharded()

        return before

    def _close_evaluation(self, *_: object) -> None:
        if torch.is_grad_enabled() or not self._entered_sharded:
            return
        for group in self.groups:
            group.to_sharded()
        if self._arena is not None:
            self._arena.fence("the end of an evaluation")

    def _install_paging(self, paging: Paging) -> None:
        pager = paging.pager
        for group in self.groups:
            if (name := group.name) not in pager.units:
                continue
            stores = [paging.stores[store.slot.name] for store in self._stores_of[name]]
            if all(store.home is None for store in stores):
                images = [store.image for store in stores]
                group.gather_from(images, partial(pager.open, name), partial(pager.close, name))
            else:
                ahead, start, end = (partial(f, name) for f in (pager.read_ahead, pager.open, pager.close))
                group.page_with(ahead, start, end)

    @property
    def _constant_stores(self) -> list[Store]:
        return [store for group in self._constant for store in self._stores_of[group.name]]

    def _publish(self, stores: Iterable[Store]) -> None:
        (publish if self._crossing is None else self._crossing)(stores)

    def _fence_homes(self, what: str) -> None:
        if self._arena is None:
            return
        if self._crossing is not None:  # which has counted what moved
            self._arena.fence(what)
            return
        gathered = self._constant_stores if self.placement == "shared" else []
        home_bytes = sum(store.slot.home_bytes for store in gathered)
        with self.ledger.timed(
            "all_gather", "parameters", "shared", full_bytes=home_bytes, world_size=self._world_size
        ):
            self._arena.fence(what)


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
    grid = copies_of_shards(mesh, options.traffic.group_size) if options.policy.shards_states else None
    inner = mesh if grid is None else grid["dp"]
    replicate = not options.policy.shards_states or 1 in (inner.size(), options.traffic.group_size)
    slots = _slots(named, options, 1 if replicate else inner.size())
    blocks = find_units(model, options.units)
    # Pieces of tensor ranks differ in size, and a head's logits stay in pieces: neither makes a unit.
    units = blocks if options.offload.pages or states is not None else with_stragglers(model, blocks)
    wiring = plan_wiring(
        Situation(
            inner,
            device,
            options.policy,
            options.traffic,
            slots,
            replicate=replicate,
            unit_bytes=largest_unit(slots, units, options.precision.reduce),
            root_bytes=largest_unit(slots, blocks, options.precision.reduce),
            output_dtype=options.precision.master,
            timeout=options.timeout,
            copies=None if grid is None else Copies.of(grid, device, options.traffic.quantised_gradients),
        )
    )
    if wiring.placement == "wire":
        units = blocks
    rank = 0 if replicate else inner.get_local_rank()
    if on_host := options.offload.on_host(device):  # FSDP2 copies to the device, also where one rank is alone
        wiring.placement, units = "wire", blocks
    fixed = options.fp32_modules
    paging = rest_on_disk(slots, units, options.offload, fixed, rank, wiring, mesh)
    paged = paging.stores if paging is not None else {}
    shards_on = torch.device("cpu") if on_host else device
    stores = {
        name: paged.get(name)
        or Store.make(slot, rank, wiring.placement, wiring.arena, shards_on, name in wiring.apart)
        for name, slot in slots.items()
    }
    places = places_of(model)
    del named
    fill(model, places, stores, mesh, options.precision, device)
    # A home costs nothing to keep: only gathered copies and paged homes are worth freeing between uses.
    gathers = options.policy.frees_parameters and wiring.placement == "wire"
    keeps = wiring.secondary if gathers and wiring.secondary > 1 else gathers
    pages = set(paging.pager.units) if paging is not None else set()
    alone = mesh_of_one(mesh) if replicate else inner
    frees = {name: keeps or name in pages for name in units}
    spread = SpreadParameters(model, wiring.ledger, divide=options.policy.shards_states)
    _wrap(model, units, alone, options, frees, on_host)
    if options.offload.pages:  # units are read while a gather would begin early
        wiring.overlap = None
    sharded = Sharded(model, options, mesh, device, stores, wiring, paging)
    sharded.spread = spread
    sharded.loose = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    _plant(sharded, places, shown_layouts(mesh, grid, states, replicate))
    assert isinstance(model, FSDPModule)
    _fsdp2.lazy_init(model, (options.precision.master, options.precision.reduce))
    sharded._reducers = wiring.connect(sharded.groups, options.precision.master)
    if wiring.overlap is not None and wiring.placement == "wire":
        for group, following in pairwise(sharded.groups):
            group.prefetch(following)
    if wiring.placement != "wire":
        sharded._install_homes()
    if paging is not None:
        sharded._install_paging(paging)
    track(model, wiring.ledger)
    sharded.set_loss_scale(1.0)
    sharded.prepare_backward(last=True)
    return sharded


def _slots(named: dict[str, nn.Parameter], options: ShardOptions, num_shards: int) -> dict[str, Slot]:
    precision, slots = options.precision, {}
    for name, parameter in named.items():
        if parameter.ndim == 0 or is_spread(parameter):
            continue  # FSDP2 cannot shard a scalar: it is kept whole and reduced by itself
        master = precision.master_of(parameter.dtype, parameter.requires_grad)
        compute = precision.compute_of(master)
        if any(name == key or name.startswith(f"{key}.") for key in options.fp32_modules):
            compute = master
        slots[name] = Slot(name, parameter.shape, master, compute, num_shards, trains=parameter.requires_grad)
    return slots


def _wrap(
    model: nn.Module,
    units: dict[str, nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions,
    frees: dict[str, bool | int],
    on_host: bool,
) -> None:
    precision = options.precision
    low = precision.compute if precision.compute != torch.float32 else None
    mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=precision.reduce)
    plain = MixedPrecisionPolicy(reduce_dtype=precision.reduce, cast_forward_inputs=False)
    ignored = {p for p in model.parameters() if p.ndim == 0 or is_spread(p)} or None
    common: dict[str, Any] = {"mesh": mesh, "ignored_params": ignored}
    if on_host:  # a mapped shard cannot be pinned, and need not: it is not what is copied
        offload = options.offload
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=offload.pin and not offload.pages)
    for name in options.fp32_modules:
        fully_shard(model.get_submodule(name), mp_policy=plain, reshard_after_forward=False, **common)
    for name, module in units.items():
        fully_shard(module, mp_policy=mixed, reshard_after_forward=frees[name], **common)
    fully_shard(model, mp_policy=mixed, reshard_after_forward=False, **common)


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
            store.shown = param
            stores.append(store)
        sharded._stores_of[group.name] = stores
