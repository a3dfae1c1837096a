"""The parameters that each optimiser takes: names, types and defaults.

The engine hands an optimiser only what the user gave, so that a library's own defaults hold;
the tables here refuse what the optimiser would not understand, and give ``"auto"`` its value.
The torch classes are listed by hand, since importing torch takes seconds; a test compares
the list with the torch that is installed.  A line for each; an option's default says what it takes (unsupported.py).
"""

from typing import Annotated, Literal

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
from thalweg.config.schema.unsupported import Typed, block

_BETAS = Typed(Betas, (0.9, 0.999))
_MAYBE, _NO_LR = Typed(bool | None, None), Typed(NonNegativeFloat | None, None)
_FREEZE_STEP = Typed(Literal["auto"] | PositiveInt, 100_000)
_STATE_DTYPE = ("fp32", "bf16", "int8")
# fmt: off
# What every optimiser takes, and how torch's run.
_COMMON = block(base=Section, lr=1e-3, weight_decay=0.0)
_FLAGS = block(base=Section, foreach=_MAYBE, maximize=False, capturable=False, differentiable=False)
_TORCH = (_COMMON, _FLAGS)
# As in DeepSpeed, Adam decouples its decay unless ``adam_w_mode`` is false; no decay by default.
_ADAM = block(
    base=_TORCH, betas=_BETAS, eps=1e-8, amsgrad=False, fused=_MAYBE, bias_correction=True, adam_w_mode=True,
    adamw_mode=True, torch_adam=False, set_grad_none=True, decoupled_weight_decay=True, fp32_optimizer_states=True,
    max_grad_norm=0.0, state_dtype=_STATE_DTYPE)
# LAMB (arXiv 1904.00962).
_LAMB = block(
    base=_COMMON, betas=_BETAS, eps=1e-8, bias_correction=True, eps_inside_sqrt=False, max_grad_norm=0.0,
    max_coeff=10.0, min_coeff=0.01, amsgrad=False, set_grad_none=True)
_ADAMAX = block(base=_TORCH, lr=2e-3, betas=_BETAS, eps=1e-8)

OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": block(
        base=_TORCH, lr=1e-2, lr_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, fused=_MAYBE, amsgrad=False,
        fp32_optimizer_states=True),
    "Lamb": _LAMB,
    # Lion (arXiv 2302.06675).
    "Lion": block(
        base=_COMMON, betas=_BETAS, set_grad_none=True, fp32_optimizer_states=True, state_dtype=_STATE_DTYPE),
    # Muon on matrices, AdamW on the rest; ``muon_lr`` and ``adam_lr`` go before ``lr``.
    "Muon": block(
        base=_COMMON, lr=0.02, momentum=Typed(DecayRate, 0.95), muon_lr=_NO_LR, adam_lr=_NO_LR,
        betas=Typed(Betas, (0.9, 0.95)), eps=1e-10, nesterov=True, ns_steps=Typed(PositiveInt, 5),
        ns_method=("gram", "standard"), ns_dtype=Typed(Literal["auto"] | Dtype, "auto"),
        ns_coefficients=Typed(AnyTuple, (3.4445, -4.775, 2.0315)),
        adjust_lr_fn=Typed(Literal["original", "match_rms_adamw"] | None, None)),
    "SGD": block(
        base=_COMMON, momentum=0.0, dampening=Typed(float, 0.0), nesterov=False, maximize=False, foreach=_MAYBE,
        differentiable=False, fused=_MAYBE),
    "ASGD": block(base=_TORCH, lr=1e-2, lambd=1e-4, alpha=0.75, t0=1e6),
    "Adadelta": block(base=_TORCH, lr=1.0, rho=Typed(UnitFloat, 0.9), eps=1e-6),
    "Adafactor": block(
        base=_COMMON, lr=1e-2, beta2_decay=Typed(Annotated[float, Field(le=0)], -0.8),
        eps=Typed(AnyTuple, (None, 1e-3)), d=Typed(Annotated[float, Field(ge=1)], 1.0), foreach=_MAYBE, maximize=False),
    "Adamax": _ADAMAX,
    "NAdam": block(base=_ADAMAX, momentum_decay=4e-3, decoupled_weight_decay=False),
    "RAdam": block(base=_TORCH, betas=_BETAS, eps=1e-8, decoupled_weight_decay=False),
    "RMSprop": block(base=_TORCH, lr=1e-2, alpha=0.99, eps=1e-8, momentum=0.0, centered=False),
    # It has no weight decay.
    "Rprop": block(
        base=Section, lr=1e-2, etas=Typed(AnyTuple, (0.5, 1.2)), step_sizes=Typed(AnyTuple, (1e-6, 50)),
        foreach=_MAYBE, maximize=False, capturable=False, differentiable=False),
    # 1-bit Adam (arXiv 2102.02888), 1-bit LAMB (2104.06069) and 0/1 Adam (2202.06009).
    "OneBitAdam": block(base=_ADAM, freeze_step=_FREEZE_STEP, cuda_aware=False, comm_backend_name="nccl"),
    "OneBitLamb": block(
        base=_LAMB, freeze_step=_FREEZE_STEP, coeff_beta=0.9, factor_max=4.0, factor_min=0.5, factor_threshold=0.1,
        cuda_aware=False, comm_backend_name="nccl"),
    "ZeroOneAdam": block(
        base=_ADAM, var_freeze_step=100_000, var_update_scaler=16, local_step_scaler=32_678, local_step_clipper=16,
        cuda_aware=False, comm_backend_name="nccl"),
}
# fmt: on
# Those that send momentum in bits.
COMPRESSED_OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
PARAMS_SCHEMAS = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULES}


def get_params_schema(block: str, type_name: object) -> type[Section] | None:
    """The parameter table of ``optimizer`` or ``scheduler`` by its type, in any case of letters."""
    name = canonical_name(block, type_name)
    return PARAMS_SCHEMAS[block][name] if name else None


def canonical_name(block: str, type_name: object) -> str | None:
    """The type's name as the tables spell it, or ``None`` if no table has it."""
    if not isinstance(type_name, str):
        return None
    return next((name for name in PARAMS_SCHEMAS[block] if name.lower() == type_name.lower()), None)
