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

from thalweg.optim.chunks import Item
from thalweg.optim.local import local
from thalweg.optim.streamed import StreamedUpdate, state_bytes
from thalweg.store import SwapFile
from thalweg.store.regions import PAGE, round_up


class Tentative:
    """Steps parameters of ``update``, all of whose tensors lie in ``swap``, until :meth:`commit` or
    :meth:`discard`.  One step at a time; not from two threads at once."""

    def __init__(self, update: StreamedUpdate, swap: SwapFile) -> None:
        self._update, self._swap = update, swap
        self._twins: dict[int, int] = {}
        self._open: list[Item] = []

    def takes(self, param: Tensor) -> bool:
        """Whether all that an update of ``param`` writes lies in the swap file."""
        copy = self._update.copies.get(param)
        return (
            param.ndim > 0
            and param not in self._update.resident
            and all(self._is_paged(tensor) for tensor in (local(param), copy) if tensor is not None)
        )

    @torch.no_grad()
    def apply(self, params: Collection[Tensor]) -> None:
        """Update ``params``, each of which has a gradient that is used up as it is.

        Raises:
            SwapError: a transfer failed; nothing that was there before has changed.
        """
        items = self._update.items(params)
        self._open += items
        self._find_twins(items)
        self._update.carry_out(items, 1.0)
        for item in items:  # what is open lives as long as the step; gradients must not
            del item.operands["grad"]

    def expect(self, params: Collection[Tensor]) -> None:
        """A hint that ``params`` come next."""
        if all(map(self.takes, params)):
            self._update.expect(params)

    def commit(self) -> None:
        """Let all new values appear in their tensors.

        Raises:
            OSError: the system could not map the file anew; the step is then in part taken.
        """
        items, self._open = self._open, []
        ranges = sorted(
            (operand.offset, operand.twin, operand.room)
            for item in items
            for operand in item.operands.values()
            if operand.offset is not None and operand.twin is not None
        )
        for first, second, nbytes in _joined(ranges):
            self._swap.exchange(first, second, nbytes)
        self._update.show(items)

    def discard(self) -> None:
        """Forget the new values, and what was expected."""
        self._update.expect(())
        items, self._open = self._open, []
        for item in items:
            for key in item.keys if item.fresh else ():
                if (offset := item.operands[key].offset) is not None:
                    self._swap.free(offset)

    def _find_twins(self, items: list[Item]) -> None:
        kept = [
            operand
            for item in items
            for name, operand in item.operands.items()
            if operand.write and operand.offset is not None and not (item.fresh and name in item.keys)
        ]
        # In the order of the file, so that what is written at once has its twins side by side.
        for operand in sorted(kept, key=lambda operand: operand.offset or 0):
            assert operand.offset is not None
            if operand.offset not in self._twins:
                self._twins[operand.offset] = self._swap.region(operand.room)
            operand.twin = self._twins[operand.offset]

    def _is_paged(self, tensor: Tensor) -> bool:
        if not tensor.numel():
            return True
        offset = self._swap.locate(tensor)
        return offset is not None and offset % PAGE == 0


def tentative_bytes(optimizer: torch.optim.Optimizer, swap: SwapFile, copies: Mapping[Tensor, Tensor]) -> int:
    """Bytes of swap file for the second places of all that an elementwise ``optimizer`` writes."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    paged = [p for p in params if swap.locate(local(p)) is not None]
    written = [local(p) for p in paged] + [copies[p] for p in paged if p in copies]
    return state_bytes(optimizer) + sum(round_up(tensor.nbytes) for tensor in written)


def _joined(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(first, second, bytes) of ranges that follow one another in both places, made one."""
    found: list[tuple[int, int, int]] = []
    for first, second, nbytes in ranges:
        if found:
            one, other, size = found[-1]
            if one + size == first and other + size == second:
                found[-1] = one, other, size + nbytes
                continue
        found.append((first, second, nbytes))
    return found
