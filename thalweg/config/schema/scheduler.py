"""The parameters that each schedule takes: DeepSpeed's five, and torch's that need no object or function."""

from __future__ import annotations

from typing import Annotated, Literal

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

NumSteps = NonNegativeInt
FloatOrList = NonNegativeFloat | Annotated[tuple[NonNegativeFloat, ...], BeforeValidator(to_tuple)]


class ScheduleParams(Section):
    """``last_batch_iteration`` as DeepSpeed has it: -1 starts afresh."""

    last_batch_iteration: Annotated[int, Field(ge=-1)] = -1


class WarmupLRParams(ScheduleParams):
    """A rise from ``warmup_min_lr`` to ``warmup_max_lr`` (else the optimiser's rate), then constant."""

    warmup_min_lr: FloatOrList = 0.0
    warmup_max_lr: FloatOrList | None = None
    warmup_num_steps: NumSteps = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupDecayLRParams(WarmupLRParams):
    """The same, then a straight fall to 0 at ``total_num_steps``."""

    total_num_steps: PositiveInt | None = None


class WarmupCosineLRParams(ScheduleParams):
    """A rise from ``warmup_min_ratio`` of the rate, a cosine to ``cos_min_ratio`` at ``total_num_steps``."""

    total_num_steps: PositiveInt | None = None
    warmup_min_ratio: UnitFloat = 0.0
    warmup_num_steps: NumSteps = 1000
    cos_min_ratio: UnitFloat = 1e-4
    warmup_type: Literal["log", "linear"] = "log"


class LRRangeTestParams(ScheduleParams):
    """Smith's range test (arXiv 1506.01186)."""

    lr_range_test_min_lr: FloatOrList = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: NonNegativeFloat = 1.0
    lr_range_test_staircase: bool = False


class OneCycleParams(ScheduleParams):
    """Smith's 1-cycle (arXiv 1803.09820)."""

    cycle_min_lr: FloatOrList | None = None
    cycle_max_lr: FloatOrList | None = None
    decay_lr_rate: NonNegativeFloat = 0.0
    cycle_first_step_size: PositiveInt = 2000
    cycle_second_step_size: PositiveInt | None = None
    cycle_first_stair_count: NonNegativeInt = 0
    cycle_second_stair_count: NonNegativeInt | None = None
    decay_step_size: NonNegativeInt = 0
    cycle_momentum: bool = True
    cycle_min_mom: UnitFloat = 0.8
    cycle_max_mom: UnitFloat = 0.9
    decay_mom_rate: NonNegativeFloat = 0.0


class TorchScheduleParams(Section):
    """``last_epoch`` as torch has it: -1 starts afresh."""

    last_epoch: Annotated[int, BeforeValidator(coerce_int), Field(ge=-1)] = -1


class StepLRParams(TorchScheduleParams):
    """A factor ``gamma`` every ``step_size`` updates."""

    step_size: PositiveInt | None = None
    gamma: NonNegativeFloat = 0.1


class MultiStepLRParams(TorchScheduleParams):
    """A factor ``gamma`` at each of the ``milestones``."""

    milestones: IntTuple | None = None
    gamma: NonNegativeFloat = 0.1


class ConstantLRParams(TorchScheduleParams):
    """A factor for the first ``total_iters`` updates."""

    factor: UnitFloat = 1 / 3
    total_iters: NonNegativeInt = 5


class LinearLRParams(TorchScheduleParams):
    """A factor that moves in a line."""

    start_factor: UnitFloat = 1 / 3
    end_factor: UnitFloat = 1.0
    total_iters: NonNegativeInt = 5


class ExponentialLRParams(TorchScheduleParams):
    """A factor ``gamma`` every update."""

    gamma: NonNegativeFloat | None = None


class PolynomialLRParams(TorchScheduleParams):
    """A fall to 0 by a polynomial."""

    total_iters: NonNegativeInt = 5
    power: NonNegativeFloat = 1.0


class CosineAnnealingLRParams(TorchScheduleParams):
    """Half a cosine over ``T_max`` updates."""

    T_max: PositiveInt | None = None
    eta_min: NonNegativeFloat = 0.0


class CosineAnnealingWarmRestartsParams(TorchScheduleParams):
    """A cosine that starts again (arXiv 1608.03983)."""

    T_0: PositiveInt | None = None
    T_mult: PositiveInt = 1
    eta_min: NonNegativeFloat = 0.0


class CyclicLRParams(TorchScheduleParams):
    """A triangle between two rates (arXiv 1506.01186)."""

    base_lr: FloatOrList | None = None
    max_lr: FloatOrList | None = None
    step_size_up: PositiveInt = 2000
    step_size_down: PositiveInt | None = None
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    gamma: NonNegativeFloat = 1.0
    scale_mode: Literal["cycle", "iterations"] = "cycle"
    cycle_momentum: bool = True
    base_momentum: FloatOrList = 0.8
    max_momentum: FloatOrList = 0.9


class OneCycleLRParams(TorchScheduleParams):
    """torch's 1-cycle (arXiv 1708.07120)."""

    max_lr: FloatOrList | None = None
    total_steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    steps_per_epoch: PositiveInt | None = None
    pct_start: UnitFloat = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    cycle_momentum: bool = True
    base_momentum: FloatOrList = 0.85
    max_momentum: FloatOrList = 0.95
    div_factor: NonNegativeFloat = 25.0
    final_div_factor: NonNegativeFloat = 1e4
    three_phase: bool = False


SCHEDULES: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "StepLR": StepLRParams,
    "MultiStepLR": MultiStepLRParams,
    "ConstantLR": ConstantLRParams,
    "LinearLR": LinearLRParams,
    "ExponentialLR": ExponentialLRParams,
    "PolynomialLR": PolynomialLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "CyclicLR": CyclicLRParams,
    "OneCycleLR": OneCycleLRParams,
}

REQUIRED_PARAMS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "StepLR": ("step_size",),
    "MultiStepLR": ("milestones",),
    "ExponentialLR": ("gamma",),
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "CyclicLR": ("base_lr", "max_lr"),
    "OneCycleLR": ("max_lr",),
}

UNUSABLE_SCHEDULES = {
    "LambdaLR": "takes a function, which JSON cannot hold; hand it to initialize(lr_scheduler=...)",
    "MultiplicativeLR": "takes a function, which JSON cannot hold; hand it to initialize(lr_scheduler=...)",
    "SequentialLR": "takes schedules, which JSON cannot hold; hand it to initialize(lr_scheduler=...)",
    "ChainedScheduler": "takes schedules, which JSON cannot hold; hand it to initialize(lr_scheduler=...)",
    "ReduceLROnPlateau": "waits for a metric; step it in your own loop",
    "SWALR": "belongs to weight averaging, which you drive; hand it to initialize(lr_scheduler=...)",
}
