"""The ordered recipe: from a plain model and a resolved config to the parts of an engine.

    split layers -> cut into stages -> recompute activations -> pick CPU kernels -> tile -> compile
    -> shard -> optimizer -> schedule

The order matters.  Splitting comes first: what follows sees a plain, smaller model.
Recomputation and kernels change how a module computes, so compiling comes after them;
sharding replaces parameters, so it comes last on the model, and the optimizer is built over
what it leaves.  Each optional feature is an object made here; the engine does not know
their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg import ops
from thalweg.config import Config, ModelFacts
from thalweg.config.schema_base import AUTO, with_values
from thalweg.device import ThreadCache
from thalweg.mesh import Axes, Degrees
from thalweg.nn.moe import MoE
from thalweg.nn.tiling import tile_model
from thalweg.observe import build_recorder, flops_per_token, resident_mib
from thalweg.observe.meter import Meter
from thalweg.ops.attention import widen_attention
from thalweg.optim import LossScaler, adopt, build_optimizer, build_schedule
from thalweg.optim.averaging import Averaging, averaging_of, scale_plain_backwards
from thalweg.optim.delayed import DelayPolicy
from thalweg.optim.groups import parameter_names, rebind
from thalweg.optim.managed import ManagedOptimizer
from thalweg.optim.tiered import manage
from thalweg.optim.window import Window
from thalweg.parallel.containers import Search, find_experts
from thalweg.parallel.expert import ExpertLayer, ExpertTeam, spread_experts
from thalweg.parallel.hosts import note_groups_across_hosts
from thalweg.parallel.pipeline.build import Pipeline
from thalweg.parallel.pipeline.driver import Around
from thalweg.parallel.pipeline.module import NOTHING, PipelineModule
from thalweg.parallel.pipeline.names import Naming
from thalweg.parallel.sequence import Attention, SequenceTeams, sequence_parallel
from thalweg.parallel.team import Team
from thalweg.parallel.tensor import parallelise, synchronise_generators
from thalweg.plan.batch import batch_of, default_length
from thalweg.plan.preflight import Preflight
from thalweg.plan.sizes import parse_bytes
from thalweg.remat.wanted import recompute
from thalweg.utils.dtypes import parse_dtype
from thalweg.utils.timing import PhaseTimer
from thalweg.zero.agree import agree_on_gradients
from thalweg.zero.options import model_facts, shard_options
from thalweg.zero.shard import Sharded, shard
from thalweg.zero.states import States
from thalweg.zero.units import find_units, is_list_of_experts
from thalweg.zero.wrapped import unwrap_parameters

ForwardContext = Callable[[], AbstractContextManager[Any]]


class Runner(Protocol):
    """Runs whole windows, where one forward and one backward at a time will not do.

    ``refusal``: what a caller of forward, backward or step is told; ``needs_batch``: whether this rank
    reads the data.
    """

    refusal: str

    @property
    def needs_batch(self) -> bool:
        """Whether this rank reads the data."""
        ...

    def agree(self, batches: Sequence[Any] | None) -> list[Any]:
        """The window that all ranks can run; None from one that reads no data; collective."""
        ...

    def train(self, batches: Sequence[Any]) -> Tensor:
        """Forward and backward of a window; its mean loss."""
        ...

    def evaluate(self, batches: Sequence[Any]) -> Tensor:
        """The mean loss of a window."""
        ...


@dataclass
class Parts:
    """What an engine drives."""

    module: nn.Module
    sharded: Sharded
    optimizer: ManagedOptimizer | None
    lr_scheduler: Any
    window: Window
    scaler: LossScaler
    meter: Meter
    phases: PhaseTimer
    forward_context: ForwardContext
    averaging: Averaging
    axes: Axes
    device: torch.device
    runner: Runner | None = None
    naming: Naming = field(default_factory=Naming)

    @property
    def mesh(self) -> DeviceMesh:
        """The 1-D data-parallel mesh."""
        return self.axes.data


def degrees_of(config: Config) -> Degrees:
    """How many ranks each axis has by the config."""
    split, stages = config.tensor_parallel, config.pipeline.stages
    return Degrees(
        sequence=config.sequence_parallel_size,
        tensor=max(1, split.autotp_size, split.tp.tp_size),
        context=config.context_parallel_size,
        pipeline=stages if isinstance(stages, int) else 1,
    )


def with_model(config: Config, model: nn.Module) -> Config:
    """The config with what the model itself says about how it is to be run.

    Raises:
        ValueError: the two contradict each other, or there is nothing to train.
    """
    count = config.pipeline.micro_batches
    if isinstance(count, int) and config.gradient_accumulation_steps in (None, AUTO):
        config = with_values(config, {"gradient_accumulation_steps": count})  # type: ignore[assignment]
    if not isinstance(model, PipelineModule):
        if not any(True for _ in model.parameters()):
            raise ValueError("the model has no parameters: there is nothing to train")
        return config
    stated, own = config.pipeline.stages, model.num_stages
    if own is not None and isinstance(stated, int) and stated != own:
        raise ValueError(
            f"the PipelineModule has num_stages = {own}, but the config's pipeline.stages is {stated}: leave "
            "one of the two out"
        )
    if stated == AUTO and own is not None:
        config = with_values(config, {"pipeline.stages": own})  # type: ignore[assignment]
    return config


def facts_of(model: nn.Module) -> ModelFacts:
    """What is known of the whole model, also where no rank will ever hold it."""
    facts = model_facts(model)
    if isinstance(model, PipelineModule):
        facts = replace(facts, num_parameters=model.num_parameters)
    return facts


def assemble(
    model: nn.Module,
    axes: Axes,
    config: Config,
    device: torch.device,
    *,
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
) -> Parts:
    """Build the parts in order; the model is changed in place.  Collective over all ranks.

    Raises:
        ValueError: the model has no parameters, or the optimizer holds foreign ones.
    """
    mesh = axes.data
    facts = facts_of(model)
    given = model
    pipeline = _open_pipeline(model, axes, config)
    model = model if pipeline is None else pipeline.model
    names = {id(parameter): name for name, parameter in given.named_parameters(remove_duplicate=False)}
    wanted = parameter_names(optimizer, model_parameters, names)
    unwrap_parameters(model)
    preflight = Preflight(model, mesh, config, device, optimizer)
    options = shard_options(model, config)
    teams, states = _split(model, axes, config, device)
    attention = _split_sequence(model, axes, pipeline, list(find_units(model, options.units).values()))
    teams += attention.teams.all if attention is not None else []
    if pipeline is not None:
        pipeline.cut()
    expert_teams = _spread_experts(model, axes, config, states)
    teams += [one.team for one in expert_teams]
    units = find_units(model, options.units)
    release = recompute(model, list(units.values()), axes, config, device)
    _pick_kernels(model, axes, config, device)
    loss_tiling = tile_model(model, config.tiling)
    _compile(model, list(units.values()), config)
    sharded = shard(model, mesh, options, device, states)
    lists = [module for name, module in model.named_modules() if is_list_of_experts(name, module)]
    agree_on_gradients(sharded.groups, lists, mesh.get_group(), device)
    for name, text in sharded.notes.items():
        config.note(f"zero_optimization.{name}", text)
    for team in teams:
        team.ledger = sharded.ledger
    for one in expert_teams:
        one.spread = sharded.spread
    sharded.on_close(release)
    preflight.watch(model)
    window = Window(config.gradient_accumulation_steps)
    if device.type == "cpu":
        window.between_passes(ThreadCache().exchange)
    averaging = averaging_of(config, window, axes, device)
    if attention is not None:
        attention.tell = averaging.hears
    if config.fp16.enabled or config.token_weighted_loss:
        scale_plain_backwards(model, window, sharded, averaging)
    scaler = LossScaler.from_config(config.fp16)
    local = None if pipeline is None else pipeline.local_name
    managed = _optimizer(model, sharded, mesh, config, optimizer, wanted, window, scaler, local)
    if managed is not None and pipeline is not None:
        managed.peers = pipeline.peers()
    if loss_tiling is not None:
        loss_tiling.settle()
        if managed is not None:
            managed.after_step(loss_tiling.expire)
    schedule = _schedule(config, managed, lr_scheduler)
    if config.seed is not None:
        torch.manual_seed(config.seed + mesh.get_local_rank())
    if pipeline is not None:
        pipeline.separate_streams()
    if axes.tensor is not None:
        synchronise_generators(teams[0])
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    context = _forward_context(config, device, averaging)
    runner = None
    if pipeline is not None:
        around = Around(averaging, context, lambda: scaler.scale)
        if attention is not None:
            around = replace(around, keep=attention.keep, resume=attention.resume)
        runner = pipeline.drive(sharded, device, around, sharded.ledger)
    return Parts(
        module=model,
        sharded=sharded,
        optimizer=managed,
        lr_scheduler=schedule,
        window=window,
        scaler=scaler,
        meter=_meter(config, axes, facts),
        phases=PhaseTimer(enabled=config.wall_clock_breakdown),
        forward_context=context,
        averaging=averaging,
        axes=axes,
        device=device,
        runner=runner,
        naming=Naming() if pipeline is None else pipeline.naming,
    )


def _open_pipeline(model: nn.Module, axes: Axes, config: Config) -> Pipeline | None:
    """The pipeline that the model or the config asks for."""
    if isinstance(model, PipelineModule):
        return Pipeline(model, axes, config, None)
    if axes.pipeline is None:
        return None
    rows = min(4, int(config.train_micro_batch_size_per_gpu))
    length = min(128, default_length(getattr(model, "config", None)))
    shapes = batch_of(model, rows, length).build()[1]
    batch = {name: torch.ones_like(value) for name, value in shapes.items()}
    limit = config.memory.device_limit
    return Pipeline(model, axes, config, batch, None if limit is None else parse_bytes(limit))


def _split(
    model: nn.Module, axes: Axes, config: Config, device: torch.device
) -> tuple[list[Team], States | None]:
    """Cut the layers over the tensor ranks, if there are any."""
    if axes.tensor is None or axes.states is None:
        return [], None
    team = Team(axes.tensor.get_group())
    facts = model_facts(model)
    note_groups_across_hosts(team.group, axes.everyone, facts.num_layers or 1, facts.hidden_size or 1, device)
    return [team], parallelise(model, team, axes.states, axes.everyone, kernels=config.cpu_kernels)


def _spread_experts(model: nn.Module, axes: Axes, config: Config, states: States | None) -> list[ExpertTeam]:
    """Spread layers of experts over data ranks: ours by their ``ep_size``, all of them by the config."""
    section = config.expert_parallel
    layers: dict[str, ExpertLayer] = {n: m for n, m in model.named_modules() if isinstance(m, MoE)}
    if section.autoep_size > 1:
        search = Search(
            section.moe_layer_pattern,
            section.expert_pattern,
            section.num_experts_attr,
            section.use_grouped_mm,
        )
        layers |= find_experts(model, search)
        if not layers:
            raise ValueError(
                f"expert_parallel.autoep_size is {section.autoep_size}, but no experts were found in "
                f"{type(model).__name__}: neither stacks of them (parameters with a row for each) nor lists "
                "called 'experts'; set it to 1"
            )
    return spread_experts(layers, axes, section.autoep_size, states)


def _split_sequence(
    model: nn.Module, axes: Axes, pipeline: Pipeline | None, blocks: list[nn.Module]
) -> Attention | None:
    """Let the model work on parts of sequences, if there are ranks for it."""
    if axes.sequence is None:
        return None
    teams = SequenceTeams(
        Team(axes.sequence.get_group(), "sequence"),
        None if axes.heads is None else Team(axes.heads.get_group(), "sequence"),
        None if axes.ring is None else Team(axes.ring.get_group(), "context"),
    )
    layers = None if pipeline is None else pipeline.share_sequences(teams)
    return layers or sequence_parallel(model, teams, blocks)


def _pick_kernels(model: nn.Module, axes: Axes, config: Config, device: torch.device) -> None:
    """Give linear layers the processor's faster kernel; every rank takes rank 0's choice."""
    if device.type != "cpu" or config.compile.enabled:
        return
    if config.fp16.enabled and config.cpu_kernels == "auto":
        widen_attention(model)
    if ops.switch_linear_layers(model, config.cpu_kernels) == 0 and axes.size == axes.data.size():
        return
    if axes.size > 1:
        root = dist.get_global_rank(axes.everyone, 0)
        table = [ops.export_table()] if dist.get_rank() == root else [None]
        dist.broadcast_object_list(table, src=root, group=axes.everyone)
        if table[0] is not None:
            ops.import_table(table[0])


def _compile(model: nn.Module, units: list[nn.Module], config: Config) -> None:
    section = config.compile
    if not section.enabled:
        return
    if experts := next((name for name, module in model.named_modules() if isinstance(module, MoE)), None):
        raise ValueError(
            f"compile.enabled is true and {experts} has experts, whose grouped product torch does not trace "
            "in every dtype: set it to false"
        )
    options: dict[str, Any] = {"backend": section.backend, "fullgraph": section.fullgraph, **section.kwargs}
    for key in ("mode", "dynamic"):
        if getattr(section, key) is not None:
            options[key] = getattr(section, key)
    for unit in units or [model]:
        unit.compile(**options)


def _forward_context(config: Config, device: torch.device, averaging: Averaging) -> ForwardContext:
    section = config.torch_autocast
    if not section.enabled:
        return averaging.forward

    @contextmanager
    def both() -> Iterator[None]:
        with torch.autocast(device.type, dtype=parse_dtype(section.dtype)), averaging.forward():
            yield

    return both


def _optimizer(
    model: nn.Module,
    sharded: Sharded,
    mesh: DeviceMesh,
    config: Config,
    given: Any,
    wanted: list[dict[str, Any]],
    window: Window,
    scaler: LossScaler,
    local_name: Callable[[str], str | None] | None,
) -> ManagedOptimizer | None:
    new = dict(model.named_parameters(remove_duplicate=False))
    known = [[local_name(name) if local_name else name for name in group["params"]] for group in wanted]
    # None for a parameter that lies on another rank, or was taken apart.
    chosen = [[None if name is None else new.get(name) for name in names] for names in known]
    groups = [
        {**group, "params": [p for p in params if p is not None]}
        for group, params in zip(wanted, chosen, strict=True)
    ]
    if groups and NOTHING in new and not any(group["params"] for group in groups):
        groups[0]["params"] = [new[NOTHING]]
    if not groups:
        groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    replicate_group = mesh.get_group() if mesh.size() > 1 else None
    inner: Any
    if isinstance(given, torch.optim.Optimizer):
        inner = adopt(rebind(given, chosen), replicate_group=replicate_group)
    elif callable(given):
        made: Any = given(groups)
        inner = adopt(made, replicate_group=replicate_group)
    elif config.optimizer is not None:
        section = config.optimizer
        params = dict(section.params)
        if config.bf16.bf16_optimizer_states:
            params.setdefault("state_dtype", "bf16")
        inner = build_optimizer(
            section.type,
            groups,
            params,
            model=model,
            replicate_group=replicate_group,
            delay=DelayPolicy.from_config(config.zero_optimization.zenflow),
        )
    else:
        return None
    return manage(inner, sharded, config, window, scaler, replicate_group)


def _schedule(config: Config, optimizer: ManagedOptimizer | None, given: Any) -> Any:
    if optimizer is None:
        return given
    if given is not None:
        built: Any = given(optimizer) if callable(given) and not hasattr(given, "step") else given
        if getattr(built, "optimizer", None) is optimizer.inner:
            built.optimizer = optimizer
        return built
    if config.scheduler is None:
        return None
    return build_schedule(config.scheduler.type, config.scheduler.params, optimizer)


def _meter(config: Config, axes: Axes, facts: ModelFacts) -> Meter:
    rank = dist.get_rank()
    recorder = build_recorder(config, rank=rank)
    monitors = (config.csv_monitor, config.jsonl_monitor, config.tensorboard, config.wandb)
    every = config.steps_per_print
    wanted = any(monitor.enabled for monitor in monitors) or bool(every and every != float("inf"))
    return Meter(
        recorder,
        group=axes.data.get_group(),
        copies=1 if axes.sequence is None else axes.sequence.size(),
        wanted=wanted,
        flops_per_token=partial(flops_per_token, facts),
        memory_mib=lambda: resident_mib(peak=True),
    )
