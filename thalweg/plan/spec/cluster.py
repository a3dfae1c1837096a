"""The machines of a plan: how many, what fits in them, and how fast they compute and move bytes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from thalweg.ops.linear.kernels import KERNELS, REFERENCE, is_usable
from thalweg.plan.spec.run_spec import RankTopology
from thalweg.utils.formatting import parse_bytes


@dataclass(frozen=True)
class Cluster:
    """Sizes in bytes, bandwidths in bytes a second and in one direction, arithmetic in FLOP/s.

    ``device_memory`` is that of one device; for CPU ranks they share ``host_memory`` and it
    stays None.  ``intra_bandwidth`` and ``inter_bandwidth`` are one device's share of the links
    inside a node and of its network; ``host_bandwidth`` is one device's link to the host;
    ``disk_*`` are of a node.  ``flops`` by dtype, of one device (for CPU ranks: of one rank).
    """

    num_nodes: int = 1
    devices_per_node: int = 1
    device: Literal["cpu", "cuda"] = "cuda"
    name: str = ""
    device_memory: int | None = None
    host_memory: int | None = None
    disk_bytes: int | None = None
    flops: Mapping[str, float] | None = None
    memory_bandwidth: float = 2.0e12
    intra_bandwidth: float = 2.0e11
    inter_bandwidth: float = 2.5e10
    host_bandwidth: float = 2.5e10
    host_memory_bandwidth: float = 1.0e11
    disk_read_bandwidth: float = 3.0e9
    disk_write_bandwidth: float = 2.0e9
    efficiency: float = 0.5
    call_seconds: float = 4e-6

    @property
    def topology(self) -> RankTopology:
        """The ranks: one a device."""
        return RankTopology(self.num_nodes, self.devices_per_node, self.device)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_nodes * self.devices_per_node

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s of one device in ``dtype``."""
        table = self.flops or {"fp32": 6.0e13, "bf16": 9.89e14}
        name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
        return table.get(name) or table.get("bf16") or table["fp32"]

    def limit_per_rank(self) -> int | None:
        """Bytes that one rank may use: its device's, or its share of the host."""
        if self.device != "cpu":
            return self.device_memory
        return self.host_memory_per_rank()

    def host_memory_per_rank(self) -> int | None:
        """A rank's share of its host's memory."""
        return None if self.host_memory is None else self.host_memory // self.devices_per_node


LOCAL_MACHINE = "this machine"
_GIB = 2**30
# Data sheets: dense peaks, memory, bandwidth of memory, of the links inside a node and to the host.
DEVICES: dict[str, Cluster] = {
    "h100": Cluster(
        name="h100", device_memory=80 * _GIB, flops={"fp32": 4.9e14, "bf16": 9.89e14, "fp16": 9.89e14},
        memory_bandwidth=3.35e12, intra_bandwidth=4.5e11, inter_bandwidth=5.0e10, host_bandwidth=5.5e10,
    ),
    "h200": Cluster(
        name="h200", device_memory=141 * _GIB, flops={"fp32": 4.9e14, "bf16": 9.89e14, "fp16": 9.89e14},
        memory_bandwidth=4.8e12, intra_bandwidth=4.5e11, inter_bandwidth=5.0e10, host_bandwidth=5.5e10,
    ),
    "a100": Cluster(
        name="a100", device_memory=80 * _GIB, flops={"fp32": 1.56e14, "bf16": 3.12e14, "fp16": 3.12e14},
        memory_bandwidth=2.0e12, intra_bandwidth=3.0e11, inter_bandwidth=2.5e10, host_bandwidth=2.5e10,
    ),
    "v100": Cluster(
        name="v100", device_memory=32 * _GIB, flops={"fp32": 1.57e13, "bf16": 1.57e13, "fp16": 1.25e14},
        memory_bandwidth=9.0e11, intra_bandwidth=1.5e11, inter_bandwidth=1.25e10, host_bandwidth=1.2e10,
    ),
    "rtx4090": Cluster(
        name="rtx4090", device_memory=24 * _GIB, flops={"fp32": 8.3e13, "bf16": 1.65e14, "fp16": 1.65e14},
        memory_bandwidth=1.0e12, intra_bandwidth=2.5e10, inter_bandwidth=3.0e9, host_bandwidth=2.5e10,
    ),
}  # fmt: skip


def build_cluster(
    num_nodes: int = 1,
    devices_per_node: int = 1,
    *,
    device: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: int | str | None = None,
) -> Cluster:
    """A cluster from what a user says: the kind of device (a name of DEVICES, ``cpu``, or None to guess).

    Without a kind, a device memory means a GPU, and nothing at all this machine's processor.

    Raises:
        ValueError: an unknown kind of device, or a size that is none.
    """
    if num_nodes < 1 or devices_per_node < 1:
        raise ValueError(f"{num_nodes} nodes with {devices_per_node} devices each have no rank; give 1 or more of both")
    kind = (device or ("h100" if device_memory is not None else "cpu")).lower()
    if kind in ("cuda", "gpu"):
        kind = "h100"
    if kind == "cpu":
        base = local_cluster(num_ranks=devices_per_node)
    elif kind in DEVICES:
        base = DEVICES[kind]
    else:
        raise ValueError(f"device {device!r} is not known; it may be cpu, {', '.join(DEVICES)}")
    overrides: dict[str, Any] = {"num_nodes": num_nodes, "devices_per_node": devices_per_node}
    for key, value in (("device_memory", device_memory), ("host_memory", host_memory), ("disk_bytes", disk)):
        if value is not None:
            overrides[key] = parse_bytes(value, key)
    return replace(base, **overrides)


def local_cluster(num_ranks: int = 1) -> Cluster:
    """This host as a cluster of one node with ``num_ranks`` CPU ranks; its speed is measured once."""
    speeds = _measure_speeds(max(1, min(num_ranks, len(os.sched_getaffinity(0)))))
    return Cluster(
        devices_per_node=num_ranks,
        device="cpu",
        name=LOCAL_MACHINE,
        host_memory=available_host_memory(),
        disk_bytes=shutil.disk_usage("/tmp" if Path("/tmp").exists() else ".").free,
        flops={key: value for key, value in speeds.items() if key in ("fp32", "bf16")},
        memory_bandwidth=speeds["copy"],
        host_memory_bandwidth=speeds["copy"],
        intra_bandwidth=speeds["copy"] / 2,
        host_bandwidth=speeds["copy"],
        efficiency=0.95,
        call_seconds=8e-6,
    )


def get_disk_limit(cluster: Cluster, folder: str | None) -> int | None:
    """Bytes for what goes to a disk: of this machine, those free where ``folder`` is (or is to be made)."""
    if cluster.disk_bytes is None or cluster.name != LOCAL_MACHINE or folder is None:
        return cluster.disk_bytes
    target = Path(folder).expanduser().absolute()
    existing = next((one for one in (target, *target.parents) if one.exists()), Path("/"))
    return shutil.disk_usage(existing).free


def available_host_memory() -> int | None:
    """Bytes that this process and its kin may still use: MemAvailable, or less where a cgroup limits them."""
    limits = []
    for row in _read_text("/proc/meminfo").splitlines():
        if row.startswith("MemAvailable:"):
            limits.append(int(row.split()[1]) * 1024)
    limits += [limit - used for limit, used in _cgroup_limits()]
    return min(limits) if limits else None


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) of this process' memory cgroup and those above it, versions 1 and 2."""
    limits = []
    for row in _read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = row.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = root / path.lstrip("/")
        for directory in [folder, *folder.parents]:
            limit, used = _read_text(directory / names[0]).strip(), _read_text(directory / names[1]).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < 2**60:
                limits.append((int(limit), int(used) - _reclaimable_bytes(directory)))
            if directory == root:
                break
    return limits


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that the kernel drops before it kills."""
    for row in _read_text(folder / "memory.stat").splitlines():
        key, _, value = row.partition(" ")
        if key in ("total_inactive_file", "inactive_file"):
            return int(value)
    return 0


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@cache
def _measure_speeds(num_busy_ranks: int) -> dict[str, float]:
    """FLOP/s of one thread by dtype and the bytes a second it copies; ``num_busy_ranks`` ranks share the memory's."""
    speeds = {}
    with torch.no_grad():
        for name, dtype, size in (("fp32", torch.float32, 512), ("bf16", torch.bfloat16, 256)):
            a = torch.ones(size, size, dtype=dtype)
            b = torch.ones(size, size, dtype=dtype)
            # Half precision is widened where the processor has no arithmetic for it, as linear layers do.
            kernels = [KERNELS["nn"][kernel] for kernel in (REFERENCE, "fp32") if is_usable("nn", kernel, dtype)]
            seconds = min(_best_seconds(partial(kernel, a, b), 3) for kernel in kernels)
            speeds[name] = 2 * size**3 / seconds / max(1, torch.get_num_threads())
        source = torch.ones(1 << 22)
        target = torch.empty_like(source)
        speeds["copy"] = 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), 3) / num_busy_ranks
    return speeds


def _best_seconds(function: Any, num_rounds: int) -> float:
    times = []
    for _ in range(num_rounds + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times[1:])
