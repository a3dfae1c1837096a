"""A file of ``torch.save``, read by torch's ``weights_only`` reader: its tree now, its tensors mapped from the file.

That reader interprets the pickle's opcodes itself and imports nothing; it calls what torch's own list has, and the
stand-ins of this file: plain containers, numpy's numbers and arrays.  DeepSpeed's own classes become an
``InertObject``, their arguments and fields.  Any other name is an error that names it.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from thalweg.checkpoint.errors import CorruptCheckpointError, UnserializableStateError
from thalweg.checkpoint.filesystem import FileSystem
from thalweg.checkpoint.format.codec import parse_numpy_dtype

# torch has one list of safe names for the whole process.
_safe_globals_lock = threading.Lock()


class InertObject:
    """What stands for an object of DeepSpeed's: what it was made with, its fields."""

    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> InertObject:
        self = super().__new__(cls)
        self.args, self.fields = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        # Two parts where the class has ``__slots__``.
        for part in state if isinstance(state, tuple) else (state,):
            self.fields.update(part or {})


class _NumpyDtype:
    """A numpy dtype of numbers; numpy's own ``__setstate__`` would take fields and sizes that no array has."""

    def __init__(self, name: str, *flags: Any) -> None:
        self.value = parse_numpy_dtype(numpy.dtype(str(name)[:8]).str)

    def __setstate__(self, state: Any) -> None:
        if state[3] is not None or state[4] is not None:
            raise ValueError("it holds a numpy dtype with fields")
        if state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


class _NumpyArray:
    """A numpy array of such a dtype."""

    value: numpy.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        self.value = numpy.frombuffer(raw, dtype.value).copy().reshape(shape, order="F" if is_fortran else "C")


def _make_numpy_scalar(dtype: _NumpyDtype, raw: bytes) -> Any:
    return numpy.frombuffer(raw, dtype.value, count=1)[0]


_STAND_INS: dict[str, Callable[..., Any]] = {
    **{f"builtins.{kind.__name__}": kind for kind in (dict, float, frozenset, int, list, str, tuple)},
    "argparse.Namespace": argparse.Namespace,
    "collections.defaultdict": lambda *factory: {},
    "collections.deque": lambda items=(), maxlen=None: list(items),
    "datetime.timedelta": datetime.timedelta,
    "numpy.dtype": _NumpyDtype,
    "numpy.ndarray": _NumpyArray,
    **{f"numpy.{core}.multiarray.scalar": _make_numpy_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": lambda *how: _NumpyArray() for core in ("core", "_core")},
    **{f"pathlib{at}.{name}": pathlib.PurePosixPath
       for at in ("", "._local") for name in ("PosixPath", "PurePosixPath")},
}  # fmt: skip


class TorchFile:
    """One file of ``torch.save``."""

    def __init__(self, io: FileSystem, path: Path) -> None:
        self.io, self.path = io, path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.io.size(self.path)

    def tree(self) -> Any:
        """What was saved; the values of its tensors come into memory page by page, where they are used.

        Raises:
            CorruptCheckpointError: not a file of ``torch.save``, or a damaged one.
            UnserializableStateError: it holds an object of a class that is not read.
        """
        try:
            with zipfile.ZipFile(self.path) as archive:
                if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                    raise ValueError("its entries are compressed, which torch.save never does")
            with _safe_globals_lock, safe_globals([(known, name) for name, known in self._stand_ins().items()]):
                return torch.load(str(self.path), map_location="cpu", mmap=True, weights_only=True)
        except UnserializableStateError:
            raise
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{self.path} is missing") from None
        except Exception as error:  # whatever a stranger's bytes lead to, it is the file that is at fault
            raise CorruptCheckpointError(
                f"{self.path} is damaged, or was written in the form before torch 1.6 ({type(error).__name__}: "
                f"{error}); such a file is read after torch.save(torch.load(FILE, weights_only=False), FILE), where "
                "you trust it"
            ) from error

    def _stand_ins(self) -> dict[str, Callable[..., Any]]:
        """What is to stand for each name in the file that torch does not know."""
        names = sorted(get_unsafe_globals_in_checkpoint(str(self.path)))
        theirs = {name: type(name.rpartition(".")[2], (InertObject,), {})
                  for name in names if name.startswith("deepspeed.")}  # fmt: skip
        unknown = [name for name in names if name not in theirs and name not in _STAND_INS]
        if unknown:
            raise UnserializableStateError(
                f"{self.path} holds an object of {', '.join(unknown)}, which is not read: nothing that a checkpoint "
                "names is imported or called here. Where you trust the file, load it with torch.load(..., "
                "weights_only=False), replace that object by plain values, and save it again"
            )
        return {**_STAND_INS, **theirs}

    def find_damage(self) -> str | None:
        """What is wrong with the bytes of the file, all of which are read, or None: each entry has a CRC-32."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                name = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            return f"{self.path} cannot be read: {error}"
        return name and f"{self.path}: the entry {name} has changed since it was saved (its CRC-32 differs)"


def load_tensors(tree: Any) -> Any:
    """``tree`` with tensors and arrays of its own, in memory."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, _NumpyArray):
        return tree.value
    if isinstance(tree, dict):
        return {key: load_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [load_tensors(value) for value in tree]
        return values if isinstance(tree, list) else tuple(values)
    return tree
