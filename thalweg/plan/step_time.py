"""Seconds of a step: arithmetic, memory, links and disk; the longest is the bottleneck.

On a CPU rank everything runs on the same cores, so the parts add up.  On a GPU transfers
overlap with arithmetic, and a step takes the longer of the two and a tenth of the shorter.
"""

from thalweg.plan.spec.cluster import Cluster
from thalweg.plan.spec.run_spec import INTER_NODE, INTRA_NODE, RunSpec
from thalweg.plan.trace.step import MAX_TRACED_MICRO_BATCHES, StepTrace

_ADAM_BYTES = {"Adam": 28, "AdamW": 28, "Lion": 20, "SGD": 12, "Adagrad": 20}


def estimate_step_time(
    trace: StepTrace, run_spec: RunSpec, bytes_by_link: dict[str, int], tiers: dict[str, int], cluster: Cluster
) -> dict[str, float]:
    """Seconds of one optimizer step on each rank, by cause."""
    scale = run_spec.accumulation_steps / min(run_spec.accumulation_steps, MAX_TRACED_MICRO_BATCHES)
    flops = cluster.peak_flops(run_spec.precision.compute_dtype) * cluster.efficiency
    updated = (spec for spec in trace.param_specs.values() if spec.requires_grad)
    shard_numel = sum(spec.shard_numel for spec in updated)
    update_bytes = shard_numel * _ADAM_BYTES.get(run_spec.optimizer or "", 28)
    breakdown = {
        "compute": trace.flops * scale / flops,
        "memory bandwidth": (trace.accessed_bytes * scale + update_bytes) / cluster.memory_bandwidth,
        "calls": trace.num_ops * scale * cluster.call_seconds,
    }
    if bytes_by_link.get(INTRA_NODE):
        breakdown["links inside a node"] = bytes_by_link[INTRA_NODE] / cluster.intra_bandwidth
    if bytes_by_link.get(INTER_NODE):
        breakdown["network between nodes"] = bytes_by_link[INTER_NODE] / cluster.inter_bandwidth
    if run_spec.states_on_host:
        breakdown["host link"] = _host_link_bytes(trace, run_spec) / cluster.host_bandwidth
        # The host's processors update for all ranks of a node, which share its memory.
        breakdown["host update"] = update_bytes * cluster.devices_per_node / cluster.host_memory_bandwidth
        breakdown["memory bandwidth"] -= update_bytes / cluster.memory_bandwidth
    if tiers["disk_read"] or tiers["disk_written"]:  # the ranks of a node share its disk
        seconds = tiers["disk_read"] / cluster.disk_read_bandwidth
        seconds += tiers["disk_written"] / cluster.disk_write_bandwidth
        breakdown["disk"] = run_spec.topology.ranks_per_node * seconds
    return breakdown


def disk_keeps_up(breakdown: dict[str, float]) -> bool:
    """Whether what goes to and from a disk is there before it is waited for."""
    rank_seconds = sum(breakdown[key] for key in ("compute", "memory bandwidth", "calls"))
    return 0.0 < breakdown.get("disk", 0.0) < rank_seconds


def _host_link_bytes(trace: StepTrace, run_spec: RunSpec) -> int:
    """Bytes that a GPU and its host exchange in a step: shards for each gather, gradients back."""
    num_gathers = run_spec.accumulation_steps * (2 if run_spec.policy.reshards_after_use else 1)
    shards = sum(unit.gather_bytes // run_spec.num_shards for unit in trace.units)
    num_reductions = run_spec.accumulation_steps if run_spec.policy.reduces_each_backward else 1
    grads = sum(unit.sharded_grad_bytes for unit in trace.units if unit.is_trainable)
    return shards * num_gathers + int(grads * run_spec.sent_share_of_grads) * num_reductions


def combine_times(breakdown: dict[str, float], cluster: Cluster) -> tuple[float, str]:
    """Seconds of the whole step, and which part is the longest."""
    bottleneck = max(breakdown, key=lambda key: breakdown[key])
    if cluster.device == "cpu":
        seconds = sum(breakdown.values())
    else:
        rank_seconds = breakdown["compute"] + breakdown["memory bandwidth"]
        transfers = ("links", "network", "host", "disk")
        transfer_seconds = sum(value for key, value in breakdown.items() if key.startswith(transfers))
        longer, shorter = (max(rank_seconds, transfer_seconds, breakdown["calls"]), min(rank_seconds, transfer_seconds))
        seconds = longer + 0.1 * shorter
    return seconds, bottleneck
