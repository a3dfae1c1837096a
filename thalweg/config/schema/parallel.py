"""Options of the parallel axes: tensor, expert and pipeline."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from thalweg.config.schema.base import (
    AUTO,
    AnyTuple,
    Dtype,
    LowerCase,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
    ignored,
    to_tuple,
    unsupported,
)
from thalweg.config.schema.unsupported import without_effect


class TPSize(Section):
    """DeepSpeed's inner block of tensor parallelism."""

    tp_size: PositiveInt = 1
    tp_grain_size: PositiveInt = ignored(1, "layers are cut by whole heads and even widths")


class TPLayerSpec(Section):
    """How linear layers are cut: those whose weight's name one of ``patterns`` matches from its start.

    ``partition_type``: ``"column"`` cuts outputs, ``"row"`` inputs.  ``shape``: what is cut is several sections one
    behind the other, each of them cut: ``[3, -1]`` of equal sizes, ``[[64, 16, 16], -1]`` of these.  ``gather_output``:
    the layer stays whole, or is cut as a head.  ``grad_allreduce``: a skipped module sees a part of the heads.
    """

    patterns: StrTuple
    partition_type: Annotated[Literal["column", "row", "skip"], LowerCase] = "column"
    shape: AnyTuple | None = None
    partition_dim: NonNegativeInt | None = None
    model_types: StrTuple | None = None
    gather_output: bool = False
    grad_allreduce: bool = False


class TPPartition(without_effect("tensor_parallel.partition_config")):
    """The user's own table of splits; the first of ``layer_specs`` that fits counts.

    ``use_default_specs``: layers that no spec names are cut as without the table; else they stay whole.
    """

    use_default_specs: bool = True
    layer_specs: Annotated[tuple[TPLayerSpec, ...], BeforeValidator(to_tuple)] = ()


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
    """Experts spread over ``autoep_size`` ranks.

    ``load_balance_coeff``: after each step the bias by which a router chooses an expert changes by this much, up where
    it got fewer tokens than the mean and down where more (arXiv 2408.15664); no auxiliary loss is needed then.
    """

    autoep_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = unsupported(
        1, "set it to 1; tensor_parallel cuts experts as it cuts the other layers"
    )
    moe_layer_pattern: str | None = None
    expert_pattern: str | None = None
    use_grouped_mm: bool = True
    load_balance_coeff: NonNegativeFloat | None = None
    num_experts_attr: str | None = None


class PipelineConfig(without_effect("pipeline")):
    """Layers spread over ``stages`` groups of ranks."""

    stages: PositiveInt = AUTO
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"] = "1f1b"
    micro_batches: PositiveInt = AUTO
    virtual_stages: PositiveInt = 1
    partition: Literal["auto"] | str = "best"
    activation_checkpoint_interval: NonNegativeInt = 0
