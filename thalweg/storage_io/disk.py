"""Every system call on a swap file, in one small replaceable object, and transfers past the page cache.

A test gives ``SwapFile`` a ``Disk`` of its own that fails, stalls or transfers short; nothing else in this
room opens, reads or writes a file.  Errors are the ``OSError`` of the system.
"""

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from thalweg.storage_io.allocator import PAGE
from thalweg.storage_io.io_threads import IoThroughput
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_FIXED = mmap.MAP_SHARED | 0x10  # MAP_FIXED, which Python does not name
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EIO}


class Disk:
    """POSIX files without a name."""

    def open_unnamed(self, folder: Path) -> int:
        """Open a new file on the file system of ``folder`` that no name leads to.

        It is born without one where the file system can (``O_TMPFILE``); else it is made with a random name
        and mode 0600 and unlinked at once.  Either way its space returns when its last user ends, however.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(folder, flags | os.O_TMPFILE, 0o600)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        path = folder / f".thalweg-swap-{secrets.token_hex(12)}"
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
        return handle

    def open_direct(self, handle: int) -> int:
        """Open the file of ``handle`` once more, for transfers that bypass the page cache."""
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, "this system has no O_DIRECT")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)

    def fallocate(self, handle: int, num_bytes: int, start: int = 0) -> None:
        """Make the file ``num_bytes`` long, every byte of it from ``start`` on backed by the disk."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, start, num_bytes - start)
        else:
            os.ftruncate(handle, num_bytes)

    def truncate(self, handle: int, num_bytes: int) -> None:
        """Make the file ``num_bytes`` long; what is new is a hole."""
        os.ftruncate(handle, num_bytes)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that this user may still write on the file system of ``folder``."""
        stats = os.statvfs(folder)
        return stats.f_bavail * stats.f_frsize

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read at byte ``offset``; returns the bytes read."""
        return os.preadv(handle, buffers, offset)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write at byte ``offset``; returns the bytes written."""
        return os.pwritev(handle, buffers, offset)

    def drop_page_cache(self, handle: int, offset: int, nbytes: int) -> None:
        """Start writing dirty pages of the range out and drop the clean ones from the page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def readahead(self, handle: int, offset: int, nbytes: int) -> None:
        """Start reading the range into the page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def is_cached(self, address: int, nbytes: int) -> bool:
        """Whether memory holds any page of a mapping's range, which begins on a page (True where nobody can tell)."""
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        call = ctypes.CDLL(None, use_errno=True).mincore
        call.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        return call(address, nbytes, ctypes.addressof(pages)) != 0 or any(page & 1 for page in bytes(pages))

    def mmap_fixed(self, handle: int, address: int, nbytes: int, offset: int) -> None:
        """Let ``nbytes`` of addresses, which a shared mapping of the file holds, show it from ``offset``.

        Raises:
            OSError: the system cannot, or has no place for one more mapping.
        """
        call = ctypes.CDLL(None, use_errno=True).mmap
        word = ctypes.c_size_t
        call.argtypes = [word, word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
        call.restype = word
        mapped_address = call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _FIXED, handle, offset)
        if mapped_address != address:
            error_number = ctypes.get_errno()
            raise OSError(error_number, os.strerror(error_number))

    def close(self, handle: int) -> None:
        """Give the handle back."""
        os.close(handle)


class DirectFile:
    """The file of ``handle``, which is closed with it; ``folder`` is where it lies, for the log.

    ``direct``: whether aligned transfers bypass the page cache; ``reads`` and ``writes`` measure transfers.
    """

    def __init__(self, disk: Disk, handle: int, folder: Path) -> None:
        self.handle, self._disk = handle, disk
        self.reads, self.writes = IoThroughput(), IoThroughput()
        self._direct_handle = self._open_direct(folder)
        self.direct = self._direct_handle is not None

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
