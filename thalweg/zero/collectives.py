"""Which collectives a run uses, decided once from where its ranks are.

one rank, or replicated parameters   no gathers; gradients are averaged
all ranks on one host, CPU           parameters and reductions in one arena
several hosts, several ranks each    arena inside a host, wire between hosts; a copy of the parameters on each
                                     where parameters stay (stages 1 and 2) or hpZ keeps them
anything else on CPU                 the wire forms that gloo does well
GPUs                                 those that FSDP2 uses, on NCCL; ours where something is quantised

What ZeRO++ quantises is what goes between hosts (and, over links, inside them): in shared
memory nothing travels, so nothing is rounded.  With MiCS all of this holds for the ranks of
one group, and reductions end in a sum over the copies of the shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thalweg.comm import CommsLog
from thalweg.comm.collectives import hierarchical, quantized, shared_memory, wire
from thalweg.comm.collectives.hierarchical import HostGroups
from thalweg.comm.collectives.reducer import (
    GradDivisor,
    GradientMemory,
    ReduceOptions,
    Reducer,
    ReplicaSync,
    ReplicatedReducer,
)
from thalweg.comm.collectives.shared_memory import CollectiveOrder, SharedMemoryArena, SharedMemoryRing
from thalweg.comm.quantization import PayloadFormat
from thalweg.comm.topology import HostTopology
from thalweg.config.schema.zero import ZeroOptimization
from thalweg.parallel_dims import control_group
from thalweg.zero.fsdp2.async_reduce import AsyncReduction
from thalweg.zero.fsdp2.private_api import FSDPGroupHandle
from thalweg.zero.policy import ZeroPolicy, is_quantized
from thalweg.zero.storage.base import ParamSpec, StorageKind, get_arena_bytes
from thalweg.zero.storage.cross_host_sync import CrossHostSync

ReducerFactory = Callable[[str, FSDPGroupHandle, ReduceOptions], Reducer | wire.WireReduceScatter]
AllGatherFactory = Callable[[str, FSDPGroupHandle], Any]
_NUM_GATHER_SLOTS = 4
# A second slot lets a rank write its next gradients while a slower peer still reads.  Replicated
# parameters leave no memory to spare for that: there one slot a rank is 17 MiB less of 590 on a small model.
NUM_REDUCE_SLOTS, NUM_REPLICATED_REDUCE_SLOTS = 2, 1


@dataclass(frozen=True)
class Collectives:
    """The collectives of a run; ``arena`` holds unsharded parameters where they are shared.

    ``memory``: common to all reductions; ``separate_masters``: parameters whose shards lie beside the
    shared copy; ``cross_host_sync``: what brings the copies of several hosts up to date; ``async_reduction``: what
    reduces during the backward pass; ``hpz_group_size``: ranks among which FSDP2 keeps gathered parameters for the
    backward pass; ``option_messages``: what an option
    comes to here, by its name.
    """

    spec: CollectivesSpec
    storage_kind: StorageKind
    make_reducer: ReducerFactory
    memory: GradientMemory = field(default_factory=GradientMemory)
    arena: SharedMemoryArena | None = None
    make_all_gather: AllGatherFactory | None = None
    cross_host_sync: CrossHostSync | None = None
    separate_masters: frozenset[str] = frozenset()
    hpz_group_size: int = 1
    option_messages: dict[str, str] = field(default_factory=dict)
    async_reduction: AsyncReduction | None = None

    def install(self, groups: Iterable[FSDPGroupHandle]) -> list[Reducer]:
        """Give each unit its collectives; returns the reducers, which divide by themselves."""
        reducers: list[Reducer] = []
        for group in groups:
            name = group.name or "<root>"
            if self.make_all_gather is not None:
                group.module.set_custom_all_gather(self.make_all_gather(name, group))
            reducer = self.make_reducer(name, group, self._reduce_options(group))
            if isinstance(reducer, Reducer):
                reducers.append(reducer)
            comm: Any = reducer  # whose type torch states more narrowly than it uses it
            group.module.set_custom_reduce_scatter(comm)
            group.tell_unused_params(comm)
            if isinstance(reducer, ReplicatedReducer):
                group.module.set_all_reduce_hook(partial(reduce_held, reducer))
        return reducers

    def _reduce_options(self, group: FSDPGroupHandle) -> ReduceOptions:
        spec, replicas = self.spec, self.spec.replicas
        options = ReduceOptions(spec.ledger, spec.output_dtype, spec.divisor, spec.sync, self.memory)
        if replicas is not None and spec.replicate:
            between = wire.SiteExchange(replicas, spec.group, spec.device, spec.ledger)
            options = replace(options, replica_mean=lambda output: between.mean_([output], group.name or "<root>"))
        elif replicas is not None:
            options = replace(options, num_replicas=len(replicas.topology.host_ids), replica_reduce=replicas)
        if self.async_reduction is not None:
            options = replace(options, try_submit=self.async_reduction.make_try_submit(group, spec.output_dtype))
        return options


def reduce_held(reducer: ReplicatedReducer, output: Tensor) -> None:
    """FSDP2's all-reduce hook.  It runs on the all-reduce stream, over memory of the reduce-scatter stream that nobody
    holds (a cast follows): recorded, it is not given to the next unit before this one is done."""
    if output.device.type != "cpu":
        output.record_stream(torch.accelerator.current_stream(output.device))
    reducer.reduce_or_keep(output)


def build_replica_sum(mics_mesh: DeviceMesh, device: torch.device, in_few_bits: bool) -> wire.AllReduceSum:
    """The sum of gradients over the ranks that hold the same shard (MiCS: the outer axis of ``mics_mesh``); collective
    over them."""
    group = mics_mesh.get_group(0)
    topology = HostTopology.discover(group, device)
    return (quantized.QuantizedAllReduceSum if in_few_bits else wire.AllReduceSum)(group, topology)


@dataclass(frozen=True)
class CollectivesSpec:
    """What the choice depends on: ranks, device, wishes, sizes."""

    mesh: DeviceMesh
    device: torch.device
    policy: ZeroPolicy
    zero: ZeroOptimization
    param_specs: Mapping[str, ParamSpec]
    replicate: bool
    unit_bytes: int
    root_bytes: int
    output_dtype: torch.dtype
    replicas: wire.AllReduceSum | None = None
    ledger: CommsLog = field(default_factory=CommsLog)
    divisor: GradDivisor = field(default_factory=GradDivisor)
    sync: ReplicaSync = field(default_factory=ReplicaSync)
    # Whether shards rest in host memory, from where FSDP2 copies them to the device, also where one rank is alone.
    shards_on_host: bool = False
    # Whether reductions over the wire may go on while the backward pass computes.
    overlaps: bool = True

    def build(
        self, storage_kind: StorageKind, option_messages: dict[str, str] | None = None, **given: Any
    ) -> Collectives:
        """The collectives of these ranks, with what is the same for every choice."""
        messages = dict(option_messages or {})
        if self.zero.zeropp_loco_param is not None and not self.zero.zero_quantized_gradients:
            messages["zeropp_loco_param.err_beta"] = "idle: zero_quantized_gradients, which it corrects, is off"
        if self.zero.mics_hierarchical_params_gather and self.replicas is None:
            messages["mics_hierarchical_params_gather"] = "idle: mics_shard_size makes no groups"
        storage_kind = "wire" if self.shards_on_host else storage_kind
        return Collectives(self, storage_kind, option_messages=messages, **given)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of all unsharded parameters."""
        return 0 if self.replicate else get_arena_bytes(self.param_specs.values())

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks among which states are sharded."""
        return self.mesh.get_group()

    def all_replicas_agree(self, possible: bool) -> bool:
        """Whether something is possible in every group of copies; all of them must have the same units."""
        if self.replicas is None:
            return possible
        flag = torch.tensor(int(possible), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.replicas.group)
        return bool(flag)


def build_collectives(spec: CollectivesSpec) -> Collectives:
    """Choose; collective over the mesh.

    ``unit_bytes`` of ``spec``: the largest unit's gradients where large leaf modules are
    units, ``root_bytes`` where they belong to the root (the wire forms).

    Raises:
        ValueError: hpZ's groups do not fit the hosts.
    """
    group, size = spec.group, spec.mesh.size()
    if size == 1:
        return _build_wire(spec, HostTopology((0,), 0))
    if spec.device.type == "cpu":
        depth = NUM_REPLICATED_REDUCE_SLOTS if spec.replicate else NUM_REDUCE_SLOTS
        arena_bytes = spec.unsharded_bytes + SharedMemoryRing.num_bytes(size, spec.unit_bytes, depth)
        arena = SharedMemoryArena.create(group, arena_bytes)
        if spec.all_replicas_agree(arena is not None):
            assert arena is not None
            spec.ledger.topology = HostTopology((0,) * size, spec.mesh.get_local_rank())
            _check_hpz_groups(spec, spec.ledger.topology)
            return _build_shared_memory(spec, arena, SharedMemoryRing(arena, spec.unit_bytes, depth))
    topology = spec.ledger.topology = HostTopology.discover(group, spec.device)
    _check_hpz_groups(spec, topology)
    hosts = HostGroups.discover(group, topology)
    if spec.all_replicas_agree(hosts is not None) and spec.device.type == "cpu":
        assert hosts is not None
        keeps_unsharded = not spec.replicate and (
            not spec.policy.reshards_after_use or spec.zero.zero_hpz_partition_size > 1
        )
        # Gathers may be wider than reductions (frozen parameters, fp32 under a 16-bit reduction).
        slot_bytes = spec.unit_bytes if keeps_unsharded else 2 * spec.root_bytes
        host_arena_bytes = SharedMemoryRing.num_bytes(hosts.num_local_ranks, slot_bytes)
        host_arena_bytes += (
            spec.unsharded_bytes
            if keeps_unsharded
            else SharedMemoryRing.num_bytes(hosts.num_local_ranks, slot_bytes, _NUM_GATHER_SLOTS)
        )
        arena = hierarchical.create_host_arena(hosts, host_arena_bytes)
        if spec.all_replicas_agree(arena is not None):
            assert arena is not None
            return _build_hierarchical(spec, arena, hosts, slot_bytes, keeps_unsharded)
    return _build_wire(spec, topology, hosts)


def _build_shared_memory(spec: CollectivesSpec, arena: SharedMemoryArena, ring: SharedMemoryRing) -> Collectives:
    if spec.replicate:
        return spec.build(
            "private",
            arena=arena,
            make_reducer=lambda name, group, options: shared_memory.SharedMemoryAllReduce(ring, name, options),
        )
    zero, messages = spec.zero, {}
    if zero.zero_hpz_partition_size > 1:
        messages["zero_hpz_partition_size"] = (
            "free on one host: parameters lie once in memory that its ranks share; nothing is ever gathered"
        )
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, name) and (name != "zero_quantized_gradients" or spec.replicas is None):
            messages[name] = "nothing travels between ranks that share one host's memory, so nothing is rounded"
    return spec.build(
        "shared",
        messages,
        arena=arena,
        make_reducer=lambda name, group, options: shared_memory.SharedMemoryReduceScatter(ring, name, options),
    )


def _build_hierarchical(
    spec: CollectivesSpec, arena: SharedMemoryArena, hosts: HostGroups, slot_bytes: int, keeps_unsharded: bool
) -> Collectives:
    ring, zero = SharedMemoryRing(arena, slot_bytes), spec.zero
    if spec.replicate:
        return spec.build(
            "private",
            make_reducer=lambda name, group, options: hierarchical.HierarchicalAllReduce(hosts, ring, name, options),
        )

    def make_reduce_scatter(
        name: str, group: FSDPGroupHandle, options: ReduceOptions
    ) -> hierarchical.HierarchicalReduceScatter:
        all_to_all = _make_all_to_all(spec, hosts.inter_host_group, hosts.inter_host_topology, group)
        return hierarchical.HierarchicalReduceScatter(hosts, ring, all_to_all, name, options)

    if keeps_unsharded:
        lossy = frozenset(
            name
            for name, param_spec in spec.param_specs.items()
            # Integers are somebody's codes already.
            if param_spec.compute_dtype.is_floating_point
            and is_quantized(zero, len(param_spec.shape), param_spec.requires_grad)
        )
        messages = {}
        if zero.zero_hpz_partition_size > 1:
            messages["zero_hpz_partition_size"] = (
                f"the {hosts.num_local_ranks} ranks of a host share one copy of the parameters, "
                "which crosses to other hosts once an update"
            )
        return spec.build(
            "shared",
            messages,
            arena=arena,
            make_reducer=make_reduce_scatter,
            separate_masters=lossy,
            cross_host_sync=CrossHostSync(hosts, spec.group, spec.ledger, lossy),
        )
    gather_ring = SharedMemoryRing(arena, slot_bytes, _NUM_GATHER_SLOTS, counter_bank=1)
    return spec.build(
        "wire",
        make_reducer=make_reduce_scatter,
        make_all_gather=lambda name, group: hierarchical.HierarchicalAllGather(
            hosts, gather_ring, name, spec.ledger, partial(_get_weight_format, zero, group)
        ),
    )


def _build_wire(spec: CollectivesSpec, topology: HostTopology, hosts: HostGroups | None = None) -> Collectives:
    zero, size, cpu = spec.zero, spec.mesh.size(), spec.device.type == "cpu"
    async_reduction, reduce_group = None, spec.group
    if cpu and size > 1 and spec.replicas is None and spec.overlaps:
        # Of its own, as the thread's collectives and the main thread's come in no common order.
        reduce_group = hierarchical.make_subgroup(range(size), spec.group, use=None)
        async_reduction = AsyncReduction(reduce_group)
    order = None
    if not cpu and size > 1:  # on CPUs the memory of a host, or gloo, tells ranks that disagree
        arena = SharedMemoryArena.create(control_group(spec.group), CollectiveOrder.num_bytes(size))
        order = None if arena is None else CollectiveOrder(arena, spec.group)
    if spec.replicate or size == 1:
        return spec.build(
            "private",
            make_reducer=lambda name, group, options: wire.WireAllReduce(reduce_group, name, options, topology, order),
            async_reduction=async_reduction,
        )

    def make_reducer(name: str, group: FSDPGroupHandle, options: ReduceOptions) -> Reducer | wire.WireReduceScatter:
        if not (zero.zero_quantized_gradients or cpu or spec.replicas is not None):
            return wire.WireReduceScatter(name, spec.ledger, topology, order)
        if hosts is None or not zero.zero_quantized_gradients:
            all_to_all = _make_all_to_all(spec, reduce_group, topology, group)
            return wire.AllToAllReduceScatter(all_to_all, name, options)
        intra_host_format = quantized.single_segment_format(quantized.INTRA_HOST_GRADIENT_QUANTIZER)
        inner = quantized.QuantizedAllToAllReduce(hosts.intra_host_group, hosts.intra_host_topology, intra_host_format)
        outer = _make_all_to_all(spec, hosts.inter_host_group, hosts.inter_host_topology, group)
        return quantized.TwoLevelReduceScatter(inner, outer, hosts.ranks_by_local_rank, name, options)

    def make_all_gather(name: str, group: FSDPGroupHandle) -> wire.WireAllGather:
        payload_format_fn = partial(_get_weight_format, zero, group)
        if zero.mics_hierarchical_params_gather and hosts is not None:
            return hierarchical.TwoLevelAllGather(hosts, name, spec.ledger, payload_format_fn)
        if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights:
            return quantized.QuantizedAllGather(name, spec.ledger, topology, payload_format_fn, size)
        return wire.WireAllGather(name, spec.ledger, topology, order)

    stays_on_gpus = spec.policy.reshards_after_use and zero.zero_hpz_partition_size < size
    # Between the two levels of a quantised reduction lie groups that gathers use as well.
    shares_groups = zero.zero_quantized_gradients and hosts is not None
    return spec.build(
        "wire",
        make_reducer=make_reducer,
        make_all_gather=make_all_gather,
        hpz_group_size=zero.zero_hpz_partition_size if stays_on_gpus else 1,
        async_reduction=None if shares_groups else async_reduction,
    )


def _make_all_to_all(
    spec: CollectivesSpec, process_group: dist.ProcessGroup, topology: HostTopology, group: FSDPGroupHandle
) -> wire.AllToAllReduce:
    """How the gradients of ``group`` travel over the links of ``process_group``."""
    if not spec.zero.zero_quantized_gradients:
        return wire.AllToAllReduce(process_group, topology)
    loco = spec.zero.zeropp_loco_param
    error_feedback = None if loco is None else quantized.ErrorFeedback(loco.err_beta, loco.reset_T)
    payload_format_fn = partial(_get_gradient_format, group)
    return quantized.QuantizedAllToAllReduce(process_group, topology, payload_format_fn, error_feedback, spec.divisor)


def _get_weight_format(
    zero: ZeroOptimization, group: FSDPGroupHandle, numel: int, dtype: torch.dtype
) -> PayloadFormat | None:
    """The codes of a unit's shards: each parameter for itself; another buffer goes as it is."""
    segments = [
        (prod(param.padded_shape), is_quantized(zero, param.sharded_param.ndim, param.sharded_param.requires_grad))
        for param in group.params
    ]
    return quantized.make_payload_format(segments, numel, dtype, quantized.WEIGHT_QUANTIZER)


def _get_gradient_format(group: FSDPGroupHandle, numel: int, dtype: torch.dtype) -> PayloadFormat | None:
    """The codes of a unit's gradients, where all that train have one; else of one run of numbers."""
    segments = [
        (prod(param.padded_shape), param.sharded_param.ndim >= 2)
        for param in group.params
        if param.sharded_param.requires_grad
    ]
    if sum(length for length, _ in segments) != numel:
        segments = [(numel, True)]
    return quantized.make_payload_format(segments, numel, dtype, quantized.GRADIENT_QUANTIZER)


def _check_hpz_groups(spec: CollectivesSpec, topology: HostTopology) -> None:
    """Refuse hpZ's groups of consecutive ranks where one would lie on two hosts."""
    size = spec.zero.zero_hpz_partition_size
    if size <= 1:
        return
    groups = [topology.host_ids[start : start + size] for start in range(0, len(topology.host_ids), size)]
    fits = all(len(hosts) == size and len(set(hosts)) == 1 for hosts in groups)
    if spec.all_replicas_agree(fits):
        return
    counts = [len(list(ranks)) for _, ranks in itertools.groupby(topology.host_ids)]
    valid_sizes = [number for number in range(2, min(counts) + 1) if all(count % number == 0 for count in counts)]
    raise ValueError(
        f"zero_optimization.zero_hpz_partition_size = {size}: groups of {size} consecutive ranks must lie on "
        f"one host, and the hosts have {counts} ranks: use "
        + (f"one of {valid_sizes}, or 1" if valid_sizes else "1, or give each host equally many ranks")
        + " to switch hpZ off"
    )
