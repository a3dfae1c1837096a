"""Options of compression: quantisation-aware training and pruning, as DeepSpeed names them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from thalweg.config.schema_base import Count, Counts, Fraction, FrozenDict, Items, Positive, Section, Texts
from thalweg.config.schema_later import Eigenvalue

QuantType = Literal["symmetric", "asymmetric"]
Rounding = Literal["nearest", "stochastic"]
Bits = Annotated[Positive, Field(le=32)]


class MixedQuantize(Section):
    """A blend of the exact and the quantised value."""

    enabled: bool = False
    quantize_change_ratio: Fraction = 0.001


class QuantizeBits(Section):
    """From how many bits to how many."""

    start_bits: Bits = 16
    target_bits: Bits = 16


class QuantizeSchedule(Section):
    """When bits are taken away."""

    quantize_period: Positive = 100
    schedule_offset: Count = 100


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
    quantize_groups: Positive = 1
    quantize_bits: QuantizeBits = QuantizeBits()
    quantize_schedule: QuantizeSchedule = QuantizeSchedule()
    quantize_algo: QuantizeAlgo = QuantizeAlgo()
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()
    eigenvalue: Eigenvalue = Eigenvalue()


class GroupParams(Section):
    """The union of the parameters that the groups of the techniques take."""

    start_bits: Bits | None = None
    target_bits: Bits | None = None
    quantization_period: Count | None = None
    bits: Bits | None = None
    dense_ratio: Fraction | None = None
    num_heads: Positive | None = None


class Group(Section):
    """One set of modules and its parameters."""

    params: GroupParams = GroupParams()
    modules: Texts = ("*",)
    related_modules: Items | None = None


class Shared(Section):
    """What the techniques have in common."""

    enabled: bool = False
    schedule_offset: Count = 0
    schedule_offset_end: Count | None = None


class WeightShared(Shared):
    """Shared parameters of weight quantisation."""

    quantizer_kernel: bool = False
    quantize_groups: Positive = 1
    quantize_verbose: bool = False
    quantization_type: QuantType = "symmetric"
    rounding: Rounding = "nearest"
    quantize_weight_in_forward: bool = False
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()


class ActivationShared(Shared):
    """Shared parameters of activation quantisation."""

    quantization_type: QuantType = "symmetric"
    range_calibration: Literal["static", "dynamic"] = "dynamic"


class SparseShared(Shared):
    """Shared parameters of sparse pruning."""

    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    block_pattern: str = "4x1"
    schedule_offset_stride: Positive = 1
    dense_ratio: Fraction = 0.1
    excluded_modules: Texts = ()


class PruneShared(Shared):
    """Shared parameters of row and channel pruning."""

    method: Literal["l1", "topk"] = "l1"


class HeadShared(Shared):
    """Shared parameters of head pruning."""

    method: Literal["l1", "topk"] = "topk"
    num_heads: Positive | None = None


class WeightTechnique(Section):
    """Weight quantisation."""

    shared_parameters: WeightShared = WeightShared()
    different_groups: dict[str, Group] = FrozenDict()


class ActivationTechnique(Section):
    """Activation quantisation."""

    shared_parameters: ActivationShared = ActivationShared()
    different_groups: dict[str, Group] = FrozenDict()


class SparseTechnique(Section):
    """Sparse pruning."""

    shared_parameters: SparseShared = SparseShared()
    different_groups: dict[str, Group] = FrozenDict()


class PruneTechnique(Section):
    """Row or channel pruning."""

    shared_parameters: PruneShared = PruneShared()
    different_groups: dict[str, Group] = FrozenDict()


class HeadTechnique(Section):
    """Head pruning."""

    shared_parameters: HeadShared = HeadShared()
    different_groups: dict[str, Group] = FrozenDict()


class LayerReduction(Section):
    """A student that starts from some layers of its teacher."""

    enabled: bool = False
    keep_number_layer: Positive | None = None
    module_name_prefix: str | None = None
    teacher_layer: Counts = ()
    other_module_name: Texts = ()


class CompressionTraining(Section):
    """DeepSpeed's compression library."""

    weight_quantization: WeightTechnique = WeightTechnique()
    activation_quantization: ActivationTechnique = ActivationTechnique()
    sparse_pruning: SparseTechnique = SparseTechnique()
    row_pruning: PruneTechnique = PruneTechnique()
    head_pruning: HeadTechnique = HeadTechnique()
    channel_pruning: PruneTechnique = PruneTechnique()
    layer_reduction: LayerReduction = LayerReduction()
