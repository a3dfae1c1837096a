"""The parameters that each schedule takes: DeepSpeed's five, and torch's that need no object or function."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from thalweg.config.schema.base import (
    IntTuple,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    UnitFloat,
    coerce_int,
    to_tuple,
)
from thalweg.config.schema.unsupported import Typed, block

FloatOrList = NonNegativeFloat | Annotated[tuple[NonNegativeFloat, ...], BeforeValidator(to_tuple)]
_LR, _COUNT = Typed(FloatOrList | None, None), Typed(PositiveInt | None, None)


def _needed(annotation: Any) -> Any:
    """A parameter that a schedule cannot do without."""
    return Field(Typed(annotation | None, None), json_schema_extra={"needed": True})


_NEEDED_LR, _NEEDED_COUNT = _needed(FloatOrList), _needed(PositiveInt)
# fmt: off
# Counters of updates as DeepSpeed and torch have them: -1 starts afresh.
_OURS = block(base=Section, last_batch_iteration=Typed(Annotated[int, Field(ge=-1)], -1))
_TORCH = block(base=Section, last_epoch=Typed(Annotated[int, BeforeValidator(coerce_int), Field(ge=-1)], -1))
# A rise from ``warmup_min_lr`` to ``warmup_max_lr`` (else the optimiser's rate), then constant.
_WARMUP = block(
    base=_OURS, warmup_min_lr=Typed(FloatOrList, 0.0), warmup_max_lr=_LR, warmup_num_steps=Typed(PositiveInt, 1000),
    warmup_type=("log", "linear"))

SCHEDULES: dict[str, type[Section]] = {
    "WarmupLR": _WARMUP,
    # The same, then a straight fall to 0 at ``total_num_steps``.
    "WarmupDecayLR": block(base=_WARMUP, total_num_steps=_NEEDED_COUNT),
    # A rise from ``warmup_min_ratio`` of the rate, a cosine to ``cos_min_ratio`` at ``total_num_steps``.
    "WarmupCosineLR": block(
        base=_OURS, total_num_steps=_NEEDED_COUNT, warmup_min_ratio=Typed(UnitFloat, 0.0),
        warmup_num_steps=Typed(PositiveInt, 1000), cos_min_ratio=Typed(UnitFloat, 1e-4), warmup_type=("log", "linear")),
    # Smith's range test (arXiv 1506.01186).
    "LRRangeTest": block(
        base=_OURS, lr_range_test_min_lr=Typed(FloatOrList, 1e-3), lr_range_test_step_size=Typed(PositiveInt, 2000),
        lr_range_test_step_rate=1.0, lr_range_test_staircase=False),
    # Smith's 1-cycle (arXiv 1803.09820).
    "OneCycle": block(
        base=_OURS, cycle_min_lr=_NEEDED_LR, cycle_max_lr=_NEEDED_LR, decay_lr_rate=0.0,
        cycle_first_step_size=Typed(PositiveInt, 2000), cycle_second_step_size=_COUNT, cycle_first_stair_count=0,
        cycle_second_stair_count=Typed(NonNegativeInt | None, None), decay_step_size=0, cycle_momentum=True,
        cycle_min_mom=Typed(UnitFloat, 0.8), cycle_max_mom=Typed(UnitFloat, 0.9), decay_mom_rate=0.0),
    "StepLR": block(base=_TORCH, step_size=_NEEDED_COUNT, gamma=0.1),
    "MultiStepLR": block(base=_TORCH, milestones=_needed(IntTuple), gamma=0.1),
    "ConstantLR": block(base=_TORCH, factor=Typed(UnitFloat, 1 / 3), total_iters=5),
    "LinearLR": block(
        base=_TORCH, start_factor=Typed(UnitFloat, 1 / 3), end_factor=Typed(UnitFloat, 1.0), total_iters=5),
    "ExponentialLR": block(base=_TORCH, gamma=_needed(NonNegativeFloat)),
    "PolynomialLR": block(base=_TORCH, total_iters=5, power=1.0),
    # Half a cosine over ``T_max`` updates, and one that starts again (arXiv 1608.03983).
    "CosineAnnealingLR": block(base=_TORCH, T_max=_NEEDED_COUNT, eta_min=0.0),
    "CosineAnnealingWarmRestarts": block(base=_TORCH, T_0=_NEEDED_COUNT, T_mult=Typed(PositiveInt, 1), eta_min=0.0),
    # A triangle between two rates (arXiv 1506.01186), and torch's 1-cycle (arXiv 1708.07120).
    "CyclicLR": block(
        base=_TORCH, base_lr=_NEEDED_LR, max_lr=_NEEDED_LR, step_size_up=Typed(PositiveInt, 2000),
        step_size_down=_COUNT, mode=("triangular", "triangular2", "exp_range"), gamma=1.0,
        scale_mode=("cycle", "iterations"),
        cycle_momentum=True, base_momentum=Typed(FloatOrList, 0.8), max_momentum=Typed(FloatOrList, 0.9)),
    "OneCycleLR": block(
        base=_TORCH, max_lr=_NEEDED_LR, total_steps=_COUNT, epochs=_COUNT, steps_per_epoch=_COUNT,
        pct_start=Typed(UnitFloat, 0.3), anneal_strategy=("cos", "linear"), cycle_momentum=True,
        base_momentum=Typed(FloatOrList, 0.85), max_momentum=Typed(FloatOrList, 0.95), div_factor=25.0,
        final_div_factor=1e4, three_phase=False),
}
# fmt: on
REQUIRED_PARAMS = {
    name: tuple(key for key, field in schema.model_fields.items() if field.json_schema_extra)
    for name, schema in SCHEDULES.items()
}
