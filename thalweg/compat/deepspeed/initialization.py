"""``deepspeed.initialize`` over Thalweg's."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thalweg.compat.deepspeed.arguments import check_process_group
from thalweg.compat.deepspeed.config import raising_deepspeed_errors, translate_config
from thalweg.compat.deepspeed.elasticity import ensure_immutable_elastic_config
from thalweg.compat.deepspeed.engine import DeepSpeedEngine, DeepSpeedUsageError
from thalweg.compat.deepspeed.hybrid_engine import DeepSpeedHybridEngine
from thalweg.compat.deepspeed.live_engines import add_engine
from thalweg.compat.deepspeed.param_views import ZeRORuntimeException, show_ds_names
from thalweg.compat.deepspeed.ulysses import SequenceParallelState
from thalweg.compat.deepspeed.zero_optimizers import show_class
from thalweg.config import Config, load
from thalweg.config.format import DEEPSPEED_DEFAULTS
from thalweg.config.reader import read_source
from thalweg.config.schema.base import replace_by_path
from thalweg.engine import build_engine


def _load_with_defaults(source: Any, mpu: SequenceParallelState | None) -> Config:
    """The config of ``source``, with what DeepSpeed does where it says nothing."""
    forced = {} if mpu is None else {"sequence_parallel_size": mpu.size}
    config = load(source, translate=lambda tree: translate_config(tree) | forced)
    # Its optimizer of stage 0 knows no hysteresis.
    defaults = DEEPSPEED_DEFAULTS if config.zero_optimization.stage else {**DEEPSPEED_DEFAULTS, "fp16.hysteresis": 1}
    unsaid = {path: value for path, value in defaults.items() if path not in config.provenance.user_set}
    if config.elasticity.enabled:
        ensure_immutable_elastic_config(config.to_dict()["elasticity"])
    filled = replace_by_path(config, unsaid)
    for path in unsaid:
        filled.add_note(path, "DeepSpeed's default")
    return filled


def _refuse_as_asked(config: Any, optimizer: Any) -> None:
    """What Thalweg could do, and DeepSpeed refuses by keys that this config sets."""
    given, zero = config.provenance.user_set, config.zero_optimization
    is_forced = config.zero_force_ds_cpu_optimizer and "zero_force_ds_cpu_optimizer" in given
    is_own = isinstance(optimizer, torch.optim.Optimizer) and not type(optimizer).__module__.startswith("thalweg.")
    if is_forced and is_own and zero.offload_optimizer.device != "none":
        raise ZeRORuntimeException(
            f"zero_force_ds_cpu_optimizer: true, and {type(optimizer).__name__} is the program's own optimizer: leave "
            'the key out, or set "optimizer" in the config'
        )
    if zero.stage < 2 and zero.overlap_comm is True and not config.managed_gradient_accumulation:
        raise DeepSpeedUsageError(
            "managed_gradient_accumulation: false takes overlap_comm only with ZeRO stage 2 or 3: leave it out, "
            "communication overlaps where it may"
        )


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """``deepspeed.initialize``: ``(engine, optimizer, dataloader, lr_scheduler)``.

    Raises:
        ConfigError: with every problem of the config at once.
        ValueError: no model, no config or one in ``args`` too, an ``mpu`` that is not of sequence parallelism.
    """
    if model is None:
        raise DeepSpeedUsageError("initialize() needs a model: deepspeed.initialize(model=model, config=...)")
    if mpu is not None and not isinstance(mpu, SequenceParallelState):
        raise ValueError(
            "mpu= is not offered by Thalweg: the axes follow from the config "
            "(tensor_parallel.autotp_size, sequence_parallel_size, pipeline.stages); leave it out"
        )
    if mesh_param is not None:
        raise ValueError(
            "mesh_param= is not offered by Thalweg: the mesh follows from the config "
            "(sequence_parallel_size); leave it out"
        )
    sources = [config or config_params, *(getattr(args, f"{name}_config", None) for name in ("deepspeed", "deepscale"))]
    given = [source for source in sources if source]
    if len(given) != 1:
        raise DeepSpeedUsageError(
            "initialize() needs a config: config= (a dict or a path), or --deepspeed_config in args, and not both"
        )
    check_process_group(dist_init_required)
    with raising_deepspeed_errors():
        resolved: Any = _load_with_defaults(given[0], mpu)
        _refuse_as_asked(resolved, optimizer)
        kind = DeepSpeedHybridEngine if resolved.hybrid_engine.enabled else DeepSpeedEngine
        user_args: dict[str, Any] = {"optimizer": optimizer, "model_parameters": model_parameters}
        user_args |= {"lr_scheduler": lr_scheduler, "casts_inputs": resolved.fp16.auto_cast}
        start = {"distributed_port": distributed_port}
        engine, loader = build_engine(kind, resolved, model, training_data, collate_fn, None, start, **user_args)
    if mpu is not None:
        meshes, group = engine.meshes, mpu.get_sequence_parallel_group()
        assert meshes.sequence is not None
        if dist.get_process_group_ranks(meshes.sequence.get_group()) != dist.get_process_group_ranks(group):
            raise ValueError("mpu= goes with neither context_parallel_size, autotp_size nor pipeline.stages above 1")
        engine.is_whole_in_eval = mpu.is_whole_in_eval
    if engine.optimizer is not None:
        show_class(engine.optimizer, engine.resolved_config)
    if engine.zero_optimization_partition_weights():
        show_ds_names(engine.module)
    engine.set_raw_config(given[0] if isinstance(given[0], Mapping) else read_source(given[0])[0].tree)
    engine.collate_fn = collate_fn
    add_engine(engine)
    return engine, engine.optimizer, loader, engine.lr_scheduler
