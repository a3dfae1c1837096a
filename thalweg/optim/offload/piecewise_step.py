"""An optimiser's own step, on pieces of parameters.

The streamed update must be the user's optimiser to the last bit, whatever its class and options.  So it does
not spell rules out: a *worker* of the very class steps over pieces (plain, flat tensors), each with a copy of
the options of its group and a view of its state.  That is right for elementwise optimisers and only for them;
``is_elementwise`` says which are known to be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.optim.algorithms.elementwise import ELEMENTWISE_OPTIMIZERS
from thalweg.optim.algorithms.lion import Lion


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser is of exactly a class whose update looks at each element alone."""
    cls = type(optimizer)
    torch_classes = {getattr(torch.optim, name, None) for name in ELEMENTWISE_OPTIMIZERS}
    return cls is Lion or cls in ELEMENTWISE_OPTIMIZERS.values() or cls in torch_classes


@dataclass
class SliceStep:
    """One piece to step: a group's options, master, gradient (of the master's dtype) and state.

    ``state`` is empty for a piece that was never stepped; afterwards it holds what the optimiser made.
    """

    group: dict[str, Any]
    master: Tensor
    grad: Tensor
    state: dict[str, Any]


class PiecewiseOptimizer:
    """Steps jobs with the class of ``optimizer``, which must be elementwise."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        assert is_elementwise(optimizer), type(optimizer)
        optimizer_class: Any = type(optimizer)
        placeholder = nn.Parameter(torch.zeros(1))
        self._inner: torch.optim.Optimizer = optimizer_class([placeholder])
        self._inner.defaults = optimizer.defaults
        self._initial_state = dict(self._inner.state.get(placeholder, {}))  # Adagrad makes its state when it is made

    @torch.no_grad()
    def step(self, slice_steps: Sequence[SliceStep]) -> None:
        """Update masters and states in place."""
        inner = self._inner
        members: dict[int, list[Tensor]] = {}
        groups: dict[int, dict[str, Any]] = {}
        inner.state = defaultdict(dict)
        for slice_step in slice_steps:
            param = slice_step.master.detach()
            param.grad = slice_step.grad
            members.setdefault(id(slice_step.group), []).append(param)
            groups[id(slice_step.group)] = slice_step.group
            inner.state[param] = slice_step.state
        inner.param_groups = [{**groups[key], "params": params} for key, params in members.items()]
        inner.step()
        inner.param_groups, inner.state = [], defaultdict(dict)

    def state_schema(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        """What a first step leaves as state of a parameter of ``dtype``: for each key the dtype of a tensor
        of the parameter's shape, or None for anything else (a step count)."""
        sample = torch.zeros(3, dtype=dtype)
        initial_state = {
            key: value.to(dtype).expand(3).clone() if value.shape == (1,) else value.clone()
            for key, value in self._initial_state.items()
        }
        slice_step = SliceStep(_clone_tensors(group), sample, torch.zeros_like(sample), initial_state)
        self.step([slice_step])
        return {
            key: value.dtype if isinstance(value, Tensor) and value.shape == sample.shape else None
            for key, value in slice_step.state.items()
        }


def _clone_tensors(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
