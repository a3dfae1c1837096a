"""Adam's options, and torch's fused kernel for optimisers that call it on tensors of their own making."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from thalweg.optim.lion import check_common
from thalweg.optim.local import ExactState

_LATE = 1e9  # a step count at which nothing is left of the bias correction


class AdamOptions(ExactState, torch.optim.Optimizer):
    """Options of Adam (``decoupled_weight_decay``: of AdamW); subclasses say how a step goes."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
    ) -> None:
        check_common("Adam", lr, betas, weight_decay)
        if not eps >= 0:
            raise ValueError(f"Adam: eps must not be negative, got {eps!r}")
        hyper = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        super().__init__(params, hyper)


def step_adam(
    group: dict[str, Any],
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    before: float,
    **by: Any,
) -> None:
    """Torch's kernel on one contiguous tensor, each element of which has had ``before`` updates.

    ``by`` overrides options of ``group``.
    """
    if not weight.numel():
        return
    options = {**group, **by}
    fused = weight.device.type in ("cpu", "cuda")
    count = before if options["bias_correction"] else _LATE
    step = torch.tensor(count, dtype=torch.float32, device=weight.device if fused else "cpu")
    adam(
        [weight], [grad], [mean], [square], [], [step],
        fused=fused, foreach=not fused, amsgrad=False, maximize=options["maximize"],
        decoupled_weight_decay=options["decoupled_weight_decay"],
        beta1=options["betas"][0], beta2=options["betas"][1],
        lr=options["lr"], weight_decay=options["weight_decay"], eps=options["eps"],
    )  # fmt: skip
