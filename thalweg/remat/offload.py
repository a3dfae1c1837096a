"""Where inputs of checkpointed units wait for the backward pass: in place, on the host, on disk, in parts.

    forward     unit 0 -> unit 1 -> ... -> unit n     save: behind the computation, `depth` at a time
    backward    unit n <- ... <- unit 1 <- unit 0     fetch: the tensors of the units before are read ahead

A *saver* takes a tensor and gives a *kept* one, whose ``fetch`` brings back the same bits.  Kept tensors know
the one saved before them, so that reading ahead follows the reverse order of saving, whatever the model does;
a guess that is wrong costs time, nothing else.  A kept tensor dies with the autograd graph that needs it and
then gives its room back, so several forward passes before a backward, a retained graph (each backward fetches
again) and exceptions need no care of their own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.store import SwapFile
from thalweg.utils.log import get_logger

_log = get_logger(__name__)

_PAGE = 4096
LEAST_BYTES = 64 * 1024
"""Smaller tensors stay where they are."""


class Kept(Protocol):
    """A tensor that was put away."""

    def fetch(self) -> Tensor:
        """Return the tensor's bits on its device; may be called again."""
        ...


class Saver(Protocol):
    """Puts tensors away."""

    def save(self, tensor: Tensor) -> Kept:
        """Put a detached tensor away; its memory may be given back once nobody else holds it."""
        ...


@dataclass
class Marker:
    """Says whether this thread is inside of a unit whose inputs are put away already."""

    local: threading.local = field(default_factory=threading.local)

    @property
    def inside(self) -> bool:
        return getattr(self.local, "depth", 0) > 0

    @contextmanager
    def unit(self) -> Iterator[None]:
        self.local.depth = getattr(self.local, "depth", 0) + 1
        try:
            yield
        finally:
            self.local.depth -= 1


@dataclass(frozen=True)
class _Here:
    tensor: Tensor

    def fetch(self) -> Tensor:
        return self.tensor


class InPlace:
    """Leaves tensors where they are: the host tier of a rank that computes on the host."""

    def save(self, tensor: Tensor) -> Kept:
        return _Here(tensor)


class _Chain:
    """The order of saving: each kept tensor's predecessor, held weakly."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._last: weakref.ref[Any] | None = None
        self._before: weakref.WeakKeyDictionary[Any, weakref.ref[Any] | None] = weakref.WeakKeyDictionary()

    def append(self, kept: Any) -> None:
        self._before[kept] = self._last
        self._last = weakref.ref(kept)

    def predecessors(self, kept: Any) -> Iterator[Any]:
        for _ in range(self.depth):
            link = self._before.get(kept)
            kept = None if link is None else link()
            if kept is None:
                return
            yield kept


# On disk


class _OnDisk:
    """Bytes in a region of a swap file: on their way out, out, or on their way back.

    They leave through a page-aligned buffer, so that the tensor itself is free at once.
    """

    def __init__(self, disk: DiskSaver, tensor: Tensor) -> None:
        self._disk, self._device = disk, tensor.device
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._room = disk.take(tensor.numel() * tensor.element_size())
        self._buffer: Tensor | None = disk.buffer(tensor.shape, tensor.dtype)
        self._buffer.copy_(tensor)
        self._write: Any = self._room.file.write(self._room.offset, self._buffer)
        self._read: Any = None
        self._into: Tensor | None = None

    def finish_write(self) -> None:
        """Wait until the bytes are out and give the buffer back."""
        if self._buffer is not None:
            buffer, write, self._buffer, self._write = self._buffer, self._write, None, None
            write.wait()
            self._disk.reuse(buffer)

    def read_ahead(self) -> None:
        if self._buffer is None and self._read is None:
            self._into = _aligned(self._shape, self._dtype, pinned=self._device.type == "cuda")
            self._read = self._room.file.read(self._room.offset, self._into)

    def fetch(self) -> Tensor:
        if self._buffer is not None:  # hardly out yet: no need to read it
            self._write.wait()
            found, self._buffer, self._write = self._buffer, None, None
        else:
            self.read_ahead()
            assert self._into is not None
            found, read = self._into, self._read
            self._into = self._read = None
            read.wait()
        self._disk.fetched(self)
        return found.to(self._device, non_blocking=True)

    def __del__(self) -> None:
        for ticket in (self.__dict__.get("_write"), self.__dict__.get("_read")):
            if ticket is not None:
                ticket.settle()
        room = self.__dict__.get("_room")
        if room is not None:
            self._disk.give_back(room)


def _aligned(shape: torch.Size, dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """An uninitialised CPU tensor at a page boundary, which direct I/O asks for."""
    nbytes = shape.numel() * dtype.itemsize
    memory = torch.empty(nbytes + _PAGE, dtype=torch.uint8, pin_memory=pinned)
    skip = -memory.data_ptr() % _PAGE
    return memory[skip : skip + nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class _Room:
    file: Any
    offset: int


class DiskSaver:
    """Keeps tensors in swap files below ``folder``, which grow with what a step needs.

    ``open_file(num_bytes)`` makes a swap file (``store.nvme.SwapFile``); ``depth``: how many tensors may be
    on their way out, and how many are read ahead.
    """

    def __init__(
        self, open_file: Callable[[int], Any], *, depth: int = 2, segment_bytes: int = 2**28
    ) -> None:
        self._open, self._segment = open_file, segment_bytes
        self._files: list[Any] = []
        self._buffers: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._leaving: deque[weakref.ref[_OnDisk]] = deque()
        self._chain = _Chain(depth)
        self._lock = threading.Lock()

    def save(self, tensor: Tensor) -> Kept:
        kept = _OnDisk(self, tensor)
        self._chain.append(kept)
        self._leaving.append(weakref.ref(kept))
        while len(self._leaving) > self._chain.depth:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                oldest.finish_write()
        return kept

    def fetched(self, kept: _OnDisk) -> None:
        """Start reading what the backward pass will want next; buffers for writing have had their time."""
        self._buffers.clear()
        for one in self._chain.predecessors(kept):
            one.read_ahead()

    def take(self, num_bytes: int) -> _Room:
        """Room for ``num_bytes``, whatever sizes were given back before: lengths of sequences differ."""
        with self._lock:
            file = next((one for one in self._files if one.largest_gap >= num_bytes), None)
            if file is None:
                file = self._one_more(num_bytes)
                self._files.append(file)
            return _Room(file, file.region(num_bytes))

    def _one_more(self, num_bytes: int) -> Any:
        """A swap file of a whole segment, or of less where the disk has no room for that."""
        size = max(self._segment, num_bytes)
        while True:
            try:
                return self._open(size)
            except ValueError:
                if size == num_bytes:
                    raise
                size = max(size // 2, num_bytes)

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A page-aligned tensor to write from."""
        free = self._buffers.get((shape, dtype))
        return free.pop() if free else _aligned(shape, dtype)

    def reuse(self, buffer: Tensor) -> None:
        """A buffer that is at rest."""
        self._buffers.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    def give_back(self, room: _Room) -> None:
        """Room that nobody needs any more."""
        with self._lock:
            if room.file in self._files:
                room.file.free(room.offset)

    @property
    def num_bytes(self) -> int:
        """Bytes of all swap files."""
        return sum(file.num_bytes for file in self._files)

    def close(self) -> None:
        """Close the swap files; nothing saved may be fetched afterwards."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._buffers.clear()


# On the host, from a GPU


class _OnHost:
    def __init__(self, host: HostSaver, tensor: Tensor) -> None:
        self._host, self._device = host, tensor.device
        self._shape = tensor.shape
        self._pinned = host.take(tensor.shape, tensor.dtype)
        stream = host.stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._pinned.copy_(tensor, non_blocking=True)
            self._copied = stream.record_event()
        tensor.record_stream(stream)
        self._back: tuple[Tensor, Any] | None = None

    def read_ahead(self) -> None:
        if self._back is None:
            stream = self._host.stream
            with torch.cuda.stream(stream):
                tensor = self._pinned.to(self._device, non_blocking=True)
                self._back = tensor, stream.record_event()

    def fetch(self) -> Tensor:
        self.read_ahead()
        assert self._back is not None
        (tensor, ready), self._back = self._back, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        tensor.record_stream(current)
        self._host.fetched(self)
        return tensor

    def __del__(self) -> None:
        pinned = self.__dict__.get("_pinned")
        if pinned is not None:
            self._copied.synchronize()
            self._host.give_back(pinned)


class HostSaver:
    """Keeps a GPU's tensors in pinned host memory, copied on a stream of their own."""

    def __init__(self, device: torch.device, *, depth: int = 2) -> None:
        self.stream = torch.cuda.Stream(device)
        self._chain = _Chain(depth)
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def save(self, tensor: Tensor) -> Kept:
        kept = _OnHost(self, tensor)
        self._chain.append(kept)
        return kept

    def fetched(self, kept: _OnHost) -> None:
        """Start copying back what the backward pass will want next."""
        for one in self._chain.predecessors(kept):
            one.read_ahead()

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A pinned tensor, from what was given back where possible."""
        free = self._free.get((shape, dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype, pin_memory=True)

    def give_back(self, pinned: Tensor) -> None:
        """A pinned tensor that nobody needs any more."""
        self._free.setdefault((pinned.shape, pinned.dtype), []).append(pinned)


# In parts, over tensor-parallel ranks


@dataclass(frozen=True)
class _Part:
    kept: Kept
    shape: torch.Size
    group: dist.ProcessGroup

    def fetch(self) -> Tensor:
        part = self.kept.fetch()
        size = dist.get_world_size(self.group)
        whole = part.new_empty(size * part.numel())
        dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole[: self.shape.numel()].view(self.shape)


class PartitionedSaver:
    """Each rank of ``group`` keeps its part of a tensor that all of them hold alike; fetching gathers.

    Korthikanti et al. 2022, section 5.  ``save`` and ``fetch`` must come in the same order on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, inner: Saver | None = None) -> None:
        self.group, self.inner = group, inner or InPlace()

    def save(self, tensor: Tensor) -> Kept:
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        count = -(-tensor.numel() // size)
        part = tensor.new_zeros(count)
        mine = tensor.reshape(-1)[rank * count : (rank + 1) * count]
        part[: mine.numel()].copy_(mine)
        return _Part(self.inner.save(part), tensor.shape, self.group)


def make_saver(
    where: Literal["none", "cpu", "nvme"], device: torch.device, folder: str | None = None
) -> Saver | None:
    """The saver for ``activation_checkpointing.offload``; None where inputs stay in place.

    Raises:
        ValueError: NVMe without a folder.
    """
    if where == "cpu" and device.type == "cuda":
        return HostSaver(device)
    if where == "cpu":
        _log.info("activations of a rank that computes on the CPU are in host memory already: none is moved")
    if where != "nvme":
        return None
    if not folder:
        raise ValueError(
            "activation_checkpointing.offload is 'nvme' and no folder is named: set memory.nvme_path, or "
            "nvme_path in offload_param or offload_optimizer"
        )
    return DiskSaver(partial(SwapFile, folder))
