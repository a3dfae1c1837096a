"""Options of a plain training step: precision, optimiser and schedule, recomputation, compilation, data."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from thalweg.config.schema.base import (
    AnyDict,
    DecayRate,
    Dtype,
    FrozenDict,
    Int64,
    IntTuple,
    LowerCase,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveIntTuple,
    Section,
    StrTuple,
    UnitFloat,
    ignored,
    later,
    unsupported,
)
from thalweg.config.schema.unsupported import Typed, block, without_effect

_EVERY_COLLECTIVE = "the ledger counts every collective"


class FP16(without_effect("fp16")):
    """Half precision with loss scaling: static where ``loss_scale`` > 0, else dynamic."""

    enabled: bool = False
    loss_scale: NonNegativeFloat = 0.0
    initial_scale_power: Annotated[NonNegativeInt, Field(le=127)] = 16
    loss_scale_window: NonNegativeInt = 1000
    hysteresis: NonNegativeInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: NonNegativeFloat = 1.0
    max_loss_scale: PositiveFloat = 2.0**64  # a model whose gradients are all zero would drive it to infinity
    fp16_master_weights_and_grads: bool = False


class BF16(without_effect("bf16")):
    """bfloat16 compute over fp32 master weights; no loss scaling."""

    enabled: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class TorchAutocast(Section):
    """``torch.autocast`` around the forward pass."""

    enabled: bool = False
    dtype: Dtype = "bf16"
    lower_precision_safe_modules: StrTuple | None = ignored(
        None, "autocast picks by operator; see communication_data_type"
    )


class DataTypes(Section):
    """Dtypes that override what ``fp16`` and ``bf16`` imply; ``None`` leaves them to decide.

    ``keep_in_fp32_modules``: names or classes of modules; ``"auto"``, also among them: what the model itself names.
    """

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Literal["auto"] | StrTuple = "auto"


class Optimizer(without_effect("optimizer")):
    """``params`` hold what the user gave, checked by the table in ``schema/optimizer.py``."""

    type: str
    params: AnyDict = FrozenDict()


class OuterOptimizerConfig(Section):
    """Sites train by themselves for ``sync_every`` steps, then their mean step goes through Nesterov SGD (DiLoCo,
    arXiv 2311.08105).

    ``site_size``: consecutive ranks of a site, ``"auto"``: those of a host.  ``quantized_deltas``: what sites exchange
    goes out in 4 bits and comes back in 8.
    """

    sync_every: PositiveInt = 100
    lr: PositiveFloat = 0.7
    momentum: DecayRate = 0.9
    site_size: Literal["auto"] | PositiveInt = "auto"
    quantized_deltas: bool = False


class GradientCompressionConfig(Section):
    """Gradients cross between hosts compressed, and what that leaves out is added to the next ones (error feedback).

    ``type``: ``"powersgd"`` (arXiv 1905.13727) or ``"topk"`` (arXiv 1809.07599).  ``matrix_approximation_rank``:
    columns of PowerSGD's factors; ``compress_ratio``: the share of a tensor's numbers that top-k sends;
    ``start_step``: how many steps are reduced in full first.
    """

    type: Literal["powersgd", "topk"] = "powersgd"
    matrix_approximation_rank: PositiveInt = 4
    compress_ratio: Annotated[float, Field(gt=0, le=1)] = 0.01
    start_step: NonNegativeInt = 1000


class SchedulerConfig(Section):
    """A learning-rate schedule, stepped once per update."""

    type: str
    params: AnyDict = FrozenDict()


class ActivationCheckpointing(without_effect("activation_checkpointing")):
    """Which units recompute their activations in the backward pass."""

    policy: Literal["none", "full", "selective"] = "none"
    every: PositiveInt = 1
    offload: Literal["none", "cpu", "nvme"] = "none"
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: NonNegativeInt | None = ignored(None, "sized a buffer that is not needed")


class SparseAttention(Section):
    """Attention over blocks of ``block`` tokens; which options a mode reads: docs/attention.md."""

    mode: Annotated[Literal["fixed", "dense", "variable", "bigbird", "bslongformer"], LowerCase] = "fixed"
    block: PositiveInt = 16
    different_layout_per_head: bool = False
    num_local_blocks: PositiveInt = 4
    num_global_blocks: PositiveInt = 1
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: PositiveInt = 1
    num_random_blocks: NonNegativeInt = 0
    local_window_blocks: Annotated[PositiveIntTuple, Field(min_length=1)] = (4,)
    num_sliding_window_blocks: PositiveInt = 3
    global_block_indices: IntTuple = (0,)
    global_block_end_indices: IntTuple | None = None


class ProgressiveLayerDropConfig(Section):
    """Layers left out by chance during training, more of them as it goes on (arXiv 2010.13369).

    The deepest layer stays with probability (1 - theta) exp(-gamma t) + theta at step t, layers below it more often.
    """

    enabled: bool = False
    theta: UnitFloat = 1.0
    gamma: NonNegativeFloat = 0.001


class Elasticity(Section):
    """A batch that many numbers of ranks divide, so that a job goes on with the same one at another number of them.

    ``max_train_batch_size`` and ``micro_batch_sizes`` must be given; ``min_gpus`` and ``max_gpus`` count all ranks.
    In ``version`` 0.2 ranks come and go by hosts of ``num_gpus_per_node``; ``model_parallel_size`` share a model.
    """

    enabled: bool = False
    max_train_batch_size: PositiveInt | None = None
    micro_batch_sizes: PositiveIntTuple | None = None
    min_gpus: PositiveInt = 1
    max_gpus: PositiveInt = 10000
    min_time: NonNegativeInt = ignored(0, "whoever schedules the job reads it")
    version: NonNegativeFloat = 0.2
    prefer_larger_batch: bool = True
    ignore_non_elastic_batch_info: bool = False
    num_gpus_per_node: PositiveInt = 1
    model_parallel_size: PositiveInt = 1


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


_ONLY_ENABLED = "set it to false; compile.enabled alone is built"


class Compile(without_effect("compile")):
    """``torch.compile`` of each unit; the lower half are switches of DeepCompile."""

    enabled: bool = False
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    kwargs: AnyDict = FrozenDict()
    deepcompile: bool = unsupported(
        False,
        "set it to false: FSDP2's sharding is not supported with DeepCompile, whose passes over the graph (gathers "
        "ahead of time, offload within a step) are not built; use engine.compile(), or compile.enabled for "
        "torch.compile of each unit",
    )
    free_activation: bool = unsupported(False, _ONLY_ENABLED)
    offload_activation: bool = unsupported(False, _ONLY_ENABLED)
    offload_opt_states: bool = unsupported(False, _ONLY_ENABLED)
    offload_parameters: bool = unsupported(False, _ONLY_ENABLED)


def _capitalize(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


_WRITER = block(
    type="fast",
    io_buffer_size=64 * 1024**2,
    io_buffer_double=True,
    io_multiplier=1,
    show_statistics=False,
    data_parallel=None,
)
_WRITERS = block(
    base=without_effect("checkpoint"),
    parallel_write=ignored(block(pipeline_stage=False), "every rank writes its own shard"),
    writer=ignored(Typed(_WRITER | None, None), "there is one writer"),
)


class CheckpointConfig(_WRITERS):
    """How checkpoints are kept and taken up again."""

    tag_validation: Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_capitalize)] = "Warn"
    keep: Literal["all"] | PositiveInt = "all"
    resume: Literal["auto", "must", "never"] = "auto"
    asynchronous: bool = False
    use_node_local_storage: bool = later(False, "set it to false and save to a shared folder")


class Health(Section):
    """What a run does about silence, non-finite values, spikes and replicas that drift apart.

    ``hang_seconds``: ranks that have waited so long for others say in the log for whom, and where that one is; each
    looks every ``heartbeat_seconds`` (a quarter of it).  ``non_finite``: what a gradient that is not finite leads to,
    beside an update that is not made.  ``spike``: the same for a gradient whose norm is over 10 times the median of the
    last 100 steps; all but "ignore" and "warn" wait on accelerators for each step's norm.  "rewind" goes back to the
    last checkpoint that was saved or loaded, and on with the data that come next.  ``replica_check_steps``: the
    parameters that several ranks hold alike are compared each so many steps and before checkpoints are written; a
    difference is an error on all ranks.
    """

    heartbeat_seconds: PositiveFloat | None = None
    hang_seconds: PositiveFloat | None = None
    replica_check_steps: PositiveInt | None = None
    non_finite: Literal["skip", "rewind", "stop"] = "skip"
    spike: Literal["ignore", "warn", "skip", "rewind", "stop"] = "ignore"

    @property
    def rejects_spikes(self) -> bool:
        """Whether an update is made only after the host has read its norm."""
        return self.spike not in ("ignore", "warn")


class Memory(Section):
    """The limits by which the plan refuses a job that cannot fit; a size is bytes or a text such as 80GiB."""

    device_limit: NonNegativeInt | str | None = None
    host_limit: NonNegativeInt | str | None = None
    nvme_path: str | None = None
    preflight: Literal["refuse", "warn", "off"] = "refuse"


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


class Comet(without_effect("comet")):
    """The Comet writer."""

    enabled: bool = False
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class FlopsProfilerConfig(without_effect("flops_profiler")):
    """The table of one forward pass, by module: after ``profile_step`` steps."""

    enabled: bool = False
    profile_step: NonNegativeInt = 1
    module_depth: Int64 = -1
    detailed: bool = True
    output_file: str | None = None


class HybridEngineConfig(without_effect("hybrid_engine")):
    """``generate`` of an engine that trains, for programs that ``import deepspeed``; others make a
    ``thalweg.rlhf.weight_sync.HybridEngine`` of it."""

    enabled: bool = False
    inference_tp_size: PositiveInt = 1


class CommsLogger(without_effect("comms_logger")):
    """The communication ledger, printed as a table."""

    enabled: bool = False
    verbose: bool = False
    prof_ops: StrTuple = ignored((), _EVERY_COLLECTIVE)
