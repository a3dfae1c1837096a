"""Updates that can be taken back: new values are written beside the old ones until the step stands.

The picture, for one unit whose masters and state lie in the swap file::

    file, before     | master, moments |  twin: what was there two steps ago |
    within backward  | old values      |  new values                         |     read here, written there
    the step stands  | new values      |  old values                         |     the ranges change places
    it does not      | old values      |  (forgotten)                        |

So updates run while the backward pass goes on, and yet a step is all or nothing: a gradient that is not
finite, wherever and whenever it turns up, an exception, or ``zero_grad()`` leave parameters, state and
counters as they were.  Not a byte more is moved than by an update in place; the price is a second place on
the disk for whatever is written.

State that comes into being needs no twin: nobody has seen it before the step stands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from thalweg.optim.dtensor_local import to_local
from thalweg.optim.offload.io_pipeline import ParamStep
from thalweg.optim.offload.nvme_step import NvmeStep, optimizer_state_bytes
from thalweg.storage_io import SwapFile
from thalweg.storage_io.allocator import PAGE, round_up


class DoubleBufferedStep:
    """Steps parameters of ``nvme_step``, all of whose tensors lie in ``swap``, until :meth:`commit` or
    :meth:`discard`.  One step at a time; not from two threads at once."""

    def __init__(self, nvme_step: NvmeStep, swap: SwapFile) -> None:
        self._nvme_step, self._swap = nvme_step, swap
        self._shadow_offsets: dict[int, int] = {}
        self._uncommitted: list[ParamStep] = []

    def can_step(self, param: Tensor) -> bool:
        """Whether all that an update of ``param`` writes lies in the swap file."""
        copy = self._nvme_step.compute_copies.get(param)
        return (
            param.ndim > 0
            and param not in self._nvme_step.in_memory_params
            and all(self._is_page_aligned(tensor) for tensor in (to_local(param), copy) if tensor is not None)
        )

    @torch.no_grad()
    def apply(self, params: Collection[Tensor]) -> None:
        """Update ``params``, each of which has a gradient that is used up as it is.

        Raises:
            SwapError: a transfer failed; nothing that was there before has changed.
        """
        items = self._nvme_step.build_param_steps(params)
        self._uncommitted += items
        self._assign_shadows(items)
        self._nvme_step.execute(items, 1.0)
        for item in items:  # what is open lives as long as the step; gradients must not
            del item.step_tensors["grad"]

    def readahead(self, params: Collection[Tensor]) -> None:
        """A hint that ``params`` come next."""
        if all(map(self.can_step, params)):
            self._nvme_step.readahead(params)

    def commit(self) -> None:
        """Let all new values appear in their tensors.

        Raises:
            OSError: the system could not map the file anew; the step is then in part taken.
        """
        items, self._uncommitted = self._uncommitted, []
        ranges = sorted(
            (operand.file_offset, operand.shadow_offset, operand.padded_bytes)
            for item in items
            for operand in item.step_tensors.values()
            if operand.file_offset is not None and operand.shadow_offset is not None
        )
        for first, second, nbytes in _merge_adjacent(ranges):
            self._swap.swap_ranges(first, second, nbytes)
        self._nvme_step.publish_state(items)

    def discard(self) -> None:
        """Forget the new values, and what was expected."""
        self._nvme_step.readahead(())
        items, self._uncommitted = self._uncommitted, []
        for item in items:
            for key in item.state_keys if item.is_new_state else ():
                if (offset := item.step_tensors[key].file_offset) is not None:
                    self._swap.free(offset)

    def _assign_shadows(self, items: list[ParamStep]) -> None:
        written = [
            operand
            for item in items
            for name, operand in item.step_tensors.items()
            if operand.write and operand.file_offset is not None and not (item.is_new_state and name in item.state_keys)
        ]
        # In the order of the file, so that what is written at once has its twins side by side.
        for operand in sorted(written, key=lambda operand: operand.file_offset or 0):
            assert operand.file_offset is not None
            if operand.file_offset not in self._shadow_offsets:
                self._shadow_offsets[operand.file_offset] = self._swap.allocate(operand.padded_bytes)
            operand.shadow_offset = self._shadow_offsets[operand.file_offset]

    def _is_page_aligned(self, tensor: Tensor) -> bool:
        if not tensor.numel():
            return True
        offset = self._swap.locate(tensor)
        return offset is not None and offset % PAGE == 0


def double_buffer_bytes(
    optimizer: torch.optim.Optimizer, swap: SwapFile, compute_copies: Mapping[Tensor, Tensor]
) -> int:
    """Bytes of swap file for the second places of all that an elementwise ``optimizer`` writes."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    on_disk = [p for p in params if swap.locate(to_local(p)) is not None]
    written = [to_local(p) for p in on_disk] + [compute_copies[p] for p in on_disk if p in compute_copies]
    return optimizer_state_bytes(optimizer) + sum(round_up(tensor.nbytes) for tensor in written)


def _merge_adjacent(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(first, second, bytes) of ranges that follow one another in both places, made one."""
    merged: list[tuple[int, int, int]] = []
    for first, second, nbytes in ranges:
        if merged:
            last_first, last_second, size = merged[-1]
            if last_first + size == first and last_second + size == second:
                merged[-1] = last_first, last_second, size + nbytes
                continue
        merged.append((first, second, nbytes))
    return merged
