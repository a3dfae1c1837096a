"""Options of ``zero_optimization``: the stage, its buffers, and the tiers outside the device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from thalweg.config.schema.base import (
    AUTO,
    Int64,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
    UnitFloat,
    coerce_int,
)

MAX_PARAMETERS = 2**63 - 1


class OffloadParam(Section):
    """Parameters kept outside the device (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 5
    buffer_size: NonNegativeInt = 100_000_000
    max_in_cpu: NonNegativeInt = 1_000_000_000
    pin_memory: bool = True


class OffloadOptimizer(Section):
    """Optimiser state kept outside the device (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 4
    buffer_size: NonNegativeInt = 100_000_000
    pin_memory: bool = True
    pipeline: bool = False
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: UnitFloat = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: UnitFloat = 0.8


class ZenFlow(Section):
    """Updates of important gradients on the device, of the rest on the host."""

    topk_ratio: UnitFloat = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Literal["auto"] | PositiveInt = "auto"
    update_interval: Literal["auto"] | PositiveInt = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: UnitFloat = 0.99
    full_warm_up_rounds: NonNegativeInt = 0
    pt_reserved_cores_perc: UnitFloat = 0.5
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
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    stage3_module_granularity_threshold: NonNegativeInt = 0
    stage3_gather_16bit_weights_on_model_save: bool = False
    leaf_module: LeafModule = LeafModule()
    ignore_unused_parameters: bool = True
    overlap_comm: bool = AUTO
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: NonNegativeInt = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: NonNegativeInt = 500_000_000
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    sub_group_size: NonNegativeInt = 1_000_000_000
    round_robin_gradients: bool = False
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    stage3_model_persistence_threshold: NonNegativeInt = MAX_PARAMETERS
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    legacy_stage1: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
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


class Aio(Section):
    """File I/O of the NVMe tier."""

    block_size: PositiveInt = 1_048_576
    queue_depth: PositiveInt = 8
    thread_count: PositiveInt = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False
