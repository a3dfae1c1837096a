"""Every option that Thalweg reads, typed: the blocks of ``ds_config.json`` and Thalweg's own keys.

The picture: a config is one frozen tree of ``Section`` blocks whose attribute names are the
keys of the JSON.  It passes through these files::

    hjson.py    text -> plain tree, with the line of every key
    load.py     plain tree -> Config, or every fault at once       (``load``)
    rules.py    the rules between options (rules.toml); what is not built yet (support.py); what has no effect
    resolve.py  every "auto" and the batch equation filled in      (``resolve``)

Invariants: an option that is not declared here is an error; an option that is declared is
either read by some room, or ``ignored`` with the reason (mostly by unread.toml), or ``unsupported`` (``later``) with
what to do when it is switched on, or in a block that nothing reads (unread.toml).
``tests/repo/config_schema.txt`` lists every option, its type and default; a test compares it, so that each change is
seen in review.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr

from thalweg.config.schema import data, parallel, training, zero
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
    ignored,
    to_jsonable,
    unsupported,
)
from thalweg.config.schema.compression import CompressionTraining, Eigenvalue, QuantizeTraining
from thalweg.config.schema.unsupported import UNREAD_BLOCKS, without_effect

_AMP = without_effect("amp")
_SAYS_WHEN = "it affects the order of division only, not the result"
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


@dataclass(frozen=True)
class Provenance:
    """Where values come from: the dotted paths that the user gave, and how the others were found."""

    user_set: frozenset[str] = frozenset()
    derived: tuple[tuple[str, str], ...] = ()
    renamed: tuple[str, ...] = ()

    @cached_property
    def user_touched(self) -> frozenset[str]:
        """The paths that the user gave, and every block around one."""
        ends = ((path, [i for i, letter in enumerate(path) if letter in ".["]) for path in self.user_set)
        return self.user_set.union(*([path[:i] for i in at] for path, at in ends))


class Config(UNREAD_BLOCKS):
    """The whole config.  ``load`` makes it, ``resolve`` completes it, the engine keeps it."""

    train_batch_size: PositiveInt = AUTO
    train_micro_batch_size_per_gpu: PositiveInt = UNSET  # follows from the others; "auto": the plan chooses
    gradient_accumulation_steps: PositiveInt = AUTO
    data_parallel_size: PositiveInt = AUTO
    sequence_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    gradient_clipping: NonNegativeFloat = 0.0
    gradient_predivide_factor: PositiveFloat = ignored(1.0, _SAYS_WHEN)
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], LowerCase] = "mean"
    token_weighted_loss: bool = False
    communication_data_type: Dtype | None = None
    seq_parallel_communication_data_type: Dtype | None = ignored(
        "fp32", "attention is exchanged in the dtype of the activations"
    )
    device: Literal["auto"] | str = "auto"
    seed: NonNegativeInt | None = None
    deterministic: bool = False
    cpu_kernels: Literal["auto", "torch"] = "auto"
    dataloader_drop_last: bool = False
    steps_per_print: NonNegativeInt | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Annotated[LogLevel, LowerCase] | None = None
    vocabulary_size: PositiveInt | None = ignored(None, "was used for a warning about its divisor")
    managed_gradient_accumulation: bool = True
    graph_harvesting: bool = ignored(False, "captured CUDA graphs, with the same numbers; compile.mode captures them")

    optimizer: training.Optimizer | None = None
    outer_optimizer: training.OuterOptimizerConfig | None = None
    gradient_compression: training.GradientCompressionConfig | None = None
    scheduler: training.SchedulerConfig | None = None
    amp: _AMP = _AMP()  # type: ignore[valid-type]
    fp16: training.FP16 = training.FP16()
    bf16: training.BF16 = training.BF16()
    torch_autocast: training.TorchAutocast = training.TorchAutocast()
    data_types: training.DataTypes = training.DataTypes()
    zero_optimization: zero.ZeroOptimization = zero.ZeroOptimization()
    activation_checkpointing: training.ActivationCheckpointing = training.ActivationCheckpointing()
    sparse_attention: training.SparseAttention | None = None
    progressive_layer_drop: training.ProgressiveLayerDropConfig = training.ProgressiveLayerDropConfig()
    tiling: training.Tiling = training.Tiling()
    curriculum_learning: data.CurriculumLearning = data.CurriculumLearning()
    data_efficiency: data.DataEfficiency = data.DataEfficiency()
    compression_training: CompressionTraining = CompressionTraining()  # type: ignore[valid-type]
    quantize_training: QuantizeTraining = QuantizeTraining()  # type: ignore[valid-type]
    eigenvalue: Eigenvalue = Eigenvalue()  # type: ignore[valid-type]
    compile: training.Compile = training.Compile()
    checkpoint: training.CheckpointConfig = training.CheckpointConfig()
    datastates_ckpt: Literal[False] | AnyDict = unsupported(False, "remove it; every checkpoint has one writer")
    elasticity: training.Elasticity = training.Elasticity()
    health: training.Health = training.Health()
    memory: training.Memory = training.Memory()
    tensorboard: training.FileMonitor = training.FileMonitor()
    csv_monitor: training.FileMonitor = training.FileMonitor()
    jsonl_monitor: training.FileMonitor = training.FileMonitor()
    wandb: training.WandB = training.WandB()
    comet: training.Comet = training.Comet()
    comms_logger: training.CommsLogger = training.CommsLogger()
    flops_profiler: training.FlopsProfilerConfig = training.FlopsProfilerConfig()
    hybrid_engine: training.HybridEngineConfig = training.HybridEngineConfig()

    tensor_parallel: parallel.TensorParallel = parallel.TensorParallel()
    expert_parallel: parallel.ExpertParallel = parallel.ExpertParallel()
    pipeline: parallel.PipelineConfig = parallel.PipelineConfig()

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

    def summarize(self) -> str:
        """The same in one line, without reasons."""
        from thalweg.config.format import summarize_config

        return summarize_config(self, self._provenance)

    def describe(self) -> str:
        """The config in readable lines, each value with its origin, and what was accepted without effect."""
        from thalweg.config.format import format_config

        return format_config(self, self._provenance)

    def __reduce__(self) -> tuple[Any, ...]:
        # By values: the classes of blocks that nothing reads have no name to be found by.
        return _unpickle, (self.to_dict(), self._provenance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))


def _unpickle(values: dict[str, Any], provenance: Provenance) -> Config:
    config = Config.model_validate(values)
    config._provenance = provenance
    return config


@dataclass(frozen=True)
class ModelSize:
    """What ``resolve`` may know of the model: ``hidden_size`` and ``num_layers`` if the model tells them."""

    num_parameters: int
    hidden_size: int | None = None
    num_layers: int | None = None
