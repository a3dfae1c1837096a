"""Options of compression: quantisation-aware training and pruning, as DeepSpeed names them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from thalweg.config.schema.base import (
    AnyTuple,
    FrozenDict,
    IntTuple,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
    UnitFloat,
)
from thalweg.config.schema.parallel import Eigenvalue

QuantType = Literal["symmetric", "asymmetric"]
Rounding = Literal["nearest", "stochastic"]
Bits = Annotated[PositiveInt, Field(le=32)]


class MixedQuantize(Section):
    """A blend of the exact and the quantised value."""

    enabled: bool = False
    quantize_change_ratio: UnitFloat = 0.001


class QuantizeBits(Section):
    """From how many bits to how many."""

    start_bits: Bits = 16
    target_bits: Bits = 16


class QuantizeSchedule(Section):
    """When bits are taken away."""

    quantize_period: PositiveInt = 100
    schedule_offset: NonNegativeInt = 100


class QuantizeAlgo(Section):
    """How values are rounded."""

    q_type: QuantType = "symmetric"
    rounding: Rounding = "nearest"


class QuantizeTraining(Section):
    """MoQ: precision lowered during training."""

    enabled: bool = False
    quantize_verbose: bool = False
    quantizer_kernel: bool = False
    quantize_type: QuantType = "symmetric"
    quantize_groups: PositiveInt = 1
    quantize_bits: QuantizeBits = QuantizeBits()
    quantize_schedule: QuantizeSchedule = QuantizeSchedule()
    quantize_algo: QuantizeAlgo = QuantizeAlgo()
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()
    eigenvalue: Eigenvalue = Eigenvalue()


class GroupParams(Section):
    """The union of the parameters that the groups of the techniques take."""

    start_bits: Bits | None = None
    target_bits: Bits | None = None
    quantization_period: NonNegativeInt | None = None
    bits: Bits | None = None
    dense_ratio: UnitFloat | None = None
    num_heads: PositiveInt | None = None


class CompressionGroup(Section):
    """One set of modules and its parameters."""

    params: GroupParams = GroupParams()
    modules: StrTuple = ("*",)
    related_modules: AnyTuple | None = None


class SharedParams(Section):
    """What the techniques have in common."""

    enabled: bool = False
    schedule_offset: NonNegativeInt = 0
    schedule_offset_end: NonNegativeInt | None = None


class WeightSharedParams(SharedParams):
    """Shared parameters of weight quantisation."""

    quantizer_kernel: bool = False
    quantize_groups: PositiveInt = 1
    quantize_verbose: bool = False
    quantization_type: QuantType = "symmetric"
    rounding: Rounding = "nearest"
    quantize_weight_in_forward: bool = False
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()


class ActivationSharedParams(SharedParams):
    """Shared parameters of activation quantisation."""

    quantization_type: QuantType = "symmetric"
    range_calibration: Literal["static", "dynamic"] = "dynamic"


class SparseSharedParams(SharedParams):
    """Shared parameters of sparse pruning."""

    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    block_pattern: str = "4x1"
    schedule_offset_stride: PositiveInt = 1
    dense_ratio: UnitFloat = 0.1
    excluded_modules: StrTuple = ()


class PruneSharedParams(SharedParams):
    """Shared parameters of row and channel pruning."""

    method: Literal["l1", "topk"] = "l1"


class HeadSharedParams(SharedParams):
    """Shared parameters of head pruning."""

    method: Literal["l1", "topk"] = "topk"
    num_heads: PositiveInt | None = None


class WeightTechnique(Section):
    """Weight quantisation."""

    shared_parameters: WeightSharedParams = WeightSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class ActivationTechnique(Section):
    """Activation quantisation."""

    shared_parameters: ActivationSharedParams = ActivationSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class SparseTechnique(Section):
    """Sparse pruning."""

    shared_parameters: SparseSharedParams = SparseSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class PruneTechnique(Section):
    """Row or channel pruning."""

    shared_parameters: PruneSharedParams = PruneSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class HeadTechnique(Section):
    """Head pruning."""

    shared_parameters: HeadSharedParams = HeadSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class LayerReduction(Section):
    """A student that starts from some layers of its teacher."""

    enabled: bool = False
    keep_number_layer: PositiveInt | None = None
    module_name_prefix: str | None = None
    teacher_layer: IntTuple = ()
    other_module_name: StrTuple = ()


class CompressionTraining(Section):
    """DeepSpeed's compression library."""

    weight_quantization: WeightTechnique = WeightTechnique()
    activation_quantization: ActivationTechnique = ActivationTechnique()
    sparse_pruning: SparseTechnique = SparseTechnique()
    row_pruning: PruneTechnique = PruneTechnique()
    head_pruning: HeadTechnique = HeadTechnique()
    channel_pruning: PruneTechnique = PruneTechnique()
    layer_reduction: LayerReduction = LayerReduction()
