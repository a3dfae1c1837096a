"""Adam's options, and torch's fused kernel for optimisers that call it on tensors of their own making."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from thalweg.optim.algorithms.lion import check_hyperparameters
from thalweg.optim.dtensor_local import StepMixin

# A step count at which beta ** count is 0 in every precision, so that torch's kernels correct nothing.
STEP_WITHOUT_CORRECTION = 1e9


class AbstractAdam(StepMixin, torch.optim.Optimizer):
    """Options of Adam (``decoupled_weight_decay``: of AdamW); subclasses say how a step goes."""

    keeps_saved_dtype = True

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
        check_hyperparameters("Adam", lr, betas, weight_decay)
        if not eps >= 0:
            raise ValueError(f"Adam: eps must not be negative, got {eps!r}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        super().__init__(params, defaults)


def fused_adam_step(
    group: dict[str, Any],
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    num_previous_steps: float,
    **overrides: Any,
) -> None:
    """Torch's kernel on one contiguous tensor, each element of which has had ``num_previous_steps`` updates.

    ``overrides`` overrides options of ``group``.
    """
    if not weight.numel():
        return
    options = {**group, **overrides}
    count = num_previous_steps if options["bias_correction"] else STEP_WITHOUT_CORRECTION
    step = torch.full((), count, dtype=torch.float32, device=weight.device)  # filled there: a copy would wait
    adam(
        [weight], [grad], [exp_avg], [exp_avg_sq], [], [step],
        fused=True, foreach=False, amsgrad=False, maximize=options["maximize"],
        decoupled_weight_decay=options["decoupled_weight_decay"],
        beta1=options["betas"][0], beta2=options["betas"][1],
        lr=options["lr"], weight_decay=options["weight_decay"], eps=options["eps"],
    )  # fmt: skip
