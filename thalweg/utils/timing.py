"""Wall-clock spans: where the seconds of a step go; and waiting for what comes to be."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(condition: Callable[[], object], seconds: float, interval: float = 0.05) -> bool:
    """Ask again and again until ``condition`` holds; whether it did within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(interval)
    return bool(holds)


class PausedCollector:
    """Around imports: the garbage collector would walk what libraries make, and keep, again and again."""

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()


class PhaseTimer:
    """Adds up the wall-clock seconds of named phases between two calls of :meth:`pop_seconds`.

    Spans may nest and may repeat: each name gets the sum of its own spans, inclusive of
    whatever ran inside, so nested names do not add up to the whole.  ``synchronize`` is
    called at both edges of a span (``torch.accelerator.synchronize`` on a GPU, where kernels
    run behind the host's back); it costs throughput, which is why a timer that nobody
    reads should be built with ``enabled=False``.  One timer serves one thread.
    """

    def __init__(self, *, enabled: bool = True, synchronize: Callable[[], None] | None = None) -> None:
        self.enabled = enabled
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time spent inside the block to ``name``; also when the block raises."""
        if not self.enabled:
            yield
            return
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def pop_seconds(self) -> dict[str, float]:
        """Return seconds by phase since the last call, in order of first use, and start anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()
