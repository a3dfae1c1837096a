"""Bytes that one rank sends in a step, by collective and by link, as the ledger counts them.

``collectives`` is the textbook's ring form (``comm/ledger.py``): ``(n-1)/n`` of the full buffer
for a gather or a reduce-scatter, twice that for an all-reduce, whatever carries it.  The
links are where these bytes really go, in the form they have there: between hosts, a flat ring
crosses the network with one rank's share of every node, the two-level forms cross it once a host, and what
ZeRO++ sends in few bits counts in those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from thalweg.comm.codec import Codec
from thalweg.comm.ledger import RING_FACTOR
from thalweg.comm.quantised import GRADIENTS, GRADIENTS_IN_HOST, WEIGHTS
from thalweg.plan.rehearsal import MICROS_TRACED, Rehearsal
from thalweg.plan.setting import BETWEEN, INSIDE, Setting
from thalweg.plan.stage import UnitSize
from thalweg.zero.crossing import STEPS


@dataclass
class Traffic:
    """Bytes a rank sends in one optimizer step: by collective (ring form), and by link."""

    collectives: dict[str, int] = field(default_factory=dict)
    links: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0

    @property
    def total(self) -> int:
        """Bytes sent in all, ring form."""
        return sum(self.collectives.values())


@dataclass(frozen=True)
class _Call:
    """``count`` collectives over the ranks of ``setting.span``.

    ``row``: bytes that one rank contributes, as they are sent inside a host, and ``far`` between hosts;
    ``local``: ranks of a host alone take part.
    """

    kind: str
    full_bytes: int
    count: int
    row: int
    far: int
    local: bool = False


def traffic_of(found: Rehearsal, setting: Setting) -> Traffic:
    """What one optimizer step (a whole window) communicates on each rank."""
    traffic = Traffic() if setting.ranks.world_size == 1 else _of_data(found, setting)
    micros = min(setting.accumulation, MICROS_TRACED)
    for entry in found.sent.entries():  # of split layers
        num_bytes = entry.sent_bytes * setting.accumulation // micros
        for table, key in ((traffic.collectives, entry.kind), (traffic.links, setting.team_link)):
            table[key] = table.get(key, 0) + num_bytes
        traffic.num_calls += entry.num_calls * setting.accumulation // micros
    return traffic


def _of_data(found: Rehearsal, setting: Setting) -> Traffic:
    """The data axis' part."""
    world = setting.ranks.world_size if setting.replicates else setting.num_shards
    sent: Counter[str] = Counter()
    links: Counter[str] = Counter()
    calls = 0
    for call in _calls(found, setting):
        sent[call.kind] += call.count * (RING_FACTOR[call.kind] * call.full_bytes * (world - 1) // world)
        calls += call.count
        for link, num_bytes in zip((INSIDE, BETWEEN), _moved(call, setting), strict=True):
            links[link] += call.count * num_bytes
    if setting.num_copies > 1:  # each shard's gradient is added up over its copies
        shard = sum(unit.reduce_bytes for unit in found.units if unit.trains) // setting.num_shards
        nearby = setting.ranks.num_nodes == 1
        links[INSIDE if nearby else BETWEEN] += 2 * shard * (setting.num_copies - 1) // setting.num_copies
    return Traffic(dict(sent), {link: total for link, total in links.items() if total}, calls)


def _calls(found: Rehearsal, setting: Setting) -> Iterator[_Call]:
    micros, policy = setting.accumulation, setting.policy
    world = setting.ranks.world_size if setting.replicates else setting.num_shards
    trained = [unit for unit in found.units if unit.trains]
    reductions = micros if policy.reduces_each_backward else 1
    for unit in trained:
        row = unit.reduce_bytes // world
        if setting.replicates:
            yield _Call("all_reduce", unit.reduce_bytes, 1, row, row)
        else:
            near, far = _gradient_rows(unit, found, setting)
            yield _Call("reduce_scatter", unit.reduce_bytes, reductions, near, far)
    if setting.replicates:
        return
    openings = micros if policy.frees_parameters and setting.placement == "wire" else 1
    if setting.placement == "shared":
        resident = [unit for unit in found.units if unit.name not in found.paged]
        whole = sum(unit.gather_bytes for unit in resident)
        far = sum(_weight_row(unit, found, setting, STEPS) for unit in resident)
        yield _Call("all_gather", whole, micros if policy.frees_parameters else 1, whole // world, far)
        return
    for unit in found.units:
        row = _weight_row(unit, found, setting, WEIGHTS)
        yield _Call("all_gather", unit.gather_bytes, openings, row, row)
        # Stage 3 frees a unit after its forward and gathers it again; the root's stays.
        if policy.frees_parameters and unit.name != "" and unit.trains:
            raw = unit.gather_bytes // world
            again = setting.traffic.secondary_size > 1
            yield _Call("all_gather", unit.gather_bytes, openings, raw if again else row, row, local=again)


def _weight_row(unit: UnitSize, found: Rehearsal, setting: Setting, codec: Codec) -> int:
    """Bytes of one rank's shards as they are gathered."""
    total = 0
    for slot in (found.slots[name] for name in unit.names):
        numel = prod(slot.padded_shape)
        few = setting.traffic.encodes(len(slot.shape), slot.name not in found.frozen)
        total += codec.num_bytes(numel) if few else numel * slot.compute.itemsize
    return total


def _gradient_rows(unit: UnitSize, found: Rehearsal, setting: Setting) -> tuple[int, int]:
    """Bytes of the gradients of one rank's rows, inside a host and between hosts."""
    raw = unit.reduce_bytes // setting.num_shards
    in_one_memory = setting.placement == "shared" and not setting.both_levels
    if not setting.traffic.quantised_gradients or in_one_memory:
        return raw, raw
    few: Counter[Codec] = Counter()
    itemsize = setting.precision.reduce.itemsize
    for slot in (found.slots[name] for name in unit.names if name not in found.frozen):
        numel = prod(slot.padded_shape)
        for codec in (GRADIENTS, GRADIENTS_IN_HOST):
            few[codec] += codec.num_bytes(numel) if len(slot.shape) >= 2 else numel * itemsize
    # Memory that ranks share needs no codes; on one node of GPUs there is one level, in 4 bits.
    near = GRADIENTS_IN_HOST if setting.span.num_nodes > 1 else GRADIENTS
    return raw if setting.in_arena else few[near], few[GRADIENTS]


def _moved(call: _Call, setting: Setting) -> tuple[int, int]:
    """Bytes that one call sends to ranks of this host, and to others."""
    nodes, local = setting.span.num_nodes, setting.span.per_node
    world, factor = nodes * local, RING_FACTOR[call.kind]
    if nodes == 1 or call.local:
        return factor * (local - 1) * (call.row * world // local if call.local else call.row), 0
    both = setting.both_levels or (call.kind == "reduce_scatter" and setting.traffic.quantised_gradients)
    if both or setting.traffic.two_level_gather:
        return factor * (local - 1) * nodes * call.row, factor * (nodes - 1) * call.far
    if setting.on_cpu:  # all to all, straight to each peer
        return factor * (local - 1) * call.row, factor * (world - local) * call.far
    # A ring, or NCCL's rings: each node's outflow is one buffer, shared by the node's devices.
    total = factor * (world - 1) * call.far
    return total * (local - 1) // local, total // local
