"""Sharing the processor out: which cores each rank of this host runs on, and how many threads it starts.

Ranks that are not bound wander over each other's caches, and each starts as many threads as the machine has
cores.  Cores are dealt in contiguous runs of the machine's own order (NUMA node, then core), and the
hardware threads of one core stay together, so a rank's memory is near it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_SYSFS = Path("/sys/devices/system/cpu")
_MAX_NUMBER = 65536  # of a core or slot
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class CpuBinding:
    """``cpus[r]`` are the logical processors of local rank ``r`` (empty: not bound); ``threads`` is per
    rank."""

    cpus: tuple[tuple[int, ...], ...]
    num_threads: int


def usable_cpus() -> tuple[int, ...]:
    """The logical processors this process may run on, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(path: Path = _CGROUP) -> float | None:
    """The cgroup's limit in processors (2.5 is two and a half), None where there is none."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def physical_cores(logical_cpus: Sequence[int], sysfs: Path = _SYSFS) -> list[tuple[int, ...]]:
    """Group logical processors by physical core, ordered by NUMA node and first processor."""
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for cpu in logical_cpus:
        folder = sysfs / f"cpu{cpu}"
        try:
            siblings = parse_list((folder / "topology/thread_siblings_list").read_text(), "cores")
        except (OSError, ValueError):
            siblings = (cpu,)
        nodes = [int(name.name[4:]) for name in folder.glob("node[0-9]*")]
        groups.setdefault((min(nodes, default=0), siblings), []).append(cpu)
    return [tuple(members) for _, members in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0]))]


def parse_list(text: str, what: str) -> tuple[int, ...]:
    """Read ``0-3,8``, as the kernel writes it, as ``(0, 1, 2, 3, 8)``; ``ValueError`` says what was expected."""
    numbers: set[int] = set()
    for item in text.strip().split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text.strip()!r} is not a list of {what}: write it as 0-3,8")
        start, stop = int(first), int(last or first)
        if not start <= stop < _MAX_NUMBER:
            raise ValueError(f"{item} is no range of {what}: write the lower one first, as in 0-3")
        numbers.update(range(start, stop + 1))
    return tuple(sorted(numbers))


def assign_cores(
    nproc: int, cores: Sequence[tuple[int, ...]], *, quota: float | None = None, bind: bool = True
) -> CpuBinding:
    """Deal physical ``cores`` to ``nproc`` ranks: disjoint runs when there are enough, else nobody is bound.

    ``threads`` is the number of physical cores each rank has for itself, at least 1, a cgroup's quota
    respected.
    """
    num_available = len(cores) if quota is None else min(float(len(cores)), quota)
    num_threads = max(1, int(num_available / nproc))
    if not bind or len(cores) < nproc:
        return CpuBinding((), num_threads)
    edges = [rank * len(cores) // nproc for rank in range(nproc + 1)]
    slices = (cores[start:end] for start, end in pairwise(edges))
    cpus = (tuple(sorted(cpu for core in core_slice for cpu in core)) for core_slice in slices)
    return CpuBinding(tuple(cpus), num_threads)
