"""Every option that Thalweg reads, typed: the blocks of ``ds_config.json`` and Thalweg's own keys.

The picture: a config is one frozen tree of ``Section`` blocks whose attribute names are the
keys of the JSON.  It passes through these files::

    hjson.py    text -> plain tree, with the line of every key
    load.py     plain tree -> Config, or every fault at once       (``load``)
    rules.py    the rules between options; what is not built yet (support.py); what has no effect
    resolve.py  every "auto" and the batch equation filled in      (``resolve``)

Invariants: an option that is not declared here is an error; an option that is declared is
either read by some room, or listed in ``support.IGNORED`` with the reason, or answered by
``support.UNSUPPORTED`` when switched on.  ``tests/repo/config_schema.txt`` lists every option,
its type and default; a test compares it, so that each change is seen in review.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr

from thalweg.config.schema import parallel, training, unsupported, zero
from thalweg.config.schema.base import (
    AUTO,
    UNSET,
    AnyDict,
    Dtype,
    LowerCase,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    to_jsonable,
)

LogLevel = Literal["debug", "info", "warning", "error", "critical"]


@dataclass(frozen=True)
class Provenance:
    """Where values come from: the dotted paths that the user gave, and how the others were found."""

    user_set: frozenset[str] = frozenset()
    derived: tuple[tuple[str, str], ...] = ()
    renamed: tuple[str, ...] = ()


class Config(Section):
    """The whole config.  ``load`` makes it, ``resolve`` completes it, the engine keeps it."""

    train_batch_size: PositiveInt = AUTO
    train_micro_batch_size_per_gpu: PositiveInt = UNSET  # follows from the others; "auto": the plan chooses
    gradient_accumulation_steps: PositiveInt = AUTO
    data_parallel_size: PositiveInt = AUTO
    sequence_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    gradient_clipping: NonNegativeFloat = 0.0
    prescale_gradients: bool = False
    gradient_predivide_factor: PositiveFloat = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    token_weighted_loss: bool = False
    communication_data_type: Dtype | None = None
    seq_parallel_communication_data_type: Dtype | None = "fp32"
    seed: NonNegativeInt | None = None
    deterministic: bool = False
    cpu_kernels: Literal["auto", "torch"] = "auto"
    dataloader_drop_last: bool = False
    steps_per_print: PositiveInt | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Annotated[LogLevel, LowerCase] | None = None
    vocabulary_size: PositiveInt | None = None
    managed_gradient_accumulation: bool = True
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    disable_allgather: bool = False
    sparse_gradients: bool = False
    graph_harvesting: bool = False
    use_data_before_expert_parallelism: bool = False

    optimizer: training.Optimizer | None = None
    scheduler: training.SchedulerConfig | None = None
    fp16: training.FP16 = training.FP16()
    bf16: training.BF16 = training.BF16()
    torch_autocast: training.TorchAutocast = training.TorchAutocast()
    data_types: training.DataTypes = training.DataTypes()
    amp: unsupported.Amp = unsupported.Amp()
    zero_optimization: zero.ZeroOptimization = zero.ZeroOptimization()
    aio: zero.Aio = zero.Aio()
    activation_checkpointing: training.ActivationCheckpointing = training.ActivationCheckpointing()
    tiling: training.Tiling = training.Tiling()
    compile: training.Compile = training.Compile()
    checkpoint: training.CheckpointConfig = training.CheckpointConfig()
    nebula: unsupported.Nebula = unsupported.Nebula()
    datastates_ckpt: Literal[False] | AnyDict = False
    health: training.Health = training.Health()
    memory: training.Memory = training.Memory()
    timers: training.Timers = training.Timers()
    tensorboard: training.FileMonitor = training.FileMonitor()
    csv_monitor: training.FileMonitor = training.FileMonitor()
    jsonl_monitor: training.FileMonitor = training.FileMonitor()
    wandb: training.WandB = training.WandB()
    comet: unsupported.Comet = unsupported.Comet()
    comms_logger: training.CommsLogger = training.CommsLogger()
    flops_profiler: unsupported.FlopsProfiler = unsupported.FlopsProfiler()

    tensor_parallel: parallel.TensorParallel = parallel.TensorParallel()
    expert_parallel: parallel.ExpertParallel = parallel.ExpertParallel()
    pipeline: parallel.PipelineConfig = parallel.PipelineConfig()
    hybrid_engine: unsupported.HybridEngine = unsupported.HybridEngine()
    weight_quantization: unsupported.WeightQuantization | None = None
    data_efficiency: unsupported.DataEfficiency = unsupported.DataEfficiency()
    curriculum_learning: unsupported.CurriculumLearning = unsupported.CurriculumLearning()
    progressive_layer_drop: unsupported.ProgressiveLayerDrop = unsupported.ProgressiveLayerDrop()
    eigenvalue: unsupported.Eigenvalue = unsupported.Eigenvalue()
    quantize_training: unsupported.QuantizeTraining = unsupported.QuantizeTraining()
    compression_training: unsupported.CompressionTraining = unsupported.CompressionTraining()
    sparse_attention: unsupported.SparseAttention | None = None
    elasticity: unsupported.Elasticity = unsupported.Elasticity()
    autotuning: unsupported.Autotuning = unsupported.Autotuning()

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @property
    def provenance(self) -> Provenance:
        """Which paths the user gave, which values were filled in and how, what was read by another name."""
        return self._provenance

    def add_note(self, path: str, text: str) -> None:
        """Remember what an option comes to in this run, for :meth:`describe`; the values stay as they are."""
        derived = (*self._provenance.derived, (path, text))
        self._provenance = replace(self._provenance, derived=derived)

    def to_dict(self) -> dict[str, Any]:
        """Every option as plain JSON values; ``load`` of it gives an equal config."""
        return to_jsonable(self)

    def describe(self) -> str:
        """The config in readable lines, each value with its origin, and what was accepted without effect."""
        from thalweg.config.format import format_config

        return format_config(self, self._provenance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))


@dataclass(frozen=True)
class ModelSize:
    """What ``resolve`` may know of the model: ``hidden_size`` and ``num_layers`` if the model tells them."""

    num_parameters: int
    hidden_size: int | None = None
    num_layers: int | None = None
