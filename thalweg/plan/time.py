"""Seconds of a step: arithmetic, memory, links and disk; the longest is the bottleneck.

On a CPU rank everything runs on the same cores, so the parts add up.  On a GPU transfers
overlap with arithmetic, and a step takes the longer of the two and a tenth of the shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thalweg.plan.cluster import Cluster
from thalweg.plan.memory import Memory
from thalweg.plan.rehearsal import MICROS_TRACED, Rehearsal
from thalweg.plan.setting import Setting
from thalweg.plan.traffic import Traffic

_ADAM_BYTES = {"Adam": 28, "AdamW": 28, "Lion": 20, "SGD": 12, "Adagrad": 20}


@dataclass
class StepTime:
    """Seconds of one optimizer step by cause, their composition, and the largest cause."""

    parts: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    bottleneck: str = ""

    @property
    def disk_keeps_up(self) -> bool:
        """Whether what goes to and from a disk is there before it is waited for."""
        own = sum(self.parts.get(key, 0.0) for key in ("compute", "memory bandwidth", "calls"))
        return 0.0 < self.parts.get("disk", 0.0) < own


def time_of(
    found: Rehearsal, setting: Setting, traffic: Traffic, memory: Memory, cluster: Cluster
) -> StepTime:
    """How long one optimizer step takes on each rank."""
    scale = setting.accumulation / min(setting.accumulation, MICROS_TRACED)
    flops = cluster.flops_of(setting.precision.compute) * cluster.efficiency
    shard = sum(
        slot.padded_numel // slot.num_shards for name, slot in found.slots.items() if name not in found.frozen
    )
    update = shard * _ADAM_BYTES.get(setting.optimizer or "", 28)
    parts = {
        "compute": found.flops * scale / flops,
        "memory bandwidth": (found.moved_bytes * scale + update) / cluster.memory_bandwidth,
        "calls": found.num_calls * scale * cluster.call_seconds,
    }
    if traffic.links.get("inside a node"):
        parts["links inside a node"] = traffic.links["inside a node"] / cluster.intra_bandwidth
    if traffic.links.get("between nodes"):
        parts["network between nodes"] = traffic.links["between nodes"] / cluster.inter_bandwidth
    if setting.states_on_host:
        parts["host link"] = _over_the_host_link(found, setting) / cluster.host_bandwidth
        parts["host update"] = _host_update(update, cluster)
        parts["memory bandwidth"] -= update / cluster.memory_bandwidth
    if memory.disk_read or memory.disk_written:  # the ranks of a node share its disk
        ranks = setting.ranks.per_node
        parts["disk"] = ranks * (
            memory.disk_read / cluster.disk_read_bandwidth
            + memory.disk_written / cluster.disk_write_bandwidth
        )
    seconds, bottleneck = compose(parts, cluster)
    return StepTime(parts, seconds, bottleneck)


def _host_update(update_bytes: int, cluster: Cluster) -> float:
    """Seconds of an update by the host's processors, whose memory all ranks of a node share."""
    return update_bytes * cluster.devices_per_node / cluster.host_memory_bandwidth


def _over_the_host_link(found: Rehearsal, setting: Setting) -> int:
    """Bytes that a GPU and its host exchange in a step: shards for each gather, gradients back."""
    openings = setting.accumulation * (2 if setting.policy.frees_parameters else 1)
    shards = sum(unit.gather_bytes // setting.num_shards for unit in found.units)
    reductions = setting.accumulation if setting.policy.reduces_each_backward else 1
    grads = sum(unit.sharded_grad_bytes for unit in found.units if unit.trains)
    return shards * openings + grads * reductions


def compose(parts: dict[str, float], cluster: Cluster) -> tuple[float, str]:
    """Seconds of the whole step, and which part is the longest."""
    bottleneck = max(parts, key=lambda key: parts[key])
    if cluster.device == "cpu":
        seconds = sum(parts.values())
    else:
        own = parts["compute"] + parts["memory bandwidth"]
        moved = sum(
            value for key, value in parts.items() if key.startswith(("links", "network", "host", "disk"))
        )
        longer, shorter = max(own, moved, parts["calls"]), min(own, moved)
        seconds = longer + 0.1 * shorter
    return seconds, bottleneck
