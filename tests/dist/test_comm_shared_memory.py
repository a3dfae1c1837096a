"""Collectives in shared memory: values, disagreement, dead and closed peers, nothing left behind."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import signal
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.comm import CommError, CommsLog
from thalweg.comm.collectives import shared_memory
from thalweg.comm.collectives.reducer import (
    CHUNK_NUMEL,
    BufferPool,
    ReduceOptions,
    ReplicatedReducer,
    ReusableBuffer,
    sum_rows,
)
from thalweg.comm.collectives.shared_memory import (
    SharedMemoryArena,
    SharedMemoryReduceScatter,
    SharedMemoryRing,
)

AVERAGE, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def _reduce(rank, world, dtype):
    group = dist.group.WORLD
    sizes = [3 * world, CHUNK_NUMEL * world + world, world]
    slot = max(sizes) * dtype.itemsize
    arena = SharedMemoryArena.create(group, SharedMemoryRing.num_bytes(world, slot))
    assert arena is not None
    reducer = SharedMemoryReduceScatter(SharedMemoryRing(arena, slot), "m", ReduceOptions(output_dtype=torch.float32))
    worst = 0.0
    for step in range(12):
        size, op = sizes[step % 3], (AVERAGE, SUM)[step % 2]
        full = [torch.randn(size, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(world)]
        given = reducer.allocate((size,), dtype=dtype, device=torch.device("cpu"))
        given.copy_(full[rank])
        out = reducer.allocate((size // world,), dtype=dtype, device=torch.device("cpu"))
        if (step + rank) % 3 == 0:
            time.sleep(0.003)
        reducer(out, given, group, op)
        expected = torch.stack([f.to(dtype).float() for f in full]).sum(0).view(world, -1)[rank]
        worst = max(worst, float((out - expected / (world if op == AVERAGE else 1)).abs().max()))
    return worst


@pytest.mark.parametrize("world", [2, 3, nightly(4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduce_scatter_sums_in_fp32_whatever_the_pace(world, dtype):
    assert max(run_ranks(_reduce, world, dtype)) < 1e-5


def _gather(rank, world):
    arena = SharedMemoryArena.create(dist.group.WORLD, SharedMemoryRing.num_bytes(world, 4096, 4))
    ring = SharedMemoryRing(arena, 4096, 4)
    good = True
    for step in range(20):
        out = ring.acquire_shared_output((5 * world,), torch.float32, "the gather")
        own = out.narrow(0, 5 * rank, 5)
        own.fill_(100.0 * step + rank)
        if (step + rank) % 4 == 0:
            time.sleep(0.003)
        ring.publish_shared_output("m")
        expected = torch.arange(world).repeat_interleave(5) + 100.0 * step
        good = good and torch.equal(out, expected)
    return good


@pytest.mark.parametrize("world", [2, nightly(4)])
def test_all_gather_keeps_writers_behind_readers(world):
    assert run_ranks(_gather, world) == [True] * world


def _other_module(rank, world):
    arena = SharedMemoryArena.create(dist.group.WORLD, SharedMemoryRing.num_bytes(world, 1024))
    ring = SharedMemoryRing(arena, 1024)
    reducer = SharedMemoryReduceScatter(ring, "this" if rank == 0 else "that")
    given = reducer.allocate((8,), dtype=torch.float32, device=torch.device("cpu"))
    out = reducer.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))
    start = time.monotonic()
    with pytest.raises(CommError, match=r"this|that"):
        reducer(out, given, dist.group.WORLD, SUM)
    return time.monotonic() - start


@pytest.mark.nightly
@pytest.mark.alone
def test_ranks_in_different_modules_learn_it_within_seconds():
    assert max(run_ranks(_other_module, 2)) < 5


def _late(rank, world):
    arena = SharedMemoryArena.create(dist.group.WORLD, 4096, timeout=0.5)
    if rank == 0:
        with pytest.raises(CommError, match=r"rank 0 waited .* for rank 1"):
            arena.barrier("the test")
    else:
        time.sleep(1.5)
    return True


@pytest.mark.waits
def test_a_peer_that_does_not_come_is_named():
    assert run_ranks(_late, 2) == [True, True]


def _dead(rank, world, folder):
    arena = SharedMemoryArena.create(dist.group.WORLD, 4096)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        arena.barrier("the test")
    except CommError as error:
        with open(os.path.join(folder, "seen"), "w") as out:
            out.write(f"{time.monotonic() - start:.2f} {error}")
    return True


@pytest.mark.alone
def test_a_dead_peer_is_noticed_within_two_seconds(tmp_path):
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(_dead, 2, str(tmp_path))
    seconds, _, message = (tmp_path / "seen").read_text().partition(" ")
    assert float(seconds) < 2
    assert "rank 1" in message
    assert "died" in message


@pytest.mark.parametrize("comes", [True, False])
def test_a_peer_that_came_and_left_while_this_rank_slept_was_there(comes, monkeypatch):
    memory = mmap.mmap(-1, 1 << 16)
    own, peer = (SharedMemoryArena(memory, rank, 2, timeout=60.0) for rank in range(2))

    def long_nap(_):
        if comes:
            peer.post(shared_memory.BARRIER_COUNT, 1)
        peer.close()

    seconds = itertools.count()
    clock = types.SimpleNamespace(sleep=long_nap, monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(shared_memory, "time", clock)
    if comes:
        own.barrier("the test")
    else:
        with pytest.raises(CommError, match="has closed its engine"):
            own.barrier("the test")


@pytest.mark.parametrize("comes_after", [0.0005, 0.05])
def test_a_rank_that_waits_long_seldom_wakes_and_is_hardly_late(comes_after, monkeypatch):
    """A wake-up costs some 60 us, which the peer may want."""
    memory, now, naps = mmap.mmap(-1, 1 << 16), 0.0, []
    own, peer = (SharedMemoryArena(memory, rank, 2, timeout=60.0) for rank in range(2))
    peer.post(shared_memory.PID, os.getpid())

    def sleep(seconds):
        nonlocal now
        naps.append(seconds)
        now += seconds + 6e-5
        if now >= comes_after:
            peer.post(shared_memory.BARRIER_COUNT, 1)

    monkeypatch.setattr(shared_memory, "time", types.SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    own.barrier("the test")
    assert len(naps) < 150
    assert now < comes_after * 17 / 16 + 2e-4


def _without_memory(rank, world, broken):
    """The arena that rank `broken` cannot have, and what each rank says of it."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    shared_memory._log.addHandler(handler)

    def fail(*_args, **_keywords):
        raise OSError(24, "Too many open files")

    patched = {0: "memfd_create", 1: "open"}
    with pytest.MonkeyPatch.context() as patch:
        if rank == broken:
            patch.setattr(shared_memory.os, patched[rank], fail)
        arena = SharedMemoryArena.create(dist.group.WORLD, 1 << 12, timeout=20)
    shared_memory._log.removeHandler(handler)
    return arena is not None, lines


@pytest.mark.parametrize("broken", [None, 0, 1])
def test_a_rank_that_cannot_share_memory_says_so_and_all_go_on_without(broken):
    results = run_ranks(_without_memory, 2, broken, timeout=30)
    for rank, (has_arena, lines) in enumerate(results):
        assert has_arena == (broken is None)
        assert len(lines) == (rank == broken)
    if broken is not None:
        assert "Too many open files" in results[broken][1][0] and "gloo" in results[broken][1][0]


def _nothing_left(rank, world):
    before = set(os.listdir("/dev/shm"))
    arena = SharedMemoryArena.create(dist.group.WORLD, 1 << 20)
    arena.barrier("the test")
    names = set(os.listdir("/dev/shm")) - before
    return sorted(name for name in names if "thalweg" in name)


def test_nothing_has_a_name():
    assert run_ranks(_nothing_left, 2) == [[], []]


def test_a_lent_block_is_lent_again_only_when_nobody_holds_it():
    lender = ReusableBuffer()
    first = lender.allocate((1000,), torch.float32)
    address = first.data_ptr()
    view = first[10:20].as_strided((2,), (1,))
    del first
    second = lender.allocate((1000,), torch.float32)
    assert second.data_ptr() != address  # the view is still somebody's
    del view, second
    third = lender.allocate((500,), torch.float32)
    again = third.data_ptr()
    del third
    assert lender.allocate((500,), torch.float32).data_ptr() == again


def test_who_holds_a_lent_block_is_not_asked_of_reference_counts(monkeypatch):
    """Interpreters are free to count fewer references than there are holders (3.14 borrows them)."""
    monkeypatch.setattr(sys, "getrefcount", lambda held: 1)
    for lender in (ReusableBuffer(), BufferPool()):
        first = lender.allocate((1000,), torch.float32)
        held = first.data_ptr(), first.untyped_storage()
        del first
        assert lender.allocate((1000,), torch.float32).data_ptr() != held[0]


class _Kept(ReplicatedReducer):
    def reduce(self, output):
        pass


@pytest.mark.parametrize("output_dtype", [None, torch.float32, torch.float64])
def test_replicated_gradients_of_one_dtype_exist_once(output_dtype):
    reducer, cpu = _Kept("m", ReduceOptions(output_dtype=output_dtype)), torch.device("cpu")
    for _ in range(2):
        given, reduced = (reducer.allocate((8,), dtype=torch.float32, device=cpu) for _ in range(2))
        assert (given.data_ptr() == reduced.data_ptr()) == (output_dtype != torch.float64)
        assert reduced.dtype == (output_dtype or torch.float32)


def test_sums_are_in_rank_order():
    rows = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    out = torch.empty(1)
    sum_rows(rows, out)
    assert out.item() == ((1e8 + torch.tensor(1.0)) - 1e8).item()


def test_the_ledger_counts_the_ring_s_bytes():
    ledger = CommsLog()
    ledger.record("all_reduce", "a", "wire", full_bytes=1000, world_size=4)
    ledger.record("reduce_scatter", "a", "wire", full_bytes=1000, world_size=4)
    assert ledger.total("all_reduce").sent_bytes == 1500
    assert ledger.total("reduce_scatter").sent_bytes == 750
    assert ledger.total().num_calls == 2
    assert "all_reduce" in ledger.table()
