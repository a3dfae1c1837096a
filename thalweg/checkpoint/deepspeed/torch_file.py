"""A file of ``torch.save`` that somebody else wrote, read by ``torch.load`` with ``weights_only`` and mapped.

Nothing that its pickle names is imported or called but what torch itself allows there, the plain containers and numpy
values of ``_PLAIN``, and stand-ins for DeepSpeed's own classes (:class:`InertObject`).  Any other name is an error
that names it.
"""

import argparse
import datetime
import pathlib
import zipfile
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from thalweg.checkpoint.errors import CorruptCheckpointError, UnserializableStateError
from thalweg.checkpoint.filesystem import FileSystem


class InertObject:
    """What stands for an object of DeepSpeed's: ``args`` it was made with; its fields are ``vars()`` of it."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Self:
        self = super().__new__(cls)
        self.args = args
        return self

    def __init__(self, *args: Any) -> None:
        pass


# torch's reader fills dicts, lists and sets alone, so what is made like one of them comes back as one.
_PLAIN: dict[str, Any] = {
    "collections.defaultdict": lambda factory=None, items=(): dict(items),
    "collections.deque": lambda items=(), maxlen=None: list(items),
    **{f"builtins.{kind.__name__}": kind for kind in (dict, frozenset, list, tuple, int, float, str, bool)},
    "argparse.Namespace": argparse.Namespace,
    "datetime.timedelta": datetime.timedelta,
    **{f"pathlib{at}.{name}": lambda *parts: pathlib.PurePosixPath(*parts)
       for at in ("", "._local") for name in ("PosixPath", "PurePosixPath")},
    **{f"numpy.{core}.multiarray.{name}": value.__reduce__()[0] for core in ("core", "_core")
       for name, value in (("scalar", numpy.float32()), ("_reconstruct", numpy.empty(0)))},
    "numpy.dtype": numpy.dtype,
    "numpy.ndarray": numpy.ndarray,
}  # fmt: skip
_NUMPY_DTYPES = [
    getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__ if name not in ("ObjectDType", "VoidDType")
]


class TorchFile:
    """One file of ``torch.save``, of ``size`` bytes."""

    def __init__(self, io: FileSystem, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                infos, self.size = archive.infolist(), io.size(path)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
            raise CorruptCheckpointError(
                f"{path} is damaged, or was written in the form before torch 1.6 ({error}); such a file is read after "
                "torch.save(torch.load(FILE, weights_only=False), FILE), where you trust it"
            ) from error
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise CorruptCheckpointError(f"{path} is a zip file, but not one that torch.save has written")

    def tree(self) -> Any:
        """What was saved; the values of its tensors come into memory page by page, where they are used.

        Raises:
            CorruptCheckpointError: not a pickle of protocol 2 (``torch.save``'s), or one that does not hold together.
            UnserializableStateError: it holds an object of a class that is not read.
        """
        try:
            names = get_unsafe_globals_in_checkpoint(str(self.path))
            stand_ins = {name: type(name, (InertObject,), {}) for name in names if name.startswith("deepspeed.")}
            if unread := sorted(set(names) - stand_ins.keys() - _PLAIN.keys()):
                raise UnserializableStateError(
                    f"{self.path} holds an object of {', '.join(unread)}, which is not read: nothing that a checkpoint "
                    "names is imported or called here. Where you trust the file, load it with torch.load(..., "
                    "weights_only=False), replace that object by plain values, and save it again"
                )
            allowed: list[Any] = [(value, name) for name, value in (_PLAIN | stand_ins).items()]
            with safe_globals([*_NUMPY_DTYPES, *allowed]):
                return torch.load(str(self.path), map_location="cpu", mmap=True, weights_only=True)
        except UnserializableStateError:
            raise
        except Exception as error:  # whatever a stranger's bytes lead to, it is the file that is at fault
            raise CorruptCheckpointError(
                f"{self.path} is not a file of torch.save that can be read: {type(error).__name__}: {error}"
            ) from error

    def find_damage(self) -> str | None:
        """What is wrong with the bytes of the file, all of which are read, or None."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                name = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            return f"{self.path} cannot be read: {error}"
        return name and f"{self.path}: the entry {name} has changed since it was saved (its CRC-32 differs)"
