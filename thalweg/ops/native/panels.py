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

import mmap
from collections.abc import Callable, Iterator, Sequence
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
    for block in pack_blocks(weight.shape, lambda start, stop, out: out.copy_(weight[start:stop]), name):
        for part, piece in block.items():
            made[part][at[part] : at[part] + piece.numel()] = piece
            at[part] += piece.numel()
    assert all(at[part] == whole.numel() for part, whole in made.items())
    return made


def pack_blocks(
    shape: Sequence[int], copy: Callable[[int, int, Tensor], object], name: str
) -> Iterator[dict[str, Tensor]]:
    """Yield the bytes (flat uint8) of each part of a packed weight (N, K), block by block of its outputs.

    ``copy(start, stop, out)`` copies rows of the weight.  What is yielded is overwritten by the next block.

    The blocks lie in memory mapped for them, not on the heap: there each small thing that a caller keeps
    between two blocks splits the hole that the first one left, so that the second one needs new memory.
    """
    n, k = shape
    kp = padded(k)
    limit = _BLOCK_BYTES // (8 if name == "int4" else 1)  # of which a 32nd goes to the heap several times
    step = min(max(limit // (4 * kp) // 32, 1) * 32, padded(n, 32))
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    whole, out = _Room(4 * step * kp), _Room(4 * step * kp)
    for start in range(0, padded(n, 32), step):
        rows = min(step, padded(n, 32) - start)
        full = whole.tensor(rows * kp, dtype).view(rows, kp)
        true = min(rows, n - start)
        copy(start, start + true, full[:true, :k])
        full[:true, k:] = 0
        full[true:] = 0
        yield _pack(full, name, out)


class _Room:
    """Memory for one tensor after the other, given back to the system when the last of them is gone."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._memory, dtype=dtype, count=count)


def _pack(full: Tensor, name: str, room: _Room) -> dict[str, Tensor]:
    columns, (n, kp) = FORMATS[name].columns, full.shape
    if name == "int4":
        return {"weight": _pack_int4(full, room)}
    if name == "int8":
        scale = torch.maximum(full.amax(1), full.amin(1).neg_()).div_(127).clamp_(min=1e-30)
        full.div_(scale[:, None]).round_().add_(128)
        pieces = full.view(-1, columns, kp // 4, 4)
        made = room.tensor(n * kp, torch.uint8).view(-1, kp // 4, columns, 4)
        made.copy_(pieces.transpose(1, 2))
        return {"weight": made.flatten(), "scale": scale.view(torch.uint8)}
    pairs = 2 if name == "bf16" else 1
    made = room.tensor(n * kp, full.dtype).view(-1, kp // pairs, columns, pairs)
    made.copy_(full.view(-1, columns, kp // pairs, pairs).transpose(1, 2))
    return {"weight": made.flatten().view(torch.uint8)}


def _aligned(nbytes: int) -> Tensor:
    """Return bytes that start on a cache line (of 64 bytes)."""
    raw = torch.empty(nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    return raw[start : start + nbytes]


def quantise_int4(full: Tensor, room: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return nibbles (N, K/32, 32), scales and offsets (N, K/32): weight = scale * nibble + offset.

    The range of each group is shrunk by the factor, out of a few, that makes the squared error smallest.  The
    nibbles are fp32, in ``room`` where it is given (as many as ``full`` has).
    """
    groups = full.float().view(full.shape[0], -1, GROUP)
    q = torch.empty_like(groups) if room is None else room.view(groups.shape)
    low, high = groups.amin(2), groups.amax(2)
    best = torch.full_like(low, float("inf"))
    scale, offset = torch.zeros_like(low), torch.zeros_like(low)
    for shrink in (1.0, 0.95, 0.9, 0.85, 0.8):
        middle, half = (low + high) / 2, (high - low) / 2 * shrink
        s = (half / 7.5).half().float().clamp_(min=2e-7)
        o = (middle - half).half().float()
        _to_nibbles(groups, s, o, q)
        error = q.mul_(s[..., None]).add_(o[..., None]).sub_(groups).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scale, offset = torch.where(better, s, scale), torch.where(better, o, offset)
    _to_nibbles(groups, scale, offset, q)
    return q, scale, offset


def _to_nibbles(groups: Tensor, scale: Tensor, offset: Tensor, out: Tensor) -> None:
    torch.sub(groups, offset[..., None], out=out)
    out.div_(scale[..., None]).round_().clamp_(0, 15)


def _pack_int4(full: Tensor, room: _Room) -> Tensor:
    n, kp = full.shape
    panels, groups = n // 16, kp // GROUP
    nibbles, scale, offset = quantise_int4(full, room.tensor(n * kp, torch.float32))
    spare = full.view(-1).view(torch.uint8)  # the weights are not needed any more
    q = spare[: n * kp].view(panels, 16, groups, 4, 2, 4)  # column, group, eight, half, k
    q.copy_(nibbles.view(q.shape))
    both = spare[n * kp : n * kp * 3 // 2].view(panels, 16, groups, 4, 4)
    torch.bitwise_left_shift(q[..., 1, :], 4, out=both)
    both |= q[..., 0, :]
    out = room.tensor(n * kp * 5 // 8, torch.uint8).view(panels, groups, 320)
    # panel, group, eight, column, k
    out[..., 64:].view(panels, groups, 4, 16, 4).copy_(both.permute(0, 2, 3, 1, 4))
    for at, values in ((0, scale), (32, offset)):
        halves = values.view(panels, 16, -1).transpose(1, 2).half().contiguous()
        out[..., at : at + 32] = halves.view(torch.uint8)
    return out.flatten()
