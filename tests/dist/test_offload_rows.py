"""Rows of PAIN_POINTS that tiers answer: bytes as a bandwidth model counts them, overlap, full disks."""

from __future__ import annotations

import tempfile
import threading
from typing import Any

import pytest
import torch

import thalweg
from tests import inspect
from tests.dist.models import tiny_gpt
from tests.dist.test_offload_use import mine, settings, start
from tests.harness import run_ranks
from thalweg.optim.offload.nvme_step import PiecewiseOptimizer
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.io_threads import IoFuture
from thalweg.storage_io.swap_file import SwapFile


def _bytes(rank, world):
    with tempfile.TemporaryDirectory(dir=".") as folder:
        engine = start(tiny_gpt(), folder)
        swap, pager = inspect.swap_file(engine), inspect.pager(engine)
        counts = []
        for step in range(3):
            reads, writes = swap.reads.nbytes, swap.writes.nbytes
            loss = engine(*mine(step, rank, world))
            here = [unit.name for unit in pager.units.values() if unit.phase != "out" and not unit.in_use]
            engine.backward(loss)
            engine.step()
            counts.append((swap.reads.nbytes - reads, swap.writes.nbytes - writes, len(here)))
        engine.close()
        return counts[-1]


def test_row23_a_step_moves_the_bytes_of_the_bandwidth_model():
    """AdamW in fp32: images twice (in part kept), master and two moments read once and written once; and
    between its passes no more units are in memory than ``buffer_count`` allows."""
    reads, writes, in_memory = run_ranks(_bytes, 1)[0]
    named = dict(tiny_gpt().named_parameters())
    pages = sum(round_up(p.numel() * 4) for p in named.values())
    root = sum(round_up(p.numel() * 4) for name, p in named.items() if not name.startswith("blocks."))
    assert writes == 3 * pages
    assert 3 * pages + pages <= reads <= 3 * pages + 2 * pages - root
    assert in_memory <= 2


class Order:
    """What happens in a step, in the order of the program: transfers begun and waited for, updates."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Any]] = []
        self.io_threads: set[str] = set()
        self.update_threads: set[tuple[str, int]] = set()
        for verb in ("read", "write"):
            patch.setattr(SwapFile, verb, self._around_transfer(verb, getattr(SwapFile, verb)))
        for call in ("preadv", "pwritev"):
            patch.setattr(Disk, call, self._around_call(getattr(Disk, call)))
        wait, step = IoFuture.wait, PiecewiseOptimizer.step

        def waiting(ticket: IoFuture) -> None:
            self.events.append(("wait", ticket))  # all are kept, so that no two ever share an id
            wait(ticket)

        def stepping(worker: PiecewiseOptimizer, jobs: Any) -> None:
            self.events.append(("update", None))
            self.update_threads.add((threading.current_thread().name, torch.get_num_threads()))
            step(worker, jobs)

        patch.setattr(IoFuture, "wait", waiting)
        patch.setattr(PiecewiseOptimizer, "step", stepping)

    def _around_transfer(self, verb: str, plain: Any) -> Any:
        def begin(swap: SwapFile, offset: int, tensor: torch.Tensor) -> IoFuture:
            ticket = plain(swap, offset, tensor)
            self.events.append((verb, ticket))
            return ticket

        return begin

    def _around_call(self, plain: Any) -> Any:
        def call(disk: Disk, *args: Any) -> int:
            self.io_threads.add(threading.current_thread().name.rpartition("_")[0])
            return plain(disk, *args)

        return call

    def blocking_writes(self) -> int:
        """Updates that began right after the write before them had been waited for."""
        last, waited, found = None, set(), 0
        for kind, what in self.events:
            if kind == "write":
                last = id(what)
            elif kind == "wait":
                waited.add(id(what))
            elif kind == "update":
                found += last in waited
        return found


def _waits_for(begin: Any) -> Any:
    def blocking(swap: SwapFile, offset: int, tensor: torch.Tensor) -> IoFuture:
        ticket = begin(swap, offset, tensor)
        ticket.wait()
        return ticket

    return blocking


def _overlap(rank: int, world: int, blocks: bool) -> dict[str, Any]:
    from thalweg.optim.offload import policy

    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(dir=".") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_MIN_BUFFER_BYTES", 1 << 16)  # so that a unit takes many buffers
        config = settings(folder)
        config["zero_optimization"]["offload_optimizer"]["buffer_size"] = 1000
        config["zero_optimization"]["offload_param"]["buffer_count"] = 3
        engine = thalweg.initialize(model=tiny_gpt(), config=config)[0]
        units = inspect.pager(engine).units
        late: list[str] = []

        def look(name: str) -> Any:
            return lambda *_: late.append(name) if units[name].phase == "out" else None

        for step in range(3):
            if step == 2:
                order = Order(patch)
                if blocks:
                    patch.setattr(SwapFile, "write", _waits_for(SwapFile.write))
                for index in range(2):  # while a block computes, its neighbour is on its way
                    inside = engine.module.blocks[index].norm1
                    inside.register_forward_hook(look(f"blocks.{index + 1}"))
                    inside = engine.module.blocks[index + 1].norm1
                    inside.register_full_backward_hook(look(f"blocks.{index}"))
            engine.backward(engine(*mine(step, rank, world)))
            engine.step()
        found = {
            "late": late,
            "io": order.io_threads,
            "updates": order.update_threads,
            "steps": sum(kind == "update" for kind, _ in order.events),
            "blocking": order.blocking_writes(),
            "main": torch.get_num_threads(),
        }
        engine.close()
        return found


@pytest.mark.alone
def test_row23_transfers_run_beside_the_computation():
    """Nothing in a step waits for a transfer that it has just begun, and no thread but four moves bytes."""
    found = run_ranks(_overlap, 1, False)[0]
    assert found["late"] == []
    assert found["io"] == {"thalweg-io"}
    assert found["updates"] == {("thalweg-stream_0", 1)} and found["main"] == 2
    assert found["steps"] >= 10 and found["blocking"] <= 4  # a unit's last write is waited for


@pytest.mark.alone
def test_row23_negative_control_a_blocking_copy_is_noticed():
    found = run_ranks(_overlap, 1, True)[0]
    assert found["blocking"] == found["steps"] - 1


def _full_disk(rank, world):
    def free_bytes(self, folder):
        return 1 << 16

    kept, Disk.free_bytes = Disk.free_bytes, free_bytes
    try:
        with tempfile.TemporaryDirectory(dir=".") as folder, pytest.raises(ValueError, match="make room"):
            thalweg.initialize(model=tiny_gpt(), config=settings(folder))
    finally:
        Disk.free_bytes = kept
    return True


def test_row24_a_full_disk_is_an_error_before_training():
    assert run_ranks(_full_disk, 1) == [True]


def _one_full_disk(rank, world, param):
    def free_bytes(self, folder):
        return 1 << 16 if rank == 1 else plain(self, folder)

    plain, Disk.free_bytes = Disk.free_bytes, free_bytes
    try:
        with tempfile.TemporaryDirectory(dir=".") as folder, pytest.raises(ValueError) as caught:
            thalweg.initialize(model=tiny_gpt(), config=settings(folder, param, "nvme"))
    finally:
        Disk.free_bytes = plain
    return str(caught.value)


@pytest.mark.parametrize("param", ["nvme", "none"])
def test_row24_one_full_disk_is_an_error_of_all_ranks(param):
    other, own = run_ranks(_one_full_disk, 2, param)
    assert "make room" in own and other == f"rank 1 cannot have {other.split('have ')[1].split(':')[0]}: {own}"


def test_row24_a_missing_folder_is_named_by_the_config():
    from thalweg.config import load, resolve

    with pytest.raises(ValueError, match=r"offload_param.nvme_path"):
        resolve(load(settings(None)), world_size=1)
