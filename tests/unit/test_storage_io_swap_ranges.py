"""Ranges of a swap file that change places: views and direct transfers agree, whatever was done."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.storage_io.allocator import PAGE, RemapTable
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.swap_file import SwapFile

PAGES = 24


def _exchanges() -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """(first, second, pages) of ranges that do not overlap."""

    def fits(one: tuple[int, int, int]) -> bool:
        first, second, count = one
        return abs(first - second) >= count and max(first, second) + count <= PAGES

    page = st.integers(0, PAGES - 1)
    return st.lists(st.tuples(page, page, st.integers(1, 8)).filter(fits), max_size=12)


def _stamp(number: int) -> torch.Tensor:
    return torch.full((PAGE,), number, dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(_exchanges(), st.booleans())
def test_any_exchanges_move_what_a_list_would(
    tmp_path_factory: pytest.TempPathFactory, exchanges: list[tuple[int, int, int]], direct: bool
) -> None:
    folder = tmp_path_factory.mktemp("swap")
    with closing(SwapFile(folder, PAGES * PAGE, block_bytes=3 * PAGE, num_threads=2)) as swap:
        whole = swap.view(0, (PAGES, PAGE), torch.uint8)
        for number in range(PAGES):
            whole[number] = _stamp(number)
        model = list(range(PAGES))
        for turn, (first, second, count) in enumerate(exchanges):
            swap.swap_ranges(first * PAGE, second * PAGE, count * PAGE)
            for i in range(count):
                model[first + i], model[second + i] = model[second + i], model[first + i]
            written = PAGES + turn  # through the one path or the other, to be seen through both
            if direct:
                swap.write(first * PAGE, _stamp(written)).wait()
            else:
                whole[first] = _stamp(written)
            model[first] = written
        read = torch.empty(PAGES, PAGE, dtype=torch.uint8)
        swap.read(0, read).wait()
        assert read[:, 0].tolist() == read[:, -1].tolist() == model
        swap.trim()
        assert whole[:, 0].tolist() == model


@settings(max_examples=200, deadline=None)
@given(_exchanges())
def test_exchanges_that_are_undone_leave_no_trace(exchanges: list[tuple[int, int, int]]) -> None:
    extents = RemapTable()
    for one in [*exchanges, *reversed(exchanges)]:
        extents.swap_ranges(*one)
    assert extents.lookup(0, PAGES) == [(0, 0, PAGES)]


def test_a_system_that_cannot_is_found_out_and_nothing_changes(tmp_path: Path) -> None:
    class Refuses(Disk):
        def mmap_fixed(self, handle: int, address: int, nbytes: int, offset: int) -> None:
            raise OSError(errno.ENOMEM, "too many mappings")

    class RefusesOnce(Disk):
        calls = 0

        def mmap_fixed(self, handle: int, address: int, nbytes: int, offset: int) -> None:
            self.calls += 1
            if self.calls == 2:
                raise OSError(errno.ENOMEM, "too many mappings")
            super().mmap_fixed(handle, address, nbytes, offset)

    with closing(SwapFile(tmp_path, 4 * PAGE)) as swap:
        assert swap.can_swap_ranges()
    with closing(SwapFile(tmp_path, 4 * PAGE, disk=Refuses())) as swap:
        assert not swap.can_swap_ranges()
    with closing(SwapFile(tmp_path, 4 * PAGE, disk=RefusesOnce())) as swap:
        view = swap.view(0, (4, PAGE), torch.uint8)
        for number in range(4):
            view[number] = _stamp(number)
        with pytest.raises(OSError, match="mappings"):
            swap.swap_ranges(0, 2 * PAGE, PAGE)
        assert view[:, 0].tolist() == [0, 1, 2, 3]
