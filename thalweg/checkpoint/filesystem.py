"""Every touch of a disk by the checkpoint room, in one small replaceable object.

``FileSystem`` is passed as an argument down to whoever needs it; nothing else in this
room calls ``os`` on a path.  A test replaces it by one that
counts, delays, fails or kills at operation k.  Handles are file descriptors.  No
method caches, so a sequence of calls is the exact sequence of system calls that a
power-loss replay has to reorder.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thalweg.utils.log import get_logger
from thalweg.utils.processes import get_hostname, process_start_time
from thalweg.utils.timing import wait_until

REPLACING_PREFIX = ".latest-"  # of what takes a file's place
_log = get_logger(__name__)


class FileSystem:
    """Plain POSIX files.  Each method is one operation; errors are the ``OSError`` of the system."""

    lock_timeout = 60.0  # seconds; a holder needs milliseconds, so whoever takes longer is stopped or stuck

    # Of a handle: cut the file to so many bytes, make its bytes survive a loss of power, give it back.
    truncate, fsync, close = staticmethod(os.ftruncate), staticmethod(os.fsync), staticmethod(os.close)
    # Of a path: whether anything has this name, bytes in the file; make one directory, which must not exist yet, remove
    # an empty one.
    exists, size = staticmethod(os.path.lexists), staticmethod(os.path.getsize)
    mkdir, rmdir = staticmethod(os.mkdir), staticmethod(os.rmdir)
    # Give a file another name in one step, replacing a file of that name; remove one.
    rename, remove = staticmethod(os.rename), staticmethod(os.unlink)

    def open_write(self, path: Path, *, direct: bool = False) -> int:
        """Create ``path``, which must not exist yet, for writing.

        ``direct``: past the page cache where the file system can; such writes come from
        aligned memory, at aligned offsets, in multiples of 4,096 bytes.
        """
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if direct:
            with contextlib.suppress(OSError):
                _set_direct(handle, True)
        return handle

    def open_read(self, path: Path) -> int:
        """Open ``path`` for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pwrite(self, handle: int, data: Any, offset: int) -> None:
        """Write all of ``data`` (bytes or a buffer) at byte ``offset``."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            try:
                done = os.pwrite(handle, view, offset)
            except OSError as error:  # a stricter alignment than 4,096 bytes, or the rest of a short write
                if error.errno != errno.EINVAL or not _set_direct(handle, False):
                    raise
                continue
            view, offset = view[done:], offset + done

    def pread_into(self, handle: int, buffer: Any, offset: int) -> int:
        """Fill ``buffer`` from byte ``offset``; returns the bytes read, fewer only at the end of the file."""
        view = memoryview(buffer).cast("B")
        total = 0
        while total < view.nbytes:
            done = os.preadv(handle, [view[total:]], offset + total)
            if not done:
                break
            total += done
        return total

    def age(self, path: Path) -> float:
        """Seconds since a file was last written to, or a directory or any file in it."""
        changes = [os.stat(path).st_mtime]
        if os.path.isdir(path):
            for entry in os.scandir(path):
                with contextlib.suppress(FileNotFoundError):
                    changes.append(entry.stat().st_mtime)
        return time.time() - max(changes)

    def listdir(self, path: Path) -> list[str]:
        """Sorted names in a directory."""
        return sorted(os.listdir(path))

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """Keep other processes that ask, too, from a directory meanwhile: none gives or takes public names there.

        Where the file system has no such locks, warn and go on without.

        Raises:
            TimeoutError: somebody has held it for ``lock_timeout`` seconds.
        """
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not wait_until(lambda: _try_lock(handle, path), self.lock_timeout, interval=0.002):
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another process has held the lock of this directory for {self.lock_timeout:g} s: "
                    "let it go on, or end it (fuser names it)",
                    str(path),
                )
            yield
        finally:
            # Not operations of a save: a disk that fails must not keep the lock.  A process that was forked meanwhile
            # (a DataLoader's worker, beside a save in the background) has the file open, too: closing would not do.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory survive a loss of power."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _try_lock(handle: int, path: Path) -> bool:
    """Whether nobody else has the lock; with a warning where the file system knows of none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning(
            "%s cannot be locked (%s): two jobs that save there at the same time may remove each other's "
            "checkpoints; give each job a directory of its own",
            path,
            error.strerror,
        )
    return True


def _set_direct(handle: int, enabled: bool) -> bool:
    """Turn direct writing on or off; whether that changed anything."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    new_flags = flags | direct if enabled else flags & ~direct
    if new_flags != flags:
        fcntl.fcntl(handle, fcntl.F_SETFL, new_flags)
    return new_flags != flags


def read_file(io: FileSystem, path: Path, limit: int | None = None) -> bytes:
    """The whole of a small file, or its first ``limit`` bytes."""
    handle = io.open_read(path)
    try:
        buffer = bytearray(io.size(path) if limit is None else limit)
        done = io.pread_into(handle, buffer, 0)
        return bytes(buffer[:done])
    finally:
        io.close(handle)


def list_if_there(io: FileSystem, path: Path) -> list[str]:
    """Sorted names in a directory; none where it is a file, or has been removed since it was listed."""
    try:
        return io.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def write_file(io: FileSystem, path: Path, data: bytes) -> None:
    """Write a new file and make its bytes durable (its name is durable after ``fsync_dir``)."""
    handle = io.open_write(path)
    try:
        io.pwrite(handle, data, 0)
        io.fsync(handle)
    finally:
        io.close(handle)


def replace_file(io: FileSystem, path: Path, data: bytes) -> None:
    """Give a small file new bytes, durably, all at once or not at all."""
    part = path.parent / make_owned_name(REPLACING_PREFIX)
    write_file(io, part, data)
    io.rename(part, path)
    io.fsync_dir(path.parent)


def make_owned_name(prefix: str) -> str:
    """A new name for something temporary of this process."""
    pid = os.getpid()
    return f"{prefix}{get_hostname()}-{pid}-{process_start_time(pid) or 0}-{secrets.token_hex(8)}"


def remove_tree(io: FileSystem, path: Path) -> None:
    """Remove a directory of this room: one level of files, and directories below it where there are any.

    What somebody else removes meanwhile is gone, too.
    """
    for name in list_if_there(io, path):
        try:
            io.remove(path / name)
        except FileNotFoundError:
            continue
        except (IsADirectoryError, PermissionError):
            remove_tree(io, path / name)
    with contextlib.suppress(FileNotFoundError):
        io.rmdir(path)
