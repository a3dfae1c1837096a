"""The optimiser's step on tensors that lie in a swap file: read n+1, update n, write n-1.

The picture, for chunks 0, 1, ... (io_pipeline.py) and a ring of buffers::

    disk      read 2 | write 0 | read 3 | write 1 | ...      threads (storage_io/io_threads.py)
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

*The rule.*  The update must be the user's optimiser to the last bit, whatever its class and options.  So it does not
spell rules out: a second optimiser of the very class (:class:`PiecewiseOptimizer`) steps over pieces (plain, flat
tensors), each with a copy of the options of its group and a view of its state.  That is right for elementwise
optimisers and only for them; ``is_elementwise`` says which are known to be.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.optim.algorithms.elementwise import ELEMENTWISE_OPTIMIZERS
from thalweg.optim.dtensor_local import as_dtensor_like, local_grad, to_local
from thalweg.optim.norms import ROW_LENGTH, RowNorms, compute_row_norms, full_row_norms
from thalweg.optim.offload import io_pipeline
from thalweg.optim.offload.io_pipeline import ALIGN_ELEMENTS, IoChunk, ParamStep
from thalweg.optim.step import InMemoryStep
from thalweg.storage_io.allocator import PAGE, round_up
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapFile
from thalweg.utils.dtypes import HALF_DTYPES

CHUNK_ELEMENTS = 1 << 24
BATCH_ELEMENTS = 1 << 19


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser is of exactly a class whose update looks at each element alone.

    A class of ours says so itself (``elementwise = True``); one derived from it may do more.
    """
    cls = type(optimizer)
    torch_classes = {getattr(torch.optim, name, None) for name in ELEMENTWISE_OPTIMIZERS}
    return vars(cls).get("elementwise", False) or cls in ELEMENTWISE_OPTIMIZERS.values() or cls in torch_classes


@dataclass
class SliceStep:
    """One piece to step: a group's options, master, gradient (of the master's dtype) and state.

    ``state`` is empty for a piece that was never stepped; afterwards it holds what the optimiser made.
    """

    group: dict[str, Any]
    master: Tensor
    grad: Tensor
    state: dict[str, Any]


class PiecewiseOptimizer:
    """Steps jobs with the class of ``optimizer``, which must be elementwise."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        assert is_elementwise(optimizer), type(optimizer)
        optimizer_class: Any = type(optimizer)
        placeholder = nn.Parameter(torch.zeros(1))
        self._inner: torch.optim.Optimizer = optimizer_class([placeholder])
        self._inner.defaults = optimizer.defaults
        self._initial_state = dict(self._inner.state.get(placeholder, {}))  # Adagrad makes its state when it is made

    @torch.no_grad()
    def step(self, slice_steps: Sequence[SliceStep]) -> None:
        """Update masters and states in place."""
        inner = self._inner
        groups: dict[int, dict[str, Any]] = {}  # by the identity of the group as it was given
        inner.state = defaultdict(dict)
        for slice_step in slice_steps:
            param = slice_step.master.detach()
            param.grad = slice_step.grad
            group = groups.setdefault(id(slice_step.group), {**slice_step.group, "params": []})
            group["params"].append(param)
            inner.state[param] = slice_step.state
        inner.param_groups = list(groups.values())
        inner.step()
        inner.param_groups, inner.state = [], defaultdict(dict)

    def state_schema(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        """What a first step leaves as state of a parameter of ``dtype``: for each key the dtype of a tensor
        of the parameter's shape, or None for anything else (a step count)."""
        sample = torch.zeros(3, dtype=dtype)
        initial_state = {
            key: value.to(dtype).expand(3).clone() if value.shape == (1,) else value.clone()
            for key, value in self._initial_state.items()
        }
        slice_step = SliceStep(_clone_tensors(group), sample, torch.zeros_like(sample), initial_state)
        self.step([slice_step])
        return {
            key: value.dtype if isinstance(value, Tensor) and value.shape == sample.shape else None
            for key, value in slice_step.state.items()
        }


class StateInSwapFile(InMemoryStep):
    """An optimizer whose per-element state lies in ``swap``, unless ``state_in_memory`` or for ``in_memory_params``.

    ``compute_copies``: for each parameter that has one, the tensor of this rank's rows in the compute dtype, which
    the update fills.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        swap: SwapFile,
        *,
        compute_copies: Mapping[Tensor, Tensor] | None = None,
        state_in_memory: bool = False,
        in_memory_params: Collection[Tensor] = (),
    ) -> None:
        super().__init__(optimizer)
        self.swap = swap
        self.compute_copies = dict(compute_copies or {})
        self.in_memory_params = frozenset(in_memory_params)
        self._state_swap = None if state_in_memory else swap
        self.offload_state()

    def state_like(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """State of ``param``'s layout where it belongs, of undefined value."""
        return as_dtensor_like(self._allocate_state(param, to_local(param), dtype), param)

    def release(self, tensor: Tensor) -> None:
        """Give back the pages of the mapping that ``tensor`` lies in, if it does."""
        if (offset := self.swap.locate(tensor)) is not None:
            self.swap.trim(offset, tensor.nbytes)

    def offload_state(self) -> None:
        """Move state that lies in memory to the swap file."""
        for param in self.optimizer.state if self._state_swap is not None else ():
            if isinstance(param, Tensor):
                self._offload_param_state(param)

    def _offload_param_state(self, param: Tensor) -> None:
        """Move the tensors of ``param``'s state that are as large as it, and give back the pages of all of them."""
        state, piece = self.optimizer.state[param], to_local(param)
        swap = self._swap_for_state(param)
        for key, value in state.items():
            if not _is_per_element(value, piece):
                continue
            local = to_local(value)
            if swap is not None and local.numel() and swap.locate(local) is None:
                local = self._allocate_state(param, piece, value.dtype)
                local.copy_(to_local(value))
                state[key] = as_dtensor_like(local, value)
            self.release(local)

    def _swap_for_state(self, param: Tensor) -> SwapFile | None:
        return None if param in self.in_memory_params else self._state_swap

    def _allocate_state(self, param: Tensor, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory or swap of the shape of ``param``'s ``piece``, of undefined value."""
        swap = self._swap_for_state(param)
        if swap is None or piece.numel() == 0:
            return torch.empty_like(piece, dtype=dtype)
        return swap.view(swap.allocate(piece.numel() * dtype.itemsize), piece.shape, dtype)


class NvmeStep(StateInSwapFile):
    """Steps an elementwise ``optimizer`` whose tensors may lie in ``swap``.

    ``buffers``: a ring of at least two; its memory is all that the stream needs, apart from a batch of gradients.
    ``chunk_elements``: elements of parameters that share a buffer, at most;
    ``batch_elements``: elements that the arithmetic runs over at a time, where gradients are widened or copies written.
    ``where``: options of the base; compute copies may be in memory, in the swap file on a page boundary, or on a GPU.

    A master or gradient is streamed if ``local(param)`` or ``param.grad`` is a view of ``swap`` that begins
    on a page boundary and owns its pages to the end; anything else is used where it is.  New state goes to
    the swap file unless ``state_in_memory``, or the parameter is among ``in_memory_params``.

    Raises:
        ValueError: the swap file or the buffers are too small.
        SwapError: (when stepping) a transfer failed; parameters and state are then partly updated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        swap: SwapFile,
        buffers: BufferRing,
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
        batch_elements: int = BATCH_ELEMENTS,
        **where: Any,
    ) -> None:
        self.buffers, self.io_pipeline = buffers, io_pipeline.IoPipeline(swap, buffers)
        self._chunk_elements = max(chunk_elements, ALIGN_ELEMENTS)
        self._batch_elements = max(batch_elements, ALIGN_ELEMENTS)
        self._piecewise = PiecewiseOptimizer(optimizer)
        self._scratch: dict[torch.dtype, Tensor] = {}
        super().__init__(optimizer, swap, **where)

    @torch.no_grad()
    def apply(self, factor: float = 1.0, subset: Collection[Tensor] | None = None) -> None:
        """Scale the gradients by ``factor`` and update every parameter (``subset`` of these) that has one."""
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            hook(self.optimizer, (), {})
        items = self.build_param_steps(subset)
        self.execute(items, factor)
        self.publish_state(items)
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})

    # Its parts, for whoever wants new values elsewhere first (double_buffered_step.py)

    def build_param_steps(self, subset: Collection[Tensor] | None, needs_grad: bool = True) -> list[ParamStep]:
        """What a step over these parameters reads and writes."""
        groups = self.optimizer.param_groups
        return [item for group in groups for item in self._build_group_steps(group, subset, needs_grad)]

    def execute(self, param_steps: Sequence[ParamStep], factor: float, finish_writes: bool = True) -> None:
        """Read, update and write; the last writes may be under way where ``io_pipeline.flush()`` is to end them."""
        self.io_pipeline.run(self._split_into_chunks(param_steps), partial(self._update, factor), finish_writes)

    def readahead(self, params: Collection[Tensor]) -> None:
        """A hint that these parameters, whose gradients will be in memory, are updated next; none: take the
        hint back, as must be done before anything else may write to them."""
        if not params:
            self.io_pipeline.cancel_readahead()
        elif all(self.optimizer.state.get(param) for param in params):
            self.io_pipeline.readahead(self._split_into_chunks(self.build_param_steps(params, needs_grad=False)))

    def _split_into_chunks(self, param_steps: Sequence[ParamStep]) -> list[IoChunk]:
        return io_pipeline.split_into_chunks(param_steps, self.buffers.buffer_bytes, self._chunk_elements)

    def publish_state(self, param_steps: Sequence[ParamStep]) -> None:
        """Let ``optimizer.state`` have what was carried out: views for what was cut, and the counters."""
        for item in param_steps:
            state, piece = self.optimizer.state[item.param], to_local(item.param)
            if item.is_new_state:
                state.update({key: item.new_scalar_state.get(key) for key in item.scalar_state})
                for key in item.state_keys:
                    state[key] = as_dtensor_like(item.step_tensors[key].tensor.view(piece.shape), item.param)
                continue
            for key, value in item.new_scalar_state.items():
                if isinstance(state[key], Tensor) and isinstance(value, Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value

    # One step

    def row_norms_fn(self, params: Sequence[Tensor]) -> Callable[[Tensor], RowNorms]:
        """Those gradients of ``params`` that lie in the swap file have streamed through when it returns."""
        items = []
        for param in params:
            step_tensor = self._make_step_tensor(local_grad(param))
            if step_tensor.file_offset is not None:
                items.append(ParamStep({}, param, step_tensor.tensor.numel(), {"grad": step_tensor}, (), {}, False))
        known: dict[int, RowNorms] = {}  # by their address

        def collect(chunk: IoChunk, buffer: Tensor) -> None:
            for piece in chunk.slices:
                grad = piece.param_step.step_tensors["grad"].tensor
                full, rest = known.setdefault(grad.data_ptr(), ([], []))
                flat = piece.get_tensor("grad", buffer)
                full_size = flat.numel() // ROW_LENGTH * ROW_LENGTH if grad.numel() >= 2 * ROW_LENGTH else 0
                if full_size:
                    full += full_row_norms(flat[:full_size])
                if full_size < flat.numel():
                    remainder = flat[full_size:]
                    rest.append(remainder.float() if remainder.dtype in HALF_DTYPES else remainder.clone())

        self.io_pipeline.run(io_pipeline.split_into_chunks(items, self.buffers.buffer_bytes, 1 << 62), collect)
        return lambda piece: known.get(piece.data_ptr()) or compute_row_norms(piece)

    def _update(self, factor: float, chunk: IoChunk, buffer: Tensor) -> None:
        if any(self._needs_batches(piece.param_step, factor) for piece in chunk.slices):
            for batch in io_pipeline.split_slices(chunk.slices, self._batch_elements):
                self._step(batch, buffer, factor)
        else:
            self._step(chunk.slices, buffer, factor)

    def _needs_batches(self, param_step: ParamStep, factor: float) -> bool:
        """Whether anything but the kernel itself passes over the item's elements."""
        operands = param_step.step_tensors
        is_upcast = operands["grad"].tensor.dtype != operands["master"].tensor.dtype
        return factor != 1.0 or is_upcast or "copy" in operands or self._comes_to_host(param_step)

    def _step(self, pieces: Sequence[io_pipeline.ParamSlice], buffer: Tensor, factor: float) -> None:
        jobs: list[SliceStep] = []
        used = 0
        for piece in pieces:
            item = piece.param_step
            master, grad = piece.get_tensor("master", buffer), piece.get_tensor("grad", buffer)
            if factor != 1.0:
                grad.mul_(factor)
            if self._comes_to_host(item):
                master, grad = master.cpu(), grad.cpu()
            if grad.dtype != master.dtype:
                wide = self._get_scratch(master.dtype, used, grad.numel())
                used += grad.numel()
                grad = wide.copy_(grad)
            state: dict[str, Any] = {}
            if not item.is_new_state:
                state = _clone_tensors(item.scalar_state)
                state |= {key: piece.get_tensor(key, buffer) for key in item.state_keys}
            jobs.append(SliceStep(item.group, master, grad, state))
        self._piecewise.step(jobs)
        for piece, job in zip(pieces, jobs, strict=True):
            item = piece.param_step
            for key, value in job.state.items():
                if key not in item.state_keys:
                    item.new_scalar_state[key] = value
                elif item.is_new_state:
                    piece.get_tensor(key, buffer).copy_(value)
            if self._comes_to_host(item):
                piece.get_tensor("master", buffer).copy_(job.master)
            if "copy" in item.step_tensors:
                piece.get_tensor("copy", buffer).copy_(job.master)

    def _comes_to_host(self, item: ParamStep) -> bool:
        """Whether what is updated lies on an accelerator (an expert's shard does) and its state comes from the disk."""
        on_device = item.step_tensors["master"].tensor.device.type != "cpu"
        return on_device and self._swap_for_state(item.param) is not None

    def _get_scratch(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        have = self._scratch.get(dtype)
        if have is None or have.numel() < start + count:
            need = max(start + count, self._batch_elements + ALIGN_ELEMENTS)
            have = self._scratch[dtype] = torch.empty(need, dtype=dtype)
        return have[start : start + count]

    # Items: what a step works on

    def _build_group_steps(
        self, group: dict[str, Any], subset: Collection[Tensor] | None, needs_grad: bool = True
    ) -> list[ParamStep]:
        schemas: dict[torch.dtype, dict[str, torch.dtype | None]] = {}
        param_steps = []
        for param in group["params"]:
            if (needs_grad and param.grad is None) or (subset is not None and param not in subset):
                continue
            master = to_local(param).detach()
            state = self.optimizer.state.get(param, {})
            is_new = not state
            if (is_new or master.ndim == 0) and master.dtype not in schemas:
                schemas[master.dtype] = self._piecewise.state_schema(group, master.dtype)
            if is_new:
                kinds = schemas[master.dtype].items()
                state_tensors = {k: self._allocate_state(param, master, d) for k, d in kinds if d is not None}
                scalars = {key: None for key, dtype in kinds if dtype is None}
            else:
                # A 0-dim parameter's moment looks like a counter: what a first step makes tells them apart.
                known = schemas[master.dtype] if master.ndim == 0 else {}
                state_tensors = {k: to_local(v) for k, v in state.items() if _is_per_element(v, master) or known.get(k)}
                scalars = {k: v for k, v in state.items() if k not in state_tensors}
            operands = {"master": self._make_step_tensor(master, write=True)}
            if param.grad is not None:
                operands["grad"] = self._make_step_tensor(local_grad(param))
            for key, value in state_tensors.items():
                operands[key] = self._make_step_tensor(value, read=not is_new, write=True)
            if param in self.compute_copies:
                operands["copy"] = self._make_step_tensor(self.compute_copies[param], read=False, write=True)
            param_steps.append(ParamStep(group, param, master.numel(), operands, tuple(state_tensors), scalars, is_new))
        return param_steps

    def _make_step_tensor(self, tensor: Tensor, read: bool = True, write: bool = False) -> io_pipeline.StepTensor:
        offset = self.swap.locate(tensor)
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} is not contiguous and cannot be streamed: call "
                ".contiguous() on the parameter before the engine is made"
            )
        return io_pipeline.StepTensor(tensor.view(-1), None if offset is None or offset % PAGE else offset, read, write)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer, in_memory_params: Collection[Tensor] = ()) -> int:
    """Bytes of swap file that the state of an elementwise ``optimizer`` takes, in pages; that of ``in_memory_params``
    parameters is elsewhere."""
    worker, total = PiecewiseOptimizer(optimizer), 0
    for group in optimizer.param_groups:
        schemas: dict[torch.dtype, list[torch.dtype]] = {}
        for param in group["params"]:
            if not param.requires_grad or param in in_memory_params:
                continue
            if param.dtype not in schemas:
                state_dtypes = worker.state_schema(group, param.dtype).values()
                schemas[param.dtype] = [dtype for dtype in state_dtypes if dtype is not None]
            count = to_local(param).numel()
            total += sum(round_up(count * dtype.itemsize) for dtype in schemas[param.dtype])
    return total


def _is_per_element(value: Any, piece: Tensor) -> bool:
    """Whether a state entry has an element for each of the parameter's."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    return to_local(value).shape == piece.shape


def _clone_tensors(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
