"""The swap file: transfers, views, coherence, failing disks, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import resident_bytes
from thalweg.storage_io.allocator import PAGE, RangeAllocator
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.evictable_memory import aligned_empty
from thalweg.storage_io.io_threads import combine_futures
from thalweg.storage_io.swap_file import SwapError, SwapFile

MIB = 1 << 20


def _bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.tuples(st.integers(1, 70_000), st.integers(0, 4097), st.integers(0, 5000)), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_any_tensor_comes_back(tmp_path_factory: pytest.TempPathFactory, items: list) -> None:
    """Any size, at any offset in its region, from any address: aligned or not."""
    folder = tmp_path_factory.mktemp("swap")
    with closing(SwapFile(folder, MIB, num_threads=2, block_bytes=2 * PAGE)) as swap:
        wanted, places = [], []
        for seed, (count, shift, address) in enumerate(items):
            source = torch.empty(count + address, dtype=torch.uint8)[address:]
            source.copy_(_bytes(count, seed))
            offset = swap.allocate(count + shift) + shift
            places.append(offset)
            wanted.append(source)
        combine_futures([swap.write(o, s) for o, s in zip(places, wanted, strict=True)]).wait()
        for offset, source in zip(places, wanted, strict=True):
            into = aligned_empty((source.numel(),), torch.uint8)
            swap.read(offset, into).wait()
            assert torch.equal(into, source)
            assert torch.equal(swap.view(offset, (source.numel(),), torch.uint8), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes_and_shapes(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.rand(3, 5, 700) * 100).to(dtype)
    with closing(SwapFile(tmp_path, MIB)) as swap:
        offset = swap.allocate(value.nbytes)
        swap.write(offset, value).wait()
        assert torch.equal(swap.view(offset, value.shape, dtype), value)
        back = torch.empty_like(value)
        swap.read(offset, back).wait()
        assert torch.equal(back, value)
        assert swap.view(offset, (0, 3), dtype).shape == (0, 3)
        swap.read(offset, torch.empty(0)).wait()


def test_views_and_direct_transfers_see_each_other(tmp_path: Path) -> None:
    """Alternate both paths over the same bytes, with and without trimming; negative control at the end."""
    count = 64 * PAGE
    with closing(SwapFile(tmp_path, MIB, block_bytes=4 * PAGE)) as swap:
        assert swap.direct, "this test means little without direct I/O"
        offset = swap.allocate(count)
        view, buffer = swap.view(offset, (count,), torch.uint8), aligned_empty((count,), torch.uint8)
        for turn in range(24):
            value = _bytes(count, turn)
            if turn % 2:
                view.copy_(value)
                if turn % 3 == 0:
                    swap.trim(offset, count)
                swap.read(offset, buffer).wait()
                assert torch.equal(buffer, value), turn
            else:
                buffer.copy_(value)
                swap.write(offset, buffer).wait()
                assert torch.equal(view, value), turn
        assert not torch.equal(view, _bytes(count, 99))


def test_trim_returns_memory_and_keeps_bytes(tmp_path: Path) -> None:
    count = 32 * MIB
    with closing(SwapFile(tmp_path, count)) as swap:
        view = swap.view(0, (count,), torch.uint8)
        before = resident_bytes()
        view.fill_(7)
        filled = resident_bytes()
        assert filled - before > 0.9 * count
        swap.trim()
        assert resident_bytes() - before < 0.2 * count
        assert int(view.sum(dtype=torch.int64)) == 7 * count


def test_locate(tmp_path: Path) -> None:
    with closing(SwapFile(tmp_path, MIB)) as swap:
        offset = swap.allocate(4000)
        view = swap.view(offset, (1000,), torch.float32)
        assert swap.locate(view) == offset
        assert swap.locate(view[10:]) == offset + 40
        assert swap.locate(torch.zeros(3)) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_regions_never_overlap(calls: list[tuple[bool, int]]) -> None:
    regions, taken = RangeAllocator(200_000, 512), {}
    for give_back, size in calls:
        if give_back and taken:
            regions.free(sorted(taken)[size % len(taken)])
            taken.pop(sorted(taken)[size % len(taken)])
            continue
        offset = regions.allocate(size)
        if offset is not None:
            assert offset % 512 == 0 and offset + size <= 200_000
            assert all(o + s <= offset or offset + size <= o for o, s in taken.items())
            taken[offset] = size
    for offset in taken:
        regions.free(offset)
    assert regions.largest_gap == 200_000


# Failing disks


class _Failing(Disk):
    """Fails the transfers whose numbers are in ``at``, or moves fewer bytes than asked for."""

    def __init__(self, cause: int = errno.EIO, at: range = range(0), most: int | None = None) -> None:
        self.cause, self.at, self.most, self.count = cause, at, most, 0

    def _step(self, buffers):
        self.count += 1
        if self.count - 1 in self.at:
            raise OSError(self.cause, os.strerror(self.cause))
        return [b[: self.most] for b in buffers] if self.most else buffers

    def preadv(self, handle, buffers, offset) -> int:
        return super().preadv(handle, self._step(buffers), offset)

    def pwritev(self, handle, buffers, offset) -> int:
        return super().pwritev(handle, self._step(buffers), offset)


@pytest.mark.parametrize("cause", [errno.EIO, errno.ENOSPC])
def test_an_error_names_file_offset_bytes_and_cause(tmp_path: Path, cause: int) -> None:
    disk = _Failing(cause, range(3, 4))
    with closing(SwapFile(tmp_path, MIB, block_bytes=PAGE, num_threads=1, disk=disk)) as swap:
        ticket = swap.write(2 * PAGE, aligned_empty((4 * PAGE,), torch.uint8))
        with pytest.raises(SwapError) as caught:
            ticket.wait()
        said = str(caught.value)
        assert str(tmp_path) in said and os.strerror(cause) in said
        assert f"{PAGE} bytes at offset {4 * PAGE}" in said
        # The file goes on to work once the disk does.
        swap.write(0, torch.ones(10)).wait()
        assert swap.view(0, (10,), torch.float32).sum() == 10


@pytest.mark.parametrize("most", [1, 511, PAGE, 3 * PAGE + 5])
def test_short_transfers_are_completed(tmp_path: Path, most: int) -> None:
    value = _bytes(6 * PAGE + 123 if most > 1 else 300, 1)
    with closing(SwapFile(tmp_path, MIB, disk=_Failing(most=most))) as swap:
        swap.write(PAGE, value).wait()
        back = aligned_empty((value.numel(),), torch.uint8)
        swap.read(PAGE, back).wait()
        assert torch.equal(back, value)


def test_a_coarser_alignment_than_a_page_falls_back(tmp_path: Path) -> None:
    value = _bytes(8 * PAGE, 2)
    with closing(SwapFile(tmp_path, MIB, disk=_Failing(errno.EINVAL, range(1, 2)))) as swap:
        assert swap.direct
        buffer = aligned_empty((value.numel(),), torch.uint8)
        buffer.copy_(value)
        swap.write(0, buffer).wait()
        assert torch.equal(swap.view(0, (value.numel(),), torch.uint8), value)


class _NoDirect(Disk):
    def open_direct(self, handle: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_no_direct_io_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="thalweg")
    logging.getLogger("thalweg").propagate = True
    with closing(SwapFile(tmp_path, MIB, disk=_NoDirect())) as swap:
        assert not swap.direct
        buffer = aligned_empty((10 * PAGE,), torch.uint8)
        buffer.copy_(_bytes(10 * PAGE, 3))
        swap.write(PAGE, buffer).wait()
        assert torch.equal(swap.view(PAGE, (10 * PAGE,), torch.uint8), buffer)
    assert len([r for r in caplog.records if "no direct I/O" in r.message]) == 1


class _Named(Disk):
    """A file system without ``O_TMPFILE``."""

    def open_unnamed(self, folder: Path) -> int:
        flag, os.O_TMPFILE = os.O_TMPFILE, os.O_RDONLY | os.O_DIRECTORY
        try:
            return super().open_unnamed(folder)
        finally:
            os.O_TMPFILE = flag


@pytest.mark.parametrize("disk", [Disk, _Named])
def test_the_folder_stays_empty(tmp_path: Path, disk: type[Disk]) -> None:
    with closing(SwapFile(tmp_path, MIB, disk=disk())) as swap:
        assert list(tmp_path.iterdir()) == []
        swap.write(0, torch.ones(5)).wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.alone
def test_row24_a_disk_that_is_too_small_is_refused_at_once(tmp_path: Path) -> None:
    free = Disk().free_bytes(tmp_path)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"needs .* TiB and the disk of .* has .* free.*larger disk"):
        SwapFile(tmp_path, free + (1 << 40))
    assert time.perf_counter() - start < 1 and Disk().free_bytes(tmp_path) > 0.9 * free

    class _Lying(Disk):
        """Says that there is room (a quota, another writer), and then there is none."""

        def fallocate(self, handle: int, num_bytes: int, start: int = 0) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ValueError, match="No space left on device"):
        SwapFile(tmp_path, MIB, disk=_Lying())
    with pytest.raises(ValueError, match="cannot be used"):
        SwapFile(tmp_path / "missing", MIB)
    with closing(SwapFile(tmp_path, MIB)) as swap:
        swap.allocate(MIB - PAGE)
        with pytest.raises(ValueError, match="make it larger"):
            swap.allocate(2 * PAGE)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own of a few MiB, where this user may mount one."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]]
    else:
        image.write_bytes(bytes(16 * MIB))
        commands = [["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    for command in commands:
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"this user cannot run {' '.join(command[:3])}")
    try:
        yield folder
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_row24_a_really_full_disk(small_disk: Path) -> None:
    """Refused when the file is made; what was taken on the way there is given back."""
    free = Disk().free_bytes(small_disk)
    with pytest.raises(ValueError, match=r"needs .* has .* free"):
        SwapFile(small_disk, free + MIB)

    class Hopeful(Disk):
        """Believes that there is room, so that the system call finds out."""

        def free_bytes(self, folder: Path) -> int:
            return 1 << 40

    with pytest.raises(ValueError, match="No space left on device"):
        SwapFile(small_disk, free + MIB, disk=Hopeful())
    assert Disk().free_bytes(small_disk) == free
    with closing(SwapFile(small_disk, free // 2)) as swap:
        # Somebody fills the disk: what was taken stays ours.
        with contextlib.suppress(OSError), (small_disk / "theirs").open("wb", buffering=0) as theirs:
            while theirs.write(bytes(PAGE)):
                pass
        assert Disk().free_bytes(small_disk) < PAGE
        source, count = aligned_empty((free // 2 // PAGE * PAGE,), torch.uint8), free // 2 // PAGE * PAGE
        source.copy_(_bytes(count, 5))
        swap.write(0, source).wait()
        swap.view(0, (PAGE,), torch.uint8).fill_(9)
        back = aligned_empty((count,), torch.uint8)
        swap.read(0, back).wait()
        assert torch.equal(back[PAGE:], source[PAGE:]) and int(back[0]) == 9
    (small_disk / "theirs").unlink()
    gc.collect()
    assert Disk().free_bytes(small_disk) == free


def test_a_dropped_file_returns_descriptors_threads_and_space(tmp_path: Path) -> None:
    def use() -> None:
        swap = SwapFile(tmp_path, 64 * MIB)
        swap.write(0, torch.ones(1000)).wait()
        assert len(os.listdir("/proc/self/fd")) > before
        assert any(t.name.startswith("thalweg-io") for t in threading.enumerate())

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        use()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not any(t.name.startswith("thalweg-io") for t in threading.enumerate())


def test_a_file_may_be_dropped_while_it_is_written(tmp_path: Path) -> None:
    """The last to hold it is then a transfer, on a thread of its own."""

    class Slow(Disk):
        def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
            time.sleep(0.1)
            return super().pwritev(handle, buffers, offset)

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    SwapFile(tmp_path, MIB, disk=Slow()).write(0, torch.ones(1000))
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) <= before


_KILLED = """
import os, sys, torch
from thalweg.storage_io.swap_file import SwapFile
swap = SwapFile(sys.argv[1], 64 << 20)
swap.view(0, (1 << 20,), torch.uint8).fill_(1)
swap.write(1 << 20, torch.ones(1 << 20))
print("ready", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_after_sigkill(tmp_path: Path) -> None:
    free = Disk().free_bytes(tmp_path)
    job = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert job.stdout is not None and job.stdin is not None
    assert job.stdout.readline() == b"ready\n"
    assert list(tmp_path.iterdir()) == []
    job.send_signal(signal.SIGKILL)
    job.wait()
    job.stdin.close()
    job.stdout.close()
    assert list(tmp_path.iterdir()) == []
    assert Disk().free_bytes(tmp_path) > free - (512 << 20)  # others use this disk too


def test_a_forked_child_has_threads_of_its_own(tmp_path: Path) -> None:
    with closing(SwapFile(tmp_path, MIB)) as swap:
        swap.write(0, torch.ones(100)).wait()
        stale = swap.write(PAGE, torch.ones(100))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                swap.write(2 * PAGE, torch.full((100,), 3.0)).wait()
                try:
                    stale.wait()
                except RuntimeError:
                    code = 0
            finally:
                os._exit(code)
        stale.wait()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert swap.view(2 * PAGE, (100,), torch.float32).sum() == 300
