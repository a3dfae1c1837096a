"""Collectives that go on while the backward pass computes the next unit's gradients.

One thread does them, in the order given, over a process group that nobody else uses: every
rank then runs the same collectives in the same order, whatever the main thread does meanwhile
on other groups.  A collective waits in C++ and sums in torch's operators, both without the
interpreter's lock.

The results are complete after :meth:`CommThread.drain`, which whoever submits has to see to
before anybody reads them.  At most ``max_pending`` wait at a time, which bounds the memory of their
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class CommThread:
    """A queue of collectives and the thread that runs them."""

    def __init__(self, max_pending: int = 2) -> None:
        self._max_pending = max_pending
        self._pending: list[Future[None]] = []
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` after what was submitted before; waits while ``max_pending`` are unfinished."""
        while len(self._pending) >= self._max_pending:
            self._pending.pop(0).result()
        if self._executor is None:  # at first use, so that a fork before it is harmless
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="thalweg-reduce")
        self._pending.append(self._executor.submit(_run_without_grad, work))

    def drain(self) -> None:
        """Wait for everything submitted; the first error of any of it is raised here."""
        pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the thread, after what it is at."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        self._pending = []


def _run_without_grad(work: Callable[[], None]) -> None:
    # Grad mode belongs to a thread: this one has never left the default.
    with torch.no_grad():
        work()
