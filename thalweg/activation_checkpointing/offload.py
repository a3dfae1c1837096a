"""Where inputs of checkpointed units wait for the backward pass: in place, on the host, on disk, in parts.

    forward     unit 0 -> unit 1 -> ... -> unit n     save: behind the computation, two at a time
    backward    unit n <- ... <- unit 1 <- unit 0     fetch: the tensors of the units before are read ahead

A *saver* takes a tensor and gives a *kept* one, whose ``fetch`` brings back the same bits.  Kept tensors know
the one saved before them, so that reading ahead follows the reverse order of saving, whatever the model does;
a guess that is wrong costs time, nothing else.  A kept tensor dies with the autograd graph that needs it and
then gives its room back, so several forward passes before a backward, a retained graph (each backward fetches
again) and exceptions need no care of their own.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.storage_io.disk import Disk
from thalweg.storage_io.evictable_memory import aligned_empty
from thalweg.storage_io.io_threads import IoFuture
from thalweg.storage_io.swap_file import MAX_SWAP_BYTES, SwapFile
from thalweg.utils.log import get_logger

_log = get_logger(__name__)

MIN_OFFLOAD_BYTES = 64 * 1024
"""Smaller tensors stay where they are."""
READ_AHEAD_DEPTH = 2  # how many tensors may be on their way out, and how many are read ahead


class OffloadedActivation(Protocol):
    """A tensor that was put away."""

    def fetch(self) -> Tensor:
        """Return the tensor's bits on its device; may be called again."""
        ...


class ActivationOffloader(Protocol):
    """Puts tensors away."""

    def save(self, tensor: Tensor) -> OffloadedActivation:
        """Put a detached tensor away; its memory may be given back once nobody else holds it."""
        ...


class ReadAheadOffloader:
    """The order of saving (each kept tensor knows its predecessor, weakly) and buffers that wait to be used again."""

    def __init__(self) -> None:
        self._last_saved: weakref.ref[Any] | None = None
        self._free_buffers: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def append(self, offloaded: Any) -> None:
        """It is the last one that was saved."""
        offloaded.previous, self._last_saved = self._last_saved, weakref.ref(offloaded)

    def on_fetch(self, offloaded: Any) -> None:
        """Start to bring back what the backward pass will want next."""
        for _ in range(READ_AHEAD_DEPTH):
            offloaded = None if offloaded.previous is None else offloaded.previous()
            if offloaded is None:
                return
            offloaded.read_ahead()

    def get_buffer(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A page-aligned tensor to copy to from ``device``, one that was given back where possible."""
        free = self._free_buffers.get((shape, dtype))
        return free.pop() if free else aligned_empty(shape, dtype, pinned=device.type != "cpu")

    def recycle_buffer(self, buffer: Tensor) -> None:
        """A buffer that is at rest."""
        self._free_buffers.setdefault((buffer.shape, buffer.dtype), []).append(buffer)


def copy_on_stream(tensor: Tensor, pinned: Tensor, stream: torch.Stream) -> torch.Event:
    """Copy an accelerator's tensor into page-locked memory, on ``stream``; the event says when it is there."""
    stream.wait_stream(torch.accelerator.current_stream(tensor.device))
    with stream:
        pinned.copy_(tensor, non_blocking=True)
        arrival = stream.record_event()
    tensor.record_stream(stream)
    return arrival


# On disk


class _NvmeTensor:
    """Bytes in a region of a swap file: on their way out, out, or on their way back.

    They leave through a page-aligned buffer, so that the tensor itself is free at once.
    """

    def __init__(self, offloader: NvmeActivationOffloader, tensor: Tensor) -> None:
        self._offloader, self._device = offloader, tensor.device
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._file = offloader.file
        self._offset = self._file.allocate(tensor.nbytes)
        self._buffer: Tensor | None = offloader.get_buffer(tensor.shape, tensor.dtype, self._device)
        self._arrival = offloader.copy_to_host(tensor, self._buffer)
        self._write: IoFuture | None = None
        self._read = IoFuture()
        self._read_buffer: Tensor | None = None

    def start_write(self) -> None:
        """Let the bytes go out, once they have come from the device."""
        if self._write is None and self._buffer is not None:
            self._wait_for_arrival()
            self._write = self._file.write(self._offset, self._buffer)

    def finish_write(self) -> None:
        """Wait until the bytes are out and give the buffer back."""
        self.start_write()
        if self._buffer is not None and self._write is not None:
            buffer, self._buffer = self._buffer, None
            self._write.wait()
            self._offloader.recycle_buffer(buffer)

    def _wait_for_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()

    def read_ahead(self) -> None:
        if self._buffer is None and self._read_buffer is None:
            self._read_buffer = aligned_empty(self._shape, self._dtype, pinned=self._device.type != "cpu")
            self._read = self._file.read(self._offset, self._read_buffer)

    def fetch(self) -> Tensor:
        if self._buffer is not None:  # hardly out yet: no need to read it
            self.start_write()
            assert self._write is not None
            self._write.wait()
            result, self._buffer = self._buffer, None
        else:
            self.read_ahead()
            assert self._read_buffer is not None
            result, self._read_buffer = self._read_buffer, None
            self._read.wait()
        self._offloader.on_fetch(self)
        return result.to(self._device, non_blocking=True)

    def __del__(self) -> None:
        if self.__dict__.get("_write") is None and "_arrival" in self.__dict__:
            self._wait_for_arrival()
        for future in (self.__dict__.get("_write"), self.__dict__.get("_read")):
            if future is not None:
                future.wait_ignoring_errors()
        if "_offset" in self.__dict__:
            self._file.free(self._offset)


class NvmeActivationOffloader(ReadAheadOffloader):
    """Keeps tensors in a swap file below ``folder``, which grows by ``segment_bytes`` with what a step needs."""

    def __init__(self, folder: str | Path, *, segment_bytes: int = 2**28, disk: Disk | None = None) -> None:
        super().__init__()
        self._open_file = partial(SwapFile, folder, 0, capacity=MAX_SWAP_BYTES, segment_bytes=segment_bytes, disk=disk)
        self._file: SwapFile | None = None
        self._pending_writes: deque[weakref.ref[_NvmeTensor]] = deque()
        self._stream: torch.Stream | None = None

    @property
    def file(self) -> SwapFile:
        """The swap file; it is made when it is needed."""
        if self._file is None:
            self._file = self._open_file()
        return self._file

    def save(self, tensor: Tensor) -> OffloadedActivation:
        offloaded = _NvmeTensor(self, tensor)
        self.append(offloaded)
        for pending in self._pending_writes:  # a unit's time ago they left the device
            if (earlier := pending()) is not None:
                earlier.start_write()
        if tensor.device.type == "cpu":
            offloaded.start_write()
        self._pending_writes.append(weakref.ref(offloaded))
        while len(self._pending_writes) > READ_AHEAD_DEPTH:
            oldest = self._pending_writes.popleft()()
            if oldest is not None:
                oldest.finish_write()
        return offloaded

    def copy_to_host(self, tensor: Tensor, buffer: Tensor) -> torch.Event | None:
        """Copy it into ``buffer``: from an accelerator behind its computation, to be waited for by what is returned."""
        if tensor.device.type == "cpu":
            buffer.copy_(tensor)
            return None
        self._stream = stream = self._stream or torch.Stream(tensor.device)
        return copy_on_stream(tensor, buffer, stream)

    def on_fetch(self, offloaded: _NvmeTensor) -> None:
        """Read ahead; buffers for writing have had their time."""
        self._free_buffers.clear()
        super().on_fetch(offloaded)

    @property
    def num_bytes(self) -> int:
        """Bytes of the swap file."""
        return 0 if self._file is None else self._file.num_bytes

    def close(self) -> None:
        """Close the swap file; nothing saved may be fetched afterwards."""
        if self._file is not None:
            self._file.close()
        self._free_buffers.clear()


# On the host, from a GPU


class _PinnedTensor:
    def __init__(self, offloader: CpuActivationOffloader, tensor: Tensor) -> None:
        self._offloader, self._device = offloader, tensor.device
        self._shape = tensor.shape
        self._pinned = offloader.get_buffer(tensor.shape, tensor.dtype, self._device)
        self._copy_event = copy_on_stream(tensor, self._pinned, offloader.stream)
        self._prefetched: tuple[Tensor, Any] | None = None

    def read_ahead(self) -> None:
        if self._prefetched is None:
            stream = self._offloader.stream
            with stream:
                tensor = self._pinned.to(self._device, non_blocking=True)
                self._prefetched = tensor, stream.record_event()

    def fetch(self) -> Tensor:
        self.read_ahead()
        assert self._prefetched is not None
        (tensor, ready), self._prefetched = self._prefetched, None
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(ready)
        tensor.record_stream(current)
        self._offloader.limit(self._offloader.fetches, current.record_event())
        self._offloader.on_fetch(self)
        return tensor

    def __del__(self) -> None:
        pinned = self.__dict__.get("_pinned")
        if pinned is not None:
            self._copy_event.synchronize()
            self._offloader.recycle_buffer(pinned)


class CpuActivationOffloader(ReadAheadOffloader):
    """Keeps a GPU's tensors in pinned host memory, copied on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.stream = torch.Stream(device)
        self.saves: deque[torch.Event] = deque()
        self.fetches: deque[torch.Event] = deque()

    def save(self, tensor: Tensor) -> OffloadedActivation:
        offloaded = _PinnedTensor(self, tensor)
        self.limit(self.saves, offloaded._copy_event)
        self.append(offloaded)
        return offloaded

    def limit(self, events: deque[torch.Event], event: torch.Event) -> None:
        """Wait for the device: a host far ahead of it would have memory for all units at once."""
        events.append(event)
        if len(events) > READ_AHEAD_DEPTH:
            events.popleft().synchronize()


# In parts, over tensor-parallel ranks


@dataclass(frozen=True)
class _PartitionedTensor:
    shard: OffloadedActivation | Tensor
    shape: torch.Size
    group: dist.ProcessGroup

    def fetch(self) -> Tensor:
        local_shard = self.shard if isinstance(self.shard, Tensor) else self.shard.fetch()
        size = dist.get_world_size(self.group)
        gathered = local_shard.new_empty(size * local_shard.numel())
        dist.all_gather_into_tensor(gathered, local_shard, group=self.group)
        return gathered[: self.shape.numel()].view(self.shape)


class PartitionedActivationOffloader:
    """Each rank of ``group`` keeps its part of a tensor that all of them hold alike; fetching gathers.

    Korthikanti et al. 2022, section 5.  ``inner``: where the parts wait; None leaves them in place.
    ``save`` and ``fetch`` must come in the same order on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, inner: ActivationOffloader | None = None) -> None:
        self.group, self.inner = group, inner

    def save(self, tensor: Tensor) -> OffloadedActivation:
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        shard_numel = -(-tensor.numel() // size)
        shard = tensor.new_zeros(shard_numel)
        local_values = tensor.reshape(-1)[rank * shard_numel : (rank + 1) * shard_numel]
        shard[: local_values.numel()].copy_(local_values)
        part = shard if self.inner is None else self.inner.save(shard)
        return _PartitionedTensor(part, tensor.shape, self.group)


def build_activation_offloader(
    target: Literal["none", "cpu", "nvme"], device: torch.device, folder: str | None = None
) -> ActivationOffloader | None:
    """The saver for ``activation_checkpointing.offload``; None where inputs stay in place.

    Raises:
        ValueError: NVMe without a folder.
    """
    if target == "cpu" and device.type != "cpu":
        return CpuActivationOffloader(device)
    if target == "cpu":
        _log.info("activations of a rank that computes on the CPU are in host memory already: none is moved")
    if target != "nvme":
        return None
    if not folder:
        raise ValueError(
            "activation_checkpointing.offload is 'nvme' and no folder is named: set memory.nvme_path, or "
            "nvme_path in offload_param or offload_optimizer"
        )
    return NvmeActivationOffloader(folder)
