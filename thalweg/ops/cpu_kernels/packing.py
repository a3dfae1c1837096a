"""How packed weights lie in memory, and the packing.

A weight (N, K) is packed once into panels of 16 or 32 output columns, each panel a single stream over k, so
that every weight is read once per product whatever the number of rows.

======  =======================================================  =====================================
format  a panel's stream                                         what it is multiplied by
======  =======================================================  =====================================
fp32    for each k: 32 floats                                    fp32 rows
bf16    for each pair of k: 32 pairs                             bf16 rows, or fp32 ones
int8    for each four k: 32 x 4 bytes, weight + 128              int8 rows with a scale, or int16 ones
int4    for each group of 32 k: 16 scales and 16 offsets in      int8 rows with a scale and their sums
        fp16, then 4 x 16 x 8 nibbles                            over each group
======  =======================================================  =====================================

K is padded to a multiple of 64 with zero weights.  Panels follow each other in the order of their columns,
so a block of columns can be packed alone: nothing larger than a block is ever held in fp32.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
_BLOCK_BYTES = 1 << 20  # of a weight in fp32 that is packed at once


@dataclass(frozen=True)
class WeightFormat:
    """How a kind of weight is laid out, the same for all instruction sets."""

    name: str
    panel_columns: int  # of a panel
    k_step: int  # what the innermost loop takes at once
    k_bytes: int  # of a panel for each k, scales included


WEIGHT_FORMATS = {
    "fp32": WeightFormat("fp32", 32, 1, 128),
    "bf16": WeightFormat("bf16", 32, 2, 64),
    "int8": WeightFormat("int8", 32, 4, 32),
    "int4": WeightFormat("int4", 16, GROUP_SIZE, 10),
}


def round_up(size: int, multiple: int = 64) -> int:
    """Round up to a multiple."""
    return -(-size // multiple) * multiple


def packed_nbytes(out_features: int, in_features: int, weight_format: str) -> dict[str, int]:
    """Return the bytes of each part of a packed weight (N, K): ``weight``, and for int8 ``scale``."""
    elements = round_up(out_features, 32) * round_up(in_features)
    if weight_format == "int8":
        return {"weight": elements, "scale": 4 * round_up(out_features, 32)}
    return {"weight": {"fp32": 4 * elements, "bf16": 2 * elements, "int4": elements * 5 // 8}[weight_format]}


class PackingBuffer:
    """Memory for one tensor after the other, mapped for it, which grows where it must."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def as_tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory, whose earlier ones are not used any more."""
        if self._memory is None or len(self._memory) < count * dtype.itemsize:
            self._memory = mmap.mmap(-1, count * dtype.itemsize)
        return torch.frombuffer(self._memory, dtype=dtype, count=count)


def iter_packed_blocks(
    shape: Sequence[int],
    copy_rows: Callable[[int, int, Tensor], object],
    weight_format: str,
    buffers: tuple[PackingBuffer, PackingBuffer] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield the bytes (flat uint8) of each part of a packed weight (N, K), block by block of its outputs.

    ``copy_rows(start, stop, out)`` copies rows of the weight.  What is yielded is overwritten by the next block.
    ``buffers``: used for one weight after the other, whose pages come once.

    The blocks lie in memory mapped for them, not on the heap: there each small thing that a caller keeps
    between two blocks splits the hole that the first one left, so that the second one needs new memory.
    """
    n, k = shape
    kp = round_up(k)
    max_bytes = _BLOCK_BYTES // (8 if weight_format == "int4" else 1)  # of which a 32nd goes to the heap several times
    step = min(max(max_bytes // (4 * kp) // 32, 1) * 32, round_up(n, 32))
    dtype = torch.bfloat16 if weight_format == "bf16" else torch.float32
    full_buffer, packed_buffer = buffers or (PackingBuffer(), PackingBuffer())
    for start in range(0, round_up(n, 32), step):
        rows = min(step, round_up(n, 32) - start)
        full = full_buffer.as_tensor(rows * kp, dtype).view(rows, kp)
        num_valid = min(rows, n - start)
        copy_rows(start, start + num_valid, full[:num_valid, :k])
        full[:num_valid, k:] = 0
        full[num_valid:] = 0
        yield _pack_block(full, weight_format, packed_buffer)


def _pack_block(full: Tensor, weight_format: str, buffer: PackingBuffer) -> dict[str, Tensor]:
    columns, (n, kp) = WEIGHT_FORMATS[weight_format].panel_columns, full.shape
    if weight_format == "int4":
        return {"weight": _pack_int4(full, buffer)}
    if weight_format == "int8":
        scale = torch.maximum(full.amax(1), full.amin(1).neg_()).div_(127).clamp_(min=1e-30)
        full.div_(scale[:, None]).round_().add_(128)
        pieces = full.view(-1, columns, kp // 4, 4)
        packed = buffer.as_tensor(n * kp, torch.uint8).view(-1, kp // 4, columns, 4)
        packed.copy_(pieces.transpose(1, 2))
        return {"weight": packed.flatten(), "scale": scale.view(torch.uint8)}
    pairs = 2 if weight_format == "bf16" else 1
    packed = buffer.as_tensor(n * kp, full.dtype).view(-1, kp // pairs, columns, pairs)
    packed.copy_(full.view(-1, columns, kp // pairs, pairs).transpose(1, 2))
    return {"weight": packed.flatten().view(torch.uint8)}


def quantize_int4(full: Tensor, buffer: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return nibbles (N, K/32, 32), scales and offsets (N, K/32): weight = scale * nibble + offset.

    The range of each group is shrunk by the factor, out of a few, that makes the squared error smallest.  The
    nibbles are fp32, in ``buffer`` where it is given (as many as ``full`` has).
    """
    groups = full.float().view(full.shape[0], -1, GROUP_SIZE)
    q = torch.empty_like(groups) if buffer is None else buffer.view(groups.shape)
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


def _pack_int4(full: Tensor, buffer: PackingBuffer) -> Tensor:
    n, kp = full.shape
    panels, groups = n // 16, kp // GROUP_SIZE
    nibbles, scale, offset = quantize_int4(full, buffer.as_tensor(n * kp, torch.float32))
    spare = full.view(-1).view(torch.uint8)  # the weights are not needed any more
    q = spare[: n * kp].view(panels, 16, groups, 4, 2, 4)  # column, group, eight, half, k
    q.copy_(nibbles.view(q.shape))
    both = spare[n * kp : n * kp * 3 // 2].view(panels, 16, groups, 4, 4)
    torch.bitwise_left_shift(q[..., 1, :], 4, out=both)
    both |= q[..., 0, :]
    out = buffer.as_tensor(n * kp * 5 // 8, torch.uint8).view(panels, groups, 320)
    # panel, group, eight, column, k
    out[..., 64:].view(panels, groups, 4, 16, 4).copy_(both.permute(0, 2, 3, 1, 4))
    for at, values in ((0, scale), (32, offset)):
        halves = values.view(panels, 16, -1).transpose(1, 2).half().contiguous()
        out[..., at : at + 32] = halves.view(torch.uint8)
    return out.flatten()
