"""``torch.optim``'s elementwise optimisers, stepping on local pieces (see ``dtensor_local.py``).

An update is elementwise when each element of the new parameter depends on that element's own history alone.
All the classes below are, so a shard is stepped exactly as that part of the whole parameter would be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thalweg.optim import foreach
from thalweg.optim.algorithms.fused_adam import STEP_WITHOUT_CORRECTION
from thalweg.optim.algorithms.moment_codec import SCALE_SUFFIX, convert_moments
from thalweg.optim.dtensor_local import LocalStepMixin, default_state_dtype


def _has_low_bit_moments(param: Tensor, state: dict[str, Any]) -> bool:
    dtype, keys = default_state_dtype(param), ("exp_avg", "exp_avg_sq")
    # torch casts 8-bit codes to the parameter's dtype where it loads them: only their scales tell.
    return any(key + SCALE_SUFFIX in state or (key in state and state[key].dtype != dtype) for key in keys)


class _AdamBase(LocalStepMixin):
    """Adds ``bias_correction=False``, which torch's Adam does not have (DeepSpeed's does)."""

    def __init__(self, params: Any, *, bias_correction: bool = True, **hyper: Any) -> None:
        super().__init__(params, **hyper)  # pyright: ignore[reportCallIssue]
        self.defaults["bias_correction"] = bias_correction  # pyright: ignore[reportAttributeAccessIssue]
        for group in self.param_groups:  # pyright: ignore[reportAttributeAccessIssue]
            group.setdefault("bias_correction", bias_correction)

    def _update_params(self) -> None:
        for param, state in self.state.items():  # pyright: ignore[reportAttributeAccessIssue]
            if _has_low_bit_moments(param, state):  # as a checkpoint may have brought them
                convert_moments(param, state, "fp32")
        super()._update_params()

    def _init_group(self, group: dict[str, Any], *lists: list[Any], **named: list[Any]) -> Any:
        result = super()._init_group(group, *lists, **named)  # pyright: ignore[reportAttributeAccessIssue]
        steps = [*lists, *named.values()][-1]
        if steps and not group.get("bias_correction", True):
            foreach.add_(steps, 1.0)
            steps[:] = [torch.full_like(step, STEP_WITHOUT_CORRECTION) for step in steps]
        return result


class Adam(_AdamBase, torch.optim.Adam):
    """Adam with the L2 term in the gradient (Kingma and Ba, 2015)."""


class AdamW(_AdamBase, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""


class Adagrad(LocalStepMixin, torch.optim.Adagrad):
    """Adagrad (Duchi et al., 2011)."""


class Adadelta(LocalStepMixin, torch.optim.Adadelta):
    """Adadelta (Zeiler, 2012)."""


class Adamax(LocalStepMixin, torch.optim.Adamax):
    """Adamax (Kingma and Ba, 2015, section 7)."""


class ASGD(LocalStepMixin, torch.optim.ASGD):
    """Averaged SGD (Polyak and Juditsky, 1992)."""


class NAdam(LocalStepMixin, torch.optim.NAdam):
    """Adam with Nesterov momentum (Dozat, 2016)."""


class RAdam(LocalStepMixin, torch.optim.RAdam):
    """Rectified Adam (Liu et al., 2020)."""


class RMSprop(LocalStepMixin, torch.optim.RMSprop):
    """RMSprop (Tieleman and Hinton, 2012)."""


class Rprop(LocalStepMixin, torch.optim.Rprop):
    """Resilient propagation (Riedmiller and Braun, 1993)."""


class SGD(LocalStepMixin, torch.optim.SGD):
    """SGD with momentum."""


ELEMENTWISE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls for cls in (Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)
}

_FUSED_DEVICES = {"Adam": ("cpu", "cuda"), "AdamW": ("cpu", "cuda"), "SGD": ("cpu", "cuda"), "Adagrad": ("cpu",)}


def has_fused_kernel(name: str, params: Iterable[Tensor]) -> bool:
    """Whether torch has a fused kernel of the optimiser ``name`` for all of ``params``."""
    devices = _FUSED_DEVICES.get(name, ())
    return all(p.device.type in devices and p.is_floating_point() for p in params)
