"""Every option that Thalweg reads, typed: the blocks of ``ds_config.json`` and Thalweg's own keys.

The picture: a config is one frozen tree of ``Section`` blocks whose attribute names are the
keys of the JSON.  It passes through four hands, each in one file::

    text.py     text -> plain tree, with the line of every key
    load.py     plain tree -> Config, or every fault at once       (``load``)
    check.py    the rules between options; what is not built yet; what has no effect
    resolve.py  every "auto" and the batch equation filled in      (``resolve``)

Invariants: an option that is not declared here is an error; an option that is declared is
either read by some room, or listed in ``check.IGNORED`` with the reason, or answered by
``check.UNSUPPORTED`` when switched on.  ``tests/repo/config_schema.txt`` lists every option,
its type and default; a test compares it, so that each change is seen in review.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr

from thalweg.config import schema_compress as compress
from thalweg.config import schema_later as later
from thalweg.config import schema_train as train
from thalweg.config import schema_zero as zero
from thalweg.config.schema_base import (
    AUTO,
    PositiveFloat,
    NonNegativeInt,
    Dtype,
    AnyDict,
    LowerCase,
    NonNegativeFloat,
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
    train_micro_batch_size_per_gpu: PositiveInt = AUTO
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

    optimizer: train.Optimizer | None = None
    scheduler: train.Scheduler | None = None
    fp16: train.FP16 = train.FP16()
    bf16: train.BF16 = train.BF16()
    torch_autocast: train.TorchAutocast = train.TorchAutocast()
    data_types: train.DataTypes = train.DataTypes()
    amp: train.Amp = train.Amp()
    zero_optimization: zero.ZeroOptimization = zero.ZeroOptimization()
    aio: zero.Aio = zero.Aio()
    activation_checkpointing: train.ActivationCheckpointing = train.ActivationCheckpointing()
    tiling: train.Tiling = train.Tiling()
    compile: train.Compile = train.Compile()
    checkpoint: train.Checkpoint = train.Checkpoint()
    nebula: train.Nebula = train.Nebula()
    datastates_ckpt: Literal[False] | AnyDict = False
    health: train.Health = train.Health()
    memory: train.Memory = train.Memory()
    timers: train.Timers = train.Timers()
    tensorboard: train.FileMonitor = train.FileMonitor()
    csv_monitor: train.FileMonitor = train.FileMonitor()
    jsonl_monitor: train.FileMonitor = train.FileMonitor()
    wandb: train.WandB = train.WandB()
    comet: train.Comet = train.Comet()
    comms_logger: train.CommsLogger = train.CommsLogger()
    flops_profiler: train.FlopsProfiler = train.FlopsProfiler()

    tensor_parallel: later.TensorParallel = later.TensorParallel()
    expert_parallel: later.ExpertParallel = later.ExpertParallel()
    pipeline: later.Pipeline = later.Pipeline()
    hybrid_engine: later.HybridEngine = later.HybridEngine()
    weight_quantization: later.WeightQuantization | None = None
    data_efficiency: later.DataEfficiency = later.DataEfficiency()
    curriculum_learning: later.CurriculumLearning = later.CurriculumLearning()
    progressive_layer_drop: train.ProgressiveLayerDrop = train.ProgressiveLayerDrop()
    eigenvalue: later.Eigenvalue = later.Eigenvalue()
    quantize_training: compress.QuantizeTraining = compress.QuantizeTraining()
    compression_training: compress.CompressionTraining = compress.CompressionTraining()
    sparse_attention: later.SparseAttention | None = None
    elasticity: later.Elasticity = later.Elasticity()
    autotuning: later.Autotuning = later.Autotuning()

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @property
    def provenance(self) -> Provenance:
        """Which paths the user gave, which values were filled in and how, what was read by another name."""
        return self._provenance

    def add_note(self, path: str, text: str) -> None:
        """Remember what an option comes to in this run, for :meth:`describe`; the values stay as they are."""
        derived = (*self._provenance.derived, (path, text))
        self._provenance = replace(self._provenance, filled=derived)

    def to_dict(self) -> dict[str, Any]:
        """Every option as plain JSON values; ``load`` of it gives an equal config."""
        return to_jsonable(self)

    def describe(self) -> str:
        """The config in readable lines, each value with its origin, and what was accepted without effect."""
        from thalweg.config.describe import format_config

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
