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
from thalweg.config.schema.unsupported import UnreadBlock, without_effect


class TPSize(Section):
    """DeepSpeed's inner block of tensor parallelism."""

    tp_size: PositiveInt = 1
    tp_grain_size: PositiveInt = ignored(1, "layers are cut by whole heads and even widths")


class TPPartition(UnreadBlock):
    """The user's own table of splits."""

    use_default_specs: bool = True
    layer_specs: AnyTuple = unsupported((), "remove it; layers are found by themselves")


class TensorParallel(without_effect("tensor_parallel")):
    """Each linear layer split over ``autotp_size`` ranks (0 and 1: not at all)."""

    autotp_size: NonNegativeInt = 0
    dtype: Dtype = ignored("fp16", "the dtypes are those of bf16, fp16 and data_types")
    sequence_parallel: bool = unsupported(
        False, "set it to false; sequence_parallel_size and context_parallel_size cut the activations of norms too"
    )
    partition_config: TPPartition | None = None
    preset_model: str | None = ignored(None, "the family is read off the model's own config")
    tp: TPSize = TPSize()


class ExpertParallel(without_effect("expert_parallel")):
    """Experts spread over ``autoep_size`` ranks."""

    autoep_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = unsupported(
        1, "set it to 1; tensor_parallel cuts experts as it cuts the other layers"
    )
    moe_layer_pattern: str | None = None
    expert_pattern: str | None = None
    use_grouped_mm: bool = True
    load_balance_coeff: NonNegativeFloat | None = unsupported(None, "remove it; the model's own auxiliary loss counts")
    num_experts_attr: str | None = None


class PipelineConfig(without_effect("pipeline")):
    """Layers spread over ``stages`` groups of ranks."""

    stages: PositiveInt = AUTO
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"] = "1f1b"
    micro_batches: PositiveInt = AUTO
    virtual_stages: PositiveInt = 1
    partition: str = "best"
    activation_checkpoint_interval: NonNegativeInt = 0
