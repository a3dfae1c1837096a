"""Options of the parallel axes: tensor, expert and pipeline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from thalweg.config.schema.base import (
    AUTO,
    AnyTuple,
    Dtype,
    Int64,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
    to_tuple,
)


class TPSize(Section):
    """DeepSpeed's inner block of tensor parallelism."""

    tp_size: PositiveInt = 1
    tp_grain_size: PositiveInt = 1


class TPLayerSpec(Section):
    """How the parameters that match ``patterns`` are split."""

    patterns: StrTuple = ()
    partition_type: Literal["row", "column", "skip"] = "column"
    shape: AnyTuple | None = None
    partition_dim: Int64 | None = None
    model_types: StrTuple | None = None


class TPPartition(Section):
    """The user's own table of splits."""

    use_default_specs: bool = True
    layer_specs: Annotated[tuple[TPLayerSpec, ...], BeforeValidator(to_tuple)] = ()


class TensorParallel(Section):
    """Each linear layer split over ``autotp_size`` ranks (0 and 1: not at all)."""

    autotp_size: NonNegativeInt = 0
    dtype: Dtype = "fp16"
    tp_overlap_comm: bool = False
    sequence_parallel: bool = False
    partition_config: TPPartition | None = None
    preset_model: str | None = None
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = False
    tp: TPSize = TPSize()


class ExpertParallel(Section):
    """Experts spread over ``autoep_size`` ranks."""

    enabled: bool = False
    autoep_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1
    preset_model: str | None = None
    moe_layer_pattern: str | None = None
    router_pattern: str | None = None
    expert_pattern: str | None = None
    use_grouped_mm: bool = True
    disable_triton_grouped_mm: bool = False
    validate_folding_routing: bool = False
    route_norm: bool | None = None
    route_scale: NonNegativeFloat = 1.0
    score_func: str | None = None
    score_apply: str | None = None
    combine_impl: str | None = None
    top_k: PositiveInt | None = None
    routed_scaling_factor: NonNegativeFloat | None = None
    load_balance_coeff: NonNegativeFloat | None = None
    num_expert_groups: PositiveInt | None = None
    num_limited_groups: PositiveInt | None = None
    expert_w1: str | None = None
    expert_w2: str | None = None
    expert_w3: str | None = None
    num_experts_attr: str | None = None
    top_k_attr: str | None = None
    has_shared_experts: bool | None = None
    shared_experts_pattern: str | None = None
    shared_experts_gate_pattern: str | None = None


class PipelineConfig(Section):
    """Layers spread over ``stages`` groups of ranks."""

    stages: PositiveInt = AUTO
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"] = "1f1b"
    micro_batches: PositiveInt = AUTO
    virtual_stages: PositiveInt = 1
    partition: str = "best"
    seed_layers: bool = False
    activation_checkpoint_interval: NonNegativeInt = 0
    pipe_partitioned: bool = True
    grad_partitioned: bool = True
    use_reentrant: bool = True
