"""A pickle as data: its opcodes are interpreted here, and nothing that it names is ever imported or called.

``pickletools.genops`` reads the opcodes; a stack of plain values follows them.  A global (the name of a class or
function) is kept as its name.  Where the pickle would call one, ``_BUILDERS`` says what comes of it: containers,
numpy values, tensors over the storages of the file.  DeepSpeed's own classes become an ``InertObject``: their name,
arguments and fields.  Any other name is an error that names it.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from thalweg.checkpoint.errors import CorruptCheckpointError, UnserializableStateError
from thalweg.checkpoint.format.codec import parse_numpy_dtype
from thalweg.checkpoint.format.dtypes import DTYPES

StorageReader = Callable[[str, int, int], torch.Tensor]  # of a storage by its key, bytes [start, start + n), as uint8


@dataclass(frozen=True)
class _Storage:
    """A storage of a file, by its key there; ``dtype`` is None for one of plain bytes."""

    key: str
    dtype: torch.dtype | None


@dataclass
class InertObject:
    """What stands for an object of DeepSpeed's: its class by name, what it was made with, its fields."""

    class_name: str
    args: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Global:
    """The name of a class or function."""

    name: str


@dataclass(frozen=True)
class _ArrayShell:
    """A numpy array before its ``BUILD``."""


_MARK = object()
STORAGE_DTYPES: dict[str, torch.dtype | None] = {
    **{f"torch.{kind}Storage": getattr(torch, dtype) for kind, dtype in {
        "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
        "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
        "ComplexFloat": "complex64", "ComplexDouble": "complex128",
    }.items()},
    "torch.storage.UntypedStorage": None,
}  # fmt: skip


def unpickle(data: bytes, source: str, read_storage: StorageReader) -> Any:
    """The value that a pickle describes; ``source`` (a path) begins the text of errors.

    Raises:
        CorruptCheckpointError: not a pickle, or one that does not hold together.
        UnserializableStateError: it holds an object of a class that is not read.
    """
    try:
        return _Interpreter(source, read_storage).run(data)
    except (UnserializableStateError, CorruptCheckpointError):
        raise
    except Exception as error:  # whatever a stranger's bytes lead to, it is the file that is at fault
        raise CorruptCheckpointError(
            f"{source} is not a file of torch.save that can be read: {type(error).__name__}: {error}"
        ) from error


class _Interpreter:
    """One pickle's stack and memo."""

    def __init__(self, source: str, read_storage: StorageReader) -> None:
        self.source, self.read_storage = source, read_storage
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Interpret all opcodes up to STOP."""
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _CONSTANT_OPCODES:
                self.stack.append(_CONSTANT_OPCODES[name]())
            elif name in _VALUE_OPCODES:
                self.stack.append(argument)
            elif name not in _IGNORED_OPCODES:
                handler = _HANDLERS.get(name)
                if handler is None:
                    raise ValueError(f"the opcode {name} is not read")
                handler(self, argument)
        raise ValueError("it has no end")

    def pop_to_mark(self) -> list[Any]:
        """The values above the last mark, which goes with them."""
        position = len(self.stack) - 1
        while self.stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise ValueError("it has no mark")
        items = self.stack[position + 1 :]
        del self.stack[position:]
        return items

    def pop_many(self, count: int) -> list[Any]:
        """The ``count`` values on top."""
        items = self.stack[len(self.stack) - count :]
        if len(items) != count or any(item is _MARK for item in items):
            raise ValueError("its stack is empty")
        del self.stack[len(self.stack) - count :]
        return items

    def push_global(self, name: str) -> None:
        """The name itself, or the dtype that it is one of."""
        module, _, last = name.rpartition(".")
        dtype = DTYPES.get(last) if module == "torch" else None
        self.stack.append(_Global(name) if dtype is None else dtype)

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What comes of calling ``function``, which is only a name."""
        if not isinstance(function, _Global):
            raise ValueError("it calls something that is not a name")
        builder = _BUILDERS.get(function.name)
        if builder is not None:
            return builder(self, *args)
        if function.name.split(".")[0] == "deepspeed":
            return InertObject(function.name, args)
        raise UnserializableStateError(
            f"{self.source} holds an object of {function.name}, which is not read: nothing that a checkpoint names is "
            "imported or called here. Where you trust the file, load it with torch.load(..., weights_only=False), "
            "replace that object by plain values, and save it again"
        )

    def build(self, state: Any) -> None:
        """Give the object on top its state."""
        target = self.stack[-1]
        if isinstance(target, InertObject):
            target.fields.update(_object_fields(state))
        elif isinstance(target, argparse.Namespace):
            vars(target).update({str(key): value for key, value in _object_fields(state).items()})
        elif isinstance(target, numpy.dtype):
            if state[3] is not None or state[4] is not None:
                raise ValueError("it holds a numpy dtype with fields")
            self._replace_top(target.newbyteorder(state[1]) if state[1] in ("<", ">") else target)
        elif isinstance(target, _ArrayShell):
            _, shape, dtype, is_fortran, raw = state
            flat = numpy.frombuffer(raw, dtype).copy()
            self._replace_top(flat.reshape(shape, order="F" if is_fortran else "C"))
        elif not isinstance(target, dict):  # attributes of an OrderedDict carry nothing that is needed
            raise ValueError(f"it sets the state of a {type(target).__name__}")

    def _replace_top(self, value: Any) -> None:
        previous, self.stack[-1] = self.stack[-1], value
        for key, known in self.memo.items():
            if known is previous:
                self.memo[key] = value

    def rebuild_tensor(
        self, storage: _Storage, offset: int, shape: Any, strides: Any, *rest: Any, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor over a storage; of the ``rest`` (requires_grad, hooks, metadata) nothing is needed."""
        dtype = dtype or storage.dtype
        if dtype is None or offset < 0 or len(shape) != len(strides) or min([0, *shape, *strides]) < 0:
            raise ValueError("it holds a tensor of an impossible shape")
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)
        span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        values = self.read_storage(storage.key, offset * dtype.itemsize, span * dtype.itemsize)
        return values.view(dtype).as_strided(tuple(shape), tuple(strides))

    def load_storage(self, persistent_id: Any) -> None:
        """The storage that ``torch.save`` has put beside the pickle."""
        kind, storage_type, key, *_ = persistent_id
        if kind != "storage" or not isinstance(storage_type, _Global):
            raise ValueError("it refers to something other than a storage")
        self.stack.append(_Storage(str(key), STORAGE_DTYPES[storage_type.name]))


def _object_fields(state: Any) -> dict[Any, Any]:
    """The fields of an object's ``__dict__`` and, where there are two parts, of its ``__slots__``."""
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts if part for key, value in part.items()}


def _append(machine: _Interpreter, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, list | collections.deque):
        target.extend(items)
    elif isinstance(target, set):
        target.update(items)
    else:
        raise ValueError(f"it appends to a {type(target).__name__}")


def _set_items(machine: _Interpreter, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, dict) or len(items) % 2:
        raise ValueError(f"it sets items of a {type(target).__name__}")
    target.update(zip(items[::2], items[1::2], strict=True))


def _reduce(machine: _Interpreter) -> None:
    function, args = machine.pop_many(2)
    machine.stack.append(machine.call(function, tuple(args)))


def _new_with_keywords(machine: _Interpreter) -> None:
    function, args, keywords = machine.pop_many(3)
    if keywords:
        raise ValueError("it makes an object with keywords")
    machine.stack.append(machine.call(function, tuple(args)))


def _make_numpy_scalar(machine: _Interpreter, dtype: numpy.dtype, raw: bytes) -> Any:
    return numpy.frombuffer(raw, dtype, count=1)[0]


def _make_array(machine: _Interpreter, raw: bytes, dtype: numpy.dtype, shape: tuple[int, ...], order: str) -> Any:
    return numpy.frombuffer(bytes(raw), dtype).copy().reshape(shape, order="F" if order == "F" else "C")


def _reconstruct(machine: _Interpreter, cls: Any, *rest: Any) -> Any:
    return machine.call(cls, ())


def _rebuild_from_type(machine: _Interpreter, function: Any, cls: Any, args: Any, state: Any) -> Any:
    return machine.call(function, tuple(args))


def _encode(machine: _Interpreter, text: str, encoding: str) -> bytes:
    return text.encode({"latin1": "latin-1", "latin-1": "latin-1"}[encoding])


def _make_bytearray(machine: _Interpreter, value: Any = b"", encoding: str | None = None) -> bytearray:
    if isinstance(value, int):
        raise ValueError("it makes an array of a number of bytes")
    return bytearray(value if encoding is None else _encode(machine, value, encoding))


_ignored_factory: Callable[..., dict] = lambda machine, *factory: {}

_BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda machine, items=(): dict(items),
    "collections.defaultdict": _ignored_factory,
    "collections.deque": lambda machine, items=(), maxlen=None: collections.deque(items, maxlen),
    "collections.Counter": lambda machine, items=(): collections.Counter(dict(items)),
    "builtins.dict": lambda machine, items=(): dict(items),
    "builtins.list": lambda machine, items=(): list(items),
    "builtins.tuple": lambda machine, items=(): tuple(items),
    "builtins.set": lambda machine, items=(): set(items),
    "builtins.frozenset": lambda machine, items=(): frozenset(items),
    "builtins.complex": lambda machine, *parts: complex(*parts),
    "builtins.bytearray": _make_bytearray,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstruct,
    "argparse.Namespace": lambda machine: argparse.Namespace(),
    "datetime.timedelta": lambda machine, *parts: datetime.timedelta(*parts),
    **{f"pathlib{at}.{name}": lambda machine, *parts: pathlib.PurePosixPath(*parts)
       for at in ("", "._local") for name in ("PosixPath", "PurePosixPath")},
    **{f"numpy.{core}.multiarray.scalar": _make_numpy_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": lambda machine, *how: _ArrayShell() for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _make_array for core in ("core", "_core")},
    "numpy.dtype": lambda machine, name, *flags: parse_numpy_dtype(numpy.dtype(str(name)[:8]).str),
    "torch.Size": lambda machine, sizes=(): tuple(sizes),
    "torch.device": lambda machine, *name: ":".join(map(str, name)),
    "torch.serialization._get_layout": lambda machine, name: str(name),
    "torch._utils._rebuild_tensor": _Interpreter.rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _Interpreter.rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": lambda machine, storage, offset, shape, strides, grad, hooks, dtype, *more: (
        machine.rebuild_tensor(storage, offset, shape, strides, dtype=dtype)
    ),
    "torch._utils._rebuild_parameter": lambda machine, data, *rest: data,
    "torch._utils._rebuild_parameter_with_state": lambda machine, data, *rest: data,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
}  # fmt: skip

_CONSTANT_OPCODES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_VALUE_OPCODES = frozenset(
    name.upper()
    for kind in (
        "long1 long4 binint binint1 binint2 binfloat",
        "short_binunicode binunicode binunicode8 binstring short_binstring",
        "binbytes short_binbytes binbytes8 bytearray8",
    )
    for name in kind.split(" ")
)
_IGNORED_OPCODES = frozenset({"PROTO", "FRAME"})
_HANDLERS: dict[str, Callable[[_Interpreter, Any], Any]] = {
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "BINPUT": lambda m, key: m.memo.__setitem__(key, m.stack[-1]),
    "LONG_BINPUT": lambda m, key: m.memo.__setitem__(key, m.stack[-1]),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "BINGET": lambda m, key: m.stack.append(m.memo[key]),
    "LONG_BINGET": lambda m, key: m.stack.append(m.memo[key]),
    "GLOBAL": lambda m, name: m.push_global(_modern_name(*name.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.push_global(_modern_name(*m.pop_many(2))),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop_many(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop_many(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop_many(3))),
    "FROZENSET": lambda m, _: m.stack.append(frozenset(m.pop_to_mark())),
    "APPEND": lambda m, _: _append(m, m.pop_many(1)),
    "APPENDS": lambda m, _: _append(m, m.pop_to_mark()),
    "ADDITEMS": lambda m, _: _append(m, m.pop_to_mark()),
    "SETITEM": lambda m, _: _set_items(m, m.pop_many(2)),
    "SETITEMS": lambda m, _: _set_items(m, m.pop_to_mark()),
    "REDUCE": lambda m, _: _reduce(m),
    "NEWOBJ": lambda m, _: _reduce(m),
    "NEWOBJ_EX": lambda m, _: _new_with_keywords(m),
    "BUILD": lambda m, _: m.build(m.pop_many(1)[0]),
    "BINPERSID": lambda m, _: m.load_storage(m.pop_many(1)[0]),
}  # fmt: skip


def _modern_name(module: str, name: str) -> str:
    """The dotted name, with Python 3's name for the modules that protocol 2 calls as Python 2 did."""
    return f"{ {'__builtin__': 'builtins', 'copy_reg': 'copyreg'}.get(module, module) }.{name}".replace(" ", "")
