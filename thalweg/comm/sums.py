"""The one summation that every reduction uses: rank order, fp32, cache-sized pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# 256 KiB of fp32: the piece being summed and its two operands stay in a core's L2.
PIECE = 1 << 16


def sum_rows(rows: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
    """Write ``scale * (rows[0] + rows[1] + ...)`` into ``out``; all 1-D of one length.

    Rows may be of a lower precision than ``out``: the sum is taken in ``out``'s dtype,
    in the order given, so equal inputs give equal bits wherever it runs.
    """
    numel = out.numel()
    step = PIECE if out.device.type == "cpu" else max(1, numel)
    same = all(row.dtype == out.dtype for row in rows)
    for start in range(0, numel, step):
        length = min(step, numel - start)
        piece = out.narrow(0, start, length)
        parts = [row.narrow(0, start, length) for row in rows]
        if same and len(parts) > 1:
            torch.add(parts[0], parts[1], out=piece)
            rest = parts[2:]
        else:
            piece.copy_(parts[0])
            rest = parts[1:]
        for part in rest:
            piece.add_(part)
        if scale != 1.0:
            piece.mul_(scale)
