"""A layer's keys, or values, for runners out of torch operators: as they are, or in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
_LARGEST = 448.0  # of torch.float8_e4m3fn


class Pool:
    """Rows (heads, dim) by slot, given and taken in ``dtype``, kept as ``cache``.

    ``int8`` has a scale for each row and head, ``fp8`` (e4m3) none; ``auto`` keeps rows as they are.
    """

    def __init__(
        self, slots: int, heads: int, dim: int, *, dtype: torch.dtype, cache: str, device: torch.device
    ) -> None:
        self._dtype, self._cache = dtype, cache
        kept = _KEPT.get(cache, dtype)
        self._rows = torch.zeros(slots, heads, dim, dtype=kept, device=device)
        self._scales = torch.zeros(slots if cache == "int8" else 0, heads, 1, device=device)

    def put(self, places: Tensor, rows: Tensor) -> None:
        """Keep rows (T, heads, dim) at places (T,)."""
        if self._cache == "int8":
            scale = rows.float().abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
            self._scales[places] = scale
            self._rows[places] = (rows.float() / scale).round_().to(torch.int8)
        elif self._cache == "fp8":
            # Not every device indexes 8-bit floats: the bytes are moved.
            small = rows.float().clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
            self._rows.view(torch.uint8)[places] = small.view(torch.uint8)
        else:
            self._rows[places] = rows.to(self._rows.dtype)

    def get(self, places: Tensor) -> Tensor:
        """Return the rows (T, heads, dim) at places (T,)."""
        if self._cache == "int8":
            return (self._rows[places].float() * self._scales[places]).to(self._dtype)
        if self._cache == "fp8":
            return self._rows.view(torch.uint8)[places].view(torch.float8_e4m3fn).to(self._dtype)
        return self._rows[places].to(self._dtype)
