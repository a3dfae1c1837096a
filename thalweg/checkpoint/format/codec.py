"""A tree of Python values as JSON plus tensors, and back, equal.

What JSON has is written as it is.  What JSON lacks (tuples, sets, bytes, non-string
keys, inf, numpy scalars, ...) becomes an object with the one key ``__thalweg__`` that
names its codec, and ``v``.  Tensors and arrays leave the tree: they are stored as
logical tensors and the tree holds their name.  There is no codec that imports a class
or calls a function by a name read from disk; what has no codec is an error with its
path, at save time.
"""

import argparse
import base64
import collections
import datetime
import decimal
import fractions
import json
import math
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor

from thalweg.checkpoint.errors import CorruptCheckpointError, UnserializableStateError
from thalweg.checkpoint.format.dtypes import DTYPE_NAMES, DTYPES

TAG_KEY = "__thalweg__"
MAX_DEPTH = 200
_INLINE_BYTES = 1024  # longer byte strings are stored as tensors, not as text

_SAFE_NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d+(\[\d*[a-zA-Z]+\])?")  # plain bytes: no objects, no records


def _base64_decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# name: (types, value -> encodable parts, parts -> value); the parts are encoded in their turn
_CODECS: dict[str, tuple[tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": ((complex,), lambda v: [v.real, v.imag], lambda p: complex(*p)),
    "range": ((range,), lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    "slice": ((slice,), lambda v: [v.start, v.stop, v.step], lambda p: slice(*p)),
    "deque": ((collections.deque,), lambda v: [list(v), v.maxlen], lambda p: collections.deque(p[0], p[1])),
    "ordered": ((collections.OrderedDict,), lambda v: dict(v), lambda p: collections.OrderedDict(p)),
    "counter": ((collections.Counter,), lambda v: dict(v), lambda p: collections.Counter(p)),
    "path": ((pathlib.PosixPath, pathlib.WindowsPath), str, pathlib.Path),
    "purepath": ((pathlib.PurePosixPath,), str, pathlib.PurePosixPath),
    "datetime": ((datetime.datetime,), lambda v: v.isoformat(), datetime.datetime.fromisoformat),
    "date": ((datetime.date,), lambda v: v.isoformat(), datetime.date.fromisoformat),
    "time": ((datetime.time,), lambda v: v.isoformat(), datetime.time.fromisoformat),
    "timedelta": (
        (datetime.timedelta,),
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda p: datetime.timedelta(*p),
    ),
    "decimal": ((decimal.Decimal,), str, decimal.Decimal),
    "fraction": ((fractions.Fraction,), lambda v: [v.numerator, v.denominator], lambda p: fractions.Fraction(*p)),
    "uuid": ((uuid.UUID,), str, uuid.UUID),
    "namespace": ((argparse.Namespace,), lambda v: dict(vars(v)), lambda p: argparse.Namespace(**p)),
    "simple": ((types.SimpleNamespace,), lambda v: dict(vars(v)), lambda p: types.SimpleNamespace(**p)),
    "dtype": ((torch.dtype,), lambda v: DTYPE_NAMES[v], lambda p: DTYPES[p]),
    "device": ((torch.device,), str, torch.device),
    "size": ((torch.Size,), list, torch.Size),
    "bytearray": ((bytearray,), bytes, bytearray),
}
_BUILTIN_CONVERTERS: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
_ENCODERS_BY_TYPE = {cls: (name, codec[1]) for name, codec in _CODECS.items() for cls in codec[0]}
_DECODERS: dict[str, Callable[[Any], Any]] = {name: codec[2] for name, codec in _CODECS.items()} | {
    **{cls.__name__: cls for cls in (tuple, set, frozenset, dict)},
    "bytes": _base64_decode,
    "float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "int": lambda text: int(text, 16),
}


def encode_tree(tree: Any, prefix: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """``tree`` as JSON-able values, and the tensors that left it, named ``prefix/path``."""
    encoder = _TreeEncoder(prefix)
    return encoder.encode(tree, ()), encoder.tensors


def decode_tree(node: Any, load_tensor: Callable[[str], torch.Tensor]) -> Any:
    """The tree that ``encode`` was given; ``load_tensor(name)`` returns a stored tensor."""
    if isinstance(node, list):
        return [decode_tree(item, load_tensor) for item in node]
    if not isinstance(node, dict):
        return node
    if TAG_KEY not in node:
        return {key: decode_tree(value, load_tensor) for key, value in node.items()}
    try:
        name, value = node[TAG_KEY], node["v"]
        if name == "tensor":
            return load_tensor(value)
        if name == "bytes_tensor":
            return load_tensor(value).numpy().tobytes()
        if name == "numpy":
            return _view_bytes((), node["dtype"], _base64_decode(value))[()]
        if name == "ndarray":
            raw = b"" if value is None else load_tensor(value).numpy().tobytes()
            return _view_bytes(node["shape"], node["dtype"], raw)
        return _DECODERS[name](decode_tree(value, load_tensor))
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the state tree holds a {node.get(TAG_KEY)!r} that cannot be read: {error}"
        ) from error


class _TreeEncoder:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}
        self.active_ids: set[int] = set()  # containers being encoded, to find cycles

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() < 4096 else _make_tagged("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else _make_tagged("float", repr(value))
        if isinstance(value, torch.Tensor):
            return _make_tagged("tensor", self._extract_tensor(_check_tensor(value, self._fail, path), path))
        if isinstance(value, numpy.generic | numpy.ndarray):
            return self._encode_numpy(value, path)
        if kind is bytes and len(value) <= _INLINE_BYTES:
            return _make_tagged("bytes", base64.b64encode(value).decode())
        if kind is bytes:
            raw = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return _make_tagged("bytes_tensor", self._extract_tensor(raw, path))
        return self._encode_nested(value, path)

    def _encode_nested(self, value: Any, path: tuple[str, ...]) -> Any:
        if id(value) in self.active_ids:
            self._fail(path, "contains itself")
        if len(path) > MAX_DEPTH:
            self._fail(path, f"is nested deeper than {MAX_DEPTH} levels")
        self.active_ids.add(id(value))
        try:
            return self._encode_container(value, path)
        finally:
            self.active_ids.discard(id(value))

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            encoded = [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            return encoded if kind is list else _make_tagged("tuple", encoded)
        if kind in (set, frozenset):
            items = [self.encode(item, (*path, repr(item))) for item in value]
            return _make_tagged(kind.__name__, sorted(items, key=lambda item: json.dumps(item, sort_keys=True)))
        if kind in (dict, collections.defaultdict):
            return self._encode_dict(value, path)
        if kind in _ENCODERS_BY_TYPE:
            name, to_parts = _ENCODERS_BY_TYPE[kind]
            return _make_tagged(name, self.encode(to_parts(value), path))
        for base, plain in _BUILTIN_CONVERTERS.items():  # an IntEnum, say, comes back equal as the plain value
            if isinstance(value, base) and plain(value) == value:
                return self.encode(plain(value), path)
        return self._fail(path, f"is a {kind.__module__}.{kind.__qualname__}, which has no safe form on disk")

    def _encode_dict(self, value: dict, path: tuple[str, ...]) -> Any:
        if all(type(key) is str for key in value) and TAG_KEY not in value:
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            step = key if isinstance(key, str) else repr(key)
            pairs.append([self.encode(key, (*path, f"key {step}")), self.encode(item, (*path, step))])
        return _make_tagged("dict", pairs)

    def _encode_numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        is_numpys_own = type(value) in (numpy.ndarray, value.dtype.type)
        if not is_numpys_own or value.dtype.names or not _SAFE_NUMPY_DTYPE.fullmatch(value.dtype.str):
            kind = f"a numpy {type(value).__name__} of dtype {value.dtype}"
            self._fail(path, f"is {kind}, which has no safe form on disk")
        if isinstance(value, numpy.generic):
            return {**_make_tagged("numpy", base64.b64encode(value.tobytes()).decode()), "dtype": value.dtype.str}
        copied = numpy.array(value, copy=True, order="C")
        details = {"dtype": value.dtype.str, "shape": list(value.shape)}
        raw = torch.frombuffer(bytearray(copied.tobytes()), dtype=torch.uint8) if copied.nbytes else None
        return {**_make_tagged("ndarray", None if raw is None else self._extract_tensor(raw, path)), **details}

    def _extract_tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        name = "/".join((self.prefix, *path))
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        return name

    def _fail(self, path: tuple[str, ...], reason: str) -> Any:
        where = "".join(f"[{step!r}]" for step in path if step)
        raise UnserializableStateError(
            f"{self.prefix}{where} {reason}; store plain values, containers, numpy arrays or tensors instead"
        )


def _make_tagged(name: str, value: Any) -> dict[str, Any]:
    return {TAG_KEY: name, "v": value}


def _check_tensor(value: torch.Tensor, fail: Callable[..., Any], path: tuple[str, ...]) -> torch.Tensor:
    supported = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or isinstance(value, DTensor)
    problems = {
        f"a {type(value).__name__}, a tensor subclass": not supported,
        "a meta tensor, which has no values": value.device.type == "meta",
        f"a {value.layout} tensor": value.layout != torch.strided,
        f"a tensor of dtype {value.dtype}": value.dtype not in DTYPE_NAMES,
    }
    if problem := next((text for text, applies in problems.items() if applies), None):
        fail(path, f"is {problem}")
    return value.detach()


def _view_bytes(shape: Iterable[int], dtype: str, raw: bytes) -> numpy.ndarray:
    if not _SAFE_NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"dtype {dtype!r} is not plain bytes")
    return numpy.ndarray(tuple(shape), numpy.dtype(dtype), bytearray(raw) or bytearray(1))
