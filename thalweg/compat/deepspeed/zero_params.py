"""``zero.Init`` and the small names beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from thalweg.deferred_init.context import Init
from thalweg.parallel_dims import init_distributed


class DeepSpeedInit(Init):
    """``zero.Init`` as Hugging Face uses it: the process group exists within it, for its loaders ask for ranks."""

    def __enter__(self) -> DeepSpeedInit:
        if self.enabled:
            init_distributed()
        super().__enter__()
        return self


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Nothing to do: a parameter that another module uses is whole while any unit that holds it runs."""


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: ``zero.Init`` replaces none of torch's."""
    return fn
