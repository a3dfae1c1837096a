"""A computation with a derivative of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _WithBackward(torch.autograd.Function):
    """``forward(x)``, whose gradient is ``backward`` of the result's, whatever lies between."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.own_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.own_backward(grads[0]), None, None


def with_backward(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward(x)`` for autograd to take ``backward`` as its derivative; a result must not be ``x`` itself."""
    return _WithBackward.apply(x, forward, backward)  # type: ignore[return-value]
