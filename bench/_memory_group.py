"""Memory cgroups for benchmarks that run in less memory than the machine has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A cgroup with so many bytes of memory, page cache and all; None where this user cannot make one."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.is_dir() else old.parent) / f"thalweg-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def within_group(group: Path | None, command: list[str]) -> list[str]:
    """Return a command that runs within a cgroup."""
    return command if group is None else ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]


def group_peak(group: Path) -> int:
    """Return the most bytes that a cgroup has had."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0
