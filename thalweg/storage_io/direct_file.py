"""Transfers at byte offsets of an open file, past the page cache where the file system and the memory allow it."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Literal

from thalweg.storage_io.allocator import PAGE
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.io_threads import IoThroughput
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


class DirectFile:
    """The file of ``handle``, which is closed with it; ``folder`` is where it lies, for the log.

    ``reads`` and ``writes`` measure transfers.
    """

    def __init__(self, disk: Disk, handle: int, folder: Path) -> None:
        self.handle, self._disk = handle, disk
        self.reads, self.writes = IoThroughput(), IoThroughput()
        self._direct_handle = self._open_direct(folder)

    @property
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return self._direct_handle is not None

    def _open_direct(self, folder: Path) -> int | None:
        handle = None
        try:
            handle = self._disk.open_direct(self.handle)
            # Some file systems accept the flag and refuse the transfer.
            self._disk.preadv(handle, [memoryview(mmap.mmap(-1, PAGE))], 0)
        except OSError as error:
            if handle is not None:
                self._disk.close(handle)
            _log.info(
                "the file system of %s has no direct I/O (%s): transfers go through the page cache, which is slower "
                "and shares memory with what computes",
                folder,
                error.strerror,
            )
            return None
        return handle

    def transfer(self, verb: Literal["read", "write"], data: memoryview, offset: int, direct: bool = False) -> None:
        """Move all of ``data``, of bytes; ``direct``: it and ``offset`` begin on pages, and the page cache is bypassed.

        Raises:
            OSError: the transfer failed.
        """
        syscall = self._disk.preadv if verb == "read" else self._disk.pwritev
        total = 0
        try:
            while total < data.nbytes:
                # What follows a short transfer may not be aligned any more.
                aligned = self._direct_handle if direct and total % PAGE == 0 else None
                try:
                    transferred = syscall(self.handle if aligned is None else aligned, [data[total:]], offset + total)
                except OSError as error:
                    if error.errno == errno.EINVAL and aligned is not None:  # a coarser alignment than a page
                        direct = False
                        continue
                    raise
                if transferred <= 0:
                    raise OSError(errno.EIO, "the file ends early")
                total += transferred
        finally:
            (self.reads if verb == "read" else self.writes).add(total)

    def close(self) -> None:
        """Give the handles back."""
        for handle in (self.handle, self._direct_handle):
            if handle is not None:
                self._disk.close(handle)
