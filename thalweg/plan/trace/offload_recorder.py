"""Inputs of checkpointed units that leave the device, as events: what
`activation_checkpointing/offload.py` does to a tensor.

A tensor that is saved is copied into a buffer and free at once; at most two buffers are on their way.
Coming back it is a new tensor, and the two before it are read ahead.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from thalweg.activation_checkpointing.offload import READ_AHEAD_DEPTH, ReadAheadOffloader
from thalweg.plan.trace.alloc_recorder import AllocationRecorder


class _OffloadedFake:
    """A tensor that was offloaded; a fake of its shape comes back."""

    def __init__(self, recorder: OffloadRecorder, tensor: Tensor) -> None:
        self._recorder = recorder
        self._shape, self._dtype, self.num_bytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.read_id = 0
        weakref.finalize(self, recorder.on_freed, tensor.nbytes).atexit = False

    def read_ahead(self) -> None:
        """Take the memory that the bytes come back into."""
        if not self.read_id:
            self.read_id = self._recorder.alloc_recorder.record_alloc(self.num_bytes, "activations")

    def fetch(self) -> Tensor:
        """The tensor again."""
        recorder = self._recorder
        recorder.finish_writes()
        if self.read_id:
            recorder.alloc_recorder.record_free(self.read_id)
            self.read_id = 0
        recorder.on_fetch(self)
        return torch.empty(self._shape, dtype=self._dtype)


class OffloadRecorder(ReadAheadOffloader):
    """A :class:`thalweg.activation_checkpointing.ActivationOffloader` that writes events to a recorder."""

    def __init__(self, alloc_recorder: AllocationRecorder) -> None:
        super().__init__()
        self.alloc_recorder = alloc_recorder
        self._in_flight: deque[int] = deque()
        self._current_bytes = self.peak_offloaded_bytes = self.offloaded_bytes = 0

    def save(self, tensor: Tensor) -> _OffloadedFake:
        """Offload a tensor."""
        offloaded = _OffloadedFake(self, tensor)
        self.append(offloaded)
        self._current_bytes += tensor.nbytes
        self.offloaded_bytes += tensor.nbytes
        self.peak_offloaded_bytes = max(self.peak_offloaded_bytes, self._current_bytes)
        self._in_flight.append(self.alloc_recorder.record_alloc(tensor.nbytes, "buffers"))
        self.finish_writes(READ_AHEAD_DEPTH)
        return offloaded

    def finish_writes(self, num_left: int = 0) -> None:
        """Let no more be on its way out: nothing when the backward pass begins."""
        while len(self._in_flight) > num_left:
            self.alloc_recorder.record_free(self._in_flight.popleft())

    def on_freed(self, num_bytes: int) -> None:
        """The graph that needed a tensor is gone."""
        self._current_bytes -= num_bytes
