"""An optimiser that the user has built, made to step on local pieces.

``torch.optim``'s own classes run on ``DTensor`` s, but slowly (5 to 8% of a step in dispatching, and torch's
default on a CPU is a loop of unfused operations), and three of them not at all or wrongly (Rprop, Adafactor,
Muon). Each has a counterpart here with the same groups and the same state, so an object of exactly such a
class is turned into its counterpart. Any other class, a user's own or a library's, is left as it is.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import nn

from thalweg.optim.algorithms.adafactor import Adafactor
from thalweg.optim.algorithms.elementwise import ELEMENTWISE_OPTIMIZERS, has_fused_kernel
from thalweg.optim.algorithms.muon import Muon


def to_local_optimizer(
    optimizer: torch.optim.Optimizer, *, replicate_group: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """Return ``optimizer`` itself, its class exchanged for the one here that steps on local pieces, if any.

    Call it when its groups hold the final, sharded parameters. Groups, state, hooks and a schedule's hold on
    it stay. Where neither ``fused`` nor ``foreach`` was chosen, the fused kernel is, where there is one.
    ``replicate_group``: see :class:`.algorithms.muon.Muon`.
    """
    torch_class = type(optimizer)
    local_classes = {**ELEMENTWISE_OPTIMIZERS, "Adafactor": Adafactor, "Muon": Muon}
    local_class = local_classes.get(torch_class.__name__)
    if local_class is None or torch_class is not getattr(torch.optim, torch_class.__name__, None):
        return optimizer
    # torch installs its hooks around a class's step when the first object of it is made.
    template = local_class([nn.Parameter(torch.zeros(1, 1))])
    optimizer.__class__ = local_class
    if inspect.unwrap(local_class.step) is not inspect.unwrap(torch_class.step):
        # A torch schedule has put a wrapper of the old class's step onto the object; the new one needs none.
        optimizer.__dict__.pop("step", None)
    if isinstance(optimizer, Muon):
        optimizer.configure_like_torch(replicate_group)
    for key, value in vars(template).items():
        vars(optimizer).setdefault(key, value)
    for group in optimizer.param_groups:
        kernel_not_chosen = group.get("fused") is None and group.get("foreach") is None
        if kernel_not_chosen and has_fused_kernel(torch_class.__name__, group["params"]):
            group["fused"] = True
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                if "step" in state:
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)
    return optimizer
