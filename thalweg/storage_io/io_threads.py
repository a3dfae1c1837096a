"""Threads that move bytes while Python computes, and the tickets they give out.

``preadv`` and ``pwritev`` release the interpreter, so a handful of threads keeps a disk busy; what they cost
is the hand-over, some 30 us a block.  Threads start at the first transfer, never at import, and end at
``close`` or with the interpreter.  A forked child has none of its parent's threads: it gets its own at its
first transfer, and waiting there for a ticket of the parent is an error, not a hang.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class IoFuture:
    """Transfers under way.  :meth:`wait` returns when all are done, or raises the first one's error."""

    __slots__ = ("_futures", "_pid")

    def __init__(self, futures: Iterable[Future[Any]] = ()) -> None:
        self._futures = tuple(futures)
        self._pid = os.getpid()

    def wait(self) -> None:
        """Return when the bytes have moved; call it again at will.

        Raises:
            SwapError: a transfer failed.
        """
        futures, error = self._futures, None
        if futures and self._pid != os.getpid():
            raise RuntimeError("a transfer begun before a fork belongs to the parent process")
        for future in futures:
            # Every part is waited for, so that nobody writes into the buffer after an error was raised.
            error = error or future.exception()
        if error is not None:
            raise error
        self._futures = ()

    def wait_ignoring_errors(self) -> None:
        """As :meth:`wait`, but an error is left for it to raise: for buffers that must be at rest."""
        for future in self._futures:
            future.exception()


def combine_futures(futures: Iterable[IoFuture]) -> IoFuture:
    """One ticket for all of ``futures``."""
    return IoFuture(inner_future for future in futures for inner_future in future._futures)


class IoThreadPool:
    """At most ``num_threads`` threads that run calls in the order in which they came; each runs ``initializer``
    first."""

    def __init__(
        self, num_threads: int, name: str = "thalweg-io", initializer: Callable[[], None] | None = None
    ) -> None:
        self.num_threads, self._name, self._initializer = num_threads, name, initializer
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``call(*args)`` on a thread."""
        if self._pid != os.getpid():
            self._lock, self._pool, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_threads, self._name, self._initializer)
            return self._pool.submit(call, *args)

    def close(self) -> None:
        """Finish what was begun and end the threads."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            # The last one to hold a swap file may be its own transfer; a thread cannot wait for itself.
            pool.shutdown(wait=not threading.current_thread().name.startswith(self._name))


class IoThroughput:
    """Bytes moved one way, counted by several threads."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """A transfer of ``nbytes`` is over."""
        with self._lock:
            self.nbytes += nbytes
