"""Inputs of checkpointed units that leave the device, as events: what `remat/offload.py` does to a tensor.

A tensor that is saved is copied into a buffer and free at once; at most ``depth`` buffers are on their way.
Coming back it is a new tensor, and ``depth`` of those before it are read ahead.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from thalweg.plan.tape import Tape

_DEPTH = 2


class _Away:
    """A tensor that was put away; a fake of its shape comes back."""

    def __init__(self, saver: EventSaver, tensor: Tensor, before: weakref.ref[_Away] | None) -> None:
        self._saver, self._before = saver, before
        self._shape, self._dtype, self.num_bytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.read = 0
        weakref.finalize(self, saver.died, tensor.nbytes).atexit = False

    def read_ahead(self) -> None:
        """Take the memory that the bytes come back into."""
        if not self.read:
            self.read = self._saver.tape.note(self.num_bytes, "activations")

    def fetch(self) -> Tensor:
        """The tensor again."""
        saver = self._saver
        saver.settle()
        if self.read:
            saver.tape.drop(self.read)
            self.read = 0
        kept = self._before
        for _ in range(_DEPTH):
            earlier = None if kept is None else kept()
            if earlier is None:
                break
            earlier.read_ahead()
            kept = earlier._before
        return torch.empty(self._shape, dtype=self._dtype)


class EventSaver:
    """A :class:`thalweg.remat.Saver` that writes events on a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._last: weakref.ref[_Away] | None = None
        self._leaving: deque[int] = deque()
        self._away = self.most_away = self.put_away = 0

    def save(self, tensor: Tensor) -> _Away:
        """Put a tensor away."""
        kept = _Away(self, tensor, self._last)
        self._last = weakref.ref(kept)
        self._away += tensor.nbytes
        self.put_away += tensor.nbytes
        self.most_away = max(self.most_away, self._away)
        self._leaving.append(self.tape.note(tensor.nbytes, "buffers"))
        while len(self._leaving) > _DEPTH:
            self.tape.drop(self._leaving.popleft())
        return kept

    def settle(self) -> None:
        """The backward pass begins: nothing is on its way out."""
        while self._leaving:
            self.tape.drop(self._leaving.popleft())

    def died(self, num_bytes: int) -> None:
        """The graph that needed a tensor is gone."""
        self._away -= num_bytes
