"""``deepspeed.ops``' optimizers: each name builds Thalweg's, which steps over shards wherever they lie."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.optim import build_optimizer


def _build(type_name: str, params: Any, **hyper: Any) -> torch.optim.Optimizer:
    return build_optimizer(type_name, params, {key: value for key, value in hyper.items() if value is not None})


class _ByName(type):
    """A class whose objects are of another one's: ``isinstance`` finds them, an engine's optimizer too."""

    def __instancecheck__(cls, value: Any) -> bool:
        return type(getattr(value, "inner", value)).__name__ in cls.builds  # type: ignore[attr-defined]


class DeepSpeedCPUAdam(metaclass=_ByName):
    """AdamW, or Adam with ``adamw_mode=False``."""

    builds = ("Adam", "AdamW")

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        options = {"bias_correction": bias_correction, "amsgrad": amsgrad, "adam_w_mode": adamw_mode}
        return _build(
            "Adam", model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            state_dtype=None if fp32_optimizer_states else "bf16", **options,
        )  # fmt: skip


class FusedAdam(metaclass=_ByName):
    """AdamW, or Adam with ``adam_w_mode=False``."""

    builds = ("Adam", "AdamW")

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        options = {"bias_correction": bias_correction, "amsgrad": amsgrad, "adam_w_mode": adam_w_mode}
        return _build("Adam", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)


class DeepSpeedCPUAdagrad(metaclass=_ByName):
    """Adagrad."""

    builds = ("Adagrad",)

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        return _build("Adagrad", model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(metaclass=_ByName):
    """Lion."""

    builds = ("Lion",)

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        state_dtype = None if fp32_optimizer_states else "bf16"
        return _build("Lion", model_params, lr=lr, betas=betas, weight_decay=weight_decay, state_dtype=state_dtype)


FusedLion = DeepSpeedCPULion


class FusedLamb(metaclass=_ByName):
    """LAMB."""

    builds = ("Lamb",)

    def __new__(cls, params: Any, lr: float = 1e-3, **hyper: Any) -> Any:
        return _build("Lamb", params, lr=lr, **hyper)
