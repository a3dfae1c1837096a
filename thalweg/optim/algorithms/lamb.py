"""LAMB: Adam's direction, with a step as long as the parameter's own norm asks for (You et al., 2020).

    r = m_hat / (sqrt(v_hat) + eps) + weight_decay p          elementwise, on the local piece
    ratio = |p| / |r|, held in [min_coeff, max_coeff]         of the LOGICAL parameter
    p -= lr ratio r

The norms are the only numbers that cross ranks. Phases of a step: all directions (local); all norms of all
groups of parameters in one all-reduce for each process group; all updates (local).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from thalweg.device import widest_float
from thalweg.optim import dtensor_local, foreach
from thalweg.optim.algorithms.lion import check_hyperparameters
from thalweg.optim.algorithms.moment_codec import ADAM_MOMENTS
from thalweg.optim.dtensor_local import to_local
from thalweg.optim.norms import square_sums


def init_adam_state(state: dict[str, Any], param: Tensor, num_steps: float) -> None:
    """Moments of a parameter that has none, and its count of steps."""
    if "exp_avg" not in state:
        state["step"] = torch.tensor(float(num_steps), device="cpu")
        for moment in ADAM_MOMENTS:
            state[moment] = dtensor_local.zeros_state_like(param)


class Lamb(dtensor_local.StepMixin, torch.optim.Optimizer):
    """LAMB (arXiv:1904.00962, algorithm 2), with DeepSpeed's clamp on the trust ratio.

    A parameter or a direction of norm zero has a ratio of 1. ``bias_correction=False`` uses the moments as
    they are; ``eps_inside_sqrt`` adds eps under the root. DeepSpeed's kernel leaves the moments uncorrected
    in the direction and corrects the learning rate instead, which weighs decay and norm differently in the
    first steps; here the paper's order is kept. State: ``step``, ``exp_avg``, ``exp_avg_sq``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_hyperparameters("Lamb", lr, betas, weight_decay)
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"Lamb: 0 <= min_coeff <= max_coeff must hold, got {min_coeff!r} and {max_coeff!r}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def _update_params(self) -> None:
        """One all-reduce for each process group that the parameters are spread over, with two numbers for each
        parameter, whether it has a gradient or not: all ranks must hold the same parameters."""
        with ExitStack() as stack:
            stepped = []
            for group in self.param_groups:
                if params := [p for p in group["params"] if p.grad is not None]:
                    work, grads = stack.enter_context(dtensor_local.working_copies(params))
                    stepped.append((group, params, work, self._directions(group, params, work, grads)))
            every_param = [p for group in self.param_groups for p in group["params"]]
            position = {id(p): i for i, p in enumerate(every_param)}
            # (|p|^2, |r|^2) of each parameter's piece, then the norms of the logical tensors.
            device = to_local(every_param[0]).device
            rows = torch.zeros(len(every_param), 2, dtype=widest_float(device), device=device)
            for _, params, work, directions in stepped:
                chosen = torch.tensor([position[id(p)] for p in params], device=rows.device)
                sums = torch.stack([square_sums(work), square_sums(directions)], dim=1)
                rows.index_copy_(0, chosen, sums.to(rows.device))
            shard_groups = dtensor_local.get_shard_groups(every_param)
            if len(set(shard_groups)) == 1:  # as a rule: then all rows are one tensor
                dtensor_local.all_reduce_tensors_([rows], shard_groups[:1])
            else:
                dtensor_local.all_reduce_tensors_(rows.unbind(), shard_groups)
            norms = rows.sqrt().tolist()
            for group, params, work, directions in stepped:
                ratios = [self._clamped_trust_ratio(group, *norms[position[id(p)]]) for p in params]
                self._observe_ratios(params, ratios)
                foreach.mul_(directions, [-float(group["lr"]) * ratio for ratio in ratios])
                foreach.add_(work, directions)

    def _directions(
        self, group: dict[str, Any], params: list[Tensor], work: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        for param in params:
            init_adam_state(self.state[param], param, 0)
            self.state[param]["step"] += 1
        first = [to_local(self.state[p]["exp_avg"]) for p in params]
        second = [to_local(self.state[p]["exp_avg_sq"]) for p in params]
        foreach.lerp_(first, grads, 1 - beta1)
        foreach.mul_(second, beta2)
        foreach.addcmul_(second, grads, grads, value=1 - beta2)
        steps, corrected = [float(self.state[p]["step"]) for p in params], group["bias_correction"]
        denominators = foreach.div(second, [1 - beta2**s if corrected else 1.0 for s in steps])
        if group["eps_inside_sqrt"]:
            foreach.add_(denominators, group["eps"])
        denominators = foreach.sqrt(denominators)
        if not group["eps_inside_sqrt"]:
            foreach.add_(denominators, group["eps"])
        foreach.mul_(denominators, [1 - beta1**s if corrected else 1.0 for s in steps])
        directions = foreach.div(first, denominators)
        if group["weight_decay"]:
            foreach.add_(directions, work, alpha=group["weight_decay"])
        return directions

    def _observe_ratios(self, params: Sequence[Tensor], ratios: Sequence[float]) -> None:
        """The trust ratios of a step."""

    @staticmethod
    def _clamped_trust_ratio(group: dict[str, Any], weight_norm: float, update_norm: float) -> float:
        if not (weight_norm > 0 and update_norm > 0):
            return 1.0
        return min(max(weight_norm / update_norm, group["min_coeff"]), group["max_coeff"])
