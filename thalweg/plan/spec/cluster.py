"""The machines of a plan: how many, what fits in them, and how fast they compute and move bytes."""

import os
import shutil
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from thalweg.ops.linear.kernels import KERNELS, REFERENCE, is_usable
from thalweg.plan.spec.devices import Device, get_device, local_device
from thalweg.plan.spec.run_spec import RankTopology
from thalweg.utils.formatting import parse_bytes
from thalweg.utils.procfs import available_host_memory


@dataclass(frozen=True)
class Cluster:
    """Sizes in bytes, bandwidths in bytes a second and in one direction, arithmetic in FLOP/s.

    ``device_memory`` is that of one device; for CPU ranks they share ``host_memory`` and it
    stays None.  ``intra_bandwidth`` and ``inter_bandwidth`` are one device's share of the links
    inside a node and of its network; ``host_bandwidth`` is one device's link to the host;
    ``disk_*`` are of a node.  ``flops`` by dtype, of one device (for CPU ranks: of one rank).  ``is_assumed``: nobody
    said which device it is.
    """

    num_nodes: int = 1
    devices_per_node: int = 1
    device: Literal["cpu", "accelerator"] = "accelerator"
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
    is_assumed: bool = False

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
        table = self.flops or get_device("h100").flops
        name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
        return table.get(name) or table.get("bf16") or table["fp32"]

    def limit_per_rank(self) -> int | None:
        """Bytes that one rank may use: its device's, or its share of the host."""
        return self.device_memory if self.device != "cpu" else self.host_memory_per_rank()

    def host_memory_per_rank(self) -> int | None:
        """A rank's share of its host's memory."""
        return None if self.host_memory is None else self.host_memory // self.devices_per_node


LOCAL_MACHINE = "this machine"
_THIS_DEVICE = ("auto", "gpu", "cuda", "accelerator")  # the accelerator that is here, whatever it is


def build_cluster(
    num_nodes: int = 1,
    devices_per_node: int = 1,
    *,
    device: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: int | str | None = None,
) -> Cluster:
    """A cluster from what a user says: the device (a name as in ``devices.py``, ``cpu``, or None to guess).

    Without a device, its memory alone means an H100 (see :attr:`Cluster.is_assumed`), and nothing at all the
    accelerator of this machine, else its processor.

    Raises:
        ValueError: an unknown device, or a size that is none.
    """
    if num_nodes < 1 or devices_per_node < 1:
        raise ValueError(f"{num_nodes} nodes with {devices_per_node} devices each have no rank; give 1 or more of both")
    here = torch.accelerator.current_accelerator(check_available=True)
    kind = "" if device is None else device.lower()
    if device is None and device_memory is not None and here is None:
        base = replace(accelerator_cluster(get_device("h100")), is_assumed=True)
    elif kind == "cpu" or (device is None and here is None):
        base = local_cluster(num_ranks=devices_per_node)
    elif device is not None and kind not in _THIS_DEVICE:
        base = accelerator_cluster(get_device(device))
    elif here is not None:
        base = replace(accelerator_cluster(local_device(here)), host_memory=available_host_memory())
    else:
        raise ValueError(f"device {device!r}: this machine has none; name the one to plan for, as in h100")
    overrides: dict[str, Any] = {"num_nodes": num_nodes, "devices_per_node": devices_per_node}
    for key, value in (("device_memory", device_memory), ("host_memory", host_memory), ("disk_bytes", disk)):
        if value is not None:
            overrides[key] = parse_bytes(value, key)
    return replace(base, **overrides)


def accelerator_cluster(device: Device, tf32: bool = False) -> Cluster:
    """One host with one such device; ``tf32``: products of fp32 matrices run in reduced precision."""
    return Cluster(
        name=device.name,
        device_memory=device.memory_bytes,
        flops={**device.flops, "fp32": device.peak_flops(torch.float32, tf32)},
        memory_bandwidth=device.memory_bandwidth,
        intra_bandwidth=device.link_bandwidth,
        # One port of a network as fast as the host's bus, as such machines have it.
        inter_bandwidth=min(device.host_bandwidth, 5.0e10),
        host_bandwidth=device.host_bandwidth,
    )


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
            seconds = min(_best_seconds(partial(kernel, a, b)) for kernel in kernels)
            speeds[name] = 2 * size**3 / seconds / max(1, torch.get_num_threads())
        source = torch.ones(1 << 22)
        target = torch.empty_like(source)
        speeds["copy"] = 2 * source.nbytes / _best_seconds(lambda: target.copy_(source)) / num_busy_ranks
    return speeds


def _best_seconds(function: Callable[[], object]) -> float:
    return min(timeit.repeat(function, number=1, repeat=4)[1:])
