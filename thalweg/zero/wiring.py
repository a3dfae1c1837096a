"""Which collectives a run uses, decided once from where its ranks are.

one rank, or replicated parameters   no gathers; gradients are averaged
all ranks on one host, CPU           homes and reductions in one arena
several hosts, several ranks each    arena inside a host, wire between hosts; homes on each host
                                     where parameters stay (stages 1 and 2) or hpZ keeps them
anything else on CPU                 the wire forms that gloo does well
GPUs                                 FSDP2's own, on NCCL; ours where something is quantised

What ZeRO++ quantises is what goes between hosts (and, over links, inside them): in shared
memory nothing travels, so nothing is rounded.  With MiCS all of this holds for the ranks of
one group, and reductions end in a sum over the copies of the shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thalweg.comm import (
    AllToAllReduceScatter,
    Arena,
    Codec,
    Everywhere,
    Feedback,
    HierarchicalAllGather,
    HierarchicalAllReduce,
    HierarchicalReduceScatter,
    Hosts,
    Ledger,
    Packing,
    PlainAllGather,
    PlainAllReduce,
    QuantisedAllGather,
    QuantisedEverywhere,
    QuantisedSwap,
    Ring,
    Route,
    SharedAllReduce,
    SharedReduceScatter,
    Swap,
    TwoLevelAllGather,
    TwoLevelReduceScatter,
    local_arena,
    subgroup,
)
from thalweg.comm.quantised import GRADIENTS, GRADIENTS_IN_HOST, WEIGHTS, PackingOf, one_piece
from thalweg.zero._fsdp2 import Group
from thalweg.zero.crossing import Crossing
from thalweg.zero.homes import Placement, Slot, arena_bytes
from thalweg.zero.overlap import Overlap
from thalweg.zero.policy import TrafficPolicy, ZeroPolicy

Maker = Callable[[str, Group], Any]
_GATHER_DEPTH = 4
# A second slot lets a rank write its next gradients while a slower peer still reads.  Replicated
# parameters leave no memory to spare for that: there one slot a rank is 17 MiB less of 590 on a small model.
REDUCE_DEPTH, REPLICATED_DEPTH = 2, 1


@dataclass
class Wiring:
    """The makers of each unit's collectives; ``arena`` holds the homes where there are any.

    ``apart``: parameters whose shards lie beside the homes; ``crossing``: what brings homes of
    several hosts up to date; ``overlap``: what reduces during the backward pass; ``secondary``:
    ranks among which FSDP2 keeps gathered parameters for the backward pass; ``notes``:
    what an option comes to here, by its name.
    """

    placement: Placement
    ledger: Ledger = field(default_factory=Ledger)
    arena: Arena | None = None
    reducer: Maker | None = None
    gatherer: Maker | None = None
    all_reduces: bool = False
    crossing: Crossing | None = None
    apart: frozenset[str] = frozenset()
    secondary: int = 1
    copies: Copies | None = None
    notes: dict[str, str] = field(default_factory=dict)
    overlap: Overlap | None = None

    def connect(self, groups: Iterable[Group], output_dtype: torch.dtype) -> list[Any]:
        """Give each unit its collectives; returns the reducers, whose ``divisor`` is the loss scale's.

        ``output_dtype``: of reduced gradients.
        """
        reducers: list[Any] = []
        for group in groups:
            name = group.name or "<root>"
            if self.gatherer is not None:
                group.module.set_custom_all_gather(self.gatherer(name, group))
            if self.reducer is not None:
                reducers.append(reducer := self.reducer(name, group))
                if self.copies is not None:
                    reducer.num_copies, reducer.total = self.copies.number, self.copies.total
                if self.overlap is not None:
                    reducer.later = self.overlap.later(group, output_dtype)
                group.module.set_custom_reduce_scatter(reducer)
                if self.all_reduces:
                    group.module.set_all_reduce_hook(reducer.reduce)
        return reducers


@dataclass(frozen=True)
class Copies:
    """The ranks that hold the same shard (MiCS), and the sum of gradients over them."""

    number: int
    total: Everywhere | QuantisedEverywhere

    @classmethod
    def of(cls, grid: DeviceMesh, device: torch.device, quantised: bool) -> Copies:
        """Over the outer axis of ``grid``; collective over it."""
        group = grid.get_group(0)
        route = Route.find(group, device)
        total = QuantisedEverywhere if quantised else Everywhere
        return cls(grid.size(0), total(group, route))


@dataclass
class Situation:
    """What the choice depends on: ranks, device, wishes, sizes."""

    mesh: DeviceMesh
    device: torch.device
    policy: ZeroPolicy
    traffic: TrafficPolicy
    slots: Mapping[str, Slot]
    replicate: bool
    unit_bytes: int
    root_bytes: int
    output_dtype: torch.dtype
    timeout: float
    copies: Copies | None = None
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def home_bytes(self) -> int:
        """Bytes of all homes."""
        return 0 if self.replicate else arena_bytes(self.slots.values())

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks among which states are sharded."""
        return self.mesh.get_group()

    def agreed(self, possible: bool) -> bool:
        """Whether something is possible in every group of copies; all of them must have the same units."""
        if self.copies is None:
            return possible
        answer = torch.tensor(int(possible), device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self.copies.total.group)
        return bool(answer)


def plan_wiring(here: Situation) -> Wiring:
    """Choose; collective over the mesh.

    ``unit_bytes`` of the situation: the largest unit's gradients where large leaf modules are
    units, ``root_bytes`` where they belong to the root (the wire forms).

    Raises:
        ValueError: hpZ's groups do not fit the hosts.
    """
    wiring = _choose(here)
    wiring.copies = here.copies
    if here.traffic.feedback is not None and not here.traffic.quantised_gradients:
        wiring.notes["zeropp_loco_param.err_beta"] = (
            "idle: zero_quantized_gradients, which it corrects, is off"
        )
    if here.traffic.two_level_gather and here.copies is None:
        wiring.notes["mics_hierarchical_params_gather"] = "idle: mics_shard_size makes no groups"
    return wiring


def _choose(here: Situation) -> Wiring:
    group, size = here.group, here.mesh.size()
    if size == 1:
        return _on_the_wire(here, Route((0,), 0))
    if here.device.type == "cpu":
        depth = REPLICATED_DEPTH if here.replicate else REDUCE_DEPTH
        total = here.home_bytes + Ring.num_bytes(size, here.unit_bytes, depth)
        arena = Arena.create(group, total, timeout=here.timeout)
        if here.agreed(arena is not None):
            assert arena is not None
            here.ledger.route = Route((0,) * size, here.mesh.get_local_rank())
            _check_secondary(here, here.ledger.route)
            return _on_one_host(here, arena, Ring(arena, here.unit_bytes, depth))
    route = here.ledger.route = Route.find(group, here.device)
    _check_secondary(here, route)
    hosts = Hosts.find(group, route)
    if here.agreed(hosts is not None) and here.device.type == "cpu":
        assert hosts is not None
        keeps = not here.replicate and (not here.policy.frees_parameters or here.traffic.secondary_size > 1)
        # Gathers may be wider than reductions (frozen parameters, fp32 under a 16-bit reduction).
        slot_bytes = here.unit_bytes if keeps else 2 * here.root_bytes
        room = Ring.num_bytes(hosts.num_local, slot_bytes)
        room += here.home_bytes if keeps else Ring.num_bytes(hosts.num_local, slot_bytes, _GATHER_DEPTH)
        arena = local_arena(hosts, room, here.timeout)
        if here.agreed(arena is not None):
            assert arena is not None
            return _on_both_levels(here, arena, hosts, slot_bytes, keeps)
    return _on_the_wire(here, route, hosts)


def _on_one_host(here: Situation, arena: Arena, ring: Ring) -> Wiring:
    ledger, dtype = here.ledger, here.output_dtype
    if here.replicate:
        return Wiring(
            "private",
            ledger,
            arena,
            reducer=lambda name, group: SharedAllReduce(ring, name, ledger, dtype),
            all_reduces=True,
        )
    wiring = Wiring(
        "shared",
        ledger,
        arena,
        reducer=lambda name, group: SharedReduceScatter(ring, name, ledger, dtype),
    )
    traffic = here.traffic
    if traffic.secondary_size > 1:
        wiring.notes["zero_hpz_partition_size"] = (
            "free on one host: parameters lie once in memory that its ranks share; nothing is ever gathered"
        )
    quantised = {
        "zero_quantized_weights": traffic.quantised_weights,
        "zero_quantized_nontrainable_weights": traffic.quantised_frozen,
        "zero_quantized_gradients": traffic.quantised_gradients and here.copies is None,
    }
    for name in (name for name, on in quantised.items() if on):
        wiring.notes[name] = (
            "nothing travels between ranks that share one host's memory, so nothing is rounded"
        )
    return wiring


def _on_both_levels(here: Situation, arena: Arena, hosts: Hosts, slot_bytes: int, keeps: bool) -> Wiring:
    ring, ledger, dtype, traffic = Ring(arena, slot_bytes), here.ledger, here.output_dtype, here.traffic
    rank = here.mesh.get_local_rank()
    if here.replicate:
        return Wiring(
            "private",
            ledger,
            reducer=lambda name, group: HierarchicalAllReduce(hosts, ring, name, ledger, dtype),
            all_reduces=True,
        )

    def reducer(name: str, group: Group) -> HierarchicalReduceScatter:
        made = HierarchicalReduceScatter(hosts, ring, rank, name, ledger, dtype)
        if traffic.quantised_gradients:
            made.swap = _gradient_swap(traffic, hosts.peers, hosts.peers_route, group, made)
        return made

    if keeps:
        lossy = frozenset(
            name
            for name, slot in here.slots.items()
            # Integers are somebody's codes already.
            if slot.compute.is_floating_point and traffic.encodes(len(slot.shape), slot.trains)
        )
        wiring = Wiring("shared", ledger, arena, reducer=reducer, apart=lossy)
        wiring.crossing = Crossing(hosts, rank, here.group, ledger, lossy)
        if traffic.secondary_size > 1:
            wiring.notes["zero_hpz_partition_size"] = (
                f"the {hosts.num_local} ranks of a host share one copy of the parameters, "
                "which crosses to other hosts once an update"
            )
        return wiring
    gathers = Ring(arena, slot_bytes, _GATHER_DEPTH, bank=1)
    return Wiring(
        "wire",
        ledger,
        reducer=reducer,
        gatherer=lambda name, group: HierarchicalAllGather(
            hosts, gathers, rank, name, ledger, _weights(traffic, group)
        ),
    )


def _on_the_wire(here: Situation, route: Route, hosts: Hosts | None = None) -> Wiring:
    ledger, dtype, traffic, cpu = here.ledger, here.output_dtype, here.traffic, here.device.type == "cpu"
    overlap = Overlap() if cpu and here.mesh.size() > 1 and here.copies is None else None
    # Of its own, as the thread's collectives and the main thread's come in no common order.
    everyone = here.group if overlap is None else subgroup(range(here.mesh.size()), here.group)
    if here.replicate or here.mesh.size() == 1:
        return Wiring(
            "private",
            ledger,
            reducer=lambda name, group: PlainAllReduce(everyone, name, ledger, dtype, route),
            all_reduces=True,
            overlap=overlap,
        )
    size = here.mesh.size()
    secondary = (
        traffic.secondary_size if here.policy.frees_parameters and traffic.secondary_size < size else 1
    )
    wiring = Wiring("wire", ledger, secondary=secondary)
    quantised = traffic.quantised_weights or traffic.quantised_frozen
    if traffic.two_level_gather and hosts is not None:
        both = (hosts.local_route, hosts.peers_route)
        wiring.gatherer = lambda name, group: TwoLevelAllGather(
            hosts.local, hosts.peers, both, hosts.places, name, ledger, _weights(traffic, group)
        )
    elif quantised:
        wiring.gatherer = lambda name, group: QuantisedAllGather(
            name, ledger, route, _weights(traffic, group), size
        )
    elif cpu:
        wiring.gatherer = lambda name, group: PlainAllGather(name, ledger, route)
    if traffic.quantised_gradients or cpu or here.copies is not None:
        wiring.reducer = lambda name, group: _wire_reducer(here, everyone, route, hosts, name, group)
    # Between the two levels of a quantised reduction lie groups that gathers use as well.
    wiring.overlap = overlap if not (traffic.quantised_gradients and hosts is not None) else None
    return wiring


def _wire_reducer(
    here: Situation,
    everyone: dist.ProcessGroup,
    route: Route,
    hosts: Hosts | None,
    name: str,
    group: Group,
) -> Any:
    ledger, dtype, traffic = here.ledger, here.output_dtype, here.traffic
    if not traffic.quantised_gradients:
        return AllToAllReduceScatter(name, ledger, dtype, Swap(everyone, route))
    if hosts is None:
        made = AllToAllReduceScatter(name, ledger, dtype)
        made.swap = _gradient_swap(traffic, everyone, route, group, made)
        return made
    inner = QuantisedSwap(hosts.local, hosts.local_route, one_piece(GRADIENTS_IN_HOST))
    made = TwoLevelReduceScatter(
        inner, Swap(hosts.peers, hosts.peers_route), hosts.places, name, ledger, dtype
    )
    made.swap = _gradient_swap(traffic, hosts.peers, hosts.peers_route, group, made)
    return made


def _gradient_swap(
    traffic: TrafficPolicy, peers: dist.ProcessGroup, route: Route, group: Group, reducer: Any
) -> QuantisedSwap:
    feedback = None if traffic.feedback is None else Feedback(*traffic.feedback)
    return QuantisedSwap(peers, route, _gradients(group), feedback, lambda: reducer.divisor)


def _weights(traffic: TrafficPolicy, group: Group) -> PackingOf:
    """The codes of a unit's shards: each parameter for itself; another buffer goes as it is."""

    def packing_of(numel: int, dtype: torch.dtype) -> Packing | None:
        pieces = [
            (prod(param.padded_shape), traffic.encodes(param.sharded.ndim, param.sharded.requires_grad))
            for param in group.params
        ]
        return _packing(pieces, numel, dtype, WEIGHTS)

    return packing_of


def _gradients(group: Group) -> PackingOf:
    """The codes of a unit's gradients, where all that train have one; else of one run of numbers."""
    alone = one_piece(GRADIENTS)

    def packing_of(numel: int, dtype: torch.dtype) -> Packing | None:
        pieces = [
            (prod(param.padded_shape), param.sharded.ndim >= 2)
            for param in group.params
            if param.sharded.requires_grad
        ]
        if sum(length for length, _ in pieces) != numel:
            return alone(numel, dtype)
        return _packing(pieces, numel, dtype, GRADIENTS)

    return packing_of


def _packing(pieces: list[tuple[int, bool]], numel: int, dtype: torch.dtype, codec: Codec) -> Packing | None:
    encodable = dtype in (torch.float32, torch.bfloat16, torch.float16)
    fits = sum(length for length, _ in pieces) == numel
    if not (encodable and fits and any(encoded for _, encoded in pieces)):
        return None
    return Packing(tuple(pieces), codec, dtype)


def _check_secondary(here: Situation, route: Route) -> None:
    """Refuse hpZ's groups of consecutive ranks where one would lie on two hosts."""
    size = here.traffic.secondary_size
    if size <= 1:
        return
    groups = [route.hosts[start : start + size] for start in range(0, len(route.hosts), size)]
    fits = all(len(hosts) == size and len(set(hosts)) == 1 for hosts in groups)
    if here.agreed(fits):
        return
    counts = [len(list(ranks)) for _, ranks in itertools.groupby(route.hosts)]
    fitting = [number for number in range(2, min(counts) + 1) if all(count % number == 0 for count in counts)]
    raise ValueError(
        f"zero_optimization.zero_hpz_partition_size = {size}: groups of {size} consecutive ranks must lie on "
        f"one host, and the hosts have {counts} ranks: use "
        + (f"one of {fitting}, or 1" if fitting else "1, or give each host equally many ranks")
        + " to switch hpZ off"
    )
