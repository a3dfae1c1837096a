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

from thalweg.optim.dtensor_local import as_dtensor_like, to_local
from thalweg.optim.norms import PartialNorm, compute_partial_norm
from thalweg.storage_io import BufferRing, IoFuture, SwapFile
from thalweg.storage_io.allocator import PAGE, round_up

BUFFER_BYTES = 16 << 20


def grad_offload_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of swap file for the gradients of all parameters of ``optimizer``, in pages."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return sum(round_up(to_local(p).numel() * p.dtype.itemsize) for p in params)


class GradOffload:
    """Moves gradients to ``swap`` and adds them up there."""

    def __init__(self, swap: SwapFile) -> None:
        self._swap = swap
        self._buffer_ring: BufferRing | None = None
        self._views: dict[Tensor, Tensor] = {}
        self._detached: dict[Tensor, Tensor] = {}
        self._partial_norms: dict[Tensor, tuple[PartialNorm, Tensor]] = {}

    def detach(self, params: Sequence[Tensor]) -> None:
        """Before a reduction: take away what rests in the file, so that the reduction gives what is new."""
        for param in params:
            view = self._views.get(param)
            if view is not None and param.grad is view:
                self._detached[param] = view
                param.grad = None

    @torch.no_grad()
    def accumulate(self, params: Sequence[Tensor]) -> None:
        """After a reduction: add what was set aside to what is new, in memory."""
        for param in params:
            view = self._detached.pop(param, None)
            if view is None:
                continue
            if param.grad is None:
                param.grad = view
            else:
                self._add_from_file(to_local(view), to_local(param.grad))

    @torch.no_grad()
    def offload(self, params: Sequence[Tensor]) -> None:
        """Move the gradients of ``params`` that are in memory to the file."""
        for param in params:
            grad = param.grad
            if grad is None or grad is self._views.get(param) or to_local(grad).numel() == 0:
                continue
            view = self._views.get(param)
            if view is None or view.dtype != grad.dtype:
                piece = to_local(grad)
                offset = self._swap.allocate(piece.nbytes)
                view = self._views[param] = as_dtensor_like(self._swap.view(offset, piece.shape, piece.dtype), param)
            self._write_to_file(to_local(grad), to_local(view))
            self._partial_norms[param] = compute_partial_norm(to_local(grad)), _ragged_end(to_local(grad)).clone()
            param.grad = view
        if self._buffer_ring is not None:
            self._buffer_ring.release_memory()

    def partial_norms(self) -> dict[Tensor, PartialNorm]:
        """What the gradients in the file add to the norm, of those that nobody has written to since.

        A version counter would not see what is written through ``p.grad.data``.  The pages do: whoever reads or
        writes them brings them into memory.  The end that fills no page is compared.
        """
        return {
            param: partial_norm
            for param, (partial_norm, end) in self._partial_norms.items()
            if param.grad is (view := self._views[param])
            and not self._swap.was_touched(self._offset(to_local(view)), to_local(view).nbytes)
            and torch.equal(_ragged_end(to_local(view)), end)
        }

    def reset(self) -> None:
        """The gradients are dropped."""
        self._detached.clear()
        self._partial_norms.clear()

    def _get_buffer_ring(self) -> BufferRing:
        self._buffer_ring = self._buffer_ring or BufferRing(3, BUFFER_BYTES)
        return self._buffer_ring

    def _split_into_buffers(self, flat: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """(first element, piece, buffer) of a flat tensor."""
        step, ring = BUFFER_BYTES // flat.itemsize, self._get_buffer_ring()
        pieces = enumerate(range(0, flat.numel(), step))
        split = []
        for turn, first in pieces:
            piece = flat[first : first + step]
            split.append((first, piece, ring[turn].view(flat.dtype)[: piece.numel()]))
        return split

    def _write_to_file(self, grad: Tensor, view: Tensor) -> None:
        offset = self._offset(view)
        futures: list[IoFuture] = []
        for turn, (first, piece, buffer) in enumerate(self._split_into_buffers(grad.reshape(-1))):
            if turn >= len(self._get_buffer_ring()):
                futures[turn - len(self._get_buffer_ring())].wait()
            buffer.copy_(piece)
            futures.append(self._swap.write(offset + first * grad.itemsize, buffer))
        for future in futures:
            future.wait()

    def _add_from_file(self, view: Tensor, grad: Tensor) -> None:
        offset = self._offset(view)
        pieces = self._split_into_buffers(grad.view(-1))
        num_ahead = len(self._get_buffer_ring()) - 1

        def start_read(index: int) -> IoFuture:
            first, _, buffer = pieces[index]
            return self._swap.read(offset + first * grad.itemsize, buffer)

        futures = [start_read(index) for index in range(min(num_ahead, len(pieces)))]
        for index, (_, piece, buffer) in enumerate(pieces):
            futures[index].wait()
            piece.add_(buffer)
            if index + num_ahead < len(pieces):
                futures.append(start_read(index + num_ahead))

    def _offset(self, view: Tensor) -> int:
        offset = self._swap.locate(view)
        assert offset is not None
        return offset


def _ragged_end(piece: Tensor) -> Tensor:
    """The bytes of a tensor behind its last whole page."""
    return piece.reshape(-1).view(torch.uint8)[piece.nbytes // PAGE * PAGE :]
