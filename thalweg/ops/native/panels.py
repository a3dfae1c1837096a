"""How packed weights lie in memory, and the packing.

A weight (N, K) is packed once into panels of 16 or 32 output columns, each panel a single stream over k, so
that every weight is read once per product whatever the number of rows.

======  =======================================================  =====================================
format  a panel's stream                                         what meets it
======  =======================================================  =====================================
fp32    for each k: 32 floats                                    fp32 rows
bf16    for each pair of k: 32 pairs                             bf16 rows (``vdpbf16ps``)
int8    for each four k: 32 x 4 bytes, weight + 128              int8 rows with a scale (``vpdpbusd``)
int4    for each group of 32 k: 16 scales and 16 offsets in      int8 rows with a scale and their sums
        fp16, then 4 x 16 x 8 nibbles                            over each group
======  =======================================================  =====================================

K is padded to a multiple of 64 with zero weights.  Panels follow each other in the order of their columns,
so a block of columns can be packed alone: nothing larger than a block is ever held in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
_BLOCK_BYTES = 8 << 20  # of a weight in fp32 that is packed at once


@dataclass(frozen=True)
class Format:
    """How a kind of weight is laid out and how many rows fit in the registers."""

    name: str
    columns: int  # of a panel
    k_step: int  # what the innermost loop takes at once
    rows: int  # at a time, at most
    feature: str  # of the processor


FORMATS = {
    "fp32": Format("fp32", 32, 1, 12, "avx512f"),
    "bf16": Format("bf16", 32, 2, 12, "avx512bf16"),
    "int8": Format("int8", 32, 4, 12, "avx512vnni"),
    "int4": Format("int4", 16, GROUP, 10, "avx512vnni"),
}


def padded(size: int, to: int = 64) -> int:
    """Round up to a multiple."""
    return -(-size // to) * to


def packed_sizes(outputs: int, inputs: int, name: str) -> dict[str, int]:
    """Return the bytes of each part of a packed weight (N, K): ``weight``, and for int8 ``scale``."""
    elements = padded(outputs, 32) * padded(inputs)
    if name == "int8":
        return {"weight": elements, "scale": 4 * padded(outputs, 32)}
    return {"weight": {"fp32": 4 * elements, "bf16": 2 * elements, "int4": elements * 5 // 8}[name]}


def pack(weight: Tensor, name: str) -> dict[str, Tensor]:
    """Pack a weight (N, K), of any floating dtype, for the format: ``weight`` and, for int8, ``scale``."""
    made = {
        part: _aligned(nbytes)
        for part, nbytes in packed_sizes(weight.shape[0], weight.shape[1], name).items()
    }
    at = dict.fromkeys(made, 0)
    for block in pack_blocks(weight, name):
        for part, piece in block.items():
            made[part][at[part] : at[part] + piece.numel()] = piece
            at[part] += piece.numel()
    assert all(at[part] == whole.numel() for part, whole in made.items())
    return made


def pack_blocks(weight: Tensor, name: str) -> Iterator[dict[str, Tensor]]:
    """Yield the bytes (flat uint8) of each part of a packed weight, block by block of its outputs."""
    n, k = weight.shape
    kp = padded(k)
    step = max(_BLOCK_BYTES // (4 * kp) // 32, 1) * 32
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    for start in range(0, padded(n, 32), step):
        full = torch.zeros(min(step, padded(n, 32) - start), kp, dtype=dtype)
        part = weight[start : start + step]
        full[: len(part), :k] = part
        yield {
            key: value.contiguous().flatten().view(torch.uint8) for key, value in _pack(full, name).items()
        }


def _pack(full: Tensor, name: str) -> dict[str, Tensor]:
    columns, kp = FORMATS[name].columns, full.shape[1]
    if name == "fp32":
        return {"weight": full.view(-1, columns, kp).transpose(1, 2)}
    if name == "bf16":
        return {"weight": full.view(-1, columns, kp // 2, 2).transpose(1, 2)}
    if name == "int8":
        scale = full.abs().amax(1).div_(127).clamp_(min=1e-30)
        q = full.div_(scale[:, None]).round_().add_(128).to(torch.uint8)
        return {"weight": q.view(-1, columns, kp // 4, 4).transpose(1, 2), "scale": scale}
    return {"weight": _pack_int4(full)}


def _aligned(nbytes: int) -> Tensor:
    """Return bytes that start on a cache line (of 64 bytes)."""
    raw = torch.empty(nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    return raw[start : start + nbytes]


def quantise_int4(full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return nibbles (N, K/32, 32), scales and offsets (N, K/32): weight = scale * nibble + offset.

    The range of each group is shrunk by the factor, out of a few, that makes the squared error smallest.
    """
    groups = full.float().view(full.shape[0], -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    best = torch.full_like(low, float("inf"))
    scale, offset = torch.zeros_like(low), torch.zeros_like(low)
    for shrink in (1.0, 0.95, 0.9, 0.85, 0.8):
        middle, half = (low + high) / 2, (high - low) / 2 * shrink
        s = (half / 7.5).half().float().clamp_(min=2e-7)
        o = (middle - half).half().float()
        q = ((groups - o[..., None]) / s[..., None]).round_().clamp_(0, 15)
        error = (q * s[..., None] + o[..., None] - groups).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scale, offset = torch.where(better, s, scale), torch.where(better, o, offset)
    nibbles = ((groups - offset[..., None]) / scale[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return nibbles, scale, offset


def _pack_int4(full: Tensor) -> Tensor:
    n, kp = full.shape
    nibbles, scale, offset = quantise_int4(full)
    panels = n // 16
    q = nibbles.view(panels, 16, kp // GROUP, 4, 2, 4)  # column, group, eight, half, k
    q = (q[..., 0, :] | (q[..., 1, :] << 4)).permute(0, 2, 3, 1, 4)  # panel, group, eight, column, k
    out = torch.empty(panels, kp // GROUP, 320, dtype=torch.uint8)
    out[..., 64:] = q.reshape(panels, kp // GROUP, 256)
    for at, values in ((0, scale), (32, offset)):
        halves = values.view(panels, 16, -1).transpose(1, 2).half().contiguous()
        out[..., at : at + 32] = halves.view(torch.uint8)
    return out
