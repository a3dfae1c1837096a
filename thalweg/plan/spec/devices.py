"""What accelerators can do: a table from their makers' data sheets, and a measurement for one that is not in it.

Devices go by the exact name that the driver gives them (``torch.cuda.get_device_name``), since near names differ by
half: an H100 PCIe has 0.76 of the arithmetic of an H100 SXM.  A name that is not in the table is never taken for one
that is: a job measures its device, a command line gets an error.
"""

import csv
import difflib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from thalweg.device import pin

_MIB = 2**20
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """One accelerator: bytes, bytes a second in one direction, and dense FLOP/s by dtype.

    ``flops``: ``fp32`` is that of plain fp32 products, ``tf32`` that of fp32 products in reduced precision, which torch
    takes where it is told to (``torch.set_float32_matmul_precision``); a dtype without an entry runs as fp32.
    ``link_bandwidth``: of all links to other devices of the host together; ``host_bandwidth``: to the host's memory.
    ``source``: where the figures are from.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    source: str

    def peak_flops(self, dtype: torch.dtype, tf32: bool = False) -> float:
        """Peak FLOP/s of products in ``dtype``; ``tf32``: fp32 ones in reduced precision."""
        key = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "tf32" if tf32 else "fp32")
        return self.flops.get(key, self.flops["fp32"])


def _read_table() -> Iterator[tuple[str, Device]]:
    """Yield each device of ``devices.csv``, behind the name that people say for short ("" where they have none).

    Its columns: what the driver says of the memory (MiB: less than the nominal size, by what firmware and ECC take);
    dense teraFLOP/s by dtype (empty: the device has no units for it); GB/s of memory, of links in one direction, of
    the host's bus in one direction (PCIe 3, 4 and 5 with 16 lanes: 16, 32 and 64); the data sheet.
    """
    with Path(__file__).with_name("devices.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            peaks = {key: float(row[key]) * _TERA for key in ("fp32", "tf32", "fp16", "bf16") if row[key]}
            memory, links, host = (float(row[key]) * _GIGA for key in ("memory", "links", "host"))
            yield row["short"], Device(row["name"], int(row["MiB"]) * _MIB, peaks, memory, links, host, row["source"])


_TABLE = list(_read_table())
DEVICES = {device.name: device for _, device in _TABLE}
_SHORT_NAMES = {short: device.name for short, device in _TABLE if short}


def find_device(name: str) -> Device | None:
    """The device of this exact name (upper or lower case), or None."""
    return next((device for key, device in DEVICES.items() if key.lower() == name.lower()), None)


def get_device(name: str) -> Device:
    """The device of this exact name, or of a short one (``"h100"``).

    Raises:
        ValueError: nobody knows it; with the names that are near.
    """
    device = find_device(_SHORT_NAMES.get(name.lower().replace(" ", ""), name))
    if device is None:
        known = {key.lower(): key for key in (*_SHORT_NAMES, *DEVICES)}
        near = [known[key] for key in difflib.get_close_matches(name.lower(), known, n=5, cutoff=0.5)]
        listed = ", ".join(near or ["cpu", *_SHORT_NAMES])
        raise ValueError(
            f"device {name!r} is not known; near it: {listed} (and any full name as its driver gives it). For another "
            "one, plan on a machine that has it: it is measured there"
        )
    return device


def local_device(device: torch.device) -> Device:
    """This process' accelerator: from the table by its exact name, or measured; the same object each time."""
    return _local_device(device.type, device.index or 0)


@cache
def _local_device(kind: str, index: int) -> Device:
    device = torch.device(kind, index)
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    name = str(name_of(device)) if name_of is not None else kind
    return find_device(name) or measure_device(device, name)


# An unknown device is measured no longer than this, each of its six figures for as long as the others.
_MEASURE_SECONDS = 5.0


def measure_device(device: torch.device, name: str = "", seconds: float = _MEASURE_SECONDS) -> Device:
    """An accelerator's figures, measured on it in ``seconds`` at most: products by dtype, and copies.

    Products of up to 4,096 rows, fewer where the device is slow, and copies of 64 MiB; the best of some rounds.  The
    link to other devices is taken for the host's, which is what two devices without links of their own have.
    """
    free, total = torch.accelerator.get_memory_info(device)
    share = seconds / 6
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        flops = {"fp32": _product_flops(torch.float32, device, share)}
        torch.set_float32_matmul_precision("high")
        flops["tf32"] = _product_flops(torch.float32, device, share)
    finally:
        torch.set_float32_matmul_precision(precision)
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        flops[key] = _product_flops(dtype, device, share)
    count = int(min(64 * _MIB, free // 8))
    here, there = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    host = pin(torch.zeros(count, dtype=torch.uint8))
    copy = 2 * count / _best_seconds(lambda: there.copy_(here), device, share)
    bus = count / _best_seconds(lambda: here.copy_(host, non_blocking=True), device, share)
    return Device(name or device.type, total, flops, copy, bus, bus, "measured")


def _product_flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """FLOP/s of the largest product that can be timed in so many seconds, in powers of two from 128 rows on."""
    size, best = 128, 0.0
    while size <= 4096:
        a = torch.ones(size, size, dtype=dtype, device=device)
        taken = _best_seconds(lambda a=a: a @ a, device, seconds / 8)
        best = max(best, 2 * size**3 / taken)
        if 8 * taken > seconds / 4:  # what the next size would take for one product
            break
        size *= 2
    return best


def _best_seconds(run: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """The least time of one call, in bursts that take long enough to be timed, for about ``seconds``."""
    run()
    torch.accelerator.synchronize(device)
    best, calls, start = float("inf"), 1, time.perf_counter()
    while True:
        before = time.perf_counter()
        for _ in range(calls):
            run()
        torch.accelerator.synchronize(device)
        now = time.perf_counter()
        best = min(best, (now - before) / calls)
        if now - start + (now - before) > seconds:
            return best
        if now - before < 0.02:
            calls *= 2


# What a process holds on a device beside its tensors.  The context and the code of kernels and cuBLAS: 300 MiB and more
# since CUDA loads kernels lazily (pytorch/pytorch#107667); on an H200 (driver 580, CUDA 13, torch 2.11) 619 with the
# first kernel, 685 with the first product, 693 with attention.
CONTEXT_BYTES = 693 * _MIB
# NCCL's buffers of one group, as seen on four A100 with NVLink (NVIDIA/nccl#964): of two ranks, and of more.
_NCCL_PAIR_BYTES, _NCCL_GROUP_BYTES = 544 * _MIB, 688 * _MIB
# torch's workspaces of cuBLAS: 32 MiB since Hopper (CUBLAS_WORKSPACE_CONFIG's default in torch), 8 before, for the
# handle of the forward pass' thread, and as much for that of autograd's.
_CUBLAS_BYTES = 2 * 32 * _MIB


def library_bytes(group_sizes: list[int]) -> int:
    """Bytes that the libraries of a training process take of its device: communicators of groups of these sizes (those
    of one rank have none) and the workspaces of products."""
    groups = (_NCCL_PAIR_BYTES if size == 2 else _NCCL_GROUP_BYTES for size in group_sizes if size > 1)
    return sum(groups) + _CUBLAS_BYTES
