"""Collectives that go on while the backward pass computes the next unit's gradients.

One thread does them, in the order given, over a process group that nobody else uses: every
rank then runs the same collectives in the same order, whatever the main thread does meanwhile
on other groups.  A collective waits in C++ and sums in torch's operators, both without the
interpreter's lock.

The results are complete after :meth:`Background.drain`, which whoever submits has to see to
before anybody reads them.  At most ``depth`` wait at a time, which bounds the memory of their
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Background:
    """A queue of collectives and the thread that runs them."""

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._waiting: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` after what was submitted before; waits while ``depth`` are unfinished."""
        while len(self._waiting) >= self._depth:
            self._waiting.pop(0).result()
        if self._pool is None:  # at first use, so that a fork before it is harmless
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="thalweg-reduce")
        self._waiting.append(self._pool.submit(_without_grad, work))

    def drain(self) -> None:
        """Wait for everything submitted; the first error of any of it is raised here."""
        waiting, self._waiting = self._waiting, []
        failed = [error for future in waiting if (error := future.exception()) is not None]
        if failed:
            raise failed[0]

    def close(self) -> None:
        """End the thread, after what it is at."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._waiting = []


def _without_grad(work: Callable[[], None]) -> None:
    # Grad mode belongs to a thread: this one has never left the default.
    with torch.no_grad():
        work()
