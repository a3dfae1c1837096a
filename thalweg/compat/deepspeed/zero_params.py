"""``zero.Init`` and the small names beside it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from thalweg.deferred_init.context import Init
from thalweg.parallel_dims import init_distributed


class DeepSpeedInit(Init):
    """``zero.Init`` as Hugging Face uses it: the process group exists within it, for its loaders ask for ranks."""

    def __enter__(self) -> DeepSpeedInit:
        if self.enabled:
            init_distributed()
        super().__enter__()
        return self


class ZeRORuntimeException(Exception):
    """What DeepSpeed raises where a checkpoint does not fit; Thalweg loads it or raises a CheckpointError."""


class ZeroParamStatus(Enum):
    """Whether a parameter is whole, see :mod:`.param_views`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: ``zero.Init`` replaces none of torch's."""
    return fn
