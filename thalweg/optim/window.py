"""The accumulation window: the micro-batches between two updates.

Only a step closes a window.  ``engine.step()`` is called after every micro-batch and
closes it when it is full; the optimizer's own ``step()`` closes it whatever it holds.
A window closed early (the ragged tail of an epoch) still means the mean over the
micro-batches that it did see, as one big batch of them would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor


class Window:
    """Counts micro-batches; ``size`` is ``gradient_accumulation_steps``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.micro_steps = 0
        # Micro-batches of the window closed last; a loop that never counts them is taken to fill it.
        self.last_size = size
        self._seen = 0
        self._open = False
        self._scaled = False
        self._forced: bool | None = None
        # True while the engine itself runs a backward pass, whose loss it has scaled.
        self.in_backward = False
        # Whether that pass keeps its graph, so that another may follow on it.
        self.retained = False
        # The loss of that pass as it came from the model, on this rank.
        self.loss: Tensor | None = None
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.at_close: list[Callable[[], None]] = []
        # What the gradient of a window that ends must be multiplied by, where only its end tells; collective.
        self.factor_at_end: Callable[[], float] | None = None

    def between_passes(self, call: Callable[[], None]) -> None:
        """Call ``call`` before and after each of the engine's backward passes, and after each update."""
        for calls in (self.before_backward, self.after_backward, self.at_close):
            calls.append(call)

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch at hand is expected to be the window's last."""
        return self._seen + 1 >= self.size if self._forced is None else self._forced

    @property
    def mean_factor(self) -> float:
        """What the accumulated gradient must be multiplied by to be the window's mean.

        Losses were divided by ``size`` in the backward pass, when the number that would
        come was not known yet.
        """
        seen = self._num_seen
        return self.size / seen if self._scaled and 0 < seen != self.size else 1.0

    @property
    def is_even(self) -> bool:
        """Whether the gradient will be the window's mean as soon as its last backward pass has run."""
        return self.mean_factor == 1.0 and (self.factor_at_end is None or self.size == 1)

    def final_factor(self) -> float:
        """:attr:`mean_factor`, of a window that ends now; collective."""
        return self.mean_factor if self.factor_at_end is None else self.factor_at_end()

    @property
    def _num_seen(self) -> int:
        return self._seen + (1 if self._open else 0)

    def force(self, last: bool | None) -> None:
        """Declare that the micro-batch at hand is (not) the window's last; None counts again."""
        self._forced = last

    @contextmanager
    def backward(
        self, *, scaled: bool, retained: bool, count: int = 0, loss: Tensor | None = None
    ) -> Iterator[None]:
        """The engine's backward pass of the micro-batch at hand, its loss divided by ``size`` or not.

        ``count``: those of as many micro-batches at once, which it then counts too.
        """
        self.loss = None if loss is None else loss.detach()
        for call in self.before_backward:
            call()
        self._open = True
        self._scaled = self._scaled or scaled
        self.in_backward, self.retained = True, retained
        try:
            yield
            for call in self.after_backward:
                call()
            for _ in range(count):
                self.end_micro_batch()
        finally:
            self.in_backward, self.loss = False, None

    def end_micro_batch(self) -> bool:
        """Count the micro-batch; whether it completes the window."""
        last = self.is_last
        self._seen += 1
        self.micro_steps += 1
        self._open = False
        return last

    def close(self) -> None:
        """Begin a new window."""
        self.last_size = self._num_seen or self.size
        self._seen = 0
        self._open = self._scaled = False
        self._forced = None
        for call in self.at_close:
            call()
