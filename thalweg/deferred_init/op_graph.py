"""What zero.Init writes down: the operations that make the values of tensors without memory.

The picture.  A tensor of a model that is being built has a *storage* on the meta device: it
has a size, an identity and aliases, but no bytes.  Each such storage has a :class:`Cell`,
and a cell has a ``head``: the last operation that wrote to it.  An operation names what it
read as :class:`ViewRef`: a cell, the head which that cell had at the time (its *version*), and
the strided window that was looked at.  So views need no record of their own, ties are ties
because they share a storage, and the operations form a graph that holds exactly what is
still needed: an operation that overwrites a whole storage names no earlier version, and
what nobody names is garbage.

    w = torch.empty(4, 3)     cell(w): head None            (never written: zeros)
    w.uniform_(-1, 1)         cell(w): head op1, reads nothing, random state of that moment
    w[0].fill_(0)             cell(w): head op2, reads (cell(w), op1)
    w.normal_()               cell(w): head op3, reads nothing; op1 and op2 are garbage

Random numbers.  While recording, the generator is moved on exactly as if the values had been
drawn, and the operation keeps the state it found.  So replay may start anywhere, what the
user draws between or after is what an ordinary build would give, and control flow that
depends on random numbers takes the right branch.

The sequence number of an operation is its place in the program; replay runs operations in
that order, so that in-place semantics need no analysis beyond the versions.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thalweg.deferred_init.pytree import CallSpec

_sequence = itertools.count()


@dataclass(eq=False)
class RecordedOp:
    """One recorded operation.

    ``leaves`` are its flattened arguments with a :class:`ViewRef` for each tensor without memory
    and a private copy of each real one; ``outputs`` maps positions in the flattened result to
    the windows of new storages; ``writes`` are the cells it changes.  ``state`` is that of the
    random generator before it, or ``None``.  Without a ``func`` the operation is a constant:
    ``leaves[0]`` is the real storage.
    """

    func: Any
    leaves: list[Any]
    spec: CallSpec | None
    rng_state: Tensor | None = None
    outputs: dict[int, ViewRef] = field(default_factory=dict)
    writes: list[StorageRecord] = field(default_factory=list)
    seq: int = field(default_factory=lambda: next(_sequence))

    def input_refs(self) -> Iterator[ViewRef]:
        """Yield the windows it reads or changes."""
        return (leaf for leaf in self.leaves if isinstance(leaf, ViewRef))


class StorageRecord:
    """The record of one storage: its size in bytes and the last operation that wrote to it."""

    __slots__ = ("last_write", "nbytes", "weak_storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.weak_storage = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.last_write: RecordedOp | None = None

    @property
    def is_alive(self) -> bool:
        """Whether any tensor still uses the storage."""
        return self.weak_storage() is not None


@dataclass(frozen=True, eq=False, slots=True)
class ViewRef:
    """A strided window of a cell at a version (``None``: what was there does not matter, or zeros)."""

    storage_record: StorageRecord
    version: RecordedOp | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the window is the whole storage, each element once."""
        numel = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: pair[1]):
            if size != 1 and stride != numel:
                return False
            numel *= size
        return self.offset == 0 and numel * self.dtype.itemsize >= self.storage_record.nbytes


# A storage's Python object lives as long as the storage does, so records go with the last tensor that uses theirs.
storage_records: weakref.WeakKeyDictionary[torch.UntypedStorage, StorageRecord] = weakref.WeakKeyDictionary()


def get_storage_record(storage: torch.UntypedStorage) -> StorageRecord:
    """The cell of ``storage``, a new one (zeros) where there is none."""
    return storage_records.setdefault(storage, StorageRecord(storage))


def is_meta(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no memory, whatever a subclass says of itself."""
    return torch.Tensor.is_meta.__get__(tensor)  # type: ignore[attr-defined]


def make_view_ref(tensor: Tensor) -> ViewRef:
    """Describe ``tensor`` (on meta) as a window of its cell at the present version."""
    storage_record = get_storage_record(tensor.untyped_storage())
    return ViewRef(
        storage_record,
        storage_record.last_write,
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.is_conj(),
    )


@dataclass(frozen=True)
class OpTraits:
    """What recording needs to know of an operator."""

    is_random: bool
    written_args: frozenset[int | str]  # argument positions and names that it changes
    overwrites_first_arg: bool  # it changes its first argument without reading it
    is_shape_only: bool  # its result does not depend on the values of its tensor arguments
    reshapes_in_place: bool  # it changes size, stride or storage of its argument in place


_OVERWRITING_OPS = frozenset({"zero_", "fill_", "copy_", "uniform_", "normal_", "random_"}) | frozenset(
    {"exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"}
)
_RANDOM_LIKE_OPS = ("rand_like", "randn_like", "randint_like")
_SHAPE_ONLY_PREFIXES = ("new_", "empty", "zeros_like", "ones_like", "full_like", *_RANDOM_LIKE_OPS)
_RESHAPING_OPS = frozenset({"resize_", "resize_as_"})


@functools.cache
def get_op_traits(func: Any) -> OpTraits:
    """Return the :class:`OpTraits` of an ``OpOverload``."""
    schema = func._schema
    written_args: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written_args |= {argument.name} if argument.kwarg_only else {position, argument.name}
    name = schema.name.rpartition("::")[2]
    return OpTraits(
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        written_args=frozenset(written_args),
        overwrites_first_arg=name in _OVERWRITING_OPS and not (name == "bernoulli_" and func._overloadname == "Tensor"),
        is_shape_only=name.startswith(_SHAPE_ONLY_PREFIXES),
        reshapes_in_place=torch.Tag.inplace_view in func.tags or name in _RESHAPING_OPS,
    )
