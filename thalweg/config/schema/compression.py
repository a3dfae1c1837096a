"""Compression in training: ``compression_training``, ``quantize_training`` (MoQ) and ``eigenvalue``, as DeepSpeed
names their keys."""

from typing import Any

from thalweg.config.schema.base import IntTuple, PositiveInt, Section, StrTuple, UnitFloat, ignored, unsupported
from thalweg.config.schema.unsupported import Typed, block

_Q_TYPE, _ROUNDING, _L1 = ("symmetric", "asymmetric"), ("nearest", "stochastic"), ("l1", "topk")
_NO_KERNEL = "weights are quantized by torch's own operators"
_STAYS_ON = "a technique stays on once it has begun"
_EIGENVALUE = {"verbose": False, "max_iter": 100, "tol": 1e-2, "stability": 1e-6, "gas_boundary_resolution": 1}
_EIGENVALUE |= {"layer_name": "bert.encoder.layer", "layer_num": 0}


def _block(**options: Any) -> type[Section]:
    return block(base=Section, **options)


_MIXED = _block(enabled=False, quantize_change_ratio=0.001)
_GROUP = _block(
    params=_block(
        **dict.fromkeys(("start_bits", "target_bits", "bits", "num_heads"), Typed(PositiveInt | None, None)),
        quantization_period=1,
        dense_ratio=Typed(UnitFloat | None, None),
    ),
    modules=Typed(StrTuple, ("*",)),
    related_modules=None,
)


def _technique(**shared: Any) -> type[Section]:
    """A technique of compression: what its groups share, and the groups by name."""
    end = ignored(None, _STAYS_ON)
    parameters = _block(enabled=False, schedule_offset=0, schedule_offset_end=end, **shared)
    return _block(shared_parameters=parameters, different_groups=dict[str, _GROUP])  # type: ignore[valid-type]


CompressionTraining = _block(
    weight_quantization=_technique(
        quantizer_kernel=ignored(False, _NO_KERNEL), quantize_groups=Typed(PositiveInt, 1), quantize_verbose=False,
        quantization_type=_Q_TYPE, rounding=_ROUNDING,
        quantize_weight_in_forward=ignored(False, "weights are quantized in the forward pass; masters stay whole"),
        fp16_mixed_quantize=_MIXED),
    activation_quantization=_technique(quantization_type=_Q_TYPE, range_calibration=("dynamic", "static")),
    sparse_pruning=_technique(
        method=unsupported((*_L1, "snip_momentum"), 'set it to "topk" or "l1"', on=lambda name: name not in _L1),
        block_pattern=ignored("4x1", "single weights are pruned"), excluded_modules=Typed(StrTuple, ()),
        schedule_offset_stride=ignored(1, "single weights are pruned from schedule_offset on"),
        dense_ratio=ignored(0.1, "each group's params have a dense_ratio")),
    row_pruning=_technique(method=_L1),
    head_pruning=_technique(method=_L1[::-1], num_heads=Typed(PositiveInt | None, None)),
    channel_pruning=_technique(method=_L1),
    layer_reduction=_block(
        enabled=False, keep_number_layer=Typed(PositiveInt | None, None), module_name_prefix=Typed(str | None, None),
        teacher_layer=Typed(IntTuple, ()), other_module_name=Typed(StrTuple, ())))  # fmt: skip
Eigenvalue = _block(enabled=False, **_EIGENVALUE)
QuantizeTraining = _block(
    enabled=False, quantize_verbose=False, quantizer_kernel=ignored(False, _NO_KERNEL), quantize_type=_Q_TYPE,
    quantize_groups=Typed(PositiveInt, 1),
    quantize_bits=_block(start_bits=Typed(PositiveInt, 16), target_bits=Typed(PositiveInt, 16)),
    quantize_schedule=_block(quantize_period=100, schedule_offset=100),
    quantize_algo=_block(q_type=(None, *_Q_TYPE), rounding=_ROUNDING), fp16_mixed_quantize=_MIXED,
    eigenvalue=Eigenvalue)  # fmt: skip
