"""A file of ``torch.save``, read and written without pickle: its tree, with tensors that are mapped from the file.

It is a zip whose entries are not compressed: ``<name>/data.pkl`` is the tree, ``<name>/data/<key>`` a storage each,
so the elements of a tensor lie at a place in the file that is known from the zip's directory alone.  Each entry has
a CRC-32, which is what can be said about damage.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from thalweg.checkpoint.deepspeed.unpickle import STORAGE_DTYPES, unpickle
from thalweg.checkpoint.errors import CorruptCheckpointError
from thalweg.checkpoint.filesystem import FileSystem

_LOCAL_HEADER = struct.Struct("<26xHH")  # length of the name, length of the extra field


class TorchFile:
    """One file of ``torch.save``."""

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
        self._bytes = torch.from_file(str(path), shared=False, size=self.size, dtype=torch.uint8)
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()) or "data.pkl" not in infos:
            raise CorruptCheckpointError(f"{path} is a zip file, but not one that torch.save has written")
        if "byteorder" in infos and self._read("byteorder") != b"little":
            raise CorruptCheckpointError(f"{path} was written on a big-endian machine; save it again on this one")

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.io.size(self.path)

    def tree(self) -> Any:
        """What was saved; the values of its tensors come into memory page by page, where they are used."""
        return unpickle(self._read("data.pkl"), str(self.path), self._read_storage)

    def find_damage(self) -> str | None:
        """What is wrong with the bytes of the file, all of which are read, or None."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                name = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            return f"{self.path} cannot be read: {error}"
        return name and f"{self.path}: the entry {name} has changed since it was saved (its CRC-32 differs)"

    def _read(self, name: str) -> bytes:
        return self._read_range(name, 0, self._entries[name].file_size).numpy().tobytes()

    def _read_storage(self, key: str, start: int, nbytes: int) -> torch.Tensor:
        values = self._read_range(f"data/{key}", start, nbytes)
        # torch aligns storages; who packs the zip anew may not.
        return values if values.data_ptr() % 16 == start % 16 else values.clone()

    def _read_range(self, name: str, start: int, nbytes: int) -> torch.Tensor:
        info = self._entries.get(name)
        if info is None or start < 0 or start + nbytes > info.file_size:
            raise CorruptCheckpointError(f"{self.path}: a tensor lies outside the entry {name}")
        name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(self._bytes.numpy().data, info.header_offset)
        first = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes + start
        if first + nbytes > len(self._bytes):
            raise CorruptCheckpointError(f"{self.path}: the file ends inside the entry {name}")
        return self._bytes[first : first + nbytes]


def write_torch_file(file: BinaryIO, tree: Mapping[str, Any]) -> None:
    """Write dicts (keys are strings) within dicts of tensors so that ``torch.load`` reads them, with weights_only too.

    Raises:
        ValueError: a tensor is of a dtype without a storage class of its own (fp8).
    """
    tensors: list[torch.Tensor] = []
    opcodes = b"\x80\x02" + _encode(tree, tensors) + b"."
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (("data.pkl", opcodes), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
        for number, tensor in enumerate(tensors):
            with archive.open(f"archive/data/{number}", "w", force_zip64=True) as entry:
                entry.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)


def _encode(value: Any, tensors: list[torch.Tensor]) -> bytes:
    """The opcodes (of protocol 2) that put ``value`` on the stack; ``tensors`` takes those that they refer to."""
    if isinstance(value, str):
        text = value.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, int):
        return b"\x8a\x08" + struct.pack("<q", value)
    if isinstance(value, tuple):
        return b"(" + b"".join(_encode(item, tensors) for item in value) + b"t"
    if isinstance(value, Mapping):
        return b"}(" + b"".join(_encode(key, tensors) + _encode(item, tensors) for key, item in value.items()) + b"u"
    storage_class = next((name for name, dtype in STORAGE_DTYPES.items() if dtype == value.dtype), None)
    if storage_class is None:
        raise ValueError(f"a tensor of {value.dtype} has no storage class: save it in another dtype")
    tensors.append(value := value.contiguous())
    key, (module, _, name) = str(len(tensors) - 1), storage_class.rpartition(".")
    storage = b"".join(_encode(item, tensors) for item in (key, "cpu", value.numel()))
    place = b"".join(_encode(item, tensors) for item in (0, tuple(value.shape), value.stride()))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + (_encode("storage", tensors) + f"c{module}\n{name}\n".encode() + storage + b"tQ" + place)
        + b"\x89ccollections\nOrderedDict\n)RtR"  # no gradient, no hooks
    )


def load_tensors(tree: Any) -> Any:
    """``tree`` with tensors of its own, in memory."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: load_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(load_tensors(value) for value in tree)
    return tree
