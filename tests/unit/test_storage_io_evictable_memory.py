"""Memory whose pages come and go under tensors that stay, and the ring of buffers over it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.memory import resident_bytes
from thalweg.storage_io import evictable_memory
from thalweg.storage_io.allocator import PAGE
from thalweg.storage_io.evictable_memory import HUGE_PAGE, BufferRing, EvictableMemory, PagePrefaulter, aligned_empty
from thalweg.storage_io.swap_file import SwapFile

MIB = 1 << 20


def test_pages_leave_and_tensors_stay() -> None:
    memory = EvictableMemory(64 * MIB)
    start = memory.allocate(32 * MIB)
    keep = memory.allocate(MIB)
    tensor = memory.tensor(start, (8 * MIB,), torch.float32)
    neighbour = memory.tensor(keep, (1000,), torch.float32)
    before = resident_bytes()
    tensor.fill_(3)
    neighbour.fill_(4)
    address = tensor.data_ptr()
    assert resident_bytes() - before > 28 * MIB
    memory.evict(start, 32 * MIB)
    assert resident_bytes() - before < 6 * MIB
    tensor[:5] = 2
    assert tensor.data_ptr() == address and tensor[:5].sum() == 10
    assert neighbour.sum() == 4000


def test_autograd_survives_an_eviction(tmp_path: Path) -> None:
    """Saved weights are dropped between forward and backward and read back into the same place."""
    torch.manual_seed(0)
    value, x = torch.randn(300, 300), torch.randn(7, 300)
    reference = value.clone().requires_grad_()
    (x @ reference).tanh().sum().backward()

    memory = EvictableMemory(MIB)
    weight = memory.tensor(memory.allocate(value.nbytes), value.shape, value.dtype)
    with closing(SwapFile(tmp_path, MIB)) as swap:
        weight.copy_(value)
        swap.write(0, weight).wait()
        leaf = weight.detach().requires_grad_()
        loss = (x @ leaf).tanh().sum()
        memory.evict(0, round(value.nbytes))
        swap.read(0, weight).wait()
        loss.backward()
    assert torch.equal(leaf.grad, reference.grad)


def test_pages_go_from_one_range_to_another_without_being_cleared() -> None:
    memory = EvictableMemory(16 * MIB, align=HUGE_PAGE)
    one, two = memory.allocate(4 * MIB), memory.allocate(4 * MIB)
    first, second = (memory.tensor(at, (4 * MIB,), torch.uint8) for at in (one, two))
    first.fill_(3)
    second.fill_(7)
    before = resident_bytes()
    for _ in range(3):
        if not memory.move_pages(one, two, 4 * MIB):
            pytest.skip("this kernel moves no pages")
        assert int(second.min()) == int(second.max()) == 3
        assert int(first[::PAGE].max()) == 0  # mapped, and empty
        memory.evict(one, 4 * MIB)
        assert memory.move_pages(two, one, 4 * MIB)
        assert int(first.min()) == 3
    assert resident_bytes() <= before - 2 * MIB


def test_pages_come_ahead_of_use_and_keep_what_they_hold() -> None:
    memory = EvictableMemory(64 << 20)
    x = memory.tensor(0, (64 << 20,), torch.uint8)
    x[5 << 20] = 7
    before = resident_bytes()
    memory.populate(4 << 20, 16 << 20)
    assert resident_bytes() - before >= 12 << 20  # one huge page was there
    assert x[5 << 20] == 7
    ahead = PagePrefaulter(memory, chunk_bytes=4 << 20, margin_bytes=8 << 20)
    # The first quarter, most of which is there: it stays at that, as long as enough of it is left.
    assert not any(_wait(lambda: resident_bytes() - before >= 24 << 20, 0.2))
    ahead.prefault_to(2)
    assert not any(_wait(lambda: resident_bytes() - before >= 24 << 20, 0.2))
    ahead.prefault_to(9)
    assert any(_wait(lambda: resident_bytes() - before >= 42 << 20, 5.0))


def _wait(seen: Callable[[], bool], seconds: float) -> Iterator[bool]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield seen()
        time.sleep(0.01)


def test_regions_and_errors() -> None:
    memory = EvictableMemory(4 * MIB)
    first = memory.allocate(3 * MIB)
    with pytest.raises(ValueError, match="do not fit"):
        memory.allocate(2 * MIB)
    assert memory.allocate(MIB) == first + 3 * MIB


def test_a_rings_pages_are_unlocked_before_their_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    unlocked = list[int]()
    monkeypatch.setattr(evictable_memory, "lock_pages", lambda rows: True)
    monkeypatch.setattr(evictable_memory, "unlock_pages", lambda _, rows: unlocked.append(int(rows.fill_(1).sum())))
    ring = BufferRing(3, PAGE, pin=True)
    assert ring.pinned and not unlocked
    del ring
    assert unlocked == [3 * PAGE]


def test_a_ring_gives_aligned_buffers_in_turn() -> None:
    ring = BufferRing(3, 10_000)
    assert ring.buffer_bytes == 3 * PAGE and len(ring) == 3
    assert all(ring[i].data_ptr() % PAGE == 0 for i in range(3))
    assert ring[4].data_ptr() == ring[1].data_ptr() != ring[0].data_ptr()
    ring[0].fill_(1)
    ring[1].fill_(2)
    assert int(ring[0].sum()) == ring.buffer_bytes
    ring.release_memory()


@pytest.mark.parametrize("can_lock", [True, False])
def test_what_is_large_is_page_locked_where_it_lies_for_as_long_as_anything_views_it(monkeypatch, can_lock):
    """torch would round its size up to a power of two."""
    locked, unlocked, asked = [], [], []

    def lock(pages: torch.Tensor) -> bool:
        locked.append((pages.data_ptr(), pages.nbytes))
        return can_lock

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool = False, _empty: object = torch.empty) -> torch.Tensor:
        asked.append((size, pin_memory))
        return _empty(size, dtype=dtype)

    monkeypatch.setattr(evictable_memory, "can_pin", lambda: True)
    monkeypatch.setattr(evictable_memory, "lock_pages", lock)
    monkeypatch.setattr(evictable_memory, "unlock_pages", unlocked.append)
    monkeypatch.setattr(evictable_memory.torch, "empty", empty)
    shape = (3, 100_001)
    tensor = aligned_empty(shape, torch.float32, pinned=True)
    small = aligned_empty((5,), torch.float32, pinned=True)
    monkeypatch.undo()
    monkeypatch.setattr(evictable_memory, "unlock_pages", unlocked.append)
    ((address, num_bytes),) = locked
    assert tensor.shape == shape and tensor.data_ptr() % PAGE == small.data_ptr() % PAGE == 0
    assert num_bytes == 293 * PAGE and (address == tensor.data_ptr() or not can_lock)
    assert any(pins for size, pins in asked if size >= MIB) != can_lock
    part = torch.nn.Parameter(tensor.fill_(2.0)[1:]).detach()
    del tensor
    gc.collect()
    assert unlocked == [] and part.sum() == 2 * part.numel()
    del part
    gc.collect()
    assert unlocked == ([address] if can_lock else [])
