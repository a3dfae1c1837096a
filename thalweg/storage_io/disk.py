"""Every system call on a swap file, in one small replaceable object.

A test gives ``SwapFile`` a ``Disk`` of its own that fails, stalls or transfers short; nothing else in this
room opens, reads or writes a file.  Errors are the ``OSError`` of the system.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

_FIXED = getattr(mmap, "MAP_SHARED", 1) | 0x10  # MAP_FIXED, which Python does not name
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
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "mincore"):
            return True
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        call = library.mincore
        call.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        return call(address, nbytes, ctypes.addressof(pages)) != 0 or any(page & 1 for page in bytes(pages))

    def mmap_fixed(self, handle: int, address: int, nbytes: int, offset: int) -> None:
        """Let ``nbytes`` of addresses, which a shared mapping of the file holds, show it from ``offset``.

        Raises:
            OSError: the system cannot, or has no place for one more mapping.
        """
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "mmap") or not hasattr(mmap, "MAP_SHARED"):
            raise OSError(errno.ENOSYS, "this system has no mmap(2)")
        call = library.mmap
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
