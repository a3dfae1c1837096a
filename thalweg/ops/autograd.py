"""A computation with a derivative of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


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


def run_in_clean_thread(function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, run without gradients in a thread with the same number of torch threads.

    Autocast, inference mode, functorch levels, dispatch modes, saved-tensor hooks and grad mode all belong to a thread,
    so a fresh thread has none of them.  Without it a trial product inside a selective checkpoint would be recorded as
    the model's own, and the recomputation would be handed its result.
    """
    with ThreadPoolExecutor(1, "thalweg-isolated", torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.submit(torch.no_grad()(function), *args).result()
