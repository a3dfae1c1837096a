"""The ordered recipe: from a plain model and a resolved config to the parts of an engine.

    compress -> split layers -> cut into stages -> sparse attention -> recompute activations -> drop layers
    -> route tokens -> pick CPU kernels -> tile -> compile -> shard -> optimizer -> schedule

The order matters.  Compressing comes first, as it may add parameters; then splitting: what follows sees a plain,
smaller model.
Recomputation and kernels change how a module computes, so compiling comes after them;
sharding replaces parameters, so it comes last on the model, and the optimizer is built over
what it leaves.  Each optional feature is an object made here; the engine does not know
their names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from thalweg import ops
from thalweg.activation_checkpointing.apply import setup_activation_checkpointing
from thalweg.comm import CommsLog
from thalweg.comm.hang_watch import HangWatch
from thalweg.compression.schedule import setup_compression
from thalweg.config import Config, ModelSize
from thalweg.config.schema.base import AUTO, replace_by_path
from thalweg.device import MallocThreadCache, synchronize
from thalweg.nn.curriculum import CurriculumScheduler, apply_curriculum_seqlen
from thalweg.nn.layer_drop import apply_progressive_layer_drop
from thalweg.nn.moe.layer import MoE
from thalweg.nn.moe.load_balance import LoadBalancer
from thalweg.nn.random_ltd import apply_random_ltd
from thalweg.nn.sparse_attention.apply import apply_sparse_attention
from thalweg.nn.tiled_mlp import apply_tiling
from thalweg.observe.flops import flops_per_token, peak_memory_mib
from thalweg.observe.flops_profiler import StepProfile
from thalweg.observe.recorder import build_recorder
from thalweg.observe.step_meter import StepMeter
from thalweg.ops.attention.upcast import apply_upcast_sdpa
from thalweg.optim import accumulation
from thalweg.optim.accumulation import StepCallbacks
from thalweg.optim.algorithms.onebit import MomentumLink
from thalweg.optim.build import build_lr_scheduler, build_optimizer, get_optimizer_params
from thalweg.optim.gradient_compression import GradientCompression
from thalweg.optim.local_optimizer import groups_with_names, rebind_params, to_local_optimizer
from thalweg.optim.loss_scaler import LossScaler
from thalweg.optim.offload.policy import build_engine_optimizer
from thalweg.optim.outer_optimizer import OuterOptimizer
from thalweg.optim.site_sync import SiteSync
from thalweg.optim.step import EngineOptimizer
from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.expert.detect import find_experts
from thalweg.parallel.expert.expert_parallel import ExpertLayer, shard_experts
from thalweg.parallel.pipeline.module import DUMMY_PARAM_NAME, PipelineModule
from thalweg.parallel.pipeline.pipeline_parallel import PipelineParallel
from thalweg.parallel.pipeline.pipeline_runner import ForwardHooks, PipelineRunner
from thalweg.parallel.pipeline.tied_weights import ParamNaming
from thalweg.parallel.sequence.sequence_parallel import SequenceGroups, apply_sequence_parallel
from thalweg.parallel.tensor.tensor_parallel import (
    apply_tensor_parallel,
    requested_tp_size,
    sync_rng,
    warn_cross_host_groups,
)
from thalweg.parallel_dims import ParallelDims, ParallelMeshes, control_group
from thalweg.utils.dtypes import HALF_DTYPES, dtype_name, parse_dtype
from thalweg.utils.formatting import parse_bytes
from thalweg.utils.log import get_logger
from thalweg.utils.timing import PhaseTimer
from thalweg.zero.expert_params import ZeroExpertParams
from thalweg.zero.fsdp2.unused_params import sync_unused_params
from thalweg.zero.leaf_modules import get_z3_leaf_modules
from thalweg.zero.options import build_precision, build_shard_options, get_model_size
from thalweg.zero.quantized_params import unwrap_quantized_params
from thalweg.zero.shard import ShardedModel, shard_model
from thalweg.zero.units import find_units, is_expert_list
from thalweg.zero.whole_parameter import get_shard, named_shards

ForwardContext = Callable[[], AbstractContextManager[Any]]

_log = get_logger(__name__)


@dataclass
class Components:
    """What an engine drives."""

    module: nn.Module
    sharded: ShardedModel
    optimizer: EngineOptimizer | None
    lr_scheduler: Any
    window: accumulation.AccumulationWindow
    scaler: LossScaler
    meter: StepMeter | None  # None where nobody reads what it would count
    phase_timer: PhaseTimer
    forward_context: ForwardContext
    loss_normalizer: accumulation.LossNormalizer
    meshes: ParallelMeshes
    device: torch.device
    runner: PipelineRunner | None = None
    param_naming: ParamNaming = field(default_factory=ParamNaming)
    curricula: dict[str, CurriculumScheduler] = field(default_factory=dict)


def parallel_dims_from_config(config: Config) -> ParallelDims:
    """How many ranks each axis has by the config."""
    section, stages = config.tensor_parallel, config.pipeline.stages
    tp, pp = max(1, section.autotp_size, section.tp.tp_size), stages if isinstance(stages, int) else 1
    return ParallelDims(sp=config.sequence_parallel_size, tp=tp, cp=config.context_parallel_size, pp=pp)


def merge_model_settings(config: Config, model: nn.Module) -> Config:
    """The config with what the model itself says about how it is to be run.

    Raises:
        ValueError: the two contradict each other, or there is nothing to train.
    """
    num_micro_batches = config.pipeline.micro_batches
    if isinstance(num_micro_batches, int) and config.gradient_accumulation_steps in (None, AUTO):
        config = replace_by_path(config, {"gradient_accumulation_steps": num_micro_batches})  # type: ignore[assignment]
    tp_size = requested_tp_size(model)
    if tp_size is not None and config.tensor_parallel.autotp_size in (0, 1):
        config = replace_by_path(config, {"tensor_parallel.autotp_size": tp_size})  # type: ignore[assignment]
    if not isinstance(model, PipelineModule):
        if not any(True for _ in model.parameters()):
            raise ValueError("the model has no parameters: there is nothing to train")
        return config
    config_stages, model_stages = config.pipeline.stages, model.num_stages
    if model_stages is not None and isinstance(config_stages, int) and config_stages != model_stages:
        raise ValueError(
            f"the PipelineModule has num_stages = {model_stages}, but the config's pipeline.stages is {config_stages}: "
            "leave one of the two out"
        )
    if config_stages == AUTO and model_stages is not None:
        config = replace_by_path(config, {"pipeline.stages": model_stages})  # type: ignore[assignment]
    return config


def get_model_info(model: nn.Module) -> ModelSize:
    """What is known of the whole model, also where no rank will ever hold it."""
    info = get_model_size(model)
    if isinstance(model, PipelineModule):
        info = replace(info, num_parameters=model.num_parameters)
    return info


def parallelize(
    model: nn.Module,
    meshes: ParallelMeshes,
    config: Config,
    device: torch.device,
    *,
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    former_params: Mapping[Tensor, nn.Parameter] | None = None,
    casts_inputs: bool = True,
) -> Components:
    """Build the parts in order; the model is changed in place.  Collective over all ranks.

    ``former_params``: parameters that ``optimizer`` and ``model_parameters`` may name, and those in their place.
    ``casts_inputs``: see :class:`ShardOptions`.

    Raises:
        ValueError: the model has no parameters, or the optimizer holds foreign ones.
    """
    mesh = meshes.fsdp
    _make_gradients_dense(model)
    model_info = get_model_info(model)
    loss_normalizer = accumulation.build_loss_normalizer(config, config.gradient_accumulation_steps, meshes, device)
    scaler = LossScaler(config.fp16)

    def read_loss_scale() -> float:
        return scaler.scale if managed is None else managed.loss_scale

    original_model = model
    group = mesh.get_group() if mesh.size() > 1 else None
    user_params = optimizer is not None or model_parameters is not None
    compression = setup_compression(model, config, group, user_params=user_params)
    pipeline = _make_pipeline(model, meshes, config)
    model = model if pipeline is None else pipeline.model
    names = {id(parameter): name for name, parameter in original_model.named_parameters(remove_duplicate=False)}
    for former, parameter in (former_params or {}).items():
        names[id(former)] = names[id(get_shard(former))] = names[id(parameter)]
    named_groups = groups_with_names(optimizer, model_parameters, names)
    unwrap_quantized_params(model)
    from thalweg.plan.preflight import Preflight  # the plan is loaded by jobs, not by every import

    preflight = Preflight(model, mesh, config, device, optimizer)
    options = replace(build_shard_options(model, config), casts_inputs=casts_inputs)
    ledger = CommsLog()
    tp_group, tp_layout = None, None
    if meshes.tp is not None and meshes.tp_fsdp is not None:
        tp_group, size = ParallelGroup(meshes.tp.get_group(), ledger=ledger), get_model_size(model)
        warn_cross_host_groups(
            tp_group.process_group, meshes.world_group, size.num_layers or 1, size.hidden_size or 1, device
        )
        choices: Any = {"kernels": config.cpu_kernels, "partition": config.tensor_parallel.partition_config}
        tp_layout = apply_tensor_parallel(model, tp_group, meshes.tp_fsdp, meshes.world_group, **choices)
    blocks, attention = list(find_units(model, options.unit_policy).values()), None
    if meshes.sequence is not None:
        team = SequenceGroups(
            ParallelGroup(meshes.sequence.get_group(), "sequence", ledger),
            None if meshes.ulysses is None else ParallelGroup(meshes.ulysses.get_group(), "sequence", ledger),
            None if meshes.cp is None else ParallelGroup(meshes.cp.get_group(), "context", ledger),
        )
        if pipeline is not None:
            attention = pipeline.apply_sequence_parallel(team, loss_normalizer.on_token_count)
        attention = attention or apply_sequence_parallel(model, team, blocks, loss_normalizer.on_token_count)
    if pipeline is not None:
        pipeline.split_model()
    expert_params = ZeroExpertParams(ledger, shard_replicas=options.policy.shards_optimizer_states)
    balancer = None
    if coeff := config.expert_parallel.load_balance_coeff:
        balancer = LoadBalancer(model, config.expert_parallel, coeff, mesh.get_group(), device)
    layers: dict[str, ExpertLayer] = {name: one for name, one in model.named_modules() if isinstance(one, MoE)}
    ep_size = config.expert_parallel.autoep_size
    if ep_size > 1:  # ours are spread over data ranks by their own ``ep_size``, all of them by the config's
        layers |= find_experts(model, config.expert_parallel)
        num_layers = torch.tensor(len(layers))  # of all stages
        if meshes.pp is not None:
            dist.all_reduce(num_layers, group=control_group(meshes.pp.get_group()))
        if not num_layers:
            raise ValueError(
                f"expert_parallel.autoep_size is {ep_size}, but no experts were found in {type(model).__name__}: "
                "neither stacks of them (parameters with a row for each) nor lists called 'experts'; set it to 1"
            )
    shard_experts(layers, meshes, ep_size, tp_layout, expert_params=expert_params, ledger=ledger)
    units = find_units(model, options.unit_policy)
    apply_sparse_attention(model, config.sparse_attention, blocks)
    close_offload = setup_activation_checkpointing(model, list(units.values()), meshes, config, device)
    window = accumulation.AccumulationWindow(
        config.gradient_accumulation_steps, loss_normalizer, managed=config.managed_gradient_accumulation
    )
    curricula = apply_curriculum_seqlen(model, config, lambda: window.num_steps)
    apply_progressive_layer_drop(model, config.progressive_layer_drop, config.seed, lambda: window.num_steps)
    apply_random_ltd(model, config.data_efficiency, meshes.dp.get_local_rank(), lambda: window.num_steps)
    _choose_cpu_kernels(model, meshes, config, device)
    loss_tiling = apply_tiling(model, config.tiling)
    _apply_compile(model, list(units.values()), config)
    sharded = shard_model(model, mesh, options, device, tp_layout, ledger=ledger, expert_params=expert_params)
    routed = [module for name, module in model.named_modules() if is_expert_list(name, module)]
    routed += get_z3_leaf_modules(model)
    sync_unused_params(sharded.groups, routed, (mesh if sharded.sites is None else sharded.sites["dp"]).get_group())
    for name, text in sharded.option_messages.items():
        config.add_note(f"zero_optimization.{name}", text)
    sent, summed = config.communication_data_type, config.data_types.grad_accum_dtype
    if sent and summed not in (None, sent) and not options.policy.reduces_each_backward:
        config.add_note("data_types.grad_accum_dtype", "idle below stage 2, beside another communication_data_type")
    preflight.check_first_batch(model)
    if device.type == "cpu":
        window.add_listener(MallocThreadCache())
    if (seconds := config.health.hang_seconds) and dist.get_world_size() > 1:
        watch = HangWatch(meshes.world_group, ledger, device, seconds, config.health.heartbeat_seconds)
        window.add_listener(StepCallbacks(on_step=lambda _: watch.count_step(), on_close=watch.close))
    if config.fp16.enabled or config.token_weighted_loss:
        accumulation.register_loss_scale_hooks(model, window, read_loss_scale)
    # The user's optimizer over the sharded parameters, or the config's; None for a parameter that lies on another
    # rank, or was taken apart.
    params_by_name = dict(named_shards(model, remove_duplicate=False))
    to_local = (lambda name: name) if pipeline is None else pipeline.local_param_name
    local_names = [[to_local(name) for name in one["params"]] for one in named_groups]
    params_by_group = [[None if name is None else params_by_name.get(name) for name in own] for own in local_names]
    groups = [
        {**one, "params": [p for p in params if p is not None]}
        for one, params in zip(named_groups, params_by_group, strict=True)
    ]
    if groups and DUMMY_PARAM_NAME in params_by_name and not any(one["params"] for one in groups):
        groups[0]["params"] = [params_by_name[DUMMY_PARAM_NAME]]
    if not groups:
        groups = [{"params": [parameter for _, parameter in named_shards(model) if parameter.requires_grad]}]
    inner: torch.optim.Optimizer | None = None
    if isinstance(optimizer, torch.optim.Optimizer):
        inner = to_local_optimizer(rebind_params(optimizer, params_by_group), replicate_group=group)
    elif callable(optimizer):
        user_built: Any = optimizer(groups)
        inner = to_local_optimizer(user_built, replicate_group=group)
    elif config.optimizer is not None:
        link = MomentumLink(sharded.replica_sync, sharded.ledger)
        extras: dict[str, Any] = {"model": model, "replicate_group": group, "link": link}
        extras["pp_group"] = None if meshes.pp is None else meshes.pp.get_group()
        extras["zenflow_policy"] = config.zero_optimization.zenflow
        inner = build_optimizer(config.optimizer.type, groups, get_optimizer_params(config), **extras)
    managed = None
    site_sync: SiteSync | None = None
    if inner is not None:
        peers = None if pipeline is None else pipeline.tied_weights()
        if config.outer_optimizer is not None:
            assert sharded.sites is not None
            scalars = [name for name, p in named_shards(model) if p.requires_grad and p.dim() == 0]
            if scalars and config.gradient_clipping > 0 and sharded.sites.size(0) > 1:
                raise ValueError(
                    f"gradient_clipping goes by each site's norm, and {scalars[0]} has no dimensions: it has the mean "
                    "gradient of all sites and would become another at each; give it the shape (1,), or leave one out"
                )
            site_sync = OuterOptimizer(config.outer_optimizer, inner, sharded, window)
        elif config.gradient_compression is not None:
            site_sync = GradientCompression(config.gradient_compression, inner, sharded, window, group)
            if site_sync.num_sites == 1:
                config.add_note("gradient_compression.type", "idle: all ranks are on one host")
        managed = build_engine_optimizer(inner, sharded, config, window, scaler, group, peers, site_sync)
    if loss_tiling is not None:
        loss_tiling.trust_current_hooks()
        window.add_listener(StepCallbacks(on_step=loss_tiling.invalidate))
    if compression is not None:
        window.add_listener(compression)
    window.add_listener(StepCallbacks(on_close=close_offload))
    if balancer is not None:
        window.add_listener(StepCallbacks(on_step=balancer.update))
    if site_sync is not None:
        window.add_listener(site_sync)
    window.add_listener(sharded)  # after whoever moves parameters
    if config.flops_profiler.enabled and dist.get_rank() == 0:
        profile = StepProfile(model, config.flops_profiler)
        window.add_listener(StepCallbacks(on_step=profile.count_step))
    meter = _make_meter(config, meshes, model_info, device)
    if meter is not None:
        window.add_listener(StepCallbacks(on_close=meter.recorder.close))
    schedule = _make_lr_scheduler(config, managed, lr_scheduler)
    if config.seed is not None:
        torch.manual_seed(config.seed + mesh.get_local_rank())
    if pipeline is not None:
        pipeline.seed_per_stage()
    if tp_group is not None:
        sync_rng(tp_group.process_group)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    forward_context = _make_forward_context(model, config, device, loss_normalizer)
    if tp_group is not None and tp_group.has_dropout:
        # A recomputation that stops early may stop within split layers, and leave their random stream in use.
        forward_context = partial(_nested, partial(set_checkpoint_early_stop, False), forward_context)
    runner = None
    if pipeline is not None:
        hooks = ForwardHooks(loss_normalizer, forward_context, read_loss_scale)
        if attention is not None:
            hooks = replace(hooks, save_context=attention.save_context, restore_context=attention.restore_context)
        runner = pipeline.make_runner(sharded, device, hooks, ledger)
    return Components(
        module=model,
        sharded=sharded,
        optimizer=managed,
        lr_scheduler=schedule,
        window=window,
        scaler=scaler,
        meter=meter,
        phase_timer=PhaseTimer(
            enabled=config.wall_clock_breakdown,
            synchronize=None if device.type == "cpu" else partial(synchronize, device),
        ),
        forward_context=forward_context,
        loss_normalizer=loss_normalizer,
        meshes=meshes,
        device=device,
        runner=runner,
        curricula=curricula,
        param_naming=ParamNaming() if pipeline is None else pipeline.param_naming,
    )


def _make_gradients_dense(model: nn.Module) -> None:
    """Let embeddings with ``sparse=True`` make dense gradients, of the same values: sparse ones are not reduced."""
    sparse: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            module.sparse = False
            sparse.append(name)
    if sparse:
        _log.warning(
            "Gradients of %s will be dense, with the same values: the engine does not reduce sparse ones. An optimizer "
            "that takes sparse ones alone, such as SparseAdam, needs another in its place.",
            ", ".join(sparse),
        )


def _make_pipeline(model: nn.Module, meshes: ParallelMeshes, config: Config) -> PipelineParallel | None:
    """The pipeline that the model or the config asks for."""
    if isinstance(model, PipelineModule):
        return PipelineParallel(model, meshes, config, None)
    if meshes.pp is None:
        return None
    from thalweg.plan.inputs.input_spec import default_sequence_length, infer_input_spec

    rows = min(4, int(config.train_micro_batch_size_per_gpu))
    length = min(128, default_sequence_length(getattr(model, "config", None)))
    shapes = infer_input_spec(model, rows, length).make_empty()[1]
    batch = {name: torch.ones_like(value) for name, value in shapes.items()}
    limit = config.memory.device_limit
    return PipelineParallel(model, meshes, config, batch, None if limit is None else parse_bytes(limit))


def _choose_cpu_kernels(model: nn.Module, meshes: ParallelMeshes, config: Config, device: torch.device) -> None:
    """Give linear layers the processor's faster kernel; every rank takes rank 0's choice."""
    if device.type != "cpu" or config.compile.enabled:
        return
    if config.fp16.enabled and config.cpu_kernels == "auto":
        apply_upcast_sdpa(model)
    if ops.patch_linear_layers(model, config.cpu_kernels) == 0 and meshes.world_size == meshes.fsdp.size():
        return
    if meshes.world_size > 1:
        table: list[Any] = [ops.export_autotune_cache() if dist.get_rank(meshes.world_group) == 0 else None]
        dist.broadcast_object_list(table, group_src=0, group=meshes.world_group)
        ops.import_autotune_cache(table[0])


def _apply_compile(model: nn.Module, units: list[nn.Module], config: Config) -> None:
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


def _make_forward_context(
    model: nn.Module, config: Config, device: torch.device, loss_normalizer: accumulation.LossNormalizer
) -> ForwardContext:
    section, compute_dtype = config.torch_autocast, build_precision(config).compute_dtype
    if section.enabled:
        outer: ForwardContext = partial(torch.autocast, device.type, dtype=parse_dtype(section.dtype))
    else:
        buffers = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32]
        if compute_dtype not in HALF_DTYPES or not buffers:
            return loss_normalizer.forward_context
        outer = partial(_blame_fp32_buffers, buffers, dtype_name(compute_dtype))

    return partial(_nested, outer, loss_normalizer.forward_context)


@contextmanager
def _nested(outer: ForwardContext, inner: ForwardContext) -> Iterator[None]:
    with outer(), inner():
        yield


@contextmanager
def _blame_fp32_buffers(buffers: Sequence[str], compute_dtype: str) -> Iterator[None]:
    """Parameters compute in 16 bits and buffers stay as the model made them, as angles of rotary embeddings must.  An
    operator that takes no two dtypes says so, but not where they came from."""
    try:
        yield
    except RuntimeError as error:
        if "type" in str(error):
            names = ", ".join(buffers[:4]) + (", ..." if len(buffers) > 4 else "")
            error.add_note(
                f"parameters compute in {compute_dtype}, and these buffers are in fp32: {names}. If the operator met "
                f'one of them, set "data_types": {{"buffer_dtype": "{compute_dtype}"}}, or cast it in forward()'
            )
        raise


def _make_lr_scheduler(config: Config, optimizer: EngineOptimizer | None, user_scheduler: Any) -> Any:
    if optimizer is None:
        return user_scheduler
    if user_scheduler is not None:
        makes_one = callable(user_scheduler) and not hasattr(user_scheduler, "step")
        built: Any = user_scheduler(optimizer) if makes_one else user_scheduler
        if getattr(built, "optimizer", None) is optimizer.inner:
            built.optimizer = optimizer
        return built
    if config.scheduler is None:
        return None
    return build_lr_scheduler(config.scheduler.type, config.scheduler.params, optimizer)


def _make_meter(
    config: Config, meshes: ParallelMeshes, model_info: ModelSize, device: torch.device
) -> StepMeter | None:
    monitors = (config.csv_monitor, config.jsonl_monitor, config.tensorboard, config.wandb, config.comet)
    every, has_monitor = config.steps_per_print, any(monitor.enabled for monitor in monitors)
    if not has_monitor and not (every and every != float("inf")):
        return None
    return StepMeter(
        build_recorder(config, rank=dist.get_rank()),
        group=control_group(meshes.fsdp.get_group()),
        num_batch_copies=1 if meshes.sequence is None else meshes.sequence.size(),
        flops_per_token=partial(flops_per_token, model_info),
        memory_mib=partial(peak_memory_mib, device),
        every=1 if has_monitor or device.type == "cpu" else int(every or 1),
    )
