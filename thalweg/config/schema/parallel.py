"""Options of the parallel axes: tensor, expert and pipeline."""

from __future__ import annotations

from typing import Literal

from thalweg.config.schema.base import (
    AUTO,
    AnyTuple,
    Dtype,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    ignored,
    unsupported,
)
from thalweg.config.schema.unsupported import UnreadBlock, ignored_options


class TPSize(Section):
    """DeepSpeed's inner block of tensor parallelism."""

    tp_size: PositiveInt = 1
    tp_grain_size: PositiveInt = ignored(1, "layers are cut by whole heads and even widths")


class TPPartition(UnreadBlock):
    """The user's own table of splits."""

    use_default_specs: bool = True
    layer_specs: AnyTuple = unsupported((), "remove it; layers are found by themselves")


class TensorParallel(Section):
    """Each linear layer split over ``autotp_size`` ranks (0 and 1: not at all)."""

    autotp_size: NonNegativeInt = 0
    dtype: Dtype = ignored("fp16", "the dtypes are those of bf16, fp16 and data_types")
    tp_overlap_comm: bool = ignored(False, "layers wait for their sums; it cannot change a result")
    sequence_parallel: bool = unsupported(
        False, "set it to false; sequence_parallel_size and context_parallel_size cut the activations of norms too"
    )
    partition_config: TPPartition | None = None
    preset_model: str | None = ignored(None, "the family is read off the model's own config")
    keep_module_on_host: bool = ignored(False, "the model is cut tensor by tensor where it is")
    replace_with_kernel_inject: bool = ignored(False, "no kernel is injected")
    tp: TPSize = TPSize()


_FOUND_BY_STRUCTURE = ignored_options(
    "experts are found by their structure, whatever the model is called",
    **dict.fromkeys(("preset_model", "expert_w1", "expert_w2", "expert_w3", "has_shared_experts")),
    **dict.fromkeys(("shared_experts_pattern", "shared_experts_gate_pattern")),
)
_OWN_ROUTER = ignored_options(
    "the model's own router decides; it runs as it is",
    _FOUND_BY_STRUCTURE,
    **dict.fromkeys(
        ("router_pattern", "route_norm", "score_func", "score_apply", "combine_impl", "top_k", "top_k_attr")
    ),
    **dict.fromkeys(("routed_scaling_factor", "num_expert_groups", "num_limited_groups")),
    route_scale=1.0,
)


class ExpertParallel(_OWN_ROUTER):
    """Experts spread over ``autoep_size`` ranks."""

    enabled: bool = ignored(False, "experts are spread where autoep_size is above 1")
    autoep_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = unsupported(
        1, "set it to 1; tensor_parallel cuts experts as it cuts the other layers"
    )
    moe_layer_pattern: str | None = None
    expert_pattern: str | None = None
    use_grouped_mm: bool = True
    disable_triton_grouped_mm: bool = ignored(False, "grouped products are torch's own")
    validate_folding_routing: bool = ignored(False, "ranks of a tensor team route alike, to the bit")
    load_balance_coeff: NonNegativeFloat | None = unsupported(None, "remove it; the model's own auxiliary loss counts")
    num_experts_attr: str | None = None


class PipelineConfig(Section):
    """Layers spread over ``stages`` groups of ranks."""

    stages: PositiveInt = AUTO
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"] = "1f1b"
    micro_batches: PositiveInt = AUTO
    virtual_stages: PositiveInt = 1
    partition: str = "best"
    seed_layers: bool = ignored(False, "PipelineModule(seed_layers=...) says so")
    activation_checkpoint_interval: NonNegativeInt = 0
    pipe_partitioned: bool = ignored(True, "activations between stages travel whole")
    grad_partitioned: bool = ignored(True, "gradients between stages travel whole")
    use_reentrant: bool = ignored(True, "recomputation is never re-entrant; it gives the same values")
