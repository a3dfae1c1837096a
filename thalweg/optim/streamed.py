"""The optimiser's step on tensors that lie in a swap file: read n+1, update n, write n-1.

The picture, for chunks 0, 1, ... (chunks.py) and a ring of buffers (stream.py)::

    disk      read 2 | write 0 | read 3 | write 1 | ...      threads (store/io.py)
    buffers      [0: to disk] [1: in use] [2: from disk] [3: from disk]
    cores          update 1: scale, widen, the optimiser's own kernel, the compute copy

Masters, gradients and state may each lie in memory or in the swap file, parameter by parameter; where a
tensor lies is read off its address.  Within a chunk the arithmetic runs over batches that fit the cache: the
gradient is scaled and widened to the master's dtype, the kernel runs, and the low-precision copy that the
next forward pass computes with is written, all while the numbers are at hand.  So 16-bit gradients are never
held in fp32 beyond one batch, and copies cost no pass of their own.

What ``optimizer.state`` shows are views of the swap file with the layout of their parameters, so
checkpoints and users see an ordinary optimiser.  Counters (Adam's ``step``) stay in memory.  State that does
not exist yet is made by the optimiser itself, piece by piece, and written without having been read.

Invariants: a parameter without gradient is not touched, nor is its state; every element sees the same
operations as in one plain ``optimizer.step()``; nothing is written before its chunk was updated, and all
transfers are over when ``apply`` returns or raises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.optim.chunks import GRAIN, Chunk, Item, Operand, Piece, batches, cut_chunks
from thalweg.optim.clip import global_grad_norm
from thalweg.optim.local import like_param, local, local_grad
from thalweg.optim.norms import ROW, Measured, Rows, full_rows, rows
from thalweg.optim.stream import Stream
from thalweg.optim.worker import Job, Worker
from thalweg.store import Ring, SwapFile
from thalweg.store.regions import PAGE, round_up
from thalweg.utils.dtypes import HALF_DTYPES


@dataclass(frozen=True)
class StreamPolicy:
    """``chunk_elements``: elements of parameters that share a buffer, at most (where nothing is swapped, of
    one call); ``batch_elements``: elements that the arithmetic runs over at a time, where gradients are
    widened or copies written."""

    chunk_elements: int = 1 << 24
    batch_elements: int = 1 << 19


class StreamedUpdate:
    """Steps an elementwise ``optimizer`` whose tensors may lie in ``swap``.

    ``swap`` None: all is in memory, and only the batching above remains (the host step).  ``buffers``: a
    ring of at least two; its memory is all that the stream needs, apart from a batch of gradients.
    ``copies``: for each parameter that has one, the tensor of this rank's rows in the compute dtype (in
    memory, in the swap file on a page boundary, or on a GPU), which the update fills.

    A master or gradient is streamed if ``local(param)`` or ``param.grad`` is a view of ``swap`` that begins
    on a page boundary and owns its pages to the end; anything else is used where it is.  New state goes to
    the swap file if ``swap`` is given, unless ``state_in_memory``, or the parameter is among ``resident``.

    Raises:
        ValueError: the swap file or the buffers are too small.
        SwapError: (when stepping) a transfer failed; parameters and state are then partly updated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        swap: SwapFile | None = None,
        buffers: Ring | None = None,
        *,
        copies: Mapping[Tensor, Tensor] | None = None,
        policy: StreamPolicy | None = None,
        state_in_memory: bool = False,
        resident: Collection[Tensor] = (),
    ) -> None:
        assert (swap is None) == (buffers is None), "a swap file needs buffers, and buffers a swap file"
        self.optimizer, self.swap, self.buffers = optimizer, swap, buffers
        self._stream = None if swap is None or buffers is None else Stream(swap, buffers)
        self.copies = dict(copies or {})
        self.policy = policy or StreamPolicy()
        self._state_swap = None if state_in_memory else swap
        self.resident = frozenset(resident)
        self._worker = Worker(optimizer)
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.place_state()

    @property
    def waited(self) -> float:
        """Seconds of the last step in which the arithmetic waited for the disk."""
        return 0.0 if self._stream is None else self._stream.waited

    # The face of an Update

    def grad_norm(
        self,
        params: Sequence[Tensor],
        replicate_group: dist.ProcessGroup | None,
        measured: Mapping[Tensor, Measured] | None = None,
    ) -> float:
        """The global 2-norm of the gradients; collective.  Those in the swap file stream through."""
        known = self._streamed_rows([p for p in params if p.grad is not None and p not in (measured or {})])

        def rows_of(piece: Tensor) -> Rows:
            found = known.get(piece.data_ptr())
            return rows(piece) if found is None else found

        return float(
            global_grad_norm(params, replicate_group=replicate_group, rows_of=rows_of, measured=measured)
        )

    @torch.no_grad()
    def apply(self, factor: float = 1.0, only: Collection[Tensor] | None = None) -> None:
        """Scale the gradients by ``factor`` and update every parameter (``only`` of these) that has one."""
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            hook(self.optimizer, (), {})
        items = self.items(only)
        self.carry_out(items, factor)
        self.show(items)
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})

    # Its parts, for whoever wants new values elsewhere first (tentative.py)

    def items(self, only: Collection[Tensor] | None) -> list[Item]:
        """What a step over these parameters reads and writes."""
        return [item for group in self.optimizer.param_groups for item in self._items(group, only)]

    def carry_out(self, items: Sequence[Item], factor: float) -> None:
        """Read, update and write."""
        chunks = self._chunks(items)
        if self._stream is None:
            for chunk in chunks:
                self._update(factor, chunk, None)
        else:
            self._stream.run(chunks, partial(self._update, factor))

    def expect(self, params: Collection[Tensor]) -> None:
        """A hint that these parameters, whose gradients will be in memory, are updated next; none: take the
        hint back, as must be done before anything else may write to them."""
        if self._stream is not None and not params:
            self._stream.expect_nothing()
        if self._stream is None or not params or any(not self.optimizer.state.get(param) for param in params):
            return
        groups = self.optimizer.param_groups
        items = [item for group in groups for item in self._items(group, params, needs_grad=False)]
        self._stream.expect(self._chunks(items))

    def _chunks(self, items: Sequence[Item]) -> list[Chunk]:
        buffer_bytes = self.buffers.nbytes if self.buffers is not None else 0
        return cut_chunks(items, buffer_bytes, max(self.policy.chunk_elements, GRAIN))

    def show(self, items: Sequence[Item]) -> None:
        """Let ``optimizer.state`` have what was carried out: views for what was cut, and the counters."""
        for item in items:
            self._finish(item)

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """State of ``param``'s layout in the swap file, of undefined value."""
        return like_param(self._room(param, local(param), dtype), param)

    def release(self, tensor: Tensor) -> None:
        """Give back the pages of the mapping that ``tensor`` lies in, if it does."""
        self._trim(tensor)

    def place_state(self) -> None:
        """Move state that lies in memory to the swap file."""
        if self._state_swap is None:
            return
        for param, state in self.optimizer.state.items():
            if param in self.resident:
                continue
            piece = local(param)
            for key, value in state.items():
                if not _is_cut(value, piece) or self._state_swap.locate(local(value)) is not None:
                    continue
                placed = self._room(param, piece, value.dtype)
                placed.copy_(local(value))
                state[key] = like_param(placed, param)
                self._trim(placed)

    # One step

    def _streamed_rows(self, params: Sequence[Tensor]) -> dict[int, Rows]:
        """What the norm needs to know of the gradients that lie in the swap file, by their address."""
        if self._stream is None:
            return {}
        assert self.buffers is not None
        items = []
        for param in params:
            operand = self._operand(local_grad(param))
            if operand.offset is not None:
                items.append(Item({}, param, operand.tensor.numel(), {"grad": operand}, (), {}, False))
        known: dict[int, Rows] = {}

        def collect(chunk: Chunk, buffer: Tensor) -> None:
            for piece in chunk.pieces:
                whole = piece.item.operands["grad"].tensor
                full, rest = known.setdefault(whole.data_ptr(), ([], []))
                flat = piece.tensor("grad", buffer)
                cut = flat.numel() // ROW * ROW if whole.numel() >= 2 * ROW else 0
                if cut:
                    full += full_rows(flat[:cut])
                if cut < flat.numel():
                    left = flat[cut:]
                    rest.append(left.float() if left.dtype in HALF_DTYPES else left.clone())

        self._stream.run(cut_chunks(items, self.buffers.nbytes, 1 << 62), collect)
        return known

    def _update(self, factor: float, chunk: Chunk, buffer: Tensor | None) -> None:
        if any(self._in_parts(piece.item, factor) for piece in chunk.pieces):
            for batch in batches(chunk.pieces, max(self.policy.batch_elements, GRAIN)):
                self._step(batch, buffer, factor)
        else:
            self._step(chunk.pieces, buffer, factor)

    @staticmethod
    def _in_parts(item: Item, factor: float) -> bool:
        """Whether anything but the kernel itself passes over the item's elements."""
        operands = item.operands
        widened = operands["grad"].tensor.dtype != operands["master"].tensor.dtype
        return factor != 1.0 or widened or "copy" in operands

    def _step(self, pieces: Sequence[Piece], buffer: Tensor | None, factor: float) -> None:
        jobs, used = [], 0
        for piece in pieces:
            item = piece.item
            master, grad = piece.tensor("master", buffer), piece.tensor("grad", buffer)
            if factor != 1.0:
                grad.mul_(factor)
            if grad.dtype != master.dtype:
                wide = self._scratch_of(master.dtype, used, grad.numel())
                used += grad.numel()
                grad = wide.copy_(grad)
            state: dict[str, Any] = {}
            if not item.fresh:
                state = {key: _own(value) for key, value in item.scalars.items()}
                state |= {key: piece.tensor(key, buffer) for key in item.keys}
            jobs.append(Job(item.group, master, grad, state))
        self._worker.step(jobs)
        for piece, job in zip(pieces, jobs, strict=True):
            item = piece.item
            for key, value in job.state.items():
                if key not in item.keys:
                    item.new_scalars[key] = value
                elif item.fresh:
                    piece.tensor(key, buffer).copy_(value)
            if "copy" in item.operands:
                piece.tensor("copy", buffer).copy_(job.master)

    def _scratch_of(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        have = self._scratch.get(dtype)
        if have is None or have.numel() < start + count:
            need = max(start + count, self.policy.batch_elements + GRAIN)
            have = self._scratch[dtype] = torch.empty(need, dtype=dtype)
        return have[start : start + count]

    # Items: what a step works on

    def _items(
        self, group: dict[str, Any], only: Collection[Tensor] | None, needs_grad: bool = True
    ) -> list[Item]:
        schemas: dict[torch.dtype, dict[str, torch.dtype | None]] = {}
        found = []
        for param in group["params"]:
            if (needs_grad and param.grad is None) or (only is not None and param not in only):
                continue
            master = local(param).detach()
            state = self.optimizer.state.get(param, {})
            fresh = not state
            if (fresh or master.ndim == 0) and master.dtype not in schemas:
                schemas[master.dtype] = self._worker.schema(group, master.dtype)
            if fresh:
                kinds = schemas[master.dtype].items()
                cut = {k: self._room(param, master, d) for k, d in kinds if d is not None}
                scalars = {key: None for key, dtype in schemas[master.dtype].items() if dtype is None}
            else:
                # A 0-dim parameter's moment looks like a counter: what a first step makes tells them apart.
                known = schemas[master.dtype] if master.ndim == 0 else {}
                cut = {k: local(v) for k, v in state.items() if _is_cut(v, master) or known.get(k)}
                scalars = {k: v for k, v in state.items() if k not in cut}
            operands = {
                "master": self._operand(master, write=True),
                **({} if param.grad is None else {"grad": self._operand(local_grad(param))}),
                **{key: self._operand(value, read=not fresh, write=True) for key, value in cut.items()},
            }
            if param in self.copies:
                operands["copy"] = self._operand(self.copies[param], read=False, write=True)
            found.append(Item(group, param, master.numel(), operands, tuple(cut), scalars, fresh))
        return found

    def _operand(self, tensor: Tensor, read: bool = True, write: bool = False) -> Operand:
        offset = self.swap.locate(tensor) if self.swap is not None else None
        if offset is not None and offset % PAGE:
            offset = None
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} is not contiguous and cannot be streamed: call "
                ".contiguous() on the parameter before the engine is made"
            )
        return Operand(tensor.view(-1), offset, read, write)

    def _room(self, param: Tensor, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory or swap of the shape of ``param``'s ``piece``, of undefined value."""
        swap = None if param in self.resident else self._state_swap
        if swap is None or piece.numel() == 0:
            return torch.empty_like(piece, dtype=dtype)
        return swap.view(swap.region(piece.numel() * dtype.itemsize), piece.shape, dtype)

    def _finish(self, item: Item) -> None:
        state, piece = self.optimizer.state[item.param], local(item.param)
        if item.fresh:
            views = {k: item.operands[k].tensor.view(piece.shape) for k in item.keys}
            shown = {k: like_param(v, item.param) for k, v in views.items()}
            state.update({k: shown.get(k, item.new_scalars.get(k)) for k in [*item.scalars, *item.keys]})
            return
        for key, value in item.new_scalars.items():
            old = state[key]
            if isinstance(old, Tensor) and isinstance(value, Tensor):
                old.copy_(value)
            else:
                state[key] = value

    def _trim(self, tensor: Tensor) -> None:
        offset = self.swap.locate(tensor) if self.swap is not None else None
        if self.swap is not None and offset is not None:
            self.swap.trim(offset, tensor.nbytes)


def state_bytes(optimizer: torch.optim.Optimizer, resident: Collection[Tensor] = ()) -> int:
    """Bytes of swap file that the state of an elementwise ``optimizer`` takes, in pages; that of ``resident``
    parameters is elsewhere."""
    worker, total = Worker(optimizer), 0
    for group in optimizer.param_groups:
        schemas: dict[torch.dtype, list[torch.dtype]] = {}
        for param in group["params"]:
            if not param.requires_grad or param in resident:
                continue
            if param.dtype not in schemas:
                found = worker.schema(group, param.dtype).values()
                schemas[param.dtype] = [dtype for dtype in found if dtype is not None]
            count = local(param).numel()
            total += sum(round_up(count * dtype.itemsize) for dtype in schemas[param.dtype])
    return total


def _is_cut(value: Any, piece: Tensor) -> bool:
    """Whether a state entry has an element for each of the parameter's."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    return local(value).shape == piece.shape


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
