"""Run a function as if nobody had set anything up around it.

Autocast, inference mode, functorch levels, dispatch modes, saved-tensor hooks and grad mode
all belong to a thread, so a fresh thread has none of them.  Without it a trial product
inside a selective checkpoint would be recorded as the model's own, and the recomputation
would be handed its result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def run_in_clean_thread(function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, run without gradients in a thread with the same number of torch threads."""
    with ThreadPoolExecutor(1, "thalweg-isolated", torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.submit(torch.no_grad()(function), *args).result()
