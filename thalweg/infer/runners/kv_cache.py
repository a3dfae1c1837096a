"""A layer's keys, or values, for runners out of torch operators: as they are, or in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

_STORAGE_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
_FP8_MAX = 448.0  # of torch.float8_e4m3fn


class KVCacheTensor:
    """Rows (heads, dim) by position, written and gathered in ``dtype``, stored as ``kv_cache_dtype``.

    ``int8`` has a scale for each row and head, ``fp8`` (e4m3) none; ``auto`` keeps rows as they are.
    """

    def __init__(
        self,
        num_positions: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        kv_cache_dtype: str,
        device: torch.device,
    ) -> None:
        self._dtype, self._kv_cache_dtype = dtype, kv_cache_dtype
        storage_dtype = _STORAGE_DTYPES.get(kv_cache_dtype, dtype)
        self._rows = torch.zeros(num_positions, num_heads, head_dim, dtype=storage_dtype, device=device)
        self._scales = torch.zeros(num_positions if kv_cache_dtype == "int8" else 0, num_heads, 1, device=device)

    def write(self, indices: Tensor, rows: Tensor) -> None:
        """Store rows (T, heads, dim) at positions (T,)."""
        if self._kv_cache_dtype == "int8":
            scale = rows.float().abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
            self._scales[indices] = scale
            self._rows[indices] = (rows.float() / scale).round_().to(torch.int8)
        elif self._kv_cache_dtype == "fp8":
            # Not every device indexes 8-bit floats: the bytes are moved.
            as_fp8 = rows.float().clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
            self._rows.view(torch.uint8)[indices] = as_fp8.view(torch.uint8)
        else:
            self._rows[indices] = rows.to(self._rows.dtype)

    def gather(self, indices: Tensor) -> Tensor:
        """Return the rows (T, heads, dim) at positions (T,)."""
        if self._kv_cache_dtype == "int8":
            return (self._rows[indices].float() * self._scales[indices]).to(self._dtype)
        if self._kv_cache_dtype == "fp8":
            return self._rows.view(torch.uint8)[indices].view(torch.float8_e4m3fn).to(self._dtype)
        return self._rows[indices].to(self._dtype)
