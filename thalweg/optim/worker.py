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

from thalweg.optim.elementwise import ELEMENTWISE
from thalweg.optim.lion import Lion


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser is of exactly a class whose update looks at each element alone."""
    cls = type(optimizer)
    theirs = {getattr(torch.optim, name, None) for name in ELEMENTWISE}
    return cls is Lion or cls in ELEMENTWISE.values() or cls in theirs


@dataclass
class Job:
    """One piece to step: a group's options, master, gradient (of the master's dtype) and state.

    ``state`` is empty for a piece that was never stepped; afterwards it holds what the optimiser made.
    """

    group: dict[str, Any]
    master: Tensor
    grad: Tensor
    state: dict[str, Any]


class Worker:
    """Steps jobs with the class of ``optimizer``, which must be elementwise."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        assert is_elementwise(optimizer), type(optimizer)
        make: Any = type(optimizer)
        one = nn.Parameter(torch.zeros(1))
        self._inner: torch.optim.Optimizer = make([one])
        self._inner.defaults = optimizer.defaults
        self._born_with = dict(self._inner.state.get(one, {}))  # Adagrad makes its state when it is made

    @torch.no_grad()
    def step(self, jobs: Sequence[Job]) -> None:
        """Update masters and states in place."""
        inner = self._inner
        members: dict[int, list[Tensor]] = {}
        groups: dict[int, dict[str, Any]] = {}
        inner.state = defaultdict(dict)
        for job in jobs:
            param = job.master.detach()
            param.grad = job.grad
            members.setdefault(id(job.group), []).append(param)
            groups[id(job.group)] = job.group
            inner.state[param] = job.state
        inner.param_groups = [{**groups[key], "params": params} for key, params in members.items()]
        inner.step()
        inner.param_groups, inner.state = [], defaultdict(dict)

    def schema(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        """What a first step leaves as state of a parameter of ``dtype``: for each key the dtype of a tensor
        of the parameter's shape, or None for anything else (a step count)."""
        probe = torch.zeros(3, dtype=dtype)
        born_with = {
            key: value.to(dtype).expand(3).clone() if value.shape == (1,) else value.clone()
            for key, value in self._born_with.items()
        }
        job = Job(_without_effect(group), probe, torch.zeros_like(probe), born_with)
        self.step([job])
        return {
            key: value.dtype if isinstance(value, Tensor) and value.shape == probe.shape else None
            for key, value in job.state.items()
        }


def _without_effect(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
