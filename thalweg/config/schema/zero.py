"""Options of ``zero_optimization``: the stage, its buffers, and the tiers outside the device."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from thalweg.config.schema.base import (
    AUTO,
    SINGLE_GRADIENT_PATH,
    Int64,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
    UnitFloat,
    coerce_int,
    ignored,
)

MAX_PARAMETERS = 2**63 - 1
ONLY_ALL_GATHER = "parameters are gathered by all-gather alone"
_FSDP_SIZES_BUFFERS = "FSDP2 gathers and reduces whole units and sizes its buffers by them"
_NVME_ALWAYS_OVERLAPS = "reads and writes of the NVMe tier always overlap the update"
_TWO_UNITS_LIVE = "a unit is freed after use; at most two units are live"


class OffloadParam(Section):
    """Parameters kept outside the device (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 5
    buffer_size: NonNegativeInt = ignored(100_000_000, "memory for a unit's parameters is as large as the unit")
    # Unset: what the memory there is has room for (``plan/spec/config_changes.py``).
    max_in_cpu: NonNegativeInt | None = None
    pin_memory: bool = True


class OffloadOptimizer(Section):
    """Optimiser state kept outside the device (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 4
    buffer_size: NonNegativeInt = 100_000_000
    pin_memory: bool = True
    pipeline: bool = ignored(False, _NVME_ALWAYS_OVERLAPS)
    pipeline_read: bool = ignored(False, _NVME_ALWAYS_OVERLAPS)
    pipeline_write: bool = ignored(False, _NVME_ALWAYS_OVERLAPS)
    fast_init: bool = ignored(False, "state comes into being on the disk at the first step")
    ratio: UnitFloat = 1.0
    super_offload: bool = ignored(False, "updates run within the backward pass if they may")
    cpuadam_cores_perc: UnitFloat = ignored(0.8, "the update uses torch's threads")

    @model_validator(mode="after")
    def _derive_pipeline(self) -> Self:
        vars(self)["pipeline"] = self.pipeline or self.pipeline_read or self.pipeline_write  # as DeepSpeed's class does
        return self


class ZenFlow(Section):
    """Updates of important gradients on the device, of the rest on the host."""

    topk_ratio: UnitFloat = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Literal["auto"] | PositiveInt = "auto"
    update_interval: Literal["auto"] | PositiveInt = "auto"
    overlap_step: bool = False
    offload: bool = ignored(False, "the state of selected columns stays with that of the others")
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


class ZeroOptimization(Section):
    """Stages: 0 replicated, 1 optimiser state sharded, 2 gradients too, 3 parameters too."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(coerce_int)] = 0
    stage3_param_persistence_threshold: NonNegativeInt = ignored(100_000, "a small parameter travels with its unit")
    stage3_module_granularity_threshold: NonNegativeInt = 0
    stage3_gather_16bit_weights_on_model_save: bool = ignored(False, "save_16bit_model writes whole weights")
    leaf_module: LeafModule = LeafModule()
    ignore_unused_parameters: bool = ignored(True, "a parameter without gradient is left alone at every stage")
    overlap_comm: bool = ignored(AUTO, "communication always overlaps; it cannot change a result")
    contiguous_gradients: bool = ignored(True, _FSDP_SIZES_BUFFERS)
    reduce_scatter: bool = ignored(True, "sharded stages always reduce-scatter, stage 0 all-reduces")
    reduce_bucket_size: NonNegativeInt = ignored(500_000_000, _FSDP_SIZES_BUFFERS)
    use_multi_rank_bucket_allreduce: bool = ignored(True, _FSDP_SIZES_BUFFERS)
    allgather_partitions: bool = ignored(True, ONLY_ALL_GATHER)
    allgather_bucket_size: NonNegativeInt = ignored(500_000_000, _FSDP_SIZES_BUFFERS)
    load_from_fp32_weights: bool = ignored(True, "checkpoints hold the master weights")
    elastic_checkpoint: bool = ignored(False, "every checkpoint loads at any world size")
    sub_group_size: NonNegativeInt = ignored(1_000_000_000, "the optimiser steps over all shards at once")
    round_robin_gradients: bool = ignored(False, _FSDP_SIZES_BUFFERS)
    stage3_prefetch_bucket_size: NonNegativeInt = ignored(50_000_000, "prefetch runs unit by unit")
    stage3_model_persistence_threshold: NonNegativeInt = ignored(MAX_PARAMETERS, "parameters are sharded by unit")
    stage3_max_live_parameters: NonNegativeInt = ignored(1_000_000_000, _TWO_UNITS_LIVE)
    stage3_max_reuse_distance: NonNegativeInt = ignored(1_000_000_000, _TWO_UNITS_LIVE)
    stage3_use_all_reduce_for_fetch_params: bool = ignored(False, ONLY_ALL_GATHER)
    stage3_allgather_sequential: bool = ignored(False, _FSDP_SIZES_BUFFERS)
    legacy_stage1: bool = ignored(False, SINGLE_GRADIENT_PATH)
    memory_efficient_linear: bool = ignored(True, "parameters are freed by unit, whatever the layer")
    pipeline_loading_checkpoint: bool = ignored(False, "every checkpoint loads into every layout")
    override_module_apply: bool = ignored(True, "no method of nn.Module is replaced")
    log_trace_cache_warnings: bool = ignored(False, "no trace of modules is recorded")
    enable_sanity_checks: bool = ignored(False, "shapes are those of the unsharded model at all times")
    save_muon_momentum_buffer_in_memory: bool = ignored(False, "Muon's state is not streamed")
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
