"""A file of ``torch.save``, read without torch's unpickler: its tree now, its tensors when asked for.

It is a zip whose entries are not compressed: ``<name>/data.pkl`` is the tree, ``<name>/data/<key>`` a storage each,
so the elements of a tensor lie at a place in the file that is known from the zip's directory alone.  Each entry has
a CRC-32, which is what can be said about damage.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from thalweg.checkpoint.deepspeed.unpickle import StoredTensor, unpickle
from thalweg.checkpoint.errors import CorruptCheckpointError
from thalweg.checkpoint.filesystem import FileSystem
from thalweg.checkpoint.format.shards import READ_BLOCK_BYTES

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field


class TorchFile:
    """One file of ``torch.save``; only its directory and its tree are in memory."""

    def __init__(self, io: FileSystem, path: Path) -> None:
        self.io, self.path = io, path
        try:
            with zipfile.ZipFile(path) as archive:
                infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
            raise CorruptCheckpointError(
                f"{path} is damaged, or was written in the form before torch 1.6 ({error}); such a file is read after "
                "torch.save(torch.load(FILE, weights_only=False), FILE), where you trust it"
            ) from error
        self._entries = infos
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()) or "data.pkl" not in infos:
            raise CorruptCheckpointError(f"{path} is a zip file, but not one that torch.save has written")
        if "byteorder" in infos and self._read("byteorder") != b"little":
            raise CorruptCheckpointError(f"{path} was written on a big-endian machine; save it again on this one")

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.io.size(self.path)

    def tree(self) -> Any:
        """What was saved, with a ``StoredTensor`` for each tensor."""
        return unpickle(self._read("data.pkl"), str(self.path), self)

    def read_storage(self, key: str, start: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes from byte ``start`` of a storage, as uint8."""
        return self._read_range(f"data/{key}", start, nbytes)

    def find_damage(self) -> str | None:
        """What is wrong with the bytes of the file, all of which are read, or None."""
        for name, info in self._entries.items():
            digest = 0
            try:
                for start in range(0, info.file_size, READ_BLOCK_BYTES):
                    block = self._read_range(name, start, min(READ_BLOCK_BYTES, info.file_size - start))
                    digest = zlib.crc32(block.numpy().data, digest)
            except CorruptCheckpointError as error:
                return str(error)
            if digest != info.CRC:
                return f"{self.path}: the entry {name} has changed since it was saved (its CRC-32 differs)"
        return None

    def _read(self, name: str) -> bytes:
        return self._read_range(name, 0, self._entries[name].file_size).numpy().tobytes()

    def _read_range(self, name: str, start: int, nbytes: int) -> torch.Tensor:
        info = self._entries.get(name)
        if info is None or start < 0 or start + nbytes > info.file_size:
            raise CorruptCheckpointError(f"{self.path}: a tensor lies outside the entry {name}")
        values = torch.empty(nbytes, dtype=torch.uint8)
        try:
            handle = self.io.open_read(self.path)
            try:
                header = bytearray(_LOCAL_HEADER.size)
                self.io.pread_into(handle, header, info.header_offset)
                _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
                first = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes + start
                done = self.io.pread_into(handle, values.numpy(), first)
            finally:
                self.io.close(handle)
        except OSError as error:
            raise CorruptCheckpointError(f"{self.path} cannot be read: {error}") from error
        if done < nbytes:
            raise CorruptCheckpointError(f"{self.path}: the file ends inside the entry {name}")
        return values


def load_tensors(tree: Any) -> Any:
    """``tree`` with the values of its tensors read."""
    if isinstance(tree, StoredTensor):
        return tree.read().view(tree.shape)
    if isinstance(tree, dict):
        return {key: load_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(load_tensors(value) for value in tree)
    return tree
