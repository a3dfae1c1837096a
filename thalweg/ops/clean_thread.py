"""Run a function as if nobody had set anything up around it.

Autocast, inference mode, functorch levels, dispatch modes, saved-tensor hooks and grad mode
all belong to a thread, so a fresh thread has none of them.  Without it a trial product
inside a selective checkpoint would be recorded as the model's own, and the recomputation
would be handed its result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def run_in_clean_thread(function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, run without gradients in a thread with the same number of torch threads."""
    num_threads = torch.get_num_threads()
    results: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            torch.set_num_threads(num_threads)
            with torch.no_grad():
                results.append(function(*args))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="thalweg-isolated")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
