"""Reductions over the wire that go on while the backward pass computes.

FSDP2 has no streams on a CPU: a reduction returns when it is done, and the wire idles while
the next unit's gradients are computed, the processor while they travel.  Here a unit's
reduction is handed to a thread, and the backward pass ends when all of them have.  FSDP2
meanwhile sets ``.grad`` to the tensor that will hold the result.

So a reduction is done at once, as before, where something reads that tensor earlier: a
gradient to be added to, a hook on the parameter, a cast to another dtype.

One thread does them, in the order given, over a process group that nobody else uses: every
rank then runs the same collectives in the same order, whatever the main thread does meanwhile
on other groups.  A collective waits in C++ and sums in torch's operators, both without the
interpreter's lock.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from thalweg.comm.collectives.reducer import TrySubmit
from thalweg.parallel_dims import destroy_subgroup
from thalweg.zero.fsdp2.private_api import FSDPGroupHandle, is_in_backward, queue_backward_callback

_MAX_PENDING = 2  # reductions that wait at a time, which bounds the memory of their inputs


class AsyncReduction:
    """What hands the reductions of one model to the background: a queue, the thread that runs it, and its group."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._destroy_group = weakref.finalize(self, destroy_subgroup, process_group)
        self._destroy_group.atexit = False
        self._pending: list[Future[None]] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="thalweg-reduce")  # starts no thread yet
        self._callback_queued = False

    def make_try_submit(self, group: FSDPGroupHandle, output_dtype: torch.dtype) -> TrySubmit:
        """The ``try_submit`` of this unit's reducer, whose results are in ``output_dtype``."""

        def try_submit(work: Callable[[], None]) -> bool:
            if not is_in_backward() or group.reads_reduced_grads(output_dtype):
                self.drain()  # what is done now comes after what was given before
                return False
            self.submit(work)
            if not self._callback_queued:
                self._callback_queued = True
                queue_backward_callback(self.drain)
            return True

        return try_submit

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` after what was submitted before; waits while as many are unfinished as may be."""
        while len(self._pending) >= _MAX_PENDING:
            self._pending.pop(0).result()
        # Grad mode belongs to a thread: this one has never left the default.
        self._pending.append(self._executor.submit(torch.no_grad()(work)))

    def drain(self) -> None:
        """Wait for every reduction that was handed over; the first error of any of them is raised here."""
        self._callback_queued = False
        pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the thread, after what it is at, and its group."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pending = []
        self._destroy_group()
