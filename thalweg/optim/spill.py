"""Gradients that rest in the swap file between their reduction and the step.

The picture, for one unit::

    reduction -> gradient in memory -> [+ what earlier micro-batches left in the file] -> file
                                                                   .grad is a view of its place there

so that no more than a unit's gradients are in memory, whatever the length of a window.  ``.grad`` keeps its
values, layout and dtype, and anybody may read or write it, slowly; the update and the norm stream it.

Sums are those of gradients in memory, in every bit: two numbers added in either order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.optim.local import like_param, local
from thalweg.optim.norms import Measured, measure
from thalweg.store import Ring, SwapFile, Ticket
from thalweg.store.regions import round_up

BUFFER_BYTES = 16 << 20


def spill_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of swap file for the gradients of all parameters of ``optimizer``, in pages."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return sum(round_up(local(p).numel() * p.dtype.itemsize) for p in params)


class GradSpill:
    """Moves gradients to ``swap`` and adds them up there."""

    def __init__(self, swap: SwapFile) -> None:
        self._swap = swap
        self._ring: Ring | None = None
        self._views: dict[Tensor, Tensor] = {}
        self._aside: dict[Tensor, Tensor] = {}
        self._measured: dict[Tensor, tuple[Measured, int]] = {}

    def set_aside(self, params: Sequence[Tensor]) -> None:
        """Before a reduction: take away what rests in the file, so that the reduction gives what is new."""
        for param in params:
            view = self._views.get(param)
            if view is not None and param.grad is view:
                self._aside[param] = view
                param.grad = None

    @torch.no_grad()
    def bring(self, params: Sequence[Tensor]) -> None:
        """After a reduction: add what was set aside to what is new, in memory."""
        for param in params:
            view = self._aside.pop(param, None)
            if view is None:
                continue
            if param.grad is None:
                param.grad = view
            else:
                self._add(local(view), local(param.grad))

    @torch.no_grad()
    def put(self, params: Sequence[Tensor]) -> None:
        """Move the gradients of ``params`` that are in memory to the file."""
        for param in params:
            grad = param.grad
            if grad is None or grad is self._views.get(param) or local(grad).numel() == 0:
                continue
            view = self._views.get(param)
            if view is None or view.dtype != grad.dtype:
                piece = local(grad)
                place = self._swap.region(piece.nbytes)
                view = self._views[param] = like_param(
                    self._swap.view(place, piece.shape, piece.dtype), param
                )
            self._write(local(grad), local(view))
            self._measured[param] = measure(local(grad)), local(view)._version
            param.grad = view
        if self._ring is not None:
            self._ring.drop()

    def measured(self) -> dict[Tensor, Measured]:
        """What the gradients in the file add to the norm, of those that nobody has written to since."""
        return {
            param: found
            for param, (found, version) in self._measured.items()
            if param.grad is self._views[param] and local(self._views[param])._version == version
        }

    def forget(self) -> None:
        """The gradients are dropped."""
        self._aside.clear()
        self._measured.clear()

    def _buffers(self) -> Ring:
        self._ring = self._ring or Ring(3, BUFFER_BYTES)
        return self._ring

    def _pieces(self, flat: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """(first element, piece, buffer) of a flat tensor."""
        step, ring = BUFFER_BYTES // flat.itemsize, self._buffers()
        pieces = enumerate(range(0, flat.numel(), step))
        found = []
        for turn, first in pieces:
            piece = flat[first : first + step]
            found.append((first, piece, ring[turn].view(flat.dtype)[: piece.numel()]))
        return found

    def _write(self, grad: Tensor, view: Tensor) -> None:
        offset = self._offset(view)
        tickets: list[Ticket] = []
        for turn, (first, piece, buffer) in enumerate(self._pieces(grad.reshape(-1))):
            if turn >= len(self._buffers()):
                tickets[turn - len(self._buffers())].wait()
            buffer.copy_(piece)
            tickets.append(self._swap.write(offset + first * grad.itemsize, buffer))
        for ticket in tickets:
            ticket.wait()

    def _add(self, view: Tensor, grad: Tensor) -> None:
        offset = self._offset(view)
        pieces = self._pieces(grad.view(-1))
        ahead = len(self._buffers()) - 1

        def begin(index: int) -> Ticket:
            first, _, buffer = pieces[index]
            return self._swap.read(offset + first * grad.itemsize, buffer)

        tickets = [begin(index) for index in range(min(ahead, len(pieces)))]
        for index, (_, piece, buffer) in enumerate(pieces):
            tickets[index].wait()
            piece.add_(buffer)
            if index + ahead < len(pieces):
                tickets.append(begin(index + ahead))

    def _offset(self, view: Tensor) -> int:
        offset = self._swap.locate(view)
        assert offset is not None
        return offset
