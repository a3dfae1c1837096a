"""Rows of PAIN_POINTS that tiers answer: bytes as a bandwidth model counts them, full disks, bounded memory."""

from __future__ import annotations

import tempfile

import pytest

from tests.dist.models import tiny_gpt
from tests.dist.test_offload_use import mine, settings, start
from tests.harness import run_ranks
from thalweg.store.regions import round_up


def _bytes(rank, world):
    with tempfile.TemporaryDirectory(dir=".") as folder:
        engine = start(tiny_gpt(), folder)
        swap, pager = engine._parts.sharded.swap, engine._parts.sharded.paging.pager
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


def _full_disk(rank, world):
    import thalweg
    from thalweg.store.disk import Disk

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


def test_row24_a_missing_folder_is_named_by_the_config():
    from thalweg.config import load, resolve

    with pytest.raises(ValueError, match=r"offload_param.nvme_path"):
        resolve(load(settings(None)), world_size=1)
