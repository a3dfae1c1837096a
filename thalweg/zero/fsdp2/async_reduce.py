"""Reductions over the wire that go on while the backward pass computes.

FSDP2 has no streams on a CPU: a reduction returns when it is done, and the wire idles while
the next unit's gradients are computed, the processor while they travel.  Here a unit's
reduction is handed to a thread (:mod:`thalweg.comm.comm_thread`), and the backward pass ends
when all of them have.  FSDP2 meanwhile sets ``.grad`` to the tensor that will hold the result.

So a reduction is done at once, as before, where something reads that tensor earlier: a
gradient to be added to, a hook on the parameter, a cast to another dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from thalweg.comm.collectives.reducer import TrySubmit
from thalweg.comm.comm_thread import CommThread
from thalweg.zero.fsdp2.private_api import FSDPGroupHandle, is_in_backward, queue_backward_callback


class AsyncReduction:
    """What hands the reductions of one model to the background."""

    def __init__(self) -> None:
        self._comm_thread = CommThread()
        self._callback_queued = False

    def make_try_submit(self, group: FSDPGroupHandle, output_dtype: torch.dtype) -> TrySubmit:
        """The ``try_submit`` of this unit's reducer, whose results are in ``output_dtype``."""

        def try_submit(work: Callable[[], None]) -> bool:
            if not is_in_backward() or group.reads_reduced_grads(output_dtype):
                self.drain()  # what is done now comes after what was given before
                return False
            self._comm_thread.submit(work)
            if not self._callback_queued:
                self._callback_queued = True
                queue_backward_callback(self._on_backward_end)
            return True

        return try_submit

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        self.drain()

    def drain(self) -> None:
        """Wait for every reduction that was handed over."""
        self._callback_queued = False
        self._comm_thread.drain()

    def close(self) -> None:
        """End the thread."""
        self._comm_thread.close()
