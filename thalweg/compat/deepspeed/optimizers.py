"""``deepspeed.ops``' optimizers: each name builds Thalweg's, which steps over shards wherever they lie."""

from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch

from thalweg.optim.build import build_optimizer


class _ByName(type):
    """A class whose objects are of another one's: ``isinstance`` finds them, an engine's optimizer too.

    ``defaults``: what it takes behind ``first``, in DeepSpeed's order; of it ``unread`` is nothing that Thalweg's has.
    """

    builds: tuple[str, ...]
    first = "model_params"
    defaults: dict[str, Any]
    unread: tuple[str, ...] = ()

    @property
    def __signature__(cls) -> Signature:
        kind = Parameter.POSITIONAL_OR_KEYWORD
        options = [Parameter(name, kind, default=value) for name, value in cls.defaults.items()]
        return Signature([Parameter(cls.first, kind), *options])

    def __instancecheck__(cls, value: Any) -> bool:
        return type(getattr(value, "inner", value)).__name__ in cls.builds

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        call = cls.__signature__.bind(*args, **kwargs)
        call.apply_defaults()
        hyper = {key: value for key, value in call.arguments.items() if value is not None and key not in cls.unread}
        if not hyper.pop("fp32_optimizer_states", True):
            hyper["state_dtype"] = "bf16"
        return build_optimizer(cls.builds[0], hyper.pop(cls.first), hyper)


_BETAS = (0.9, 0.999)
_ADAM = {"lr": 1e-3, "bias_correction": True, "betas": _BETAS, "eps": 1e-8}
_DECAY = {"weight_decay": 0.0, "amsgrad": False}


class DeepSpeedCPUAdam(metaclass=_ByName):
    """AdamW, or Adam with ``adamw_mode=False``."""

    builds = ("Adam", "AdamW")
    defaults: ClassVar = _ADAM | _DECAY | {"adamw_mode": True, "fp32_optimizer_states": True}


class FusedAdam(metaclass=_ByName):
    """AdamW, or Adam with ``adam_w_mode=False``."""

    builds, first = ("Adam", "AdamW"), "params"
    defaults: ClassVar = _ADAM | {"adam_w_mode": True} | _DECAY | {"set_grad_none": True}


class DeepSpeedCPUAdagrad(metaclass=_ByName):
    """Adagrad."""

    builds, unread = ("Adagrad",), ("amsgrad", "fp32_optimizer_states")
    defaults: ClassVar = {"lr": 1e-2, "eps": 1e-10} | _DECAY | {"fp32_optimizer_states": True}


class DeepSpeedCPULion(metaclass=_ByName):
    """Lion."""

    builds = ("Lion",)
    defaults: ClassVar = {"lr": 1e-3, "betas": _BETAS, "weight_decay": 0.0, "fp32_optimizer_states": True}


FusedLion = DeepSpeedCPULion


class FusedLamb(metaclass=_ByName):
    """LAMB."""

    builds, first = ("Lamb",), "params"
    defaults: ClassVar = _ADAM | {
        "eps_inside_sqrt": False, "weight_decay": 0.0, "max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01,
        "amsgrad": False, "set_grad_none": True,
    }  # fmt: skip
