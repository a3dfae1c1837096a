"""Reductions over the wire that go on while the backward pass computes.

FSDP2 has no streams on a CPU: a reduction returns when it is done, and the wire idles while
the next unit's gradients are computed, the processor while they travel.  Here a unit's
reduction is handed to a thread (:mod:`thalweg.comm.background`), and the backward pass ends
when all of them have.  FSDP2 meanwhile sets ``.grad`` to the tensor that will hold the result.

So a reduction is done at once, as before, where something reads that tensor earlier: a
gradient to be added to, a hook on the parameter, a cast to another dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from thalweg.comm.background import Background
from thalweg.comm.reducer import Later
from thalweg.zero._fsdp2 import Group, after_backward, in_backward


class Overlap:
    """What hands the reductions of one model to the background."""

    def __init__(self) -> None:
        self._background = Background()
        self._ending = False

    def later(self, group: Group, output_dtype: torch.dtype) -> Later:
        """The ``later`` of this unit's reducer, whose results are in ``output_dtype``."""

        def take(work: Callable[[], None]) -> bool:
            if not in_backward() or group.reads_reduced(output_dtype):
                self.drain()  # what is done now comes after what was given before
                return False
            self._background.submit(work)
            if not self._ending:
                self._ending = True
                after_backward(self._end)
            return True

        return take

    def _end(self) -> None:
        self._ending = False
        self.drain()

    def drain(self) -> None:
        """Wait for every reduction that was handed over."""
        self._ending = False
        self._background.drain()

    def close(self) -> None:
        """End the thread."""
        self._background.close()
