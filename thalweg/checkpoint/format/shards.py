"""Shard files: safetensors, written and read piece by piece through ``FileSystem``.

A file is ``u64 header length | JSON header | data``.  The header is written from the
sizes alone, before any tensor is touched, so one piece at a time is in host memory.
Each piece has its own sha256 (in the manifest), the header has one too, and pieces
leave no gap: every byte of the file is under exactly one checksum.  The safetensors
library reads these files; it is not used to write them because it would bypass
``FileSystem`` and want all tensors at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from thalweg.checkpoint.errors import CorruptCheckpointError
from thalweg.checkpoint.filesystem import FileSystem
from thalweg.checkpoint.format.direct_writer import DirectWriter
from thalweg.checkpoint.format.dtypes import DTYPES, safetensors_dtype_and_shape
from thalweg.checkpoint.format.manifest import ChunkRecord, FileRecord
from thalweg.device import iter_host_parts

STAGING_BYTES = 16 << 20  # of each of the two buffers through which an accelerator's tensor comes
READ_BLOCK_BYTES = 4 << 20  # bytes read and hashed at a time, small enough to stay in cache


@dataclass(frozen=True)
class TensorEntry:
    """One entry of a shard to be written."""

    key: str
    dtype: str
    size: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.size) * DTYPES[self.dtype].itemsize


_Entry = TypeVar("_Entry", bound=TensorEntry)


def sort_for_alignment(entries: Iterable[_Entry]) -> list[_Entry]:
    """Slots in the order that keeps each entry's data aligned to its dtype."""
    return sorted(entries, key=lambda slot: (-DTYPES[slot.dtype].itemsize, slot.key))


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The values of a tensor as host bytes in row-major order, part by part (views where it already is that)."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()
    flat = tensor.reshape(-1).view(torch.uint8)
    for part in [flat] if flat.device.type == "cpu" or not flat.numel() else iter_host_parts(flat, STAGING_BYTES):
        yield part.cpu().numpy().data


def build_header(tensor_entries: Sequence[TensorEntry]) -> bytes:
    """The length word and JSON header for slots whose data follow in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for slot in tensor_entries:
        dtype, shape = safetensors_dtype_and_shape(slot.dtype, slot.size)
        stop = position + slot.nbytes
        entries[slot.key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def noop_release(tensor: torch.Tensor) -> None:
    """Nothing: what the memory behind a tensor needs after it was read, unless somebody knows better."""


def write_shard(
    io: FileSystem,
    path: Path,
    entries: Sequence[TensorEntry],
    values: Iterator[torch.Tensor],
    release: Callable[[torch.Tensor], None] = noop_release,
) -> tuple[FileRecord, dict[str, str]]:
    """Write a new safetensors file with the ``values`` of ``entries``, one after the other, and make it durable.

    ``release`` is given each tensor once it is written.  Returns what the file is committed with: its record and each
    key's sha256.
    """
    header = build_header(entries)
    size = len(header) + sum(slot.nbytes for slot in entries)
    with closing(DirectWriter(io, path, size)) as writer:
        writer.append(memoryview(header), lambda part: None)
        digests = {entry.key: _write_entry(writer, entry, next(values), release) for entry in entries}
        writer.finish()
    header_sha256 = hashlib.sha256(header).hexdigest()
    return FileRecord(size=size, header_bytes=len(header), header_sha256=header_sha256), digests


def _write_entry(
    writer: DirectWriter, entry: TensorEntry, value: torch.Tensor, release: Callable[[torch.Tensor], None]
) -> str:
    """Append one tensor; returns its sha256.  Nothing holds it after that."""
    assert value.nbytes == entry.nbytes, (entry, value.nbytes)
    digest = hashlib.sha256()
    for data in tensor_bytes(value):
        writer.append(data, digest.update)
    release(value)
    return digest.hexdigest()


_HeaderEntry = tuple[str, list[int], int, int]  # dtype, shape, start and stop among the data
_NOT_THERE: _HeaderEntry = ("", [], 0, -1)


class ShardReader:
    """Reads pieces of one committed shard; every byte it hands out has been checked.

    The file is open only while a piece is read, so a checkpoint of a thousand ranks can be
    loaded by one; the header is read and checked once.
    """

    def __init__(self, io: FileSystem, path: Path, record: FileRecord) -> None:
        self.io, self.path, self.record = io, path, record
        self._lock = threading.Lock()
        self._entries: dict[str, _HeaderEntry] | None = None

    def check_header(self) -> None:
        """Raise ``CorruptCheckpointError`` unless the file is there, has its size, and its header is intact."""
        with self._open_file() as handle:
            self._load_header(handle)

    def read_chunk(self, name: str, chunk: ChunkRecord, dtype: str, *, keep: bool = True) -> torch.Tensor:
        """The checked values of a piece as a CPU tensor of ``chunk.size``; without ``keep`` they are only checked.

        Raises:
            CorruptCheckpointError: a byte has changed.
        """
        with self._open_file() as handle:
            start, nbytes = self._locate(name, chunk, dtype, handle)
            flat = torch.empty(nbytes if keep else min(nbytes, READ_BLOCK_BYTES), dtype=torch.uint8)
            view, digest = flat.numpy().data, hashlib.sha256()
            for position in range(0, nbytes, READ_BLOCK_BYTES):
                block = view[position : position + READ_BLOCK_BYTES] if keep else view[: nbytes - position]
                self._read_and_hash(name, handle, block, start + position, digest)
        if digest.hexdigest() != chunk.sha256:
            location = f" at offset {list(chunk.offset)}" if any(chunk.offset) else ""
            raise CorruptCheckpointError(
                f"{self.path}: tensor {name}{location} has changed since it was saved "
                f"(sha256 {digest.hexdigest()[:12]}, committed {chunk.sha256[:12]})"
            )
        return flat.view(DTYPES[dtype]).view(chunk.size) if keep else flat

    def _read_and_hash(self, name: str, handle: int, view: memoryview, offset: int, digest: hashlib._Hash) -> None:
        try:
            done = self.io.pread_into(handle, view, offset)
        except OSError as error:
            raise CorruptCheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error
        if done < view.nbytes:
            raise CorruptCheckpointError(f"{self.path}: the file ends inside tensor {name}")
        digest.update(view)

    def _locate(self, name: str, chunk: ChunkRecord, dtype: str, handle: int) -> tuple[int, int]:
        """Where in the file a piece begins, and its bytes."""
        *form, start, stop = self._load_header(handle).get(chunk.key, _NOT_THERE)
        nbytes = math.prod(chunk.size) * DTYPES[dtype].itemsize
        fits = stop - start == nbytes and start >= 0 and stop <= self.record.size - self.record.header_bytes
        if form != [*safetensors_dtype_and_shape(dtype, chunk.size)] or not fits:
            raise CorruptCheckpointError(f"{self.path}: its header does not hold tensor {name} as the manifest says")
        return self.record.header_bytes + start, nbytes

    @contextmanager
    def _open_file(self) -> Iterator[int]:
        try:
            actual = self.io.size(self.path)
            if actual != self.record.size:
                raise CorruptCheckpointError(f"{self.path} has {actual} bytes; {self.record.size} were committed")
            handle = self.io.open_read(self.path)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{self.path} is missing") from None
        except OSError as error:
            raise CorruptCheckpointError(f"{self.path} cannot be opened: {error}") from error
        try:
            yield handle
        finally:
            self.io.close(handle)

    def _load_header(self, handle: int) -> dict[str, _HeaderEntry]:
        with self._lock:
            if self._entries is None:
                header, digest = bytearray(self.record.header_bytes), hashlib.sha256()
                self._read_and_hash("(header)", handle, memoryview(header), 0, digest)
                if digest.hexdigest() != self.record.header_sha256:
                    raise CorruptCheckpointError(f"{self.path}: its header has changed since it was saved")
                self._entries = dict(_parse_header(self.path, bytes(header)))
            return self._entries


def _parse_header(path: Path, header: bytes) -> Iterator[tuple[str, _HeaderEntry]]:
    try:
        for key, entry in json.loads(header[8:]).items():
            if key != "__metadata__":
                start, stop = entry["data_offsets"]
                yield key, (entry["dtype"], [int(n) for n in entry["shape"]], int(start), int(stop))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: its header is not that of a safetensors file: {error}") from error
