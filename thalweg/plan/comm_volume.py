"""Bytes that one rank sends in a step, by collective and by link, as the ledger counts them.

Bytes by collective are the textbook's ring form (``comm/comms_logger.py``): ``(n-1)/n`` of the full buffer
for a gather or a reduce-scatter, twice that for an all-reduce, whatever carries it.  The
links are where these bytes really go, in the form they have there: between hosts, a flat ring
crosses the network with one rank's share of every node, the two-level forms cross it once a host, and what
ZeRO++ sends in few bits counts in those.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from thalweg.comm.collectives.quantized import GRADIENT_QUANTIZER, INTRA_HOST_GRADIENT_QUANTIZER, WEIGHT_QUANTIZER
from thalweg.comm.comms_logger import RING_FACTOR
from thalweg.comm.quantization import BlockQuantizer
from thalweg.plan.spec.run_spec import INTER_NODE, INTRA_NODE, RunSpec
from thalweg.plan.trace.fsdp_events import UnitInfo
from thalweg.plan.trace.step import MAX_TRACED_MICRO_BATCHES, StepTrace
from thalweg.zero.policy import is_quantized
from thalweg.zero.storage.cross_host_sync import DELTA_QUANTIZER


@dataclass(frozen=True)
class _Collective:
    """``num_calls`` collectives over the ranks of ``run_spec.shard_topology``.

    ``intra_row_bytes``, ``inter_row_bytes``: what one rank contributes, as it is sent inside a host and between
    hosts; ``intra_node_only``: only ranks of the same host take part.
    """

    kind: str
    full_bytes: int
    num_calls: int
    intra_row_bytes: int
    inter_row_bytes: int
    intra_node_only: bool = False


def estimate_comm_volume(trace: StepTrace, run_spec: RunSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that a rank sends in one optimizer step (all micro-batches of a window): by collective, in its ring form,
    and by link."""
    by_collective: Counter[str] = Counter()
    by_link: Counter[str] = Counter()
    if run_spec.topology.world_size > 1:
        num_shards = run_spec.num_site_ranks if run_spec.replicates_states else run_spec.num_shards
        for call in _iter_collectives(trace, run_spec, num_shards):
            sent_bytes = RING_FACTOR[call.kind] * call.full_bytes * (num_shards - 1) // num_shards
            by_collective[call.kind] += call.num_calls * sent_bytes
            for link, num_bytes in zip((INTRA_NODE, INTER_NODE), _link_bytes(call, run_spec), strict=True):
                by_link[link] += call.num_calls * num_bytes
        copies = 1 if run_spec.replicates_states else run_spec.num_site_ranks // run_spec.num_shards
        if copies > 1:  # MiCS: each shard's gradient is added up over its copies
            shard = sum(unit.reduce_bytes for unit in trace.units if unit.is_trainable) // run_spec.num_shards
            link = INTRA_NODE if run_spec.topology.num_nodes == 1 else INTER_NODE
            by_link[link] += 2 * shard * (copies - 1) // copies
        if run_spec.outer_optimizer is not None:
            _add_outer_steps(trace, run_spec, by_collective, by_link)
        if run_spec.gradient_compression is not None:
            _add_compressed_gradients(trace, run_spec, by_collective, by_link)
    num_traced = min(run_spec.accumulation_steps, MAX_TRACED_MICRO_BATCHES)
    for entry in trace.comm_ledger.entries():  # of split layers
        num_bytes = entry.sent_bytes * run_spec.accumulation_steps // num_traced
        by_collective[entry.kind] += num_bytes
        by_link[run_spec.tp_link] += num_bytes
    return dict(by_collective), {link: total for link, total in by_link.items() if total}


def _add_outer_steps(trace: StepTrace, run_spec: RunSpec, by_collective: Counter[str], by_link: Counter[str]) -> None:
    """A step's part of what sites exchange when they meet: each rank of a site has a part of the parameters to send."""
    assert run_spec.outer_optimizer is not None
    num_ranks, num_sites = run_spec.num_site_ranks, run_spec.topology.world_size // run_spec.num_site_ranks
    every = run_spec.outer_optimizer.sync_every
    numel = sum(spec.shape.numel() for spec in trace.param_specs.values() if spec.requires_grad)
    part = numel // num_ranks
    row = part // num_sites
    row_bytes = 8 * row
    if run_spec.outer_optimizer.quantized_deltas:
        row_bytes = GRADIENT_QUANTIZER.num_bytes(row) + WEIGHT_QUANTIZER.num_bytes(row)
    by_collective["all_reduce"] += 8 * part * (num_sites - 1) // num_sites // every
    by_link[INTRA_NODE if run_spec.topology.num_nodes == 1 else INTER_NODE] += (num_sites - 1) * row_bytes // every
    if run_spec.replicates_states and num_ranks > 1:
        by_collective["all_gather"] += 4 * numel * (num_ranks - 1) // num_ranks // every
        by_link[INTRA_NODE] += 4 * part * (num_ranks - 1) // every


def _add_compressed_gradients(
    trace: StepTrace, run_spec: RunSpec, by_collective: Counter[str], by_link: Counter[str]
) -> None:
    """What hosts exchange in a step after ``start_step``: see ``comm/collectives/error_feedback.py``.  The ranks of a
    host have shards, or send a part each and gather what comes back."""
    options, num_ranks, num_sites = run_spec.gradient_compression, run_spec.num_site_ranks, run_spec.topology.num_nodes
    assert options is not None
    numbers = 0
    for spec in (spec for spec in trace.param_specs.values() if spec.requires_grad):
        rows, columns = -(-spec.shape[0] // run_spec.num_shards), spec.shape[1:].numel()
        if options.type == "topk":  # each number with its place
            numbers += 2 * max(1, round(options.compress_ratio * rows * columns))
        else:
            numbers += min(options.matrix_approximation_rank * (rows + columns), rows * columns)
    num_parts = num_ranks if run_spec.replicates_states else 1
    kind, factor = ("all_gather", num_sites) if options.type == "topk" else ("all_reduce", 1)
    part = 4 * numbers // num_parts
    sent = RING_FACTOR[kind] * factor * part * (num_sites - 1) // num_sites
    by_collective[kind] += sent
    by_link[INTER_NODE] += sent
    by_collective["all_gather"] += (num_parts - 1) * factor * part
    by_link[INTRA_NODE] += (num_parts - 1) * factor * part


def _iter_collectives(trace: StepTrace, run_spec: RunSpec, num_shards: int) -> Iterator[_Collective]:
    num_micro_batches, policy = run_spec.accumulation_steps, run_spec.policy
    trained = [unit for unit in trace.units if unit.is_trainable]
    num_reductions = num_micro_batches if policy.reduces_each_backward else 1
    for unit in trained:
        row_bytes = unit.reduce_bytes // num_shards
        if run_spec.replicates_states:
            yield _Collective("all_reduce", unit.reduce_bytes, 1, row_bytes, row_bytes)
        else:
            intra_row_bytes, inter_row_bytes = _gradient_row_bytes(unit, trace, run_spec)
            yield _Collective("reduce_scatter", unit.reduce_bytes, num_reductions, intra_row_bytes, inter_row_bytes)
    if run_spec.replicates_states:
        return
    num_gathers = num_micro_batches if policy.reshards_after_use else 1
    if run_spec.storage_kind == "shared":
        resident = [unit for unit in trace.units if unit.name not in trace.paged_units]
        unsharded_bytes = sum(unit.gather_bytes for unit in resident)
        inter_row_bytes = sum(_weight_row_bytes(unit, trace, run_spec, DELTA_QUANTIZER) for unit in resident)
        yield _Collective("all_gather", unsharded_bytes, num_gathers, unsharded_bytes // num_shards, inter_row_bytes)
        return
    for unit in trace.units:
        row_bytes = _weight_row_bytes(unit, trace, run_spec, WEIGHT_QUANTIZER)
        yield _Collective("all_gather", unit.gather_bytes, num_gathers, row_bytes, row_bytes)
        # Stage 3 frees a unit after its forward and gathers it again; the root's stays.
        if policy.reshards_after_use and unit.name != "" and unit.is_trainable:
            raw_row_bytes = unit.gather_bytes // num_shards
            regathers_in_node = run_spec.zero.zero_hpz_partition_size > 1
            intra = raw_row_bytes if regathers_in_node else row_bytes
            yield _Collective("all_gather", unit.gather_bytes, num_gathers, intra, row_bytes, regathers_in_node)


def _weight_row_bytes(unit: UnitInfo, trace: StepTrace, run_spec: RunSpec, codec: BlockQuantizer) -> int:
    """Bytes of one rank's shards as they are gathered."""
    total = 0
    for param_spec in (trace.param_specs[name] for name in unit.param_names):
        numel = param_spec.shard_numel
        in_few_bits = is_quantized(run_spec.zero, len(param_spec.shape), param_spec.requires_grad)
        total += codec.num_bytes(numel) if in_few_bits else numel * param_spec.compute_dtype.itemsize
    return total


def _gradient_row_bytes(unit: UnitInfo, trace: StepTrace, run_spec: RunSpec) -> tuple[int, int]:
    """Bytes of the gradients of one rank's rows, inside a host and between hosts."""
    raw_bytes = unit.reduce_bytes // run_spec.num_shards
    in_one_memory = run_spec.storage_kind == "shared" and not run_spec.is_hierarchical
    if not run_spec.zero.zero_quantized_gradients or in_one_memory:
        return raw_bytes, raw_bytes
    encoded_bytes: Counter[BlockQuantizer] = Counter()
    itemsize = run_spec.precision.reduce_dtype.itemsize
    for param_spec in (spec for name in unit.param_names if (spec := trace.param_specs[name]).requires_grad):
        numel = param_spec.shard_numel
        for codec in (GRADIENT_QUANTIZER, INTRA_HOST_GRADIENT_QUANTIZER):
            encoded_bytes[codec] += codec.num_bytes(numel) if len(param_spec.shape) >= 2 else numel * itemsize
    # Memory that ranks share needs no codes; on one node of GPUs there is one level, in 4 bits.
    intra_codec = INTRA_HOST_GRADIENT_QUANTIZER if run_spec.shard_topology.num_nodes > 1 else GRADIENT_QUANTIZER
    return raw_bytes if run_spec.uses_shared_memory else encoded_bytes[intra_codec], encoded_bytes[GRADIENT_QUANTIZER]


def _link_bytes(collective: _Collective, run_spec: RunSpec) -> tuple[int, int]:
    """Bytes that one call sends to ranks of this host, and to others."""
    num_nodes, ranks_per_node = run_spec.shard_topology.num_nodes, run_spec.shard_topology.ranks_per_node
    world, factor = num_nodes * ranks_per_node, RING_FACTOR[collective.kind]
    intra = factor * (ranks_per_node - 1) * collective.intra_row_bytes  # a row of each peer in this host
    if num_nodes == 1 or collective.intra_node_only:
        return intra * num_nodes, 0
    in_codes = collective.kind == "reduce_scatter" and run_spec.zero.zero_quantized_gradients
    is_hierarchical = run_spec.is_hierarchical or in_codes
    if is_hierarchical or run_spec.zero.mics_hierarchical_params_gather:
        return intra * num_nodes, factor * (num_nodes - 1) * collective.inter_row_bytes
    if run_spec.on_cpu:  # all to all, straight to each peer
        return intra, factor * (world - ranks_per_node) * collective.inter_row_bytes
    # A ring, or NCCL's rings: each node's outflow is one buffer, shared by the node's devices.
    total = factor * (world - 1) * collective.inter_row_bytes
    return total * (ranks_per_node - 1) // ranks_per_node, total // ranks_per_node
