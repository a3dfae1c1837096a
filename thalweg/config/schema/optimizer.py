"""The parameters that each optimiser takes: names, types and defaults.

The engine hands an optimiser only what the user gave, so that a library's own defaults hold;
the tables here refuse what the optimiser would not understand, and give ``"auto"`` its value.
The torch classes are listed by hand, since importing torch takes seconds; a test compares
the list with the torch that is installed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from thalweg.config.schema.base import (
    AnyTuple,
    Betas,
    DecayRate,
    Dtype,
    NonNegativeFloat,
    PositiveInt,
    Section,
    UnitFloat,
)
from thalweg.config.schema.scheduler import SCHEDULES
from thalweg.config.schema.unsupported import block

StateDtype = Literal["fp32", "bf16", "int8"]


class OptimizerParams(Section):
    """What every optimiser takes."""

    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0


class TorchOptimizerFlags(Section):
    """How torch's optimisers run."""

    foreach: bool | None = None
    maximize: bool = False
    capturable: bool = False
    differentiable: bool = False


class AdamParams(OptimizerParams, TorchOptimizerFlags):
    """As in DeepSpeed, Adam decouples its decay unless ``adam_w_mode`` is false; no decay by default."""

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    amsgrad: bool = False
    fused: bool | None = None
    bias_correction: bool = True
    adam_w_mode: bool = True
    adamw_mode: bool = True
    torch_adam: bool = False
    set_grad_none: bool = True
    decoupled_weight_decay: bool = True
    fp32_optimizer_states: bool = True
    max_grad_norm: NonNegativeFloat = 0.0
    state_dtype: StateDtype = "fp32"


class AdagradParams(OptimizerParams, TorchOptimizerFlags):
    """Adagrad."""

    lr: NonNegativeFloat = 1e-2
    lr_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-10
    fused: bool | None = None
    amsgrad: bool = False
    fp32_optimizer_states: bool = True


class LambParams(OptimizerParams):
    """LAMB (arXiv 1904.00962)."""

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    max_grad_norm: NonNegativeFloat = 0.0
    max_coeff: NonNegativeFloat = 10.0
    min_coeff: NonNegativeFloat = 0.01
    amsgrad: bool = False
    set_grad_none: bool = True


class LionParams(OptimizerParams):
    """Lion (arXiv 2302.06675)."""

    betas: Betas = (0.9, 0.999)
    set_grad_none: bool = True
    fp32_optimizer_states: bool = True
    state_dtype: StateDtype = "fp32"


class MuonParams(OptimizerParams):
    """Muon on matrices, AdamW on the rest; ``muon_lr`` and ``adam_lr`` go before ``lr``."""

    lr: NonNegativeFloat = 0.02
    momentum: DecayRate = 0.95
    muon_lr: NonNegativeFloat | None = None
    adam_lr: NonNegativeFloat | None = None
    betas: Betas = (0.9, 0.95)
    eps: NonNegativeFloat = 1e-10
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    ns_method: Literal["gram", "standard"] = "gram"
    ns_dtype: Literal["auto"] | Dtype = "auto"
    ns_coefficients: AnyTuple = (3.4445, -4.775, 2.0315)
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None


class SGDParams(OptimizerParams):
    """SGD."""

    momentum: NonNegativeFloat = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    foreach: bool | None = None
    differentiable: bool = False
    fused: bool | None = None


class ASGDParams(OptimizerParams, TorchOptimizerFlags):
    """Averaged SGD."""

    lr: NonNegativeFloat = 1e-2
    lambd: NonNegativeFloat = 1e-4
    alpha: NonNegativeFloat = 0.75
    t0: NonNegativeFloat = 1e6


class AdadeltaParams(OptimizerParams, TorchOptimizerFlags):
    """Adadelta."""

    lr: NonNegativeFloat = 1.0
    rho: UnitFloat = 0.9
    eps: NonNegativeFloat = 1e-6


class AdafactorParams(OptimizerParams):
    """Adafactor."""

    lr: NonNegativeFloat = 1e-2
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    eps: AnyTuple = (None, 1e-3)
    d: Annotated[float, Field(ge=1)] = 1.0
    foreach: bool | None = None
    maximize: bool = False


class AdamaxParams(OptimizerParams, TorchOptimizerFlags):
    """Adamax."""

    lr: NonNegativeFloat = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8


class NAdamParams(AdamaxParams):
    """NAdam."""

    momentum_decay: NonNegativeFloat = 4e-3
    decoupled_weight_decay: bool = False


class RAdamParams(OptimizerParams, TorchOptimizerFlags):
    """RAdam."""

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    decoupled_weight_decay: bool = False


class RMSpropParams(OptimizerParams, TorchOptimizerFlags):
    """RMSprop."""

    lr: NonNegativeFloat = 1e-2
    alpha: NonNegativeFloat = 0.99
    eps: NonNegativeFloat = 1e-8
    momentum: NonNegativeFloat = 0.0
    centered: bool = False


class RpropParams(Section):
    """Rprop; it has no weight decay."""

    lr: NonNegativeFloat = 1e-2
    etas: AnyTuple = (0.5, 1.2)
    step_sizes: AnyTuple = (1e-6, 50)
    foreach: bool | None = None
    maximize: bool = False
    capturable: bool = False
    differentiable: bool = False


# What nothing runs yet: 1-bit Adam (arXiv 2102.02888), 0/1 Adam (2202.06009) and 1-bit LAMB (2104.06069).
_BACKEND: dict[str, Any] = {"cuda_aware": False, "comm_backend_name": "nccl"}
_ONE_BIT_ADAM = block(base=AdamParams, freeze_step=100_000, **_BACKEND)
_ZERO_ONE_ADAM = block(
    base=AdamParams,
    var_freeze_step=100_000,
    var_update_scaler=16,
    local_step_scaler=32_678,
    local_step_clipper=16,
    **_BACKEND,
)
_ONE_BIT_LAMB = block(
    base=LambParams,
    freeze_step=100_000,
    coeff_beta=0.9,
    factor_max=4.0,
    factor_min=0.5,
    factor_threshold=0.1,
    **_BACKEND,
)

OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "Muon": MuonParams,
    "SGD": SGDParams,
    "ASGD": ASGDParams,
    "Adadelta": AdadeltaParams,
    "Adafactor": AdafactorParams,
    "Adamax": AdamaxParams,
    "NAdam": NAdamParams,
    "RAdam": RAdamParams,
    "RMSprop": RMSpropParams,
    "Rprop": RpropParams,
    "OneBitAdam": _ONE_BIT_ADAM,
    "OneBitLamb": _ONE_BIT_LAMB,
    "ZeroOneAdam": _ZERO_ONE_ADAM,
}

UNUSABLE_OPTIMIZERS = {
    "LBFGS": "evaluates the loss several times in a step, which needs a closure; drive it by your own loop",
    "SparseAdam": "takes sparse gradients only, and reduced gradients are dense; use Adam",
    "MuAdam": "needs the package mup; build it yourself and hand it to initialize(optimizer=...)",
    "MuAdamW": "needs the package mup; build it yourself and hand it to initialize(optimizer=...)",
    "MuSGD": "needs the package mup; build it yourself and hand it to initialize(optimizer=...)",
}


def get_params_schema(block: str, type_name: object) -> type[Section] | None:
    """The parameter table of ``optimizer`` or ``scheduler`` by its type, in any case of letters."""
    name = canonical_name(block, type_name)
    return (OPTIMIZERS if block == "optimizer" else SCHEDULES).get(name) if name else None


def canonical_name(block: str, type_name: object) -> str | None:
    """The type's name as the tables spell it, or ``None`` if no table has it."""
    if not isinstance(type_name, str):
        return None
    names = OPTIMIZERS if block == "optimizer" else SCHEDULES
    return next((name for name in names if name.lower() == type_name.lower()), None)
