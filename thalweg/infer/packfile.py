"""Packed weights in a file: written once, block by block, then mapped or read piece by piece.

The file is a safetensors file with one tensor of bytes for each segment, ``segment.0`` and on, each from a
page boundary to another, so that it may be mapped and run from as it lies, or read past the page cache.  The
metadata say what it was made from and hold a checksum (CRC-32) of each segment.

A file with a key is found again by the next engine that packs the same model in the same form.  It gets its
name when it is complete, never before.  A file without a key never has a name, and goes with its engine.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import secrets
import weakref
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.store.disk import Disk
from thalweg.store.io import IoThreadPool, IoThroughput, IoFuture
from thalweg.store.regions import PAGE, round_up
from thalweg.utils.log import get_logger

log = get_logger(__name__)
_FORMAT = "thalweg packed weights 1"
_BLOCK = 4 << 20  # bytes of one transfer
_THREADS = 4
_HUGE = 2 << 20  # bytes of a huge page


def bytes_of(tensor: Tensor) -> memoryview:
    """Return flat uint8 memory as bytes."""
    data: Any = tensor.numpy()
    return memoryview(data)


class DamagedFile(RuntimeError):
    """A packed file is not what was written; the message names it and the cure."""


class PackedFile:
    """Segments of ``sizes`` bytes (whole pages) below ``folder``.

    ``key``: what the weights were made from, or None for a file that nobody is to find again.  ``complete``
    tells whether it was found; else write every segment, then :meth:`seal`.  Raises ValueError where the
    folder cannot be used.
    """

    def __init__(
        self, folder: str | Path, sizes: Sequence[int], key: Any = None, *, disk: Disk | None = None
    ) -> None:
        assert all(size % PAGE == 0 for size in sizes), sizes
        self.folder, self.sizes, self._disk = Path(folder), list(sizes), disk or Disk()
        self.reads = IoThroughput()
        self._threads = IoThreadPool(_THREADS, "thalweg-weights")
        self._about = json.dumps({"format": _FORMAT, "key": key, "sizes": self.sizes}, sort_keys=True)
        digest = hashlib.sha256(self._about.encode()).hexdigest()[:20]
        self.path = None if key is None else self.folder / f"thalweg-weights-{digest}.safetensors"
        self._room = round_up(2048 + 2 * len(self._about) + 100 * len(self.sizes))
        self._starts = [self._room + start for start in accumulate(self.sizes, initial=0)]
        self._part: Path | None = None
        self._checksums: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._verified: set[int] = set()
        self._begun: set[int] = set()
        handle = None if self.path is None else self._find(self.path)
        self.complete = handle is not None
        self._handle = self._create() if handle is None else handle
        self._direct = self._open_direct()
        # An engine that is dropped without being closed must not keep the disk's space.
        handles = [handle for handle in (self._direct, self._handle) if handle is not None]
        self._end = weakref.finalize(self, _give_back, self._disk, self._threads, handles, self._part)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"the weights file {self.path}" if self.path is not None else f"a file in {self.folder}"

    def _find(self, path: Path) -> int | None:
        """Open the file that an earlier engine left, if it is whole."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        metadata = self._metadata(handle)
        if metadata.get("about") == self._about and os.fstat(handle).st_size == self._starts[-1]:
            self._checksums = json.loads(metadata["checksums"])
            return handle
        os.close(handle)
        log.warning("%s is not what its name says; it is written anew", path)
        return None

    def _metadata(self, handle: int) -> dict[str, str]:
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError, AttributeError):
            length = int.from_bytes(os.pread(handle, 8, 0), "little")
            if length == self._room - 8:
                return dict(json.loads(os.pread(handle, length, 8))["__metadata__"])
        return {}

    def _create(self) -> int:
        total = self._starts[-1]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = self._disk.free_bytes(self.folder)
            if free < total:
                raise ValueError(
                    f"the weights take {total} bytes and the disk of {self.folder} has {free} free: make room"
                    " or name another folder"
                )
            if self.path is None:
                handle = self._disk.open_unnamed(self.folder)
            else:
                self._part = self.path.with_suffix(f".{secrets.token_hex(6)}.part")
                handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._disk.fallocate(handle, total)
        except OSError as error:
            raise ValueError(
                f"the weights cannot be written to {self.folder}: {error.strerror}. Name a folder that this"
                " user may write to"
            ) from error
        return handle

    def _open_direct(self) -> int | None:
        handle = None
        try:
            handle = self._disk.open_direct(self._handle)
            self._disk.preadv(handle, [memoryview(mmap.mmap(-1, PAGE))], 0)
        except OSError as error:
            if handle is not None:
                self._disk.close(handle)
            log.info("no direct reads in %s (%s): through the page cache", self.folder, error.strerror)
            return None
        return handle

    # Writing

    def write(self, segment: int, offset: int, data: Tensor) -> None:
        """Write bytes (flat uint8) into a segment."""
        assert not self.complete and offset + data.numel() <= self.sizes[segment]
        view, at = bytes_of(data), self._starts[segment] + offset
        for number in range(at // _HUGE, (at + len(view) - 1) // _HUGE + 1):
            self._begin(number)
        while view:
            done = self._disk.pwritev(self._handle, [view], at)
            view, at = view[done:], at + done

    def _begin(self, number: int) -> None:
        """Write zeros to 2 MiB at once, so that the page cache holds them as one huge page where it can (ext4
        since Linux 6.16, xfs): the kernels then read the file as fast as memory, on small pages at half that.
        """
        if number in self._begun:
            return
        self._begun.add(number)
        at = number * _HUGE
        view = memoryview(bytes(min(_HUGE, self._starts[-1] - at)))
        while view:
            done = self._disk.pwritev(self._handle, [view], at)
            view, at = view[done:], at + done

    def seal(self) -> None:
        """Write the header, and give the file its name."""
        if self.complete:
            return
        for segment in range(len(self.sizes)):
            self._checksums.append(self._checksum(segment))
        tensors = {
            f"segment.{i}": {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [self._starts[i] - self._room, self._starts[i + 1] - self._room],
            }
            for i, size in enumerate(self.sizes)
        }
        about = {"about": self._about, "checksums": json.dumps(self._checksums)}
        header = json.dumps({"__metadata__": about, **tensors}).encode()
        length = self._room - 8
        assert len(header) <= length, "room for the header"
        whole = length.to_bytes(8, "little") + header.ljust(length)
        self._disk.pwritev(self._handle, [memoryview(whole)], 0)
        if self.path is not None and self._part is not None:
            os.fsync(self._handle)
            os.replace(self._part, self.path)
            self._part = None
        self.complete = True
        self._verified = set(range(len(self.sizes)))

    def _checksum(self, segment: int) -> int:
        value, start = 0, self._starts[segment]
        for at in range(start, start + self.sizes[segment], _BLOCK):
            piece = os.pread(self._handle, min(_BLOCK, start + self.sizes[segment] - at), at)
            value = zlib.crc32(piece, value)
        return value

    def forget_cached(self) -> None:
        """Write the file out and leave the page cache to others."""
        os.fsync(self._handle)
        self._disk.drop_page_cache(self._handle, 0, self._starts[-1])

    # Reading

    def map(self) -> list[int]:
        """Map the file, check it, and return each segment's address.  The mapping lives until ``close``."""
        whole = mmap.mmap(self._handle, self._starts[-1], access=mmap.ACCESS_COPY)
        self._maps.append(whole)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # what is not cached yet then comes as huge pages
                whole.madvise(mmap.MADV_HUGEPAGE)
        base = torch.frombuffer(whole, dtype=torch.uint8).data_ptr()
        view = memoryview(whole)
        for segment in range(len(self.sizes)) if self.complete else ():
            start = self._starts[segment]
            self.verify(segment, view[start : start + self.sizes[segment]])
        return [base + start for start in self._starts[:-1]]

    def read(self, segment: int, into: Tensor) -> IoFuture:
        """Begin to read a segment into page-aligned bytes, past the page cache where that is possible."""
        view = bytes_of(into)
        start, size = self._starts[segment], self.sizes[segment]
        return IoFuture(
            self._threads.submit(self._read, view[at : min(at + _BLOCK, size)], start + at)
            for at in range(0, size, _BLOCK)
        )

    def _read(self, view: memoryview, offset: int) -> None:
        total = 0
        self.reads.begin()
        try:
            while total < len(view):
                # What follows a short transfer may not be aligned any more.
                direct = self._direct is not None and total % PAGE == 0
                handle = self._direct if direct and self._direct is not None else self._handle
                done = self._disk.preadv(handle, [view[total:]], offset + total)
                if done <= 0:
                    raise OSError(errno.EIO, "the file ends early")
                total += done
        except OSError as error:
            raise DamagedFile(
                f"cannot read {len(view)} bytes at {offset} of {self.name}: {error.strerror}. Delete the file"
                " to have it written anew"
            ) from error
        finally:
            self.reads.end(total)

    def verify(self, segment: int, data: memoryview) -> None:
        """Compare a segment's bytes with its checksum, the first time they are seen."""
        if segment in self._verified:
            return
        if zlib.crc32(data) != self._checksums[segment]:
            raise DamagedFile(
                f"segment {segment} of {self.name} is damaged: delete it to have it written anew"
            )
        self._verified.add(segment)

    def close(self) -> None:
        """Close the file; a file without a name, or one that was never sealed, is gone."""
        self._end()
        self._maps.clear()


def _give_back(disk: Disk, threads: IoThreadPool, handles: Sequence[int], part: Path | None) -> None:
    threads.close()
    for handle in handles:
        disk.close(handle)
    if part is not None:
        part.unlink(missing_ok=True)
