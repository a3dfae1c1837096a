"""Offload of any modules' weights: each unit has its parameters in memory only while it computes.

The picture.  Modules are cut into units (blocks, or what is left over) that are called one after the other.  A unit's
parameters are a segment of a file (``packed_file.py``) or lie in the host's pinned memory; a hook before its forward
fetches them, one behind evicts them.  The order of the last calls is remembered, and what comes next is fetched
meanwhile, as much as the memory allows: a denoiser's units come in the same order at every step.

The file has the same two sources as the ring of a decoder (``weight_ring.py``).  From the page cache, where the host
computes, parameters are views of the mapped file: nothing is moved, and the system may drop what it needs room for.
From the disk they are read past the page cache.  The slots of the ring do not fit here: the order is known only from
the calls, which may change, and each time a unit is fetched its parameters are new tensors.

Numbers are not touched: results have the same bits.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.infer.offload.packed_file import PackedWeightsFile, default_weights_folder
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import aligned_empty
from thalweg.utils.procfs import available_host_memory

_ALIGNMENT = 64
_MEMORY_FRACTION = 0.25  # of the free memory, where nobody says how much
_MIN_UNITS_IN_MEMORY = 4  # parts in memory at a time, at least: one computes, others are on their way


class ParamLocation(NamedTuple):
    """A parameter of a module, and where it lies among its unit's bytes."""

    module: nn.Module
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def view(self, buffer: Tensor) -> Tensor:
        """Return it out of its unit's bytes."""
        nbytes = self.shape.numel() * self.dtype.itemsize
        return buffer[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)

    def assign(self, value: Tensor) -> None:
        """Let the module have a value."""
        setattr(self.module, self.name, nn.Parameter(value, requires_grad=self.requires_grad))


@dataclass(eq=False)
class OffloadUnit:
    """A module, and where its parameters lie; they become other objects each time they come."""

    module: nn.Module
    params: list[ParamLocation]
    nbytes: int
    # Of the file.
    segment: int = 0
    host_buffer: Tensor | None = None
    # How many calls of it are under way.
    num_active_calls: int = 0


def begin_copy(pinned: Sequence[Tensor], device: torch.device, copy_stream: torch.Stream) -> Callable[[], list[Tensor]]:
    """Begin to copy pinned tensors to the device on a stream; what is returned gives the copies, for what the current
    stream computes from then on."""
    with copy_stream:
        copies = [tensor.to(device, non_blocking=True) for tensor in pinned]
        ready = copy_stream.record_event()

    def finish() -> list[Tensor]:
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(ready)
        for tensor in copies:
            tensor.record_stream(stream)
        return copies

    return finish


class ModuleOffloader:
    """Takes the parameters of ``roots`` out of memory until :meth:`close`.

    ``offload_device``: ``cpu`` or ``nvme``, where they are kept; ``folder``: for the file; ``max_bytes``: of weights on
    ``device`` at a time, besides the largest unit.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        *,
        offload_device: str,
        device: torch.device | str = "cpu",
        folder: str | Path | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.max_bytes = max_bytes or int(_MEMORY_FRACTION * (available_host_memory() or 2**32))
        self.units = [unit for root in roots for unit in _partition(root, self.max_bytes // _MIN_UNITS_IN_MEMORY)]
        self.resident_bytes = self.peak_resident_bytes = 0
        self._hooks: list[Any] = []
        self._next_unit: dict[OffloadUnit, OffloadUnit] = {}
        self._last_unit: OffloadUnit | None = None
        # What gives the bytes of units that are on their way; it does not refer to this object.
        self._pending: dict[OffloadUnit, Callable[[], Sequence[Tensor]]] = {}
        on_host = self.device.type == "cpu"
        self._copy_stream = None if on_host else torch.Stream(self.device)
        self._is_mapped = offload_device == "cpu" and on_host
        self._file: PackedWeightsFile | None = None
        if offload_device == "nvme" or on_host:
            sizes = [round_up(unit.nbytes) for unit in self.units]
            self._file = PackedWeightsFile(folder or default_weights_folder(), sizes)
        for segment, unit in enumerate(self.units):
            unit.segment = segment
            self._offload(unit)
        if self._file is not None:
            self._file.finalize()
        if self._is_mapped:
            assert self._file is not None, "what is mapped is in the file"
            for unit, mapped in zip(self.units, self._file.map(), strict=True):
                _assign_params(unit, mapped)
            return
        if self._file is not None:
            self._file.drop_page_cache()
        self_ref: weakref.ref[ModuleOffloader] = weakref.ref(self)
        for unit in self.units:
            self._hooks += [
                unit.module.register_forward_pre_hook(partial(_on_call, self_ref, unit, True)),
                unit.module.register_forward_hook(partial(_on_call, self_ref, unit, False), always_call=True),
            ]

    def _offload(self, unit: OffloadUnit) -> None:
        """Move a unit's parameters to where they are kept."""
        buffer = aligned_empty((unit.nbytes,), torch.uint8, pinned=self._file is None)
        for param in unit.params:
            param.view(buffer).copy_(getattr(param.module, param.name).detach())
        if self._file is None:
            unit.host_buffer = buffer
        else:
            self._file.write(unit.segment, 0, buffer)
        self._set_placeholders(unit)

    def _set_placeholders(self, unit: OffloadUnit) -> None:
        for param in unit.params:  # shape, dtype and device stay: code asks for them
            param.assign(torch.empty(1, dtype=param.dtype, device=self.device).expand(param.shape))

    # Calls

    def fetch(self, unit: OffloadUnit) -> None:
        """Let a unit have its parameters."""
        unit.num_active_calls += 1
        if unit.num_active_calls > 1:
            return
        if self._last_unit is not None:
            self._next_unit[self._last_unit] = unit
        self._last_unit = unit
        if unit not in self._pending:
            self._cancel_prefetch()
            self._pending[unit] = self._start_fetch(unit)
        _assign_params(unit, *self._pending.pop(unit)())
        following = self._next_unit.get(unit)
        while following is not None and following.num_active_calls == 0 and following not in self._pending:
            if self.resident_bytes + following.nbytes > self.max_bytes:
                break
            self._pending[following] = self._start_fetch(following)
            following = self._next_unit.get(following)

    def evict(self, unit: OffloadUnit) -> None:
        """Take them away again."""
        unit.num_active_calls -= 1
        if unit.num_active_calls == 0:
            self._set_placeholders(unit)
            self.resident_bytes -= unit.nbytes

    def _start_fetch(self, unit: OffloadUnit) -> Callable[[], Sequence[Tensor]]:
        self.resident_bytes += unit.nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)
        device, stream = self.device, self._copy_stream
        if unit.host_buffer is not None:
            assert stream is not None, "only a device has its weights on the host"
            return begin_copy([unit.host_buffer], device, stream)
        assert self._file is not None, "what is not on the host is in the file"
        buffer = aligned_empty((round_up(unit.nbytes),), torch.uint8, pinned=stream is not None)
        future = self._file.read(unit.segment, buffer)

        def finish() -> list[Tensor]:
            future.wait()
            return [buffer] if stream is None else begin_copy([buffer], device, stream)()

        return finish

    def _cancel_prefetch(self) -> None:
        """The order is another than last time: drop what is on its way."""
        for unit, finish in self._pending.items():
            finish()
            self.resident_bytes -= unit.nbytes
        self._pending.clear()

    def close(self) -> None:
        """Put all parameters back into memory."""
        for hook in self._hooks:
            hook.remove()
        self._cancel_prefetch()
        for unit in self.units:
            if self._is_mapped:
                for param in unit.params:
                    param.assign(getattr(param.module, param.name).detach().clone())
            else:
                _assign_params(unit, *self._start_fetch(unit)())
        self.units = []
        if self._file is not None:
            self._file.close()


def _on_call(offloader_ref: weakref.ref[ModuleOffloader], unit: OffloadUnit, begins: bool, *_: Any) -> None:
    """A unit's call begins or has ended: the hooks of its module."""
    offloader = offloader_ref()
    assert offloader is not None or not begins, "the engine whose weights these are has been dropped: keep it"
    if offloader is not None:
        (offloader.fetch if begins else offloader.evict)(unit)


def _partition(root: nn.Module, max_bytes: int) -> list[OffloadUnit]:
    """Return the units of a module: the largest modules in it of up to ``max_bytes`` that are called.

    The root is never one, as it may be used by other methods than ``forward``.
    """
    modules: list[nn.Module] = []
    resident_ids = {id(p) for p in root.parameters(recurse=False)}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            size = sum(p.nbytes for p in child.parameters())
            if size == 0:
                continue
            container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            is_indivisible = isinstance(child, nn.MultiheadAttention) or not any(
                p.nbytes for grandchild in child.children() for p in grandchild.parameters()
            )  # the first reaches into its own children
            if not container and (size <= max_bytes or is_indivisible):
                modules.append(child)
            else:
                resident_ids.update(id(p) for p in child.parameters(recurse=False))
                visit(child)

    visit(root)
    num_users: dict[int, int] = dict.fromkeys(resident_ids, 2)  # one that somebody else has too stays in memory
    for module in modules:
        for parameter in module.parameters():
            num_users[id(parameter)] = num_users.get(id(parameter), 0) + 1
    units = (OffloadUnit(module, *_locate_params(module, num_users)) for module in modules)
    return [unit for unit in units if unit.params]


def _locate_params(module: nn.Module, num_users: dict[int, int]) -> tuple[list[ParamLocation], int]:
    """Return where a module's own parameters are to lie, and the bytes of all."""
    locations: list[ParamLocation] = []
    starts: dict[int, int] = {}
    total = 0
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if num_users[id(parameter)] > 1:
                continue
            if id(parameter) not in starts:
                starts[id(parameter)] = total
                total += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
            offset = starts[id(parameter)]
            attributes = parameter.shape, parameter.dtype, parameter.requires_grad
            locations.append(ParamLocation(owner, name, offset, *attributes))
    return locations, total


def _assign_params(unit: OffloadUnit, buffer: Tensor) -> None:
    for param in unit.params:
        param.assign(param.view(buffer))
