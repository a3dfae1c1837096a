"""Which collectives a run uses, decided once from where its ranks are.

one rank, or replicated parameters   no gathers; gradients are averaged
all ranks on one host, CPU           homes and reductions in one arena
several hosts, several ranks each    arena inside a host, wire between hosts
anything else on CPU                 the wire forms that gloo does well
GPUs                                 FSDP2's own, on NCCL
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from thalweg.comm import (
    AllToAllReduceScatter,
    Arena,
    HierarchicalAllGather,
    HierarchicalAllReduce,
    HierarchicalReduceScatter,
    Hosts,
    Ledger,
    PlainAllGather,
    PlainAllReduce,
    Ring,
    SharedAllReduce,
    SharedReduceScatter,
    local_arena,
)
from thalweg.zero._fsdp2 import Group
from thalweg.zero.homes import Placement

Maker = Callable[[str], Any]
_GATHER_DEPTH = 4
# A second slot lets a rank write its next gradients while a slower peer still reads.  Replicated
# parameters leave no memory to spare for that: there one slot a rank is 17 MiB less of 590 on a small model.
_REDUCE_DEPTH, _REPLICATED_DEPTH = 2, 1


@dataclass
class Wiring:
    """The makers of each unit's collectives; ``arena`` holds the homes where there are any."""

    placement: Placement
    ledger: Ledger = field(default_factory=Ledger)
    arena: Arena | None = None
    reducer: Maker | None = None
    gatherer: Maker | None = None
    all_reduces: bool = False

    def connect(self, groups: Iterable[Group]) -> list[Any]:
        """Give each unit its collectives; returns the reducers, whose ``divisor`` is the loss scale's."""
        reducers: list[Any] = []
        for group in groups:
            name = group.name or "<root>"
            if self.gatherer is not None:
                group.module.set_custom_all_gather(self.gatherer(name))
            if self.reducer is not None:
                reducers.append(reducer := self.reducer(name))
                group.module.set_custom_reduce_scatter(reducer)
                if self.all_reduces:
                    group.module.set_all_reduce_hook(reducer.reduce)
        return reducers


def plan_wiring(
    mesh: DeviceMesh,
    device: torch.device,
    *,
    replicate: bool,
    home_bytes: int,
    unit_bytes: int,
    root_bytes: int,
    output_dtype: torch.dtype,
    timeout: float,
) -> Wiring:
    """Choose; collective over ``mesh``.

    ``home_bytes``: all homes; ``unit_bytes``: the largest unit's gradients where large leaf
    modules are units, ``root_bytes`` where they belong to the root (the wire forms).
    """
    ledger, group = Ledger(), mesh.get_group()
    if mesh.size() > 1 and device.type == "cpu":
        depth = _REPLICATED_DEPTH if replicate else _REDUCE_DEPTH
        total = home_bytes + Ring.num_bytes(mesh.size(), unit_bytes, depth)
        arena = Arena.create(group, total, timeout=timeout)
        if arena is not None:
            return _on_one_host(arena, Ring(arena, unit_bytes, depth), replicate, ledger, output_dtype)
        hosts = Hosts.find(group)
        if hosts is not None:
            # Gathers may be wider than reductions (frozen parameters, fp32 under a 16-bit reduction).
            slot_bytes = 2 * root_bytes
            local = hosts.num_local
            room = Ring.num_bytes(local, slot_bytes) + Ring.num_bytes(local, slot_bytes, _GATHER_DEPTH)
            arena = local_arena(hosts, room, timeout)
            if arena is not None:
                rank = mesh.get_local_rank()
                return _on_both_levels(arena, hosts, rank, slot_bytes, replicate, ledger, output_dtype)
    if replicate:
        return Wiring(
            "private",
            ledger,
            reducer=lambda name: PlainAllReduce(group, name, ledger, output_dtype),
            all_reduces=True,
        )
    if device.type != "cpu":
        return Wiring("wire", ledger)
    return Wiring(
        "wire",
        ledger,
        reducer=lambda name: AllToAllReduceScatter(name, ledger, output_dtype),
        gatherer=lambda name: PlainAllGather(name, ledger),
    )


def _on_one_host(
    arena: Arena, ring: Ring, replicate: bool, ledger: Ledger, output_dtype: torch.dtype
) -> Wiring:
    if replicate:
        return Wiring(
            "private",
            ledger,
            arena,
            reducer=lambda name: SharedAllReduce(ring, name, ledger, output_dtype),
            all_reduces=True,
        )
    return Wiring(
        "shared", ledger, arena, reducer=lambda name: SharedReduceScatter(ring, name, ledger, output_dtype)
    )


def _on_both_levels(
    arena: Arena,
    hosts: Hosts,
    rank: int,
    slot_bytes: int,
    replicate: bool,
    ledger: Ledger,
    output_dtype: torch.dtype,
) -> Wiring:
    ring = Ring(arena, slot_bytes)
    if replicate:
        return Wiring(
            "private",
            ledger,
            reducer=lambda name: HierarchicalAllReduce(hosts, ring, name, ledger, output_dtype),
            all_reduces=True,
        )
    gathers = Ring(arena, slot_bytes, _GATHER_DEPTH, bank=1)
    return Wiring(
        "wire",
        ledger,
        reducer=lambda name: HierarchicalReduceScatter(hosts, ring, rank, name, ledger, output_dtype),
        gatherer=lambda name: HierarchicalAllGather(hosts, gathers, rank, name, ledger),
    )
