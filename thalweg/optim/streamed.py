"""The optimiser's step on tensors that lie in a swap file: read n+1, update n, write n-1.

The picture, for chunks 0, 1, ... (chunks.py) and a ring of buffers::

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

The stream runs on a thread of its own that uses one core: one reaches several times a disk's rate, and a
team of threads that has to meet after each chunk is held up by whoever else computes (40 times slower, where
a backward pass had the cores).

Invariants: a parameter without gradient is not touched, nor is its state; every element sees the same
operations as in one plain ``optimizer.step()``; nothing is written before its chunk was updated, and all
transfers are over when ``apply`` returns or raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from thalweg.optim.worker import Job, Worker
from thalweg.store import IoThreads, Ring, SwapFile, Ticket
from thalweg.store.regions import PAGE, round_up
from thalweg.utils.dtypes import HALF_DTYPES
from thalweg.utils.log import get_logger
from thalweg.utils.threads import use_one_core

_log = get_logger("optim")
_SLOW = 300e6  # bytes a second; below this a disk is worth a word


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
    the swap file if ``swap`` is given, unless ``state_in_memory``.

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
    ) -> None:
        assert (swap is None) == (buffers is None), "a swap file needs buffers, and buffers a swap file"
        assert buffers is None or len(buffers) >= 2, "one buffer cannot read and write at once"
        self.optimizer, self.swap, self.buffers = optimizer, swap, buffers
        self.copies = dict(copies or {})
        self.policy = policy or StreamPolicy()
        self._state_swap = None if state_in_memory else swap
        self.waited = 0.0  # seconds of the last step in which the arithmetic waited for the disk
        self._worker = Worker(optimizer)
        self._thread = IoThreads(1, "thalweg-update", begin=use_one_core)
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._told = False
        self.place_state()

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
        items = [item for group in self.optimizer.param_groups for item in self._items(group, only)]
        buffer_bytes = self.buffers.nbytes if self.buffers is not None else 0
        chunks = cut_chunks(items, buffer_bytes, max(self.policy.chunk_elements, GRAIN))
        if self.swap is None or self.buffers is None:
            for chunk in chunks:
                self._update(factor, chunk, None)
        else:
            self._stream(chunks, self.swap, self.buffers, partial(self._update, factor))
        for item in items:
            self._finish(item)
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """State of ``param``'s layout in the swap file, of undefined value."""
        return like_param(self._room(local(param), dtype), param)

    def release(self, tensor: Tensor) -> None:
        """Give back the pages of the mapping that ``tensor`` lies in, if it does."""
        self._trim(tensor)

    def place_state(self) -> None:
        """Move state that lies in memory to the swap file."""
        if self._state_swap is None:
            return
        for param, state in self.optimizer.state.items():
            piece = local(param)
            for key, value in state.items():
                if not _is_cut(value, piece) or self._state_swap.locate(local(value)) is not None:
                    continue
                placed = self._room(piece, value.dtype)
                placed.copy_(local(value))
                state[key] = like_param(placed, param)
                self._trim(placed)

    # One step

    def _streamed_rows(self, params: Sequence[Tensor]) -> dict[int, Rows]:
        """What the norm needs to know of the gradients that lie in the swap file, by their address."""
        if self.swap is None or self.buffers is None:
            return {}
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

        self._stream(cut_chunks(items, self.buffers.nbytes, 1 << 62), self.swap, self.buffers, collect)
        return known

    def _stream(
        self,
        chunks: Sequence[Chunk],
        swap: SwapFile,
        ring: Ring,
        work: Callable[[Chunk, Tensor], None],
    ) -> None:
        if chunks:
            self._thread.submit(self._pump, chunks, swap, ring, work).result()

    @torch.no_grad()
    def _pump(
        self,
        chunks: Sequence[Chunk],
        swap: SwapFile,
        ring: Ring,
        work: Callable[[Chunk, Tensor], None],
    ) -> None:
        begun, moved = time.perf_counter(), swap.reads.nbytes + swap.writes.nbytes
        self.waited = 0.0
        depth = len(ring)
        reads: dict[int, Ticket] = {}
        writes = [Ticket() for _ in range(depth)]

        def begin(turn: int) -> None:
            if turn < len(chunks):
                self._wait(writes[turn % depth])
                reads[turn] = chunks[turn].begin_read(swap, ring[turn])

        try:
            for turn in range(depth - 1):
                begin(turn)
            for turn, chunk in enumerate(chunks):
                self._wait(reads.pop(turn))
                work(chunk, ring[turn])
                writes[turn % depth] = chunk.begin_write(swap, ring[turn])
                begin(turn + depth - 1)
            for ticket in writes:
                self._wait(ticket)
        finally:
            for ticket in [*reads.values(), *writes]:
                ticket.settle()
        self._report(time.perf_counter() - begun, swap.reads.nbytes + swap.writes.nbytes - moved)

    def _wait(self, ticket: Ticket) -> None:
        start = time.perf_counter()
        ticket.wait()
        self.waited += time.perf_counter() - start

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

    def _items(self, group: dict[str, Any], only: Collection[Tensor] | None) -> list[Item]:
        schemas: dict[torch.dtype, dict[str, torch.dtype | None]] = {}
        found = []
        for param in group["params"]:
            if param.grad is None or (only is not None and param not in only):
                continue
            master = local(param).detach()
            state = self.optimizer.state.get(param, {})
            fresh = not state
            if (fresh or master.ndim == 0) and master.dtype not in schemas:
                schemas[master.dtype] = self._worker.schema(group, master.dtype)
            if fresh:
                cut = {k: self._room(master, d) for k, d in schemas[master.dtype].items() if d is not None}
                scalars = {key: None for key, dtype in schemas[master.dtype].items() if dtype is None}
            else:
                # A 0-dim parameter's moment looks like a counter: what a first step makes tells them apart.
                known = schemas[master.dtype] if master.ndim == 0 else {}
                cut = {k: local(v) for k, v in state.items() if _is_cut(v, master) or known.get(k)}
                scalars = {k: v for k, v in state.items() if k not in cut}
            operands = {
                "master": self._operand(master, write=True),
                "grad": self._operand(local_grad(param)),
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

    def _room(self, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory or swap of ``piece``'s shape, of undefined value."""
        swap = self._state_swap
        if swap is None or piece.numel() == 0:
            return torch.empty_like(piece, dtype=dtype)
        return swap.view(swap.region(piece.numel() * dtype.itemsize), piece.shape, dtype)

    def _finish(self, item: Item) -> None:
        """Show the new state: views for what was cut, the counters as the optimiser left them."""
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

    def _report(self, seconds: float, nbytes: int) -> None:
        """Say once that the disk is what a step waits for, if it is a slow one."""
        if self._told or nbytes < (64 << 20) or self.waited < 0.5 * seconds or nbytes / seconds > _SLOW:
            return
        self._told = True
        assert self.swap is not None
        _log.warning(
            "the disk of %s moves %.0f MB/s, and the optimiser's step moves %.0f MB: %.1f of its %.1f s went "
            "by waiting. Point nvme_path to a faster disk, or keep the optimiser in memory (device cpu)",
            self.swap.folder,
            nbytes / seconds / 1e6,
            nbytes / 1e6,
            self.waited,
            seconds,
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of swap file that the state of all parameters of an elementwise ``optimizer`` takes, in pages."""
    worker, total = Worker(optimizer), 0
    for group in optimizer.param_groups:
        schemas: dict[torch.dtype, list[torch.dtype]] = {}
        for param in group["params"]:
            if not param.requires_grad:
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
