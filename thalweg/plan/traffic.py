"""Bytes that one rank sends in a step, by collective and by link, as the ledger counts them.

``sent`` is the textbook's ring form (``comm/ledger.py``): ``(n-1)/n`` of the full buffer
for a gather or a reduce-scatter, twice that for an all-reduce, whatever carries it.  The
links are where these bytes really go: between hosts, a flat ring crosses the network with
one rank's share of every node, and the two-level forms cross it once a host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from thalweg.comm.ledger import RING_FACTOR
from thalweg.plan.rehearsal import Rehearsal
from thalweg.plan.setting import Setting


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


def traffic_of(found: Rehearsal, setting: Setting) -> Traffic:
    """What one optimizer step (a whole window) communicates on each rank."""
    world = setting.ranks.world_size
    sent: Counter[str] = Counter()
    calls = 0
    for kind, full_bytes, count in _collectives(found, setting):
        sent[kind] += count * (RING_FACTOR[kind] * full_bytes * (world - 1) // world)
        calls += count
    totals = dict(sent) if world > 1 else {}
    return Traffic(totals, _links(totals, setting), calls if world > 1 else 0)


def _collectives(found: Rehearsal, setting: Setting) -> list[tuple[str, int, int]]:
    """(kind, bytes of the full buffer, calls) of one window."""
    micros, policy = setting.accumulation, setting.policy
    trained = [unit for unit in found.units if unit.trains]
    reductions = micros if policy.reduces_each_backward else 1
    if setting.replicates:
        return [("all_reduce", unit.reduce_bytes, 1) for unit in trained]
    calls = [("reduce_scatter", unit.reduce_bytes, reductions) for unit in trained]
    openings = micros if policy.frees_parameters else 1
    if setting.placement == "shared":
        return [*calls, ("all_gather", sum(slot.home_bytes for slot in found.slots.values()), openings)]
    for unit in found.units:
        # Stage 3 frees a unit after its forward and gathers it again; the root's stays.
        twice = policy.frees_parameters and unit.name != "" and unit.trains
        calls.append(("all_gather", unit.gather_bytes, openings * (2 if twice else 1)))
    return calls


def _links(sent: dict[str, int], setting: Setting) -> dict[str, int]:
    ranks, total = setting.ranks, sum(sent.values())
    if total == 0:
        return {}
    if ranks.num_nodes == 1:
        return {"inside a node": total}
    world, local = ranks.world_size, ranks.per_node
    full = total * world // (world - 1)
    if setting.both_levels:
        across = full // local * (ranks.num_nodes - 1) // ranks.num_nodes
        return {"inside a node": full * (local - 1) // local, "between nodes": across}
    if ranks.device == "cpu":  # all to all, straight to each peer
        return {
            "between nodes": full * (world - local) // world,
            "inside a node": full * (local - 1) // world,
        }
    # A ring, or NCCL's rings: each node's outflow is one buffer, shared by the node's devices.
    return {"inside a node": total * (local - 1) // local, "between nodes": total // local}
