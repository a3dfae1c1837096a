"""Options of a plain training step: precision, optimiser and schedule, recomputation, compilation, data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from thalweg.config.schema.base import (
    AnyDict,
    Dtype,
    FrozenDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
)


class FP16(Section):
    """Half precision with loss scaling: static where ``loss_scale`` > 0, else dynamic."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: NonNegativeFloat = 0.0
    initial_scale_power: Annotated[NonNegativeInt, Field(le=127)] = 16
    loss_scale_window: NonNegativeInt = 1000
    hysteresis: NonNegativeInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: NonNegativeFloat = 1.0
    fp16_master_weights_and_grads: bool = False


class BF16(Section):
    """bfloat16 compute over fp32 master weights; no loss scaling."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class TorchAutocast(Section):
    """``torch.autocast`` around the forward pass."""

    enabled: bool = False
    dtype: Dtype = "bf16"
    lower_precision_safe_modules: StrTuple | None = None


class DataTypes(Section):
    """Dtypes that override what ``fp16`` and ``bf16`` imply; ``None`` leaves them to decide."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Literal["auto"] | StrTuple = "auto"


class Optimizer(Section):
    """``params`` hold what the user gave, checked by the table in ``schema/optimizer.py``."""

    type: str
    params: AnyDict = FrozenDict()
    legacy_fusion: bool = False


class SchedulerConfig(Section):
    """A learning-rate schedule, stepped once per update."""

    type: str
    params: AnyDict = FrozenDict()


class ActivationCheckpointing(Section):
    """Which units recompute their activations in the backward pass."""

    policy: Literal["none", "full", "selective"] = "none"
    every: PositiveInt = 1
    offload: Literal["none", "cpu", "nvme"] = "none"
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: NonNegativeInt | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class Tiling(Section):
    """Long sequences in tiles: the loss without full logits, the MLPs without their full inner activation.

    ``loss_tokens``: tokens of a tile, ``None`` by memory.  ``head``: the layer that makes the logits,
    ``None`` to find it.  ``mlp``: tiles of a sequence, 1 for none; ``mlp_modules``: names or ends of names,
    ``None`` to find them.
    """

    loss: bool = False
    loss_tokens: PositiveInt | None = None
    head: str | None = None
    mlp: PositiveInt = 1
    mlp_modules: StrTuple | None = None


class Compile(Section):
    """``torch.compile`` of each unit; the lower half are the keys of DeepCompile."""

    enabled: bool = False
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    kwargs: AnyDict = FrozenDict()
    deepcompile: bool = False
    free_activation: bool = False
    free_activation_threshold: NonNegativeInt = 10 * 1024 * 1024
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    offload_parameters: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    debug_log: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    passes: StrTuple | None = None


def _capitalize(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class CheckpointWriter(Section):
    """DeepSpeed's choice of writer; Thalweg has one."""

    type: str = "fast"
    io_buffer_size: NonNegativeInt = 64 * 1024**2
    io_buffer_double: bool = True
    io_multiplier: PositiveInt = 1
    show_statistics: bool = False
    data_parallel: str | None = None
    decoupled: bool = False


class ParallelWrite(Section):
    """DeepSpeed's per-stage writing for pipelines."""

    pipeline_stage: bool = False


class CheckpointConfig(Section):
    """How checkpoints are kept and taken up again."""

    tag_validation: Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_capitalize)] = "Warn"
    keep: Literal["all"] | PositiveInt = "all"
    resume: Literal["auto", "must", "never"] = "auto"
    asynchronous: bool = False
    load_universal: bool = False
    use_node_local_storage: bool = False
    checkpoint_serialization: bool = True
    parallel_write: ParallelWrite = ParallelWrite()
    writer: CheckpointWriter | None = None


class Health(Section):
    """What a run does about silence, non-finite values and spikes."""

    heartbeat_seconds: NonNegativeFloat | None = None
    hang_seconds: NonNegativeFloat | None = None
    non_finite: Literal["skip", "rewind", "stop"] = "skip"
    spike: Literal["ignore", "warn", "skip", "rewind", "stop"] = "ignore"


class Memory(Section):
    """The limits by which the plan refuses a job that cannot fit; a size is bytes or a text such as 80GiB."""

    device_limit: NonNegativeInt | str | None = None
    host_limit: NonNegativeInt | str | None = None
    nvme_path: str | None = None
    preflight: Literal["refuse", "warn", "off"] = "refuse"


class ThroughputTimer(Section):
    """DeepSpeed's throughput timer."""

    enabled: bool = True
    synchronized: bool = True


class Timers(Section):
    """DeepSpeed's timers."""

    throughput: ThroughputTimer = ThroughputTimer()


class FileMonitor(Section):
    """A writer of records below ``output_path/job_name``."""

    enabled: bool = False
    output_path: str | None = ""
    job_name: str = "thalweg"


class WandB(Section):
    """The Weights & Biases writer."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "thalweg"


class CommsLogger(Section):
    """The communication ledger, printed as a table."""

    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    debug: bool = False
    prof_ops: StrTuple = ()
