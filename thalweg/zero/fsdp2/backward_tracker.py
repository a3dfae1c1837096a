"""Notices when a backward pass has gone through a unit for the last time.

A unit that the forward pass used twice is passed twice in the backward pass, and is reduced each time; only
then are its gradients complete.  So uses with gradients are counted in the forward pass and taken off in the
backward pass.  A count that is off (a forward pass without a backward pass) makes ``complete`` come later, not
wrong: the caller looks again when the backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from thalweg.zero.fsdp2.private_api import FSDPGroupHandle

BeforeReduce = Callable[[list[nn.Parameter]], None]
AfterReduce = Callable[[str, list[nn.Parameter], bool], None]


class BackwardTracker:
    """Counts one unit's uses, and calls ``before(parameters)`` and ``after(unit, parameters, complete)`` for
    each backward pass through it; ``handles`` remove its hooks."""

    def __init__(self, group: FSDPGroupHandle, before: BeforeReduce, after: AfterReduce) -> None:
        self._group, self._before, self._after, self._num_pending_uses = group, before, after, 0
        module: Any = group.module
        self.handles = [module.register_forward_hook(self._on_forward)]
        group.add_reduction_hooks(self._on_before_reduce, self._on_after_reduce)

    def reset(self) -> None:
        """Forget forward passes that had no backward pass."""
        self._num_pending_uses = 0

    def _on_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._num_pending_uses += 1

    def _on_before_reduce(self) -> None:
        self._before(self._parameters)

    def _on_after_reduce(self) -> None:
        self._num_pending_uses = max(0, self._num_pending_uses - 1)
        self._after(self._group.name, self._parameters, self._num_pending_uses == 0)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [param.sharded_param for param in self._group.params]
