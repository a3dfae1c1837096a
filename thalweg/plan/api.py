"""``thalweg.plan``: the question, the answer, and the order in which one becomes the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from thalweg.config import Config, load, resolve
from thalweg.observe import resident_mib
from thalweg.plan.comm_volume import estimate_comm_volume
from thalweg.plan.extrapolate import find_repeated_blocks, measure_extrapolated
from thalweg.plan.extrapolate_segments import align_segments, build_timeline, get_highest_segment
from thalweg.plan.inputs.input_spec import InputSpec, infer_input_spec, input_spec_from_example
from thalweg.plan.inputs.model_loader import MetaModel, load_meta_model
from thalweg.plan.memory.rank_memory import MemoryBreakdown, MemorySample
from thalweg.plan.memory.replay import replay_events
from thalweg.plan.report.formulas import transformer_activation_bytes, zero_state_bytes
from thalweg.plan.search.auto import fill_auto
from thalweg.plan.spec.cluster import Cluster, build_cluster, get_disk_limit
from thalweg.plan.spec.config_changes import find_nvme_path
from thalweg.plan.spec.run_spec import RunSpec, run_spec_from_config, unmodelled_options
from thalweg.plan.step_time import combine_times, estimate_step_time
from thalweg.plan.trace.fake_groups import supports_tp
from thalweg.plan.trace.step import trace_step
from thalweg.utils.log import get_logger
from thalweg.zero.options import build_shard_options, get_model_size

_log = get_logger(__name__)


@dataclass
class Plan:
    """What a run will need: bytes of each rank, bytes over each link, seconds of a step.

    ``fits`` is None where no limit is known.  ``suggestion``: the changes to the config (keys
    as in a ``ds_config.json``) of the cheapest run that fits, empty if this one is it, None if
    none was found or asked for.  ``tiers``: bytes beyond ``per_rank``: ``host`` and ``disk`` of one rank,
    ``disk_read_bytes`` and ``disk_written_bytes`` in a step.  ``published``: what the literature's formulas
    give for the same run (see ``report/formulas.py``), in bytes.  ``not_counted``: options that are on and whose effect
    is not in these numbers; the bytes are then a bound, and ``fits`` is never False.
    """

    per_rank: MemoryBreakdown
    limit: int | None
    per_host: int
    host_limit: int | None
    traffic: dict[str, int]
    links: dict[str, int]
    tiers: dict[str, int]
    step_seconds: float
    time_breakdown: dict[str, float]
    bottleneck: str
    num_parameters: int
    tokens_per_step: int
    world_size: int
    timeline: list[MemorySample] = field(default_factory=list)
    suggestion: dict[str, Any] | None = None
    reasons: list[str] = field(default_factory=list)
    not_counted: list[str] = field(default_factory=list)
    published: dict[str, float] = field(default_factory=dict)
    model: str = ""
    config: Config | None = None
    disk_limit: int | None = None
    ranks_per_node: int = 1

    @property
    def fits(self) -> bool | None:
        """Whether every rank stays within its device, the ranks of a host together within it and its disk."""
        excess = self._excess_by_resource
        within = max(excess.values()) <= 0 if excess else None
        return within if within or not self.not_counted else None

    @property
    def exceeded_resource(self) -> str:
        """What is exceeded the most, ``"memory"`` or ``"disk"``; of a run that fits, ``"memory"``."""
        excess = self._excess_by_resource
        if "disk" in excess and excess["disk"] > max(0, excess.get("memory", 0)):
            return "disk"
        return "memory"

    @property
    def excess_bytes(self) -> int:
        """By how much what :attr:`exceeded_resource` names is exceeded (negative: what is to spare)."""
        return self._excess_by_resource.get(self.exceeded_resource, 0)

    @property
    def _excess_by_resource(self) -> dict[str, int]:
        """Bytes beyond each limit that is known (negative: what is to spare)."""
        memory, excess = [], {}
        if self._uses_host_memory:
            memory.append(self.per_host - (self.host_limit or 0))
        if self.limit is not None and (not self._uses_host_memory or self.tiers.get("host")):
            memory.append(self.per_rank.total - self.limit)
        if memory:
            excess["memory"] = max(memory)
        if self.disk_limit is not None and self.tiers.get("disk"):
            excess["disk"] = self.tiers["disk"] * self.ranks_per_node - self.disk_limit
        return excess

    @property
    def _uses_host_memory(self) -> bool:
        """Whether something is held in a host's memory, whose size is known."""
        return self.per_host > 0 and self.host_limit is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the keys that `thalweg plan --json` prints."""
        from thalweg.plan.report.text import plan_to_json

        return plan_to_json(self)

    def __str__(self) -> str:
        from thalweg.plan.report.text import plan_to_text

        return plan_to_text(self)


@dataclass(frozen=True)
class Planner:
    """A model, a batch and the machines; configs are then asked about, one after the other.

    ``without_activations``: activations are left out, as nobody knows the model's inputs.  ``micro_batch``: of which
    ``train_micro_batch_size_per_gpu`` the ``batch`` is one; another one is answered with fewer or more rows.
    ``cpu_budget_s``: seconds of processor time that one trace may take (a model that goes token by token has
    a million operators).
    """

    meta_model: MetaModel
    cluster: Cluster
    batch: Any = None
    sequence_length: int | None = None
    process_bytes: int = 0
    without_activations: bool = False
    micro_batch: int | None = None
    cpu_budget_s: float | None = None

    def predict(self, config: Config) -> Plan:
        """The plan of a resolved config."""
        model = self.meta_model.model
        run_spec = run_spec_from_config(config, self.cluster.topology, build_shard_options(model, config))
        unmodelled_keys = unmodelled_options(config)
        if run_spec.tp_size > 1 and not supports_tp(self.meta_model.copy_model(), run_spec.tp_size):
            run_spec = replace(run_spec, tp_size=1)
            unmodelled_keys.append("tensor_parallel.autotp_size")
        input_spec = self._input_spec(model, run_spec)
        timelines: list[list[MemorySample]] = []
        repeated_blocks = find_repeated_blocks(model)

        def measure(shallow_model: nn.Module) -> dict[str, Any]:
            # A GPU gets the parameters one by one; on a CPU the whole model is there first.
            on_cpu = self.cluster.device == "cpu"
            initial_param_bytes = [parameter.nbytes for parameter in shallow_model.parameters()] if on_cpu else []
            depths = {name: len(list(shallow_model.get_submodule(name).children())) for name in repeated_blocks}
            trace = trace_step(shallow_model, input_spec, run_spec, self.cpu_budget_s)
            replay_args = {"process_bytes": self.process_bytes, "initial_param_bytes": initial_param_bytes}
            replayed = replay_events(trace, run_spec, **replay_args)
            comm_volume = estimate_comm_volume(trace, run_spec)
            step_time = estimate_step_time(trace, run_spec, comm_volume, replayed, self.cluster)
            if run_spec.updates_in_backward and step_time.disk_keeps_up:
                replayed = replay_events(trace, run_spec, disk_keeps_up=True, **replay_args)
            timelines.append(replayed.timeline)
            return {
                "segments": align_segments(replayed.segments, depths),
                "double_counted": {"bytes": replayed.double_counted_bytes},
                "tiers": {
                    "host": replayed.host_bytes,
                    "disk": replayed.disk_bytes,
                    "disk_read": replayed.disk_read_bytes,
                    "disk_written": replayed.disk_written_bytes,
                },
                "memory": asdict(replayed.peak),
                "traffic": comm_volume.bytes_by_collective,
                "links": comm_volume.bytes_by_link,
                "time": step_time.breakdown,
            }

        # Buffers and paged units fill up at some depth: no line goes through that.
        try:
            costs = measure_extrapolated(self.meta_model.copy_model, measure, full_model=run_spec.low_memory)
        except Exception as error:
            if run_spec.sp_size == 1:
                raise
            _log.debug("the model cannot be traced on parts of sequences: %s", error)
            run_spec = replace(run_spec, sp_size=1)
            unmodelled_keys.append("sequence_parallel_size")
            timelines.clear()
            costs = measure_extrapolated(self.meta_model.copy_model, measure, full_model=run_spec.low_memory)
        seconds, bottleneck = combine_times(costs["time"], self.cluster)
        is_full_depth, cluster = len(timelines) == 1, self.cluster
        per_rank = MemoryBreakdown(**costs["memory"]) if is_full_depth else get_highest_segment(costs["segments"])
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
            timeline=timelines[0] if is_full_depth else build_timeline(costs["segments"]),
            not_counted=unmodelled_keys,
            published=self._formula_bytes(run_spec, input_spec),
            disk_limit=get_disk_limit(cluster, find_nvme_path(config)),
            ranks_per_node=cluster.devices_per_node,
            model=self.meta_model.name,
            config=config,
        )

    def _formula_bytes(self, run_spec: RunSpec, input_spec: InputSpec | None) -> dict[str, float]:
        facts = get_model_size(self.meta_model.model)
        count = sum(parameter.numel() for parameter in self.meta_model.model.parameters())
        formulas = {"zero_states": zero_state_bytes(count, run_spec.topology.world_size, run_spec.zero_policy.stage)}
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
            return (
                spec
                if spec_micro_batch == run_spec.micro_batch_size
                else spec.with_batch_size(run_spec.micro_batch_size, spec_micro_batch)
            )
        return infer_input_spec(model, run_spec.micro_batch_size, self.sequence_length)


def plan(
    model: Any,
    config: Any = None,
    *,
    cluster: Cluster | None = None,
    num_nodes: int = 1,
    devices_per_node: int = 1,
    device: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch: Any = None,
    sequence_length: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    process_bytes: int | None = None,
    suggest: bool = True,
) -> Plan:
    """What a run will need, before anything is allocated.

    ``model``: a module (live or on meta), a class with ``model_kwargs``, a Hugging Face config
    (object, dict, path).  ``config``: a path, dict or JSON text of DeepSpeed's keys.
    ``cluster``, or its parts: sizes are bytes or texts such as ``"80GiB"``; ``device`` is
    ``"cpu"`` or the name of a GPU (``"h100"``).  ``batch``: one micro-batch of tensors on any
    device, else it is made of ``sequence_length`` tokens.  ``suggest``: look for the cheapest
    configuration that fits where this one does not.  ``process_bytes``: what a CPU rank holds
    before the model is there (by default, what this process does).

    Raises:
        ConfigError: with every problem of the config at once.
        ValueError: nothing that describes a model; inputs that cannot be guessed.
    """
    planner = build_planner(
        model,
        cluster=cluster,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        batch=batch,
        sequence_length=sequence_length,
        model_kwargs=model_kwargs,
        process_bytes=process_bytes,
    )
    world_size, facts = planner.cluster.world_size, get_model_size(planner.meta_model.model)
    resolved = resolve(fill_auto(load(config), planner), world_size=world_size, model=facts)
    planner = replace(planner, micro_batch=int(resolved.train_micro_batch_size_per_gpu))
    result = planner.predict(resolved)
    if suggest and result.fits is False:
        from thalweg.plan.search.suggest import suggest as search

        result.suggestion, result.reasons = search(planner, resolved)
    return result


def build_planner(
    model: Any,
    *,
    cluster: Cluster | None = None,
    num_nodes: int = 1,
    devices_per_node: int = 1,
    device: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch: Any = None,
    sequence_length: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    process_bytes: int | None = None,
) -> Planner:
    """The model and the machines of :func:`plan`, to be asked about one config after the other."""
    meta_model = load_meta_model(model, model_kwargs)
    resolved_cluster = cluster or build_cluster(
        num_nodes, devices_per_node, device=device, device_memory=device_memory, host_memory=host_memory
    )
    if process_bytes is None:
        process_bytes = _process_bytes(meta_model, resolved_cluster)
    return Planner(meta_model, resolved_cluster, batch, sequence_length, process_bytes)


def _process_bytes(meta_model: MetaModel, cluster: Cluster) -> int:
    """What this process holds without the model: the ranks will be such processes."""
    if cluster.device != "cpu":
        return 0
    resident = int(resident_mib() * 2**20)
    return max(0, resident - sum(meta_model.initial_param_bytes)) if meta_model.is_materialized else resident
