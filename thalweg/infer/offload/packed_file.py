"""Packed weights in a file: written once, block by block, then mapped or read piece by piece.

The file is a safetensors file with one tensor of bytes for each segment, ``segment.0`` and on, each from a
page boundary to another, so that it may be mapped and run from as it lies, or read past the page cache: these are
the two sources of offloaded weights.  The metadata say what it was made from and hold a checksum (CRC-32) of each
segment.

A file with a ``weights_id`` is found again by the next engine that packs the same model in the same format.  It gets
its name when it is complete, never before.  A file without one never has a name, and goes with its engine.

What is verified of a file that is found: its description, with the digest of the files that it was packed from
(:func:`content_digest`), and its length; the checksum of each segment, when it is first read; and the packed weights
themselves by a sample (:meth:`.weight_ring.WeightRing.pack`).
"""

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import weakref
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.ops.linear.autotune_cache import get_cache_dir
from thalweg.storage_io.allocator import PAGE, round_up
from thalweg.storage_io.disk import DirectFile, Disk
from thalweg.storage_io.io_threads import IoFuture, IoThreadPool
from thalweg.utils.log import get_logger

log = get_logger(__name__)
_FORMAT = "thalweg packed weights 2"
_TRANSFER_BYTES = 4 << 20  # bytes of one transfer
_NUM_THREADS = 4
_HUGE_PAGE = 2 << 20  # bytes of a huge page
_WHOLE_DIGEST_BYTES = 64 << 20  # a file of up to so many bytes is digested whole
_SAMPLE_BYTES = 64 << 10  # of each sample of a larger one
_NUM_SAMPLES = 1024


def default_weights_folder() -> Path:
    """Return the folder for weights where nobody names one; ValueError where there is no cache directory."""
    base = get_cache_dir()
    if base is None:
        raise ValueError("there is no cache directory for offloaded weights: set weight_offload_dir")
    return base / "weights"


def content_digest(files: Iterable[Path]) -> str:
    """Return a digest of files' names, sizes and contents.

    A file of up to 64 MiB is read whole.  Of a larger one 1,024 samples of 64 KiB are read, from its first byte, which
    in a safetensors file is the table of tensors, to its last: training changes nearly every weight, so other weights
    have other samples.  A change of a few bytes by hand may lie between them.
    """
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            starts: Iterable[int] = range(0, size, _SAMPLE_BYTES)
            if size > _WHOLE_DIGEST_BYTES:
                last = size - _SAMPLE_BYTES
                starts = [last * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)]
            for start in starts:
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()


class CorruptFileError(RuntimeError):
    """A packed file is not what was written; the message names it and the cure."""


class PackedWeightsFile:
    """Segments of ``sizes`` bytes (whole pages) below ``folder``.

    ``weights_id``: what the weights were made from, or None for a file that nobody is to find again.  ``complete``
    tells whether it was found; else write every segment, then :meth:`finalize`.  Raises ValueError where the
    folder cannot be used.
    """

    def __init__(
        self, folder: str | Path, sizes: Sequence[int], weights_id: Any = None, *, disk: Disk | None = None
    ) -> None:
        assert all(size % PAGE == 0 for size in sizes), sizes
        self.folder, self.sizes, self._disk = Path(folder), list(sizes), disk or Disk()
        self._threads = IoThreadPool(_NUM_THREADS, "thalweg-weights")
        self._description = json.dumps({"format": _FORMAT, "key": weights_id, "sizes": self.sizes}, sort_keys=True)
        digest = hashlib.sha256(self._description.encode()).hexdigest()[:20]
        self.path = None if weights_id is None else self.folder / f"thalweg-weights-{digest}.safetensors"
        self._header_bytes = round_up(2048 + 2 * len(self._description) + 100 * len(self.sizes))
        self._segment_offsets = [self._header_bytes + start for start in accumulate(self.sizes, initial=0)]
        self._temp_path: Path | None = None
        self._checksums: list[int] = []
        self._verified: set[int] = set()
        self._prefaulted: set[int] = set()
        handle = None if self.path is None else self._open_existing(self.path)
        self.complete = handle is not None
        self._fd = self._create() if handle is None else handle
        self._file = DirectFile(self._disk, self._fd, self.folder)
        self.reads = self._file.reads
        # An engine that is dropped without being closed must not keep the disk's space.
        self._finalizer = weakref.finalize(self, _release, self._threads, self._file, self._temp_path)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"the weights file {self.path}" if self.path is not None else f"a file in {self.folder}"

    def _open_existing(self, path: Path) -> int | None:
        """Open the file that an earlier engine left, if it is whole."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        metadata = self._read_metadata(handle)
        if metadata.get("about") == self._description and os.fstat(handle).st_size == self._segment_offsets[-1]:
            self._checksums = json.loads(metadata["checksums"])
            return handle
        os.close(handle)
        log.warning("%s is not what its name says; it is written anew", path)
        return None

    def _read_metadata(self, handle: int) -> dict[str, str]:
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError, AttributeError):
            length = int.from_bytes(os.pread(handle, 8, 0), "little")
            if length == self._header_bytes - 8:
                return dict(json.loads(os.pread(handle, length, 8))["__metadata__"])
        return {}

    def _create(self) -> int:
        total = self._segment_offsets[-1]
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
                self._temp_path = self.path.with_suffix(f".{secrets.token_hex(6)}.part")
                handle = os.open(self._temp_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._disk.fallocate(handle, total)
        except OSError as error:
            raise ValueError(
                f"the weights cannot be written to {self.folder}: {error.strerror}. Name a folder that this"
                " user may write to"
            ) from error
        return handle

    # Writing

    def write(self, segment: int, offset: int, data: Tensor) -> None:
        """Write bytes (flat uint8) into a segment."""
        assert not self.complete and offset + data.numel() <= self.sizes[segment]
        view, at = data.numpy().data, self._segment_offsets[segment] + offset
        for page in range(at // _HUGE_PAGE, (at + len(view) - 1) // _HUGE_PAGE + 1):
            self._prefault(page)
        self._file.transfer("write", view, at)

    def _prefault(self, page: int) -> None:
        """Write zeros to 2 MiB at once, so that the page cache holds them as one huge page where it can (ext4
        since Linux 6.16, xfs): the kernels then read the file as fast as memory, on small pages at half that.
        """
        if page in self._prefaulted:
            return
        self._prefaulted.add(page)
        at = page * _HUGE_PAGE
        self._file.transfer("write", memoryview(bytes(min(_HUGE_PAGE, self._segment_offsets[-1] - at))), at)

    def finalize(self) -> None:
        """Say that every segment is written: a file with a ``weights_id`` gets its header and its name."""
        if not self.complete and self.path is not None:  # else nobody else reads it
            self._publish(self.path)
        self.complete, self._verified = True, set(range(len(self.sizes)))

    def _publish(self, path: Path) -> None:
        self._checksums = [self._checksum(segment) for segment in range(len(self.sizes))]
        starts = [start - self._header_bytes for start in self._segment_offsets]
        tensors = {
            f"segment.{i}": {"dtype": "U8", "shape": [size], "data_offsets": starts[i : i + 2]}
            for i, size in enumerate(self.sizes)
        }
        about = {"about": self._description, "checksums": json.dumps(self._checksums)}
        header = json.dumps({"__metadata__": about, **tensors}).encode()
        length = self._header_bytes - 8
        assert len(header) <= length, "room for the header"
        padded_header = length.to_bytes(8, "little") + header.ljust(length)
        self._file.transfer("write", memoryview(padded_header), 0)
        assert self._temp_path is not None, "a file that is to have a name has none yet"
        os.fsync(self._fd)
        os.replace(self._temp_path, path)

    def _checksum(self, segment: int) -> int:
        value, start = 0, self._segment_offsets[segment]
        for at in range(start, start + self.sizes[segment], _TRANSFER_BYTES):
            piece = os.pread(self._fd, min(_TRANSFER_BYTES, start + self.sizes[segment] - at), at)
            value = zlib.crc32(piece, value)
        return value

    def drop_page_cache(self) -> None:
        """Write the file out and leave the page cache to others."""
        os.fsync(self._fd)
        self._disk.drop_page_cache(self._fd, 0, self._segment_offsets[-1])

    # Reading

    def map(self) -> list[Tensor]:
        """Map the file, verify it, and return each segment's bytes, where the page cache has them."""
        mapping = mmap.mmap(self._fd, self._segment_offsets[-1], access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:  # what is not cached yet then comes as huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                log.info("no huge pages for %s (%s): reading it takes more page faults", self.name, error.strerror)
        view = memoryview(mapping)
        for segment in range(len(self.sizes)) if self.complete else ():
            start = self._segment_offsets[segment]
            self.verify(segment, view[start : start + self.sizes[segment]])
        return [
            torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
            for start, size in zip(self._segment_offsets, self.sizes, strict=False)
        ]

    def peek(self, segment: int, offset: int, nbytes: int) -> bytes:
        """Return some bytes of a segment, through the page cache."""
        assert offset + nbytes <= self.sizes[segment]
        return os.pread(self._fd, nbytes, self._segment_offsets[segment] + offset)

    def read(self, segment: int, out: Tensor) -> IoFuture:
        """Begin to read a segment into page-aligned bytes, past the page cache where that is possible."""
        view = out.numpy().data
        start, size = self._segment_offsets[segment], self.sizes[segment]
        return IoFuture(
            self._threads.submit(self._read_block, view[at : min(at + _TRANSFER_BYTES, size)], start + at)
            for at in range(0, size, _TRANSFER_BYTES)
        )

    def _read_block(self, view: memoryview, offset: int) -> None:
        try:
            self._file.transfer("read", view, offset, direct=True)
        except OSError as error:
            raise CorruptFileError(
                f"cannot read {len(view)} bytes at {offset} of {self.name}: {error.strerror}. Delete the file"
                " to have it written anew"
            ) from error

    def verify(self, segment: int, data: memoryview) -> None:
        """Compare a segment's bytes with its checksum, the first time they are seen."""
        if segment in self._verified:
            return
        if zlib.crc32(data) != self._checksums[segment]:
            raise CorruptFileError(f"segment {segment} of {self.name} is damaged: delete it to have it written anew")
        self._verified.add(segment)

    def close(self) -> None:
        """Close the file; a file without a name, or one that was never finalized, is gone.  Mappings stay."""
        self._finalizer()


def _release(threads: IoThreadPool, file: DirectFile, temp_path: Path | None) -> None:
    threads.close()
    file.close()
    if temp_path is not None:
        temp_path.unlink(missing_ok=True)
