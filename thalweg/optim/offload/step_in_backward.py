"""Gradients that leave as soon as they are reduced: updates within the backward pass.

The picture, for one unit of the model (a transformer block)::

    backward of unit n+1 | reduction n+1 | update n+1, gradient gone | backward of unit n | ...

so that the gradients of all units never exist at once.  The norm is summed as they leave, from the same
numbers and in the same order as if they had stayed, and equals that of an ordinary step in every bit.

Two ways, by where the update writes:

*On NVMe* updates can be taken back (:class:`DoubleBufferedStep`): new values lie beside the old ones until
``step()`` has found the norm over all ranks finite.  A step is all or nothing, in every dtype, with a loss scale
too.  What is written to memory (masters that stay there) cannot be taken back: such gradients rest in the swap file
(:class:`GradOffload`) until ``step()``, and so do all of them where the disk has no room for second places.

*On the host* updates are made in place, for what would take them back is as large as the gradients that
were to go.  Ranks first agree that the loss is finite everywhere; else they wait, and ``step()`` skips.  What
is left is a gradient that overflows although the loss does not: the units that came before it in the
backward pass keep their updates, all others of that rank theirs not, ``skipped_steps`` counts the step, and
a warning names them.  With gradient clipping nothing is updated early.

The rule: the optimiser's state is offloaded, it works element by element and nobody has hung a hook on it;
there is no gradient clipping (nor, on the host, an fp16 loss scale); the backward pass is
``engine.backward``'s, not one that retains its graph, and belongs to the last micro-batch of a full window.
In any other backward pass (a plain ``loss.backward()`` among them, whose user may read ``.grad``) gradients
stay for ``step()``, which takes whatever is left.

What differs from an ordinary step to the eye: ``.grad`` is None after the backward pass, and a step of two
backward passes is an error (add the losses up).

*Updates that can be taken back* (:class:`DoubleBufferedStep`): new values are written beside the old ones until
the step stands.  The picture, for one unit whose masters and state lie in the swap file::

    file, before     | master, moments |  twin: what was there two steps ago |
    within backward  | old values      |  new values                         |     read here, written there
    the step stands  | new values      |  old values                         |     the ranges change places
    it does not      | old values      |  (forgotten)                        |

So updates run while the backward pass goes on, and yet a step is all or nothing: a gradient that is not
finite, wherever and whenever it turns up, an exception, or ``zero_grad()`` leave parameters, state and
counters as they were.  Not a byte more is moved than by an update in place; the price is a second place on
the disk for whatever is written.

State that comes into being needs no twin: nobody has seen it before the step stands.

*Gradients that rest in the swap file* (:class:`GradOffload`) between their reduction and the step.  For one unit::

    reduction -> gradient in memory -> [+ what earlier micro-batches left in the file] -> file
                                                                   .grad is a view of its place there

so that no more than a unit's gradients are in memory, whatever the length of a window.  ``.grad`` keeps its
values, layout and dtype, and anybody may read or write it, slowly; the update and the norm stream it.

Sums are those of gradients in memory, in every bit: two numbers added in either order.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.optim.accumulation import AccumulationWindow, StepListener, StepResult
from thalweg.optim.dtensor_local import as_dtensor_like, local_grad, to_local, trainable_params
from thalweg.optim.norms import PartialNorm, PartialNorms, compute_partial_norm
from thalweg.optim.offload.io_pipeline import IoRange, ParamStep, merge_adjacent
from thalweg.optim.offload.nvme_step import NvmeStep, optimizer_state_bytes
from thalweg.optim.step import InMemoryStep
from thalweg.parallel_dims import control_group
from thalweg.storage_io.allocator import PAGE, round_up
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.io_threads import IoFuture
from thalweg.storage_io.swap_file import SwapError, SwapFile
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
# Units whose updates may wait for the disk while the backward pass goes on: each holds its gradients.
MAX_PENDING_UPDATES = 2


class DoubleBufferedStep:
    """Steps parameters of ``nvme_step``, all of whose tensors lie in its swap file, until :meth:`commit` or
    :meth:`discard`.  One step at a time; not from two threads at once."""

    def __init__(self, nvme_step: NvmeStep) -> None:
        self._nvme_step, self._swap = nvme_step, nvme_step.swap
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
        """Update ``params``, each of which has a gradient that is used up as it is; :meth:`flush` ends the writes.

        Raises:
            SwapError: a transfer failed, of this call or one before; nothing that was there before has changed.
        """
        items = self._nvme_step.build_param_steps(params)
        self._uncommitted += items
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
        self._nvme_step.execute(items, 1.0, finish_writes=False)
        for item in items:  # what is open lives as long as the step; gradients must not
            del item.step_tensors["grad"]

    def readahead(self, params: Collection[Tensor]) -> None:
        """A hint that ``params`` come next."""
        if all(map(self.can_step, params)):
            self._nvme_step.readahead(params)

    def flush(self) -> None:
        """Return when all new values are written.

        Raises:
            SwapError: a write failed; nothing that was there before has changed.
        """
        self._nvme_step.io_pipeline.flush()

    def commit(self) -> None:
        """Let all new values appear in their tensors.

        Raises:
            SwapError: a write failed; nothing that was there before has changed.
            OSError: the system could not map the file anew; the step is then in part taken.
        """
        self.flush()
        items, self._uncommitted = self._uncommitted, []
        ranges = sorted(
            IoRange(operand.file_offset, operand.shadow_offset, operand.padded_bytes)
            for item in items
            for operand in item.step_tensors.values()
            if operand.file_offset is not None and operand.shadow_offset is not None
        )
        for first, second, nbytes in merge_adjacent(ranges):
            self._swap.swap_ranges(first, second, nbytes)
        self._nvme_step.publish_state(items)

    def discard(self) -> None:
        """Forget the new values, and what was expected."""
        self._nvme_step.readahead(())
        with suppress(SwapError):
            self.flush()
        items, self._uncommitted = self._uncommitted, []
        for item in items:
            for key in item.state_keys if item.is_new_state else ():
                if (offset := item.step_tensors[key].file_offset) is not None:
                    self._swap.free(offset)

    def _is_page_aligned(self, tensor: Tensor) -> bool:
        if not tensor.numel():
            return True
        offset = self._swap.locate(tensor)
        return offset is not None and offset % PAGE == 0


def double_buffer_bytes(nvme_step: NvmeStep) -> int:
    """Bytes of swap file for the second places of all that it writes."""
    copies, params = nvme_step.compute_copies, trainable_params(nvme_step.optimizer)
    on_disk = [p for p in params if nvme_step.swap.locate(to_local(p)) is not None]
    written = [to_local(p) for p in on_disk] + [copies[p] for p in on_disk if p in copies]
    return optimizer_state_bytes(nvme_step.optimizer) + sum(round_up(tensor.nbytes) for tensor in written)


BUFFER_BYTES = 16 << 20


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
            self._swap.write_through(self._offset(to_local(view)), to_local(grad), grad.dtype, self._get_buffer_ring())
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

    def _add_from_file(self, view: Tensor, grad: Tensor) -> None:
        offset, flat, ring = self._offset(view), grad.view(-1), self._get_buffer_ring()
        step, num_ahead = BUFFER_BYTES // grad.itemsize, len(ring) - 1
        pieces = flat.split(step)
        buffers = [ring[turn].view(grad.dtype)[: piece.numel()] for turn, piece in enumerate(pieces)]
        reads: list[IoFuture] = []
        for turn, piece in enumerate(pieces):
            while len(reads) < min(turn + num_ahead, len(pieces)):
                reads.append(self._swap.read(offset + len(reads) * step * grad.itemsize, buffers[len(reads)]))
            reads[turn].wait()
            piece.add_(buffers[turn])

    def _offset(self, view: Tensor) -> int:
        offset = self._swap.locate(view)
        assert offset is not None
        return offset


def _ragged_end(piece: Tensor) -> Tensor:
    """The bytes of a tensor behind its last whole page."""
    return piece.reshape(-1).view(torch.uint8)[piece.nbytes // PAGE * PAGE :]


class StepInBackward(InMemoryStep, StepListener):
    """A strategy around ``inner`` that updates units as they are reduced.

    ``in_place``: updates may be made in place within the backward pass, and ``on_params_updated(units)`` is called;
    ``double_buffered``: they may be made there as far as it takes them; ``grad_offload``: where gradients rest that
    cannot be used up at once.  ``use_thread``: update on a thread of its own, for an update that waits for a disk.
    ``group``: the ranks that make one step.
    """

    def __init__(
        self,
        inner: InMemoryStep,
        window: AccumulationWindow,
        on_params_updated: Callable[[list[str]], None],
        *,
        in_place: bool = True,
        double_buffered: DoubleBufferedStep | None = None,
        grad_offload: GradOffload | None = None,
        use_thread: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert not (in_place and double_buffered is not None), "in place or tentative, not both"
        super().__init__(inner.optimizer)
        self.inner, self.window = inner, window
        self.state_like, self.offload_state, self.release = inner.state_like, inner.offload_state, inner.release
        self.partial_norms: dict[Tensor, PartialNorm] = {}
        self.skipped_units: list[str] = []
        self._on_params_updated, self._in_place, self._grad_offload = (on_params_updated, in_place, grad_offload)
        self._double_buffered, self._group = double_buffered, group
        self._loss_is_finite_everywhere = True
        self._incomplete_units: dict[str, list[Tensor]] = {}
        # By unit: the parameters that left after it the last time, whose state is read ahead.
        self._next_params: dict[str, frozenset[Tensor]] = {}
        self._last_unit = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thalweg-update") if use_thread else None
        self._pending_updates: list[Future[None]] = []

    # The face of an Update

    def grad_norm(
        self, params: Sequence[Tensor], replicate_group: dist.ProcessGroup | None, partial_norms: PartialNorms = None
    ) -> Tensor:
        """The global 2-norm, gradients that have left included; collective."""
        if (error := self.wait_for_updates()) is not None:
            raise error
        offloaded_norms = self._grad_offload.partial_norms() if self._grad_offload is not None else {}
        norms = {**offloaded_norms, **self.partial_norms, **(partial_norms or {})}
        return self.inner.grad_norm(params, replicate_group, norms)

    def apply(self, factor: float = 1.0, subset: Collection[Tensor] | None = None) -> None:
        """Let tentative updates stand, and update what is left."""
        if self._double_buffered is not None:
            self._double_buffered.commit()
        self.inner.apply(factor, subset)

    # The backward pass

    def before_reduce(self, params: Sequence[Tensor]) -> None:
        """The gradients of ``params`` are about to be reduced."""
        if self._grad_offload is not None:
            self._grad_offload.detach(params)

    def after_reduce(self, unit: str, params: Sequence[Tensor], complete: bool) -> None:
        """The gradients of ``unit`` have been reduced; ``complete`` if this backward adds no more to them."""
        if self._grad_offload is not None:
            self._grad_offload.accumulate(params)
        with_grad = [param for param in params if param.grad is not None]
        if not with_grad:
            return
        if not self._can_step():
            if self._grad_offload is not None:
                self._grad_offload.offload(with_grad)
        elif complete:
            self._step_unit(unit, with_grad)
        else:
            self._incomplete_units[unit] = with_grad

    def wait_for_updates(self) -> BaseException | None:
        """Return when no update is under way, with the first error of one."""
        pending, self._pending_updates = self._pending_updates, []
        if error := next((error for error in [future.exception() for future in pending] if error), None):
            return error
        try:
            if self._double_buffered is not None:
                self._double_buffered.flush()
        except SwapError as error:
            return error
        return None

    def after_step(self, result: StepResult) -> None:
        """The step that these gradients belong to is over."""
        if self.skipped_units and self._in_place:
            _log.warning(
                "a gradient was not finite: %s kept their values, units that came before in the backward "
                "pass are updated; with gradient_clipping a step is left out as a whole",
                ", ".join(self.skipped_units),
            )
        self._reset()

    def discard(self) -> None:
        """The user forgets this step's gradients, and with them what became of their updates."""
        if (error := self.wait_for_updates()) is not None:
            _log.warning("an update that is dropped had failed: %s", error)
        if self.partial_norms and self._in_place:
            _log.warning(
                "zero_grad() after a backward pass that has updated %d parameters already: "
                "offload_optimizer updates within the backward pass",
                len(self.partial_norms),
            )
        self._reset()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _reset(self) -> None:
        self.partial_norms.clear()
        self.skipped_units.clear()
        self._incomplete_units.clear()
        self._last_unit = ""
        if self._double_buffered is not None:
            self._double_buffered.discard()
        if self._grad_offload is not None:
            self._grad_offload.reset()

    def _can_step(self) -> bool:
        window, optimizer = self.window, self.optimizer
        is_full_window = window.in_backward and window.is_last and not window.retain_graph and window.needs_no_rescale
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        possible = self._double_buffered is not None or (self._in_place and self._loss_is_finite_everywhere)
        return possible and is_full_window and not hooked

    def before_backward(self) -> None:
        """Before a backward pass; collective."""
        if self.partial_norms:
            self.wait_for_updates()
            self._reset()
            raise ValueError(
                "a second backward pass in one step: offload_optimizer has used the gradients of the first up. Add the "
                "losses and call engine.backward() once, or pass retain_graph=True to all but the last"
            )
        self._loss_is_finite_everywhere = True
        if self._in_place and self.window.is_last:
            loss = self.window.loss
            broken = torch.tensor(0.0 if loss is None or bool(loss.isfinite().all()) else 1.0)
            if self._group is not None:
                dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=control_group(self._group))
            self._loss_is_finite_everywhere = not bool(broken)

    def after_backward(self) -> None:
        """What the backward pass has left: units that were used more often than they were reduced."""
        if self._can_step():
            for unit, params in list(self._incomplete_units.items()):
                self._step_unit(unit, [param for param in params if param.grad is not None])
        self._incomplete_units.clear()

    @torch.no_grad()
    def _step_unit(self, unit: str, params: list[Tensor]) -> None:
        self._incomplete_units.pop(unit, None)
        if self._double_buffered is not None:
            can_step = self._double_buffered.can_step
            if self._grad_offload is not None:
                self._grad_offload.offload([param for param in params if not can_step(param)])
            params = [param for param in params if can_step(param)]
        if not params:
            return
        norms = {param: compute_partial_norm(local_grad(param)) for param in params}
        self.partial_norms |= norms
        are_finite = all(norm.is_finite for norm in norms.values())
        if self.skipped_units or not are_finite:  # the step is lost: nothing more of it is worth doing
            self.skipped_units.append(unit or "the root")
            for param in params:
                param.grad = None
            return
        if self._double_buffered is None:
            # What is in memory of it is outdated; what may be read meanwhile goes when the step ends.
            self._on_params_updated([unit])
        if self._thread is None:
            self._run_step(params, None)
        else:
            while len(self._pending_updates) >= MAX_PENDING_UPDATES:
                self._pending_updates.pop(0).result()
            previous_unit, self._last_unit = self._last_unit, unit or "the root"
            self._next_params[previous_unit] = frozenset(params)
            upcoming = self._next_params.get(self._last_unit)
            self._pending_updates.append(self._thread.submit(self._run_step, params, upcoming))

    @torch.no_grad()
    def _run_step(self, params: list[Tensor], next_params: Collection[Tensor] | None) -> None:
        if self._double_buffered is not None:
            self._double_buffered.apply(set(params))
            if next_params:
                self._double_buffered.readahead(next_params)
        else:
            self.inner.apply(1.0, set(params))
        for param in params:
            param.grad = None
