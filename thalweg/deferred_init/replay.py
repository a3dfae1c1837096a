"""Replay: the values of recorded tensors, with as little alive at a time as the program allows.

Three phases.  *Slice*: from the windows that are wanted, follow versions backwards to the
operations that made them.  *Components*: operations that share no storage are independent;
each component is run by itself, so a model whose parameters do not depend on each other
costs one full tensor at a time, however its program was ordered.  *Run*: in program order,
each storage allocated when it is first touched and dropped after its last use.

A recorded operation finds the random state that it found when it was recorded; the state of
the default generator is as before when replay has finished.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thalweg.deferred_init.op_graph import RecordedOp, StorageRecord, ViewRef, get_op_traits
from thalweg.deferred_init.pytree import flatten, unflatten_call


class _ThreadState(threading.local):
    """What one thread is doing: open contexts, replay under way, values it forced last."""

    num_open_contexts: int = 0
    num_pauses: int = 0
    cached_storages: dict[StorageRecord, tuple[RecordedOp, torch.UntypedStorage]] | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the program is inside a context, and this is the program and not us."""
        return self.num_open_contexts > 0 and self.num_pauses == 0


thread_state = _ThreadState()


@contextmanager
def pause_recording() -> Any:
    """Run a part of the program as if no context were open."""
    thread_state.num_pauses += 1
    try:
        yield
    finally:
        thread_state.num_pauses -= 1


@contextmanager
def pause_recording_no_grad() -> Any:
    """Run torch operations that are our own: they are not recorded, and have no gradients."""
    with pause_recording(), torch.no_grad():
        yield


def compute_values(refs: Sequence[ViewRef]) -> list[Tensor]:
    """Return the real values of ``refs``, all at once (they may share memory with each other).

    Inside a context the result is remembered until the next call, so that a loop that looks
    at a tensor again and again (rejection sampling) does not begin anew each time.
    """
    cached = dict(thread_state.cached_storages or {}) if thread_state.num_open_contexts else {}
    ops = _collect_ops(refs, cached)
    while stale := _find_overwritten(ops, cached):
        for cell in stale:
            del cached[cell]
        ops = _collect_ops(refs, cached)
    with pause_recording_no_grad(), torch.random.fork_rng(devices=()):
        executor = _Executor(ops, cached, retained={ref.storage_record for ref in refs})
        executor.run()
        values = [executor.get_tensor(ref) for ref in refs]
    if thread_state.num_open_contexts:
        thread_state.cached_storages = executor.snapshot()
    return values


def replay_targets(targets: Sequence[ViewRef], emit: Callable[[int, Tensor], None]) -> None:
    """Call ``emit(index, value)`` once for each target; the value is valid during the call only.

    The order is the same on every rank that recorded the same program.
    """
    with pause_recording_no_grad(), torch.random.fork_rng(devices=()):
        for indices, ops in _split_components(targets):
            _Executor(ops).run([(index, targets[index]) for index in indices], emit)


def _collect_ops(refs: Iterable[ViewRef], cached: dict[StorageRecord, tuple[RecordedOp, Any]]) -> list[RecordedOp]:
    """Return the operations behind ``refs`` in program order, up to what is known already."""
    ops: set[RecordedOp] = set()
    stack = list(refs)
    while stack:
        ref = stack.pop()
        op = ref.version
        if op is None or op in ops or (ref.storage_record in cached and cached[ref.storage_record][0] is op):
            continue
        ops.add(op)
        stack.extend(op.input_refs())
    return sorted(ops, key=lambda op: op.seq)


def _find_overwritten(ops: list[RecordedOp], cached: dict[StorageRecord, tuple[RecordedOp, Any]]) -> set[StorageRecord]:
    """Return the cells of ``known`` that some operation needs at an earlier version."""
    touched = ((op, cell) for op in ops for cell in _get_touched_storages(op))
    return {cell for op, cell in touched if cell in cached and op.seq < cached[cell][0].seq}


def _split_components(targets: Sequence[ViewRef]) -> list[tuple[list[int], list[RecordedOp]]]:
    """Split targets and the operations behind them into groups that share no storage."""
    ops = _collect_ops(targets, {})
    leader: dict[StorageRecord, StorageRecord] = {}

    def find(cell: StorageRecord) -> StorageRecord:
        while leader.setdefault(cell, cell) is not cell:
            leader[cell] = cell = leader[leader[cell]]
        return cell

    for op in ops:
        touched = _get_touched_storages(op)
        for cell in touched[1:]:
            leader[find(cell)] = find(touched[0])
    groups: dict[StorageRecord, tuple[list[int], list[RecordedOp]]] = {}
    for index, ref in enumerate(targets):
        groups.setdefault(find(ref.storage_record), ([], []))[0].append(index)
    for op in ops:
        groups[find(_get_touched_storages(op)[0])][1].append(op)
    return list(groups.values())


def _get_touched_storages(op: RecordedOp) -> list[StorageRecord]:
    return [ref.storage_record for ref in op.input_refs()] + op.writes


class _Executor:
    """A run of operations on real storages.

    Storages are dropped after their last use; with ``keep`` the named ones stay, and those
    that tensors of the program still use.
    """

    def __init__(
        self,
        ops: list[RecordedOp],
        cached: dict[StorageRecord, tuple[RecordedOp, torch.UntypedStorage]] | None = None,
        retained: set[StorageRecord] | None = None,
    ) -> None:
        self.ops, self.retained = ops, retained
        self.storages = {cell: storage for cell, (_, storage) in (cached or {}).items()}
        self.versions: dict[StorageRecord, RecordedOp] = {cell: op for cell, (op, _) in (cached or {}).items()}

    def run(
        self, targets: Sequence[tuple[int, ViewRef]] = (), emit: Callable[[int, Tensor], None] | None = None
    ) -> None:
        """Run all operations; emit each target as soon as it has its final version."""
        last_use = {cell: op for op in self.ops for cell in _get_touched_storages(op)}
        ready_targets: dict[RecordedOp | None, list[tuple[int, ViewRef]]] = {}
        for index, ref in targets:
            ready_targets.setdefault(ref.version, []).append((index, ref))
        for op in [None, *self.ops]:
            if op is not None:
                self._run_op(op)
            touched = _get_touched_storages(op) if op is not None else []
            for index, ref in ready_targets.get(op, ()):
                assert emit is not None
                emit(index, self.get_tensor(ref))
                touched.append(ref.storage_record)
            for cell in touched:
                is_kept = self.retained is not None and (cell in self.retained or cell.is_alive)
                if last_use.get(cell) in (op, None) and not is_kept:
                    self.storages.pop(cell, None)

    def get_tensor(self, ref: ViewRef) -> Tensor:
        """Return the real tensor of a window; a storage that was never written is zeros."""
        storage = self.storages.get(ref.storage_record)
        if storage is None:
            storage = torch.zeros(ref.storage_record.nbytes, dtype=torch.uint8).untyped_storage()
            self.storages[ref.storage_record] = storage
        value = torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)
        return value.conj() if ref.conj else value

    def snapshot(self) -> dict[StorageRecord, tuple[RecordedOp, torch.UntypedStorage]]:
        """Return what is in memory now and still the present value of a living storage."""
        return {
            cell: (op, self.storages[cell])
            for cell, op in self.versions.items()
            if cell in self.storages and cell.last_write is op and cell.is_alive
        }

    def _run_op(self, op: RecordedOp) -> None:
        if op.func is None:
            (cell,) = op.writes
            # The constant itself stays as it is: later operations may write to this storage.
            is_only_op = self.retained is None and len(self.ops) == 1
            self.storages[cell] = op.leaves[0] if is_only_op else op.leaves[0].clone()
            self.versions[cell] = op
            return
        if get_op_traits(op.func).overwrites_first_arg:
            first = op.leaves[0]
            if isinstance(first, ViewRef) and first.version is None and first.storage_record not in self.storages:
                empty = torch.empty(first.storage_record.nbytes, dtype=torch.uint8)
                self.storages[first.storage_record] = empty.untyped_storage()
        leaves = [self.get_tensor(leaf) if isinstance(leaf, ViewRef) else leaf for leaf in op.leaves]
        assert op.spec is not None
        args, kwargs = unflatten_call(op.spec, _restore_rng_state(op, leaves))
        results, _ = flatten(op.func(*args, **kwargs))
        for position, ref in op.outputs.items():
            self._set_storage(ref, results[position])
        for cell in op.writes:
            self.versions[cell] = op

    def _set_storage(self, ref: ViewRef, result: Tensor) -> None:
        """Make ``result`` the content of a new storage, laid out as it was recorded."""
        same_layout = tuple(result.stride()) == ref.stride and result.storage_offset() == ref.offset
        same_numbers = result.dtype == ref.dtype and not result.is_conj()
        storage = result.untyped_storage()
        if same_layout and same_numbers and storage.nbytes() >= ref.storage_record.nbytes:
            self.storages[ref.storage_record] = storage
        else:
            self.get_tensor(ref).copy_(result)


def _restore_rng_state(op: RecordedOp, leaves: list[Any]) -> list[Any]:
    if op.rng_state is None:
        return leaves
    torch.set_rng_state(op.rng_state)  # for operators that take no generator
    generator = torch.Generator()
    generator.set_state(op.rng_state)
    return [generator if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
