"""A model, a batch and the machines, which are asked about one config after the other."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from thalweg.activation_checkpointing.apply import default_nvme_path
from thalweg.config import Config
from thalweg.config.schema.base import replace_by_path
from thalweg.plan import extrapolate
from thalweg.plan.comm_volume import estimate_comm_volume
from thalweg.plan.estimates import transformer_activation_bytes, zero_state_bytes
from thalweg.plan.inputs.input_spec import InputSpec, infer_input_spec, input_spec_from_example
from thalweg.plan.inputs.model_loader import MetaModel, load_meta_model
from thalweg.plan.memory.rank_memory import MemoryBreakdown, MemorySample
from thalweg.plan.memory.replay import replay_events
from thalweg.plan.result import Plan
from thalweg.plan.spec.cluster import Cluster, build_cluster, get_disk_limit
from thalweg.plan.spec.devices import CONTEXT_BYTES, library_bytes
from thalweg.plan.spec.run_spec import RunSpec, choose_max_in_cpu, run_spec_from_config, unmodelled_options
from thalweg.plan.step_time import combine_times, disk_keeps_up, estimate_step_time
from thalweg.plan.trace.fake_groups import supports_tp
from thalweg.plan.trace.step import StepTrace, build_param_specs, drop_untraced_choices, trace_step
from thalweg.utils.formatting import format_bytes
from thalweg.utils.log import get_logger
from thalweg.utils.procfs import resident_bytes
from thalweg.zero.options import build_shard_options, get_model_size
from thalweg.zero.storage.base import describe_uneven_shards

_log = get_logger(__name__)


@dataclass(frozen=True)
class Planner:
    """A model, a batch and the machines; configs are then asked about, one after the other.

    ``without_activations``: activations are left out, as nobody knows the model's inputs.  ``micro_batch``: of which
    ``train_micro_batch_size_per_gpu`` the ``batch`` is one; another one is answered with fewer or more rows.
    ``deferred_init``: whether the program builds the model under :class:`thalweg.zero.Init`, so that it is never whole
    in memory; None: it does where parameters rest on a disk.
    ``cpu_budget_s``: seconds of processor time that one trace may take (a model that goes token by token has
    a million operators).
    ``traces``: those made so far, as a search asks about configs that differ in what no trace shows.
    """

    meta_model: MetaModel
    cluster: Cluster
    batch: Any = None
    sequence_length: int | None = None
    process_bytes: int = 0
    without_activations: bool = False
    micro_batch: int | None = None
    cpu_budget_s: float | None = None
    deferred_init: bool | None = None
    traces: dict[str, StepTrace] = field(default_factory=dict, repr=False, compare=False)

    def predict(self, config: Config) -> Plan:
        """The plan of a resolved config."""
        model = self.meta_model.model
        if changes := choose_max_in_cpu(config, self.cluster.host_memory_per_rank()):
            config = replace_by_path(config, changes)
        is_deferred = self.deferred_init
        if is_deferred is None:
            is_deferred = config.zero_optimization.offload_param.device == "nvme"
        run_spec = run_spec_from_config(config, self.cluster.topology, build_shard_options(model, config))
        unmodelled_keys = unmodelled_options(config)
        tp_size, tp_partition = run_spec.tp_size, run_spec.tp_partition
        if tp_size > 1 and not supports_tp(self.meta_model.copy_model(), tp_size, tp_partition):
            run_spec = replace(run_spec, tp_size=1)
            unmodelled_keys.append("tensor_parallel.autotp_size")
        input_spec = self._input_spec(model, run_spec)
        timelines: list[list[MemorySample]] = []
        repeated_blocks = extrapolate.find_repeated_blocks(model)
        holes: list[int] = []  # of a device's allocator: as many in a deep model as in a shallow one

        def measure(shallow_model: nn.Module) -> dict[str, Any]:
            # A GPU gets the parameters one by one; on a CPU the whole model is there first.
            is_whole = self.cluster.device == "cpu" and not is_deferred
            initial_param_bytes = [parameter.nbytes for parameter in shallow_model.parameters()] if is_whole else []
            depths = {name: len(list(shallow_model.get_submodule(name).children())) for name in repeated_blocks}
            key = repr((depths, input_spec, drop_untraced_choices(run_spec)))
            if key not in self.traces:
                self.traces[key] = trace_step(shallow_model, input_spec, run_spec, self.cpu_budget_s)
            trace = self.traces[key]
            replay_args = {"process_bytes": self.process_bytes, "initial_param_bytes": initial_param_bytes}
            replayed = replay_events(trace, run_spec, **replay_args)
            traffic, links = estimate_comm_volume(trace, run_spec)
            seconds = estimate_step_time(trace, run_spec, links, replayed.tiers, self.cluster)
            if run_spec.updates_in_backward and disk_keeps_up(seconds):
                replayed = replay_events(trace, run_spec, disk_keeps_up=True, **replay_args)
            timelines.append(replayed.timeline)
            if self.cluster.device != "cpu":
                holes.append(replayed.peak.fragmentation)
            return {
                "segments": extrapolate.align_segments(replayed.segments, depths),
                "double_counted": {"bytes": replayed.double_counted_bytes},
                "tiers": replayed.tiers,
                "memory": asdict(replayed.peak),
                "traffic": traffic,
                "links": links,
                "time": seconds,
            }

        # Buffers and paged units fill up at some depth: no line goes through that.
        measure_all = partial(extrapolate.measure_extrapolated, full_model=run_spec.low_memory)
        try:
            costs = measure_all(self.meta_model.copy_model, measure)
        except ValueError as error:
            if run_spec.sp_size == 1:
                raise
            _log.info("the model cannot be traced on parts of sequences: %s", error)
            run_spec = replace(run_spec, sp_size=1)
            unmodelled_keys.append("sequence_parallel_size")
            timelines.clear()
            costs = measure_all(self.meta_model.copy_model, measure)
        seconds, bottleneck = combine_times(costs["time"], self.cluster)
        is_full_depth, cluster = len(timelines) == 1, self.cluster
        if is_full_depth:
            per_rank = MemoryBreakdown(**costs["memory"])
        else:
            per_rank = extrapolate.get_highest_segment(costs["segments"])
            per_rank = replace(per_rank, fragmentation=max(holes, default=per_rank.fragmentation))
        if cluster.device == "cpu":
            groups = cluster.devices_per_node // run_spec.topology.ranks_per_node  # each has shared memory of its own
            host_bytes = cluster.devices_per_node * per_rank.total - groups * costs["double_counted"]["bytes"]
        else:
            host_bytes = cluster.devices_per_node * costs["tiers"]["host"]
        return Plan(
            per_rank=per_rank,
            limit=cluster.limit_per_rank(),
            per_host=host_bytes,
            host_limit=cluster.host_memory,
            traffic=costs["traffic"],
            links=costs["links"],
            tiers=costs["tiers"],
            step_seconds=seconds,
            time_breakdown=costs["time"],
            bottleneck=bottleneck,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            tokens_per_step=(input_spec.num_tokens if input_spec else run_spec.micro_batch_size)
            * run_spec.accumulation_steps
            * run_spec.topology.world_size
            // run_spec.sp_size,
            world_size=self.cluster.world_size,
            timeline=timelines[0] if is_full_depth else extrapolate.build_timeline(costs["segments"]),
            not_counted=unmodelled_keys,
            assumptions=self._list_assumptions(is_deferred),
            warnings=self._list_warnings(run_spec, unmodelled_keys),
            published=self._formula_bytes(run_spec, input_spec),
            disk_limit=get_disk_limit(cluster, default_nvme_path(config)),
            ranks_per_node=cluster.devices_per_node,
            model=type(model).__name__,
            config=config,
        )

    def _list_assumptions(self, is_deferred: bool) -> list[str]:
        """What neither the config nor the command line says."""
        found = []
        if is_deferred and self.deferred_init is None:
            whole = format_bytes(sum(parameter.nbytes for parameter in self.meta_model.model.parameters()))
            found.append(f"a model that is built under thalweg.zero.Init(), as built whole it takes {whole} first")
        if self.cluster.is_assumed:
            found.append(f"the speed of {self.cluster.name}, as no device is named")
        return found

    def _list_warnings(self, run_spec: RunSpec, unmodelled_keys: list[str]) -> list[str]:
        """What makes ranks hold more than their share; where tensor or expert ranks cut first, the run says it."""
        if run_spec.tp_size > 1 or "expert_parallel.autoep_size" in unmodelled_keys:
            return []
        uneven_shards = describe_uneven_shards(build_param_specs(self.meta_model.model, run_spec).values())
        return [] if uneven_shards is None else [uneven_shards]

    def _formula_bytes(self, run_spec: RunSpec, input_spec: InputSpec | None) -> dict[str, float]:
        facts = get_model_size(self.meta_model.model)
        world_size, stage = run_spec.topology.world_size, run_spec.policy.stage
        formulas = {"zero_states": zero_state_bytes(facts.num_parameters, world_size, stage)}
        if input_spec is not None and facts.hidden_size and facts.num_layers:
            tokens = input_spec.num_tokens
            formulas["activations"] = transformer_activation_bytes(facts.hidden_size, facts.num_layers, 1, tokens)
        return formulas

    def _input_spec(self, model: nn.Module, run_spec: RunSpec) -> InputSpec | None:
        if self.without_activations:
            return None
        if self.batch is not None:
            spec = self.batch if isinstance(self.batch, InputSpec) else input_spec_from_example(self.batch)
            spec_micro_batch = self.micro_batch or run_spec.micro_batch_size
            size = run_spec.micro_batch_size
            return spec if spec_micro_batch == size else spec.with_batch_size(size, spec_micro_batch)
        return infer_input_spec(model, run_spec.micro_batch_size, self.sequence_length)


def build_planner(
    model: Any,
    cluster: Cluster | None = None,
    batch: Any = None,
    sequence_length: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    process_bytes: int | None = None,
    **machines: Any,
) -> Planner:
    """The model and the machines of :func:`plan`, to be asked about one config after the other.

    ``machines``: without a ``cluster``, what :func:`build_cluster` takes.
    """
    meta_model = load_meta_model(model, model_kwargs)
    cluster = cluster or build_cluster(**machines)
    process_bytes = _process_bytes(meta_model, cluster) if process_bytes is None else process_bytes
    return Planner(meta_model, cluster, batch, sequence_length, process_bytes)


def _process_bytes(meta_model: MetaModel, cluster: Cluster) -> int:
    """What a rank holds without the model: on a processor what this process does, on a device what libraries take."""
    if cluster.device != "cpu":
        return CONTEXT_BYTES + library_bytes([cluster.world_size])
    own = sum(parameter.nbytes for parameter in meta_model.model.parameters()) if meta_model.is_materialized else 0
    return max(0, resident_bytes() - own)
