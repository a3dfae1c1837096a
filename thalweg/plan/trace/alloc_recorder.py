"""The allocation recorder: what a model allocates and frees in a training step, without allocating it.

The picture: the model's operators run on fake tensors (shapes without data) under a
dispatch mode that sees each of them.  A storage that an operator makes is written down
with its bytes, and once more when its last reference is gone, wherever that was: a
Python variable, autograd's saved tensors, a gradient.  Views and in-place results share a
storage and so cost nothing.  What is left is one list of events in the order of the run,

    (+id, bytes, label)   a storage is made       label: who made it, see :class:`AllocationRecorder`
    (-id, 0, "")          it is gone

from which peaks, the timeline and the allocator's behaviour follow.  Besides, it
adds up the arithmetic (torch's own formulas) and the bytes that operators read and write.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from thalweg.activation_checkpointing.offload import READ_AHEAD_DEPTH, ReadAheadOffloader
from thalweg.ops._torch_private import ITEM_CALL
from thalweg.ops.grouped_mm import fake_grouped_mm
from thalweg.ops.linear.autotune_cache import get_autotune_cache
from thalweg.ops.linear.functional import MIN_FLOPS
from thalweg.ops.linear.kernels import REFERENCE

TraceEvent = tuple[int, int, str]
_MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _guess_kernel(dtype: torch.dtype) -> str:
    """What the measurement will choose, before there is one: processors without AVX-512 widen half precision."""
    is_half, capability = dtype in (torch.bfloat16, torch.float16), torch.backends.cpu.get_cpu_capability()
    return "fp32" if is_half and not capability.startswith("AVX512") else REFERENCE


class AllocationRecorder(TorchDispatchMode):
    """Records the storages made while it is on; ``label`` names what is made now."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[TraceEvent] = []
        self.label = "activations"
        self.vocab_size: int | None = None  # results of this width have a label of their own: logits
        self.linear_kernels = "torch"  # "auto": linear layers choose theirs, see ops/linear.py
        self.flops = 0
        self.accessed_bytes = 0
        self.num_ops = 0
        self.cpu_deadline: float | None = None  # of this thread's processor time; operators after it are an error
        self._storage_ids: dict[int, int] = {}
        self._next_id = 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled under this mode; torch's wrapper would cost a sixth of a trace.
        return False

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of ``tensors`` out: they are counted elsewhere."""
        for tensor in tensors:
            self._storage_ids[tensor.untyped_storage()._cdata] = 0

    def record_alloc(self, num_bytes: int, label: str) -> int:
        """Write a storage down that no operator has made; returns its id for :meth:`record_free`."""
        storage_id = self._next_id
        self._next_id += 1
        self.events.append((storage_id, num_bytes, label))
        return storage_id

    def record_free(self, storage_id: int) -> None:
        """The storage that :meth:`record_alloc` wrote down is gone."""
        self.events.append((-storage_id, 0, ""))

    def record_mark(self, name: str) -> None:
        """Write down that ``name`` (a phase, a module) begins."""
        self.events.append((0, 0, name))

    def pop_events(self) -> list[TraceEvent]:
        """The events so far; the list begins anew."""
        events, self.events = self.events, []
        return events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # Two of three dispatches ask for a fake's device; the answer is at hand.
            self.num_ops += 1
            return args[0].fake_device
        kwargs, number = kwargs or {}, 0
        if self.label == "update" and func is ITEM_CALL:
            # An optimizer reads a norm or its count of steps: any number does, as it moves no bytes.
            return 0.5 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        result = fake_grouped_mm(func.name(), args)
        if result is None:
            copied = self._kernel_copy_bytes(func, args)
            number = self.record_alloc(copied, self.label) if copied else 0
            result = func(*args, **kwargs)
        made = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                made += self._record_storage(leaf)
        if number:
            self.record_free(number)
        self._count_op(func, args, kwargs, result, made)
        return result

    def _kernel_copy_bytes(self, func: Any, args: Any) -> int:
        """Bytes that the kernel of a linear layer's product takes beside its result (``ops/linear/kernels.py``).

        oneDNN's product of a weight's gradient copies the gradient, transposed, its convolution the result, torch's
        neither.  The gradient of the logits is the largest block of many a step, and so is its copy.  A kernel that
        widens half precision to fp32 has both operands and the result in fp32.
        """
        if self.linear_kernels != "auto" or func not in _MATRIX_PRODUCTS:
            return 0
        left, right = args[-2:]
        (rows, inner), columns = left.shape, right.shape[1]
        if left.dtype != right.dtype or 2 * rows * inner * columns < MIN_FLOPS:
            return 0
        is_grad_weight = left.stride() == (1, rows) and rows > 1
        if is_grad_weight:
            shape = "tn", left.dtype, inner, rows, columns
        else:
            shape = "nt" if right.stride() == (1, inner) else "nn", left.dtype, rows, inner, columns
        name = get_autotune_cache().lookup(*shape) or _guess_kernel(left.dtype)
        if name.startswith("fp32"):
            return 4 * (left.numel() + right.numel() + rows * columns)
        copy_bytes = {"onednn": left.nbytes, "convolution": rows * columns * left.itemsize}
        return copy_bytes.get(name, 0) if is_grad_weight else 0

    def _record_storage(self, tensor: Any) -> int:
        if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight: its own storage has a size, and no memory
            return sum(self._record_storage(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type == "meta":  # somebody asks for a shape
            return 0
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storage_ids:
            return 0
        num_bytes = storage.nbytes()
        is_logits = self.vocab_size is not None and tensor.ndim > 1 and tensor.shape[-1] == self.vocab_size
        self._storage_ids[key] = storage_id = self.record_alloc(num_bytes, "logits" if is_logits else self.label)
        weakref.finalize(storage, self._on_storage_freed, key, storage_id).atexit = False
        return num_bytes

    def _on_storage_freed(self, key: int, storage_id: int) -> None:
        self._storage_ids.pop(key, None)
        self.record_free(storage_id)

    def _count_op(self, func: Any, args: Any, kwargs: Any, result: Any, created_bytes: int) -> None:
        self.num_ops += 1
        if self.cpu_deadline is not None and self.num_ops % 256 == 0 and time.thread_time() > self.cpu_deadline:
            raise TimeoutError(f"after {self.num_ops:,} operators the step was not over")
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        if created_bytes or func._schema.name.endswith("_"):
            read = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.accessed_bytes += read + created_bytes


class _OffloadedFake:
    """A tensor that was offloaded; a fake of its shape comes back."""

    def __init__(self, recorder: OffloadRecorder, tensor: Tensor) -> None:
        self._recorder = recorder
        self._shape, self._dtype, self.num_bytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.read_id = 0
        weakref.finalize(self, recorder.on_freed, tensor.nbytes).atexit = False

    def read_ahead(self) -> None:
        """Take the memory that the bytes come back into."""
        if not self.read_id:
            self.read_id = self._recorder.alloc_recorder.record_alloc(self.num_bytes, "activations")

    def fetch(self) -> Tensor:
        """The tensor again."""
        recorder = self._recorder
        recorder.finish_writes()
        if self.read_id:
            recorder.alloc_recorder.record_free(self.read_id)
            self.read_id = 0
        recorder.on_fetch(self)
        return torch.empty(self._shape, dtype=self._dtype)


class OffloadRecorder(ReadAheadOffloader):
    """A :class:`thalweg.activation_checkpointing.ActivationOffloader` that writes events to a recorder.

    A tensor that is saved is copied into a buffer and free at once; at most two buffers are on their way.
    Coming back it is a new tensor, and the two before it are read ahead.
    """

    def __init__(self, alloc_recorder: AllocationRecorder) -> None:
        super().__init__()
        self.alloc_recorder = alloc_recorder
        self._in_flight: deque[int] = deque()
        self._current_bytes = self.peak_offloaded_bytes = self.offloaded_bytes = 0

    def save(self, tensor: Tensor) -> _OffloadedFake:
        """Offload a tensor."""
        offloaded = _OffloadedFake(self, tensor)
        self.append(offloaded)
        self._current_bytes += tensor.nbytes
        self.offloaded_bytes += tensor.nbytes
        self.peak_offloaded_bytes = max(self.peak_offloaded_bytes, self._current_bytes)
        self._in_flight.append(self.alloc_recorder.record_alloc(tensor.nbytes, "buffers"))
        self.finish_writes(READ_AHEAD_DEPTH)
        return offloaded

    def finish_writes(self, num_left: int = 0) -> None:
        """Let no more be on its way out: nothing when the backward pass begins."""
        while len(self._in_flight) > num_left:
            self.alloc_recorder.record_free(self._in_flight.popleft())

    def on_freed(self, num_bytes: int) -> None:
        """The graph that needed a tensor is gone."""
        self._current_bytes -= num_bytes
