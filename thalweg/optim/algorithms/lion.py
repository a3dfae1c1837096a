"""Lion: the sign of an interpolated momentum (Chen et al., 2023, arXiv:2302.06675, algorithm 2)."""

from typing import Any

import torch
from torch import Tensor

from thalweg.optim import foreach
from thalweg.optim.algorithms.moment_codec import ADAM_MOMENTS, convert_moments
from thalweg.optim.dtensor_local import StepMixin, to_local, working_copies, zeros_state_like


class Lion(StepMixin, torch.optim.Optimizer):
    """``u = sign(b1 m + (1 - b1) g)``; ``p -= lr (u + weight_decay p)``; ``m = b2 m + (1 - b2) g``.

    One moment (``exp_avg``) for each parameter. Defaults are DeepSpeed's; the paper recommends betas of
    (0.9, 0.99) and, against AdamW, a learning rate 3 to 10 times smaller with a decay as much larger.
    Elementwise: each rank steps its own piece.
    """

    elementwise = True  # pieces of a parameter are stepped apart (NVMe)

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        check_hyperparameters("Lion", lr, betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update_params(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for param in params:
                if "exp_avg" not in self.state[param]:
                    self.state[param]["exp_avg"] = zeros_state_like(param)
                convert_moments(param, self.state[param], "fp32", ADAM_MOMENTS[:1])  # a checkpoint may have less bits
            if params:
                with working_copies(params) as (work, grads):
                    lion_step(group, work, grads, [to_local(self.state[p]["exp_avg"]) for p in params])


def lion_step(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], moments: list[Tensor]) -> None:
    """The rule on plain tensors, in place."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    update = foreach.lerp(moments, grads, 1 - beta1)
    foreach.sign_(update)
    if group["weight_decay"]:
        foreach.mul_(params, 1 - lr * group["weight_decay"])
    foreach.add_(params, update, alpha=-lr)
    foreach.lerp_(moments, grads, 1 - beta2)


def check_hyperparameters(name: str, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Raise ``ValueError`` for rates that no step can use."""
    if not float(lr) >= 0:
        raise ValueError(f"{name}: lr must not be negative, got {lr!r}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {betas!r}")
    if not weight_decay >= 0:
        raise ValueError(f"{name}: weight_decay must not be negative, got {weight_decay!r}")
