"""The one summation that every reduction uses: rank order, fp32, cache-sized pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# 256 KiB of fp32: the piece being summed and its two operands stay in a core's L2.
CHUNK_NUMEL = 1 << 16


def sum_rows(rows: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
    """Write ``scale * (rows[0] + rows[1] + ...)`` into ``out``; all 1-D of one length.

    Rows may be of a lower precision than ``out``: the sum is taken in ``out``'s dtype,
    in the order given, so equal inputs give equal bits wherever it runs.
    """
    numel = out.numel()
    step = CHUNK_NUMEL if out.device.type == "cpu" else max(1, numel)
    same_dtype = all(row.dtype == out.dtype for row in rows)
    for start in range(0, numel, step):
        length = min(step, numel - start)
        chunk = out.narrow(0, start, length)
        row_chunks = [row.narrow(0, start, length) for row in rows]
        if same_dtype and len(row_chunks) > 1:
            torch.add(row_chunks[0], row_chunks[1], out=chunk)
            remaining = row_chunks[2:]
        else:
            chunk.copy_(row_chunks[0])
            remaining = row_chunks[1:]
        for row_chunk in remaining:
            chunk.add_(row_chunk)
        if scale != 1.0:
            chunk.mul_(scale)
