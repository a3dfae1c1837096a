"""What the kernel tells of this machine; nothing where it has no ``/proc``."""

from __future__ import annotations

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


def resident_bytes(*, peak: bool = False) -> int:
    """Return the bytes of this process in memory, or the most there were so far; 0 where unknown.

    Read from ``/proc``: ``getrusage`` reports a parent's peak as the child's after a fork.
    """
    found = read_fields("/proc/self/status").get("VmHWM" if peak else "VmRSS", "0 kB")
    return int(found.split()[0]) * 1024
