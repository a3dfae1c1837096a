"""What accelerators can do: a table from their makers' data sheets, and a measurement for one that is not in it.

Devices go by the exact name that the driver gives them (``torch.cuda.get_device_name``), since near names differ by
half: an H100 PCIe has 0.76 of the arithmetic of an H100 SXM.  A name that is not in the table is never taken for one
that is: a job measures its device, a command line gets an error.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

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


# What the driver says of the memory (MiB: less than the nominal size, by what the firmware and ECC take); dense
# teraFLOP/s in fp32, tf32, fp16 and bf16 (0: the device has no units for it); GB/s of memory, of links in one
# direction, of the host's bus in one direction (PCIe 3, 4 and 5 with 16 lanes: 16, 32 and 64).
_TABLE = """
NVIDIA B200                      183359  75    1125   2250   2250   7700 900  64  NVIDIA HGX B200 data sheet
NVIDIA H200                      143771  67    494.5  989    989    4800 450  64  NVIDIA H200 data sheet
NVIDIA H100 80GB HBM3            81559   67    494.5  989    989    3350 450  64  NVIDIA H100 data sheet, SXM
NVIDIA H100 NVL                  95830   60    417.5  835.5  835.5  3938 300  64  NVIDIA H100 NVL data sheet
NVIDIA H100 PCIe                 81559   51.2  378    756    756    2039 300  64  NVIDIA H100 PCIe product brief
NVIDIA GH200 480GB               97871   67    494    990    990    4000 450  450 NVIDIA GH200 data sheet
NVIDIA H800                      81559   67    494.5  989    989    3350 200  64  NVIDIA H800 data sheet, SXM
NVIDIA H20                       97871   44    74     148    148    4000 450  64  NVIDIA H20 data sheet
NVIDIA A100-SXM4-80GB            81920   19.5  156    312    312    2039 300  32  NVIDIA A100 data sheet
NVIDIA A100-SXM4-40GB            40960   19.5  156    312    312    1555 300  32  NVIDIA A100 data sheet
NVIDIA A100 80GB PCIe            81920   19.5  156    312    312    1935 300  32  NVIDIA A100 data sheet
NVIDIA A100-PCIE-40GB            40960   19.5  156    312    312    1555 300  32  NVIDIA A100 data sheet
NVIDIA A800-SXM4-80GB            81920   19.5  156    312    312    2039 200  32  NVIDIA A800 data sheet
NVIDIA A40                       46068   37.4  74.8   149.7  149.7  696  56   32  NVIDIA A40 data sheet
NVIDIA A30                       24576   10.3  82     165    165    933  100  32  NVIDIA A30 data sheet
NVIDIA A10                       23028   31.2  62.5   125    125    600  32   32  NVIDIA A10 data sheet
NVIDIA A10G                      23028   35    35     70     70     600  32   32  NVIDIA A10G data sheet
NVIDIA L40S                      46068   91.6  183    362    362    864  32   32  NVIDIA L40S data sheet
NVIDIA L40                       46068   90.5  90.5   181    181    864  32   32  NVIDIA L40 data sheet
NVIDIA L4                        23034   30.3  60     121    121    300  32   32  NVIDIA L4 data sheet
NVIDIA RTX 6000 Ada Generation   49140   91.1  182.1  364.2  364.2  960  32   32  NVIDIA Ada architecture paper
NVIDIA RTX A6000                 49140   38.7  77.4   154.8  154.8  768  56   32  NVIDIA RTX A6000 data sheet
NVIDIA GeForce RTX 5090          32607   104.8 104.8  209.5  209.5  1792 64   64  NVIDIA Blackwell architecture paper
NVIDIA GeForce RTX 4090          24564   82.6  82.6   165.2  165.2  1008 32   32  NVIDIA Ada architecture paper
NVIDIA GeForce RTX 4080          16376   48.7  48.7   97.5   97.5   717  32   32  NVIDIA Ada architecture paper
NVIDIA GeForce RTX 3090          24576   35.6  35.6   71     71     936  56   32  NVIDIA Ampere architecture paper
NVIDIA GeForce RTX 3080          10240   29.8  29.8   59.5   59.5   760  32   32  NVIDIA Ampere architecture paper
Tesla T4                         15360   8.1   0      65     0      320  16   16  NVIDIA T4 data sheet
Tesla V100-SXM2-32GB             32768   15.7  0      125    0      900  150  16  NVIDIA V100 data sheet
Tesla V100-SXM2-16GB             16384   15.7  0      125    0      900  150  16  NVIDIA V100 data sheet
Tesla V100-PCIE-32GB             32768   14    0      112    0      900  16   16  NVIDIA V100 data sheet
AMD Instinct MI300X              196592  163.4 653.7  1307.4 1307.4 5300 448  64  AMD Instinct MI300X data sheet
AMD Instinct MI250X              65520   23.9  0      191.5  191.5  1638 250  36  AMD MI250X data sheet, one of two dies
AMD Instinct MI210               65520   22.6  0      181    181    1638 150  32  AMD Instinct MI210 data sheet
"""
_NAME_WIDTH = 33


def _parse(row: str) -> Device:
    name, (*figures, source) = row[:_NAME_WIDTH].strip(), row[_NAME_WIDTH:].split(maxsplit=8)
    memory, fp32, tf32, fp16, bf16, bandwidth, link, host = map(float, figures)
    flops = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    peaks = {key: value * _TERA for key, value in flops.items() if value}
    return Device(name, int(memory) * _MIB, peaks, bandwidth * _GIGA, link * _GIGA, host * _GIGA, source)


DEVICES = {device.name: device for device in map(_parse, _TABLE.strip().splitlines())}
# What people say for short.
_SHORT_NAMES = {
    "b200": "NVIDIA B200",
    "h200": "NVIDIA H200",
    "h100": "NVIDIA H100 80GB HBM3",
    "h800": "NVIDIA H800",
    "h20": "NVIDIA H20",
    "gh200": "NVIDIA GH200 480GB",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a40": "NVIDIA A40",
    "a30": "NVIDIA A30",
    "a10": "NVIDIA A10",
    "a10g": "NVIDIA A10G",
    "a6000": "NVIDIA RTX A6000",
    "l40s": "NVIDIA L40S",
    "l40": "NVIDIA L40",
    "l4": "NVIDIA L4",
    "rtx5090": "NVIDIA GeForce RTX 5090",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx4080": "NVIDIA GeForce RTX 4080",
    "rtx3090": "NVIDIA GeForce RTX 3090",
    "rtx3080": "NVIDIA GeForce RTX 3080",
    "t4": "Tesla T4",
    "v100": "Tesla V100-SXM2-32GB",
    "mi300x": "AMD Instinct MI300X",
    "mi250x": "AMD Instinct MI250X",
    "mi210": "AMD Instinct MI210",
}


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
    host = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
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


# What a process holds on a device beside its tensors, before torch's allocator has given out a byte.  The context: 300
# MiB and more since CUDA loads kernels lazily (pytorch/pytorch#107667), about 500 on the large devices.
CONTEXT_BYTES = 512 * _MIB
# NCCL's buffers of one group, as seen on four A100 with NVLink (NVIDIA/nccl#964): of two ranks, and of more.
_NCCL_PAIR_BYTES, _NCCL_GROUP_BYTES = 544 * _MIB, 688 * _MIB
# torch's workspace of cuBLAS on one stream: 32 MiB since Hopper (CUBLAS_WORKSPACE_CONFIG's default in torch), 8 before.
_CUBLAS_BYTES = 32 * _MIB


def library_bytes(group_sizes: list[int]) -> int:
    """Bytes that the libraries of a training process take of its device: communicators of groups of these sizes (those
    of one rank have none) and the workspace of products."""
    groups = (_NCCL_PAIR_BYTES if size == 2 else _NCCL_GROUP_BYTES for size in group_sizes if size > 1)
    return sum(groups) + _CUBLAS_BYTES
