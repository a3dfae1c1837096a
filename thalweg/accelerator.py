"""``get_accelerator()``: the device of this process under one set of names, whatever it is.

The names are those that programs ask of DeepSpeed's accelerator.  Without a device all of them hold for the processor:
its memory is the host's, its streams are the program's own order.  A name that is not here is asked of
``torch.<device>``.
"""

import os
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._triton import has_triton

from thalweg.device import communication_backend, current_accelerator, pick_device
from thalweg.utils.env import read_rank_info
from thalweg.utils.procfs import available_host_memory, resident_bytes


class Accelerator:
    """The accelerator of this process, or its processor."""

    @property
    def _type(self) -> str:
        return current_accelerator().type

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._type)

    def _index(self, device_index: int | None) -> int:
        return torch.accelerator.current_device_index() if device_index is None else device_index

    # Which device

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, ``cuda:1``, ``cpu``."""
        return self._type if device_index is None or self._type == "cpu" else f"{self._type}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is the current one."""
        return nullcontext() if self._type == "cpu" else self._module.device(device_index)

    def current_device_name(self) -> str:
        """The device that is current; where none was chosen yet, this rank's."""
        if self._type != "cpu" and (index := torch.accelerator.current_device_index()):
            return f"{self._type}:{index}"
        return str(pick_device(read_rank_info().local_rank))

    def current_device(self) -> int | str:
        """Its number, or "cpu": what ``tensor.to`` takes."""
        return "cpu" if self._type == "cpu" else torch.accelerator.current_device_index()

    def device_count(self) -> int:
        """Devices that this process sees; without an accelerator the ranks of the host."""
        if self._type != "cpu":
            return torch.accelerator.device_count()
        return max(read_rank_info().local_world_size, int(os.environ.get("LOCAL_SIZE", 0)))

    def set_device(self, device_index: int) -> None:
        """Make it the current one."""
        if self._type != "cpu":
            torch.accelerator.set_device_index(device_index)

    def communication_backend_name(self) -> str:
        """What collectives run on."""
        return communication_backend(self._type)

    def is_available(self) -> bool:
        """There is always a device."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.device.type == self._type

    # What it can do

    def is_synchronized_device(self) -> bool:
        """Whether a call returns when its work is done."""
        return self._type == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_bf16_supported(self) -> bool:
        """Whether bf16 computes here."""
        return self._type == "cpu" or self._module.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether fp16 computes here."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run here."""
        return self._type != "cpu" and has_triton()

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that a model may compute in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def get_compile_backend(self) -> str:
        """What ``torch.compile`` uses unless told otherwise."""
        return "inductor"

    # Work and its order

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._type != "cpu":
            torch.accelerator.synchronize(device_index)

    def stream(self, stream: Any) -> Any:
        """A context in which work goes to ``stream``."""
        return self._module.stream(stream) if stream is not None else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that work goes to; None where there are none."""
        return None if self._type == "cpu" else self._module.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that work goes to if nobody says otherwise; None where there are none."""
        return None if self._type == "cpu" else self._module.default_stream(device_index)

    def range_push(self, message: str) -> None:
        """Begin a named range of the profiler's."""
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_push(message)

    def range_pop(self) -> None:
        """End it."""
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_pop()

    # Random numbers

    def random(self) -> Any:
        """torch's generators."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seed the device's generator."""
        return torch.manual_seed(seed) if self._type == "cpu" else self._module.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The seed of the device's generator."""
        return torch.initial_seed() if self._type == "cpu" else self._module.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the device's generator."""
        if self._type == "cpu":
            return torch.get_rng_state()
        return self._module.get_rng_state(self._index(device_index))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Put it back."""
        if self._type == "cpu":
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, self._index(device_index))

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator itself."""
        return torch.default_generator if self._type == "cpu" else self._module.default_generators[device_index]

    # Memory

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors hold; of the processor, what this process holds."""
        return self._count_bytes("memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds; of the processor, what this process holds."""
        return self._count_bytes("memory_reserved", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that :meth:`memory_allocated` was."""
        return self._count_bytes("max_memory_allocated", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most that :meth:`memory_reserved` was."""
        return self._count_bytes("max_memory_reserved", device_index)

    def _count_bytes(self, name: str, device_index: int | None) -> int:
        if self._type == "cpu":
            return resident_bytes(peak=name.startswith("max_"))
        return getattr(torch.accelerator, name)(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin to look for the most anew."""
        if self._type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """What the allocator counts."""
        return {} if self._type == "cpu" else torch.accelerator.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        if self._type != "cpu":
            return torch.accelerator.get_memory_info(device_index)[1]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that are free; of the host's memory, those that this process may still use."""
        if self._type != "cpu":
            return torch.accelerator.get_memory_info(device_index)[0]
        return available_host_memory() or self.total_memory()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in memory that the device copies from without a stop."""
        return tensor if self._type == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is."""
        return self._type == "cpu" or tensor.is_pinned()

    def empty_cache(self) -> None:
        """Give back what the device's allocator keeps."""
        if self._type != "cpu":
            torch.accelerator.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@cache
def get_accelerator() -> Accelerator:
    """The one of this process."""
    return Accelerator()
