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


class AccumulationWindow:
    """Counts micro-batches; ``num_micro_batches`` is ``gradient_accumulation_steps``."""

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.micro_steps = 0
        # Micro-batches of the window closed last; a loop that never counts them is taken to fill it.
        self.last_num_micro_batches = num_micro_batches
        self._num_ended = 0
        self._backward_started = False
        self._loss_divided = False
        self._is_last_override: bool | None = None
        # True while the engine itself runs a backward pass, whose loss it has scaled.
        self.in_backward = False
        # Whether that pass keeps its graph, so that another may follow on it.
        self.retain_graph = False
        # The loss of that pass as it came from the model, on this rank.
        self.loss: Tensor | None = None
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.on_close: list[Callable[[], None]] = []
        # What the gradient of a window that ends must be multiplied by, where only its end tells; collective.
        self.final_factor_fn: Callable[[], float] | None = None

    def add_pass_callback(self, callback: Callable[[], None]) -> None:
        """Call ``call`` before and after each of the engine's backward passes, and after each update."""
        for callbacks in (self.before_backward, self.after_backward, self.on_close):
            callbacks.append(callback)

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch at hand is expected to be the window's last."""
        return (
            self._num_ended + 1 >= self.num_micro_batches if self._is_last_override is None else self._is_last_override
        )

    @property
    def mean_factor(self) -> float:
        """What the accumulated gradient must be multiplied by to be the window's mean.

        Losses were divided by ``num_micro_batches`` in the backward pass, when the number that would
        come was not known yet.
        """
        num_done = self._num_done
        return (
            self.num_micro_batches / num_done if self._loss_divided and 0 < num_done != self.num_micro_batches else 1.0
        )

    @property
    def needs_no_rescale(self) -> bool:
        """Whether the gradient will be the window's mean as soon as its last backward pass has run."""
        return self.mean_factor == 1.0 and (self.final_factor_fn is None or self.num_micro_batches == 1)

    def final_factor(self) -> float:
        """:attr:`mean_factor`, of a window that ends now; collective."""
        return self.mean_factor if self.final_factor_fn is None else self.final_factor_fn()

    @property
    def _num_done(self) -> int:
        return self._num_ended + (1 if self._backward_started else 0)

    def set_is_last(self, is_last: bool | None) -> None:
        """Declare that the micro-batch at hand is (not) the window's last; None counts again."""
        self._is_last_override = is_last

    @contextmanager
    def backward(
        self,
        *,
        loss_divided: bool,
        retain_graph: bool,
        num_micro_batches: int = 0,
        loss: Tensor | None = None,
    ) -> Iterator[None]:
        """The engine's backward pass of the micro-batch at hand, its loss divided by the window's size or not.

        ``num_micro_batches``: those of as many micro-batches at once, which it then counts too.
        """
        self.loss = None if loss is None else loss.detach()
        for callback in self.before_backward:
            callback()
        self._backward_started = True
        self._loss_divided = self._loss_divided or loss_divided
        self.in_backward, self.retain_graph = True, retain_graph
        try:
            yield
            for callback in self.after_backward:
                callback()
            for _ in range(num_micro_batches):
                self.end_micro_batch()
        finally:
            self.in_backward, self.loss = False, None

    def end_micro_batch(self) -> bool:
        """Count the micro-batch; whether it completes the window."""
        last = self.is_last
        self._num_ended += 1
        self.micro_steps += 1
        self._backward_started = False
        return last

    def close(self) -> None:
        """Begin a new window."""
        self.last_num_micro_batches = self._num_done or self.num_micro_batches
        self._num_ended = 0
        self._backward_started = self._loss_divided = False
        self._is_last_override = None
        for callback in self.on_close:
            callback()
