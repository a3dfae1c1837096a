"""What the kernel tells of this machine; nothing where it has no ``/proc``."""

import multiprocessing
import os
import sys
import threading
from pathlib import Path


def read_text(path: str | Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_fields(path: str) -> dict[str, str]:
    """The ``key: value`` lines of a file of ``/proc`` up to a blank one: of ``cpuinfo``, the first processor."""
    lines = read_text(path).split("\n\n", 1)[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def boot_id() -> str:
    """A text that no other machine has, nor this one after its next start."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def available_host_memory() -> int | None:
    """Bytes that this process and its kin may still use: MemAvailable, or less where a cgroup limits them."""
    limits = [limit - used for limit, used in _cgroup_limits()]
    if available := read_fields("/proc/meminfo").get("MemAvailable"):
        limits.append(int(available.split()[0]) * 1024)
    return min(limits) if limits else None


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) of this process' memory cgroup and those above it, versions 1 and 2."""
    limits = []
    for row in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = row.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = root / path.lstrip("/")
        for directory in [folder, *folder.parents]:
            limit, used = read_text(directory / names[0]).strip(), read_text(directory / names[1]).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < 2**60:
                limits.append((int(limit), int(used) - _reclaimable_bytes(directory)))
            if directory == root:
                break
    return limits


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that the kernel drops before it kills."""
    for row in read_text(folder / "memory.stat").splitlines():
        key, _, value = row.partition(" ")
        if key in ("total_inactive_file", "inactive_file"):
            return int(value)
    return 0


def resident_bytes(pid: int | str = "self", *, peak: bool = False) -> int:
    """Return the bytes of a process in memory, or the most there were so far; 0 where unknown.

    Read from ``/proc``: ``getrusage`` reports a parent's peak as the child's after a fork.
    """
    found = read_fields(f"/proc/{pid}/status").get("VmHWM" if peak else "VmRSS", "0 kB")
    return int(found.split()[0]) * 1024


def end_with_parent() -> None:
    """End this process as soon as the one that has started it ends, however that was."""
    parent = multiprocessing.parent_process()
    # Another environment's interpreter is no child of multiprocessing: who starts it holds its standard input open.
    wait = sys.stdin.buffer.read if parent is None else parent.join
    threading.Thread(target=lambda: (wait(), os._exit(1)), daemon=True).start()
