"""Build a model on a device and in a dtype: ``with OnDevice(dtype=torch.float16, device="meta"):``."""

from __future__ import annotations

from typing import Any

import torch


class OnDevice:
    """Tensors of the constructors within are made on ``device``, floating ones as ``dtype``.

    On "meta" they have shapes and no memory, and no values that could be had back: ``thalweg.zero.Init`` keeps those.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._entered: list[tuple[Any, torch.dtype]] = []

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._entered.append((self.device.__enter__(), torch.get_default_dtype()))
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            _, dtype = self._entered.pop()
            torch.set_default_dtype(dtype)
            self.device.__exit__(*error)
