"""LAMB: Adam's direction, with a step as long as the parameter's own norm asks for (You et al., 2020).

    r = m_hat / (sqrt(v_hat) + eps) + weight_decay p          elementwise, on the local piece
    ratio = |p| / |r|, held in [min_coeff, max_coeff]         of the LOGICAL parameter
    p -= lr ratio r

The norms are the only numbers that cross ranks. Phases of a step: all directions (local); all norms of all
groups of parameters in one all-reduce for each process group; all updates (local).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from thalweg.optim import foreach
from thalweg.optim.algorithms.lion import check_hyperparameters, evaluate_closure
from thalweg.optim.dtensor_local import (
    AllReduce,
    Fp32StateMixin,
    all_reduce_rows,
    default_all_reduce,
    get_shard_groups,
    to_local,
    working_copies,
    zeros_state_like,
)
from thalweg.optim.norms import square_sums


class Lamb(Fp32StateMixin, torch.optim.Optimizer):
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
        self.all_reduce: AllReduce = default_all_reduce

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss if one is given.

        One all-reduce for each process group that the parameters are spread over, with two numbers for each
        parameter, whether it has a gradient or not: all ranks must hold the same parameters.
        """
        loss = evaluate_closure(closure)
        with ExitStack() as stack:
            stepped = []
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                work, grads = stack.enter_context(working_copies(params))
                stepped.append((params, work, self._directions(group, params, work, grads) if params else []))
            ratios = self._param_and_update_norms(stepped)
            for group, (params, work, directions) in zip(self.param_groups, stepped, strict=True):
                if params:
                    scales = [-float(group["lr"]) * self._clamped_trust_ratio(group, *ratios[id(p)]) for p in params]
                    foreach.mul_(directions, scales)
                    foreach.add_(work, directions)
        return loss

    def _directions(
        self, group: dict[str, Any], params: list[Tensor], work: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        for param in params:
            state = self.state[param]
            if "exp_avg" not in state:
                state.update(
                    step=torch.tensor(0.0, device="cpu"),
                    exp_avg=zeros_state_like(param),
                    exp_avg_sq=zeros_state_like(param),
                )
            state["step"] += 1
        first = [to_local(self.state[p]["exp_avg"]) for p in params]
        second = [to_local(self.state[p]["exp_avg_sq"]) for p in params]
        foreach.lerp_(first, grads, 1 - beta1)
        foreach.mul_(second, beta2)
        foreach.addcmul_(second, grads, grads, value=1 - beta2)
        steps = [float(self.state[p]["step"]) for p in params]
        corrected = group["bias_correction"]
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

    def _param_and_update_norms(
        self, stepped: list[tuple[list[Tensor], list[Tensor], list[Tensor]]]
    ) -> dict[int, tuple[float, float]]:
        """Return (|p|, |r|) of the logical tensors, by the parameter's id."""
        params = [p for group in self.param_groups for p in group["params"]]
        position = {id(p): i for i, p in enumerate(params)}
        rows = torch.zeros(len(params), 2, dtype=torch.float64, device=to_local(params[0]).device)
        for group_params, work, directions in stepped:
            if group_params:
                chosen = torch.tensor([position[id(p)] for p in group_params], device=rows.device)
                sums = torch.stack([square_sums(work), square_sums(directions)], dim=1)
                rows.index_copy_(0, chosen, sums.to(rows.device))
        rows = all_reduce_rows(rows, get_shard_groups(params), all_reduce=self.all_reduce).sqrt()
        return {id(p): (row[0], row[1]) for p, row in zip(params, rows.tolist(), strict=True)}

    @staticmethod
    def _clamped_trust_ratio(group: dict[str, Any], weight_norm: float, update_norm: float) -> float:
        if not (weight_norm > 0 and update_norm > 0):
            return 1.0
        return min(max(weight_norm / update_norm, group["min_coeff"]), group["max_coeff"])
