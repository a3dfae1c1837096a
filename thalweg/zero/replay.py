"""Replay: the values of recorded tensors, with as little alive at a time as the program allows.

Three phases.  *Slice*: from the windows that are wanted, follow versions backwards to the
operations that made them.  *Components*: operations that share no storage are independent;
each component is run by itself, so a model whose parameters do not depend on each other
costs one full tensor at a time, however its program was ordered.  *Run*: in program order,
each storage allocated when it is first touched and dropped after its last use.

A recorded operation finds the random state that it found when it was recorded; the state of
the default generator is as before when replay has finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thalweg.zero.flat import leaves_of, rebuild_call
from thalweg.zero.record import Cell, Op, Ref, facts_of


class _Local(threading.local):
    """What one thread is doing: open contexts, replay under way, values it forced last."""

    depth: int = 0
    busy: int = 0
    known: dict[Cell, tuple[Op, torch.UntypedStorage]] | None = None

    @property
    def recording(self) -> bool:
        """Whether the program is inside a context, and this is the program and not us."""
        return self.depth > 0 and self.busy == 0


local = _Local()


@contextmanager
def paused() -> Any:
    """Run a part of the program as if no context were open."""
    local.busy += 1
    try:
        yield
    finally:
        local.busy -= 1


@contextmanager
def quiet() -> Any:
    """Run torch operations that are our own: they are not recorded, and have no gradients."""
    with paused(), torch.no_grad():
        yield


def values_of(refs: Sequence[Ref]) -> list[Tensor]:
    """Return the real values of ``refs``, all at once (they may share memory with each other).

    Inside a context the result is remembered until the next call, so that a loop that looks
    at a tensor again and again (rejection sampling) does not begin anew each time.
    """
    known = dict(local.known) if local.depth and local.known else {}
    ops = _slice(refs, known)
    while stale := _overtaken(ops, known):
        for cell in stale:
            del known[cell]
        ops = _slice(refs, known)
    with quiet(), _default_generator_kept():
        real = _Real(ops, known, keep={ref.cell for ref in refs})
        real.run()
        found = [real.view(ref) for ref in refs]
    if local.depth:
        local.known = real.snapshot()
    return found


def replay(targets: Sequence[Ref], emit: Callable[[int, Tensor], None]) -> None:
    """Call ``emit(index, value)`` once for each target; the value is valid during the call only.

    The order is the same on every rank that recorded the same program.
    """
    with quiet(), _default_generator_kept():
        for indices, ops in _components(targets):
            _Real(ops).run([(index, targets[index]) for index in indices], emit)


@contextmanager
def _default_generator_kept() -> Any:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _slice(refs: Iterable[Ref], known: dict[Cell, tuple[Op, Any]]) -> list[Op]:
    """Return the operations behind ``refs`` in program order, up to what is known already."""
    found: set[Op] = set()
    stack = list(refs)
    while stack:
        ref = stack.pop()
        op = ref.version
        if op is None or op in found or (ref.cell in known and known[ref.cell][0] is op):
            continue
        found.add(op)
        stack.extend(op.reads())
    return sorted(found, key=lambda op: op.seq)


def _overtaken(ops: list[Op], known: dict[Cell, tuple[Op, Any]]) -> set[Cell]:
    """Return the cells of ``known`` that some operation needs at an earlier version."""
    touched = ((op, cell) for op in ops for cell in _cells_of(op))
    return {cell for op, cell in touched if cell in known and op.seq < known[cell][0].seq}


def _components(targets: Sequence[Ref]) -> list[tuple[list[int], list[Op]]]:
    """Split targets and the operations behind them into groups that share no storage."""
    ops = _slice(targets, {})
    leader: dict[Cell, Cell] = {}

    def find(cell: Cell) -> Cell:
        while leader.setdefault(cell, cell) is not cell:
            leader[cell] = cell = leader[leader[cell]]
        return cell

    for op in ops:
        touched = _cells_of(op)
        for cell in touched[1:]:
            leader[find(cell)] = find(touched[0])
    groups: dict[Cell, tuple[list[int], list[Op]]] = {}
    for index, ref in enumerate(targets):
        groups.setdefault(find(ref.cell), ([], []))[0].append(index)
    for op in ops:
        groups[find(_cells_of(op)[0])][1].append(op)
    return list(groups.values())


def _cells_of(op: Op) -> list[Cell]:
    return [ref.cell for ref in op.reads()] + op.writes


class _Real:
    """A run of operations on real storages.

    Storages are dropped after their last use; with ``keep`` the named ones stay, and those
    that tensors of the program still use.
    """

    def __init__(
        self,
        ops: list[Op],
        known: dict[Cell, tuple[Op, torch.UntypedStorage]] | None = None,
        keep: set[Cell] | None = None,
    ) -> None:
        self.ops, self.keep = ops, keep
        self.storages = {cell: storage for cell, (_, storage) in (known or {}).items()}
        self.versions: dict[Cell, Op] = {cell: op for cell, (op, _) in (known or {}).items()}

    def run(
        self,
        targets: Sequence[tuple[int, Ref]] = (),
        emit: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Run all operations; emit each target as soon as it has its final version."""
        last = {cell: op for op in self.ops for cell in _cells_of(op)}
        ready: dict[Op | None, list[tuple[int, Ref]]] = {}
        for index, ref in targets:
            ready.setdefault(ref.version, []).append((index, ref))
        for op in [None, *self.ops]:
            if op is not None:
                self._execute(op)
            touched = _cells_of(op) if op is not None else []
            for index, ref in ready.get(op, ()):
                assert emit is not None
                emit(index, self.view(ref))
                touched.append(ref.cell)
            for cell in touched:
                if last.get(cell) in (op, None) and (
                    self.keep is None or not (cell in self.keep or cell.alive)
                ):
                    self.storages.pop(cell, None)

    def view(self, ref: Ref) -> Tensor:
        """Return the real tensor of a window; a storage that was never written is zeros."""
        storage = self.storages.get(ref.cell)
        if storage is None:
            storage = torch.zeros(ref.cell.nbytes, dtype=torch.uint8).untyped_storage()
            self.storages[ref.cell] = storage
        return _window(ref, storage)

    def snapshot(self) -> dict[Cell, tuple[Op, torch.UntypedStorage]]:
        """Return what is in memory now and still the present value of a living storage."""
        return {
            cell: (op, self.storages[cell])
            for cell, op in self.versions.items()
            if cell in self.storages and cell.head is op and cell.alive
        }

    def _execute(self, op: Op) -> None:
        if op.func is None:
            (cell,) = op.writes
            # The constant itself stays as it is: later operations may write to this storage.
            alone = self.keep is None and len(self.ops) == 1
            self.storages[cell] = op.leaves[0] if alone else op.leaves[0].clone()
            self.versions[cell] = op
            return
        if facts_of(op.func).overwrites:
            first = op.leaves[0]
            if isinstance(first, Ref) and first.version is None and first.cell not in self.storages:
                empty = torch.empty(first.cell.nbytes, dtype=torch.uint8)
                self.storages[first.cell] = empty.untyped_storage()
        leaves = [self.view(leaf) if isinstance(leaf, Ref) else leaf for leaf in op.leaves]
        assert op.spec is not None
        args, kwargs = rebuild_call(op.spec, _with_random_state(op, leaves))
        results = leaves_of(op.func(*args, **kwargs))
        for position, ref in op.outputs.items():
            self._adopt(ref, results[position])
        for cell in op.writes:
            self.versions[cell] = op

    def _adopt(self, ref: Ref, result: Tensor) -> None:
        """Make ``result`` the content of a new storage, laid out as it was recorded."""
        same = tuple(result.stride()) == ref.stride and result.storage_offset() == ref.offset
        storage = result.untyped_storage()
        if (
            same
            and result.dtype == ref.dtype
            and storage.nbytes() >= ref.cell.nbytes
            and not result.is_conj()
        ):
            self.storages[ref.cell] = storage
            return
        self.view(ref).copy_(result)


def _window(ref: Ref, storage: torch.UntypedStorage) -> Tensor:
    value = torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)
    return value.conj() if ref.conj else value


def _with_random_state(op: Op, leaves: list[Any]) -> list[Any]:
    if op.state is None:
        return leaves
    torch.set_rng_state(op.state)  # for operators that take no generator
    generator = torch.Generator()
    generator.set_state(op.state)
    return [generator if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
