"""``torch.optim``'s elementwise optimisers, stepping on local pieces (see ``dtensor_local.py``).

An update is elementwise when each element of the new parameter depends on that element's own history alone.
All the classes below are, so a shard is stepped exactly as that part of the whole parameter would be.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from thalweg.optim import dtensor_local, foreach
from thalweg.optim.algorithms.fused_adam import STEP_WITHOUT_CORRECTION
from thalweg.optim.algorithms.moment_codec import SCALE_SUFFIX, convert_moments
from thalweg.optim.dtensor_local import LocalStepMixin


def _has_low_bit_moments(param: Tensor, state: dict[str, Any]) -> bool:
    dtype, keys = dtensor_local.default_state_dtype(param), ("exp_avg", "exp_avg_sq")
    # torch casts 8-bit codes to the parameter's dtype where it loads them: only their scales tell.
    return any(key + SCALE_SUFFIX in state or (key in state and state[key].dtype != dtype) for key in keys)


class _AdamBase(LocalStepMixin):
    """Adds ``bias_correction=False``, which torch's Adam does not have (DeepSpeed's does)."""

    def __init__(self, params: Any, *, bias_correction: bool = True, **hyper: Any) -> None:
        super().__init__(params, **hyper)  # pyright: ignore[reportCallIssue]
        self.defaults["bias_correction"] = bias_correction  # pyright: ignore[reportAttributeAccessIssue]
        for group in self.param_groups:  # pyright: ignore[reportAttributeAccessIssue]
            group.setdefault("bias_correction", bias_correction)

    @property
    def takes_found_inf(self) -> bool:
        """Whether a step goes by the tensor ``found_inf``, as of torch's GradScaler."""
        return all(group["fused"] for group in self.param_groups)  # pyright: ignore[reportAttributeAccessIssue]

    def _init_group(self, group: dict[str, Any], *lists: list[Any], **named: list[Any]) -> Any:
        for param in group["params"]:
            state = self.state.get(param)  # pyright: ignore[reportAttributeAccessIssue]
            if state and _has_low_bit_moments(param, state):  # as a checkpoint may have brought them
                convert_moments(param, state, "fp32")
        result = super()._init_group(group, *lists, **named)
        if not group.get("bias_correction", True):
            steps = [*lists, *named.values()][-1]
            if steps:
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


class SGD(dtensor_local.StepMixin, torch.optim.SGD):
    """SGD with momentum.

    torch's class writes its momentum buffers back by parameter after the kernel, so its lists cannot be
    exchanged; the step is spelt out here over torch's functional form.
    """

    def _update_params(self) -> None:
        keys = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] if group["momentum"] else {} for p in params]
            buffers: list[Tensor | None] = [s.get("momentum_buffer") for s in states]
            buffers = [b if b is None else dtensor_local.to_local(b) for b in buffers]
            options = {key: group[key] for key in keys}
            with dtensor_local.working_copies(params) as (work, grads):
                for is_new in (True, False):  # the fused kernel wants all buffers or none
                    chosen = [i for i, buffer in enumerate(buffers) if (buffer is None) == is_new]
                    some_work, some_grads = [work[i] for i in chosen], [grads[i] for i in chosen]
                    momenta: list[Any] = [buffers[i] for i in chosen]
                    if chosen:
                        sgd(some_work, some_grads, momenta, has_sparse_grad=False, **options)
                    if is_new and group["momentum"]:
                        for i, buffer in zip(chosen, momenta, strict=True):
                            states[i]["momentum_buffer"] = dtensor_local.as_dtensor_like(buffer, params[i])


ELEMENTWISE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls for cls in (Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)
}

_FUSED = ("Adam", "AdamW", "OneBitAdam", "SGD")  # on the CPU and on every accelerator


def has_fused_kernel(name: str, params: Iterable[Tensor]) -> bool:
    """Whether torch has a fused kernel of the optimiser ``name`` for all of ``params``."""
    on_all_devices, on_cpu = name in _FUSED, name in (*_FUSED, "Adagrad")
    return all((on_cpu if p.device.type == "cpu" else on_all_devices) and p.is_floating_point() for p in params)
