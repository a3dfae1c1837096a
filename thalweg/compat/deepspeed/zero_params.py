"""The small names beside ``zero.Init``."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class ZeRORuntimeException(Exception):
    """What DeepSpeed raises where a checkpoint does not fit, which Thalweg loads or answers with a CheckpointError; and
    for a program's own optimizer with offload, which Thalweg takes unless ``zero_force_ds_cpu_optimizer`` is set."""


class ZeroParamStatus(Enum):
    """Whether a parameter is whole, see :mod:`.param_views`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: ``zero.Init`` replaces none of torch's."""
    return fn
