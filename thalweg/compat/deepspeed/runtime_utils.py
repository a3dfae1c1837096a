"""Small functions of ``deepspeed.utils.torch`` and ``deepspeed.runtime.utils``."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.accelerator import get_accelerator
from thalweg.data.sampler import rank_slice_bounds
from thalweg.launch.cpu_affinity import parse_list


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is neither older nor newer."""
    have = _numbers(torch.__version__)
    is_new_enough = min_version is None or have >= _numbers(min_version)
    return is_new_enough and (max_version is None or have <= _numbers(max_version))


def _numbers(version: float | str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", str(version))
    return tuple(map(int, found.group().split(".")[:2])) if found else ()


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` with a span of its name in torch's profiler."""
    return torch.profiler.record_function(func.__qualname__)(func)


def parse_range_list(range_str: str) -> list[int]:
    """``0,2-4`` as [0, 2, 3, 4].

    Raises:
        ValueError: a range that is none, or numbers that do not grow.
    """
    numbers = [number for item in range_str.split(",") for number in parse_list(item, "a list of ranges")]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"{range_str!r}: write each number once, the smallest first")
    return numbers


def is_current_accelerator_supported() -> bool:
    """Whether this accelerator is known; every one that torch names is."""
    return True


def is_model_parallel_parameter(param: Tensor) -> bool:
    """Whether a rank holds a part of it for itself; tensor ranks share theirs as a DTensor."""
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


def set_random_seed(seed: int) -> None:
    """Seed every generator."""
    import random

    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call."""
    values = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(values)})"


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where each of ``num_parts`` runs of equally many items begins, and the end."""
    return [*(rank_slice_bounds(num_items, part, num_parts)[0] for part in range(num_parts)), num_items]


def clip_grad_norm_(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2, mpu: Any = None) -> Any:
    """torch's."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
