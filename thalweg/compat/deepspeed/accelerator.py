"""``get_accelerator()``: the device under DeepSpeed's names; what it does not name is asked of ``torch.<device>``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from thalweg.device import pick_device
from thalweg.utils.env import read_rank_info


class AcceleratorNames:
    """The accelerator of this process, or its processor."""

    @property
    def _type(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, ``cuda:1``, ``cpu``."""
        return self._type if device_index is None or self._type == "cpu" else f"{self._type}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is the current one."""
        return torch.get_device_module(self._type).device(device_index)

    def current_device_name(self) -> str:
        """The device of this rank."""
        return str(pick_device(read_rank_info().local_rank))

    def current_device(self) -> int:
        """Its number."""
        return torch.cuda.current_device() if self._type == "cuda" else 0

    def device_count(self) -> int:
        """Devices that this process sees; without an accelerator the ranks of the host."""
        return torch.cuda.device_count() if self._type == "cuda" else read_rank_info().local_world_size

    def set_device(self, device_index: int) -> None:
        """Make it the current one."""
        if self._type == "cuda":
            torch.cuda.set_device(device_index)

    def communication_backend_name(self) -> str:
        """What collectives run on."""
        return "nccl" if self._type == "cuda" else "gloo"

    def is_available(self) -> bool:
        """There is always a device."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether a call returns when its work is done."""
        return self._type == "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._type == "cuda":
            torch.cuda.synchronize(device_index)

    def is_bf16_supported(self) -> bool:
        """Whether bf16 computes here."""
        return self._type == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether fp16 computes here."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that a model may compute in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.device.type == self._type

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in memory that the device copies from without a stop."""
        return tensor if self._type == "cpu" else tensor.pin_memory()

    def empty_cache(self) -> None:
        """Give back what the device's allocator keeps."""
        if self._type == "cuda":
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> Any:
        """Seed the device's generator."""
        return torch.cuda.manual_seed(seed) if self._type == "cuda" else torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.get_device_module(self._type), name)


@cache
def get_accelerator() -> AcceleratorNames:
    """The one of this process."""
    return AcceleratorNames()
