"""The three places a tensor can be kept in, behind one protocol.

    put(key, tensor)   the tier holds this value from now on; the caller writes to ``tensor`` no more
    prefetch(key)      a hint: the value will be wanted soon
    get(key)           the value, on the device, with the shape and dtype it came with
    release(key)       forget it

``DeviceTier`` keeps the tensor itself.  ``HostTier`` keeps a copy in (pinned) host memory.  ``NvmeTier``
keeps bytes in a swap file and passes them through a ring of buffers, so that its own memory is bounded by
the ring and by what was got or prefetched and not yet released.  A tensor may be larger than a buffer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thalweg.storage_io.allocator import PAGE
from thalweg.storage_io.buffer_ring import BufferRing
from thalweg.storage_io.io_threads import IoFuture
from thalweg.storage_io.swap_file import SwapFile


class Tier(Protocol):
    """Keeps tensors under keys; see the head of this file."""

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Hold the value of ``tensor`` under ``key``, which must be free."""
        ...

    def prefetch(self, key: Hashable) -> None:
        """Begin to bring the value near; may do nothing."""
        ...

    def get(self, key: Hashable) -> Tensor:
        """The value; ``KeyError`` if there is none."""
        ...

    def release(self, key: Hashable) -> None:
        """Forget the value; tensors got before stay valid."""
        ...


class DeviceTier:
    """Tensors stay where they are."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Tensor] = {}

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Hold the tensor itself."""
        assert key not in self._held, key
        self._held[key] = tensor

    def prefetch(self, key: Hashable) -> None:
        """Nothing to do."""

    def get(self, key: Hashable) -> Tensor:
        """The tensor that was put."""
        return self._held[key]

    def release(self, key: Hashable) -> None:
        """Forget it."""
        del self._held[key]


class HostTier:
    """Copies in host memory; ``get`` brings them back to the device they came from.

    From a CUDA device the copies are pinned and run on a stream of their own, behind what was queued before;
    a tensor that is on the CPU already is held as it is.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[Tensor, torch.device]] = {}
        self._near: dict[Hashable, tuple[Tensor, torch.cuda.Event]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Copy ``tensor`` to the host."""
        assert key not in self._held, key
        if tensor.device.type != "cuda":
            self._held[key] = (tensor.to("cpu"), tensor.device)
            return
        stream = self._stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        self._held[key] = (copy, tensor.device)

    def prefetch(self, key: Hashable) -> None:
        """Start the copy back, on the copying stream."""
        copy, device = self._held[key]
        if device.type != "cuda" or key in self._near:
            return
        with torch.cuda.stream(self._stream(device)):
            near = copy.to(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._near[key] = (near, event)

    def get(self, key: Hashable) -> Tensor:
        """The value on its device; later work of the current stream waits for the copy."""
        copy, device = self._held[key]
        if device.type != "cuda":
            return copy.to(device)
        self.prefetch(key)
        near, event = self._near[key]
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        near.record_stream(current)
        return near

    def release(self, key: Hashable) -> None:
        """Forget both copies."""
        self._near.pop(key, None)
        del self._held[key]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


@dataclass
class _Held:
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    written: list[IoFuture]
    near: Tensor | None = None
    read: IoFuture | None = None


class NvmeTier:
    """Values in ``swap``; ``ring`` bounds what is on its way out."""

    def __init__(self, swap: SwapFile, ring: BufferRing) -> None:
        self.swap, self.ring = swap, ring
        self._busy: list[IoFuture] = [IoFuture() for _ in range(len(ring))]
        self._turn = 0
        self._held: dict[Hashable, _Held] = {}

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Copy ``tensor`` into buffers, piece by piece, and send them off; it may be freed at once.

        Raises:
            ValueError: the swap file is full.
        """
        assert key not in self._held, key
        data = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else None
        held = _Held(self.swap.allocate(tensor.nbytes), tensor.shape, tensor.dtype, tensor.device, [])
        self._held[key] = held
        for start in range(0, tensor.nbytes, self.ring.buffer_bytes):
            assert data is not None
            part = data[start : start + self.ring.buffer_bytes]
            slot = self._turn % len(self.ring)
            self._turn += 1
            self._busy[slot].wait()
            buffer = self.ring[slot][: part.numel()]
            buffer.copy_(part)
            self._busy[slot] = self.swap.write(held.offset + start, buffer)
            held.written.append(self._busy[slot])

    def prefetch(self, key: Hashable) -> None:
        """Begin to read the value."""
        held = self._held[key]
        if held.near is None:
            for ticket in held.written:
                ticket.wait()
            held.written.clear()
            held.near = aligned_empty(held.shape, held.dtype)
            held.read = self.swap.read(held.offset, held.near)

    def get(self, key: Hashable) -> Tensor:
        """Wait for the value; until it is released it stays in memory."""
        self.prefetch(key)
        held = self._held[key]
        assert held.near is not None and held.read is not None
        held.read.wait()
        return held.near.to(held.device)

    def release(self, key: Hashable) -> None:
        """Forget the value and give its place in the file back."""
        held = self._held.pop(key)
        for ticket in [*held.written, *([held.read] if held.read else [])]:
            ticket.wait()
        self.swap.free(held.offset)


def aligned_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised CPU memory that begins on a page boundary."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + nbytes].view(dtype).view(shape)
