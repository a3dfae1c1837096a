"""Options of ``zero_optimization``: the stage, its buffers, and the tiers outside the device."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from thalweg.config.schema.base import (
    AUTO,
    Int64,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
    UnitFloat,
    coerce_int,
    ignored,
)
from thalweg.config.schema.unsupported import without_effect


class OffloadParam(without_effect("zero_optimization.offload_param")):
    """Parameters kept outside the device (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 5
    # Unset: what the memory there is has room for (``plan/spec/run_spec.py``).
    max_in_cpu: NonNegativeInt | None = None
    pin_memory: bool = True


class OffloadOptimizer(without_effect("zero_optimization.offload_optimizer")):
    """Optimiser state kept outside the device (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 4
    buffer_size: NonNegativeInt = 100_000_000
    pin_memory: bool = True
    ratio: UnitFloat = 1.0
    cpuadam_cores_perc: UnitFloat = ignored(0.8, "the update uses torch's threads")

    @model_validator(mode="after")
    def _derive_pipeline(self) -> Self:
        said = vars(self)  # of DeepSpeed's class; without effect, so that its fields come of a table
        said["pipeline"] = said["pipeline"] or said["pipeline_read"] or said["pipeline_write"]  # as there
        return self


class ZenFlow(without_effect("zero_optimization.zenflow")):
    """Updates of important gradients on the device, of the rest on the host."""

    topk_ratio: UnitFloat = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Literal["auto"] | PositiveInt = "auto"
    update_interval: Literal["auto"] | PositiveInt = "auto"
    overlap_step: bool = False
    auto_ratio: UnitFloat = 0.99
    full_warm_up_rounds: NonNegativeInt = 0
    pt_reserved_cores_perc: UnitFloat = ignored(0.5, "the delayed update uses torch's threads")
    steps_per_epoch: NonNegativeInt | None = None


class LeafModule(Section):
    """Modules gathered as one unit at stage 3: by class, by name, or by the end of the name."""

    classes: StrTuple = ()
    names: StrTuple = ()
    name_suffixes: StrTuple = ()


class LoCo(Section):
    """Error feedback for quantised gradients (arXiv 2407.04480)."""

    err_beta: UnitFloat = 0.8
    reset_T: PositiveInt = 1024


class ZeroOptimization(without_effect("zero_optimization")):
    """Stages: 0 replicated, 1 optimiser state sharded, 2 gradients too, 3 parameters too."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(coerce_int)] = 0
    stage3_module_granularity_threshold: NonNegativeInt = 0
    leaf_module: LeafModule = LeafModule()
    overlap_comm: bool = ignored(AUTO, "communication always overlaps; it cannot change a result")
    stage3_gather_16bit_weights_on_model_save: bool = ignored(False, "save_16bit_model writes whole weights")
    elastic_checkpoint: bool = ignored(False, "every checkpoint loads at any world size")
    zero_hpz_partition_size: NonNegativeInt = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: LoCo | None = None
    mics_shard_size: Int64 = -1
    mics_hierarchical_params_gather: bool = False
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    zenflow: ZenFlow | None = None
