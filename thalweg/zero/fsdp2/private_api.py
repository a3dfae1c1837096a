"""Every private name of FSDP2 that Thalweg touches, in one place.

FSDP2 keeps a parameter in one of two states, sharded or unsharded, a group of them at
a time, and swaps the module's attribute between two Parameters.  What is done here
and has no public form:

* ``set_shard_storage``: give the sharded parameter a storage of our choice (shared memory, say);
* ``set_unsharded_storage``: name the tensor that *is* the unsharded parameter, so that unsharding
  needs no gather and no copy;
* ``support_unfreezing``: let parameters of another dtype than the trained ones train later;
* ``to_unsharded`` and ``reduce_unsharded_grads``: make those transitions outside of a forward pass.

``tests/dist/test_fsdp2_private_names.py`` says which of them a new torch has changed.

torch 2.15 leaves the gradients that wait for their reduction where autograd puts them, in the unsharded parameter's
``.grad``, kept wide by its ``grad_dtype``, and reduces units whose gradients differ in dtype.  Before, they moved to
``unsharded_accumulated_grad`` after each pass, and a unit had one dtype.  Which of the two this torch does is seen
from its class (``_GRADS_STAY_IN_PLACE``).
"""

from __future__ import annotations

import copyreg
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial, partialmethod, wraps
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from thalweg.device import enter_device, pin
from thalweg.ops._torch_private import ALLCLOSE_CALL, ITEM_CALL
from thalweg.utils.versions import TRIED_TORCH
from thalweg.zero.plain_copy import ShardedStateDict, check_whole, copy_plain, strip_training
from thalweg.zero.tp_layout import DTensorLayout
from thalweg.zero.whole_parameter import AutogradSide, WholeParameter, refuse_change

# What sharding puts into modules, and a copy as a plain model leaves out.
_ATTRIBUTES = ("_fsdp", "_is_fsdp_managed_module", "__composable_api")

_ops: Any = torch  # for its names with an underscore
_GRADS_STAY_IN_PLACE = not hasattr(FSDPParam, "to_accumulated_grad_if_needed")
# What is used of a group and of a parameter, there from the start.
GROUP_NAMES = (
    "fsdp_params", "is_sharded", "reduce_grads", "all_reduce_grads", "reshard_after_backward", "comm_ctx",
    "_training_state", "_to_unsharded", "_to_sharded", "post_backward", "finalize_backward", "unshard",
    "wait_for_unshard", "_all_gather_result", "device_handle", "device",
    "_set_unsharded_grad_dtypes" if _GRADS_STAY_IN_PLACE else "_init_mp_dtypes",
)  # fmt: skip
PARAM_NAMES = (
    "sharded_param", "_module_info", "padded_sharded_param_size", "sharded_size", "_sharding_spec",
    "_sharded_param_data", "to_sharded_dtensor", "pin_memory", "_setattr_on_modules", "all_gather_outputs",
    "reset_sharded_param", "init_all_gather_outputs", "init_unsharded_param", "_param_fqn",
    *(("_sharding_spec_by_dtype", "init_dtype_attrs") if _GRADS_STAY_IN_PLACE else ("unsharded_accumulated_grad",)),
)  # fmt: skip


class ArrivingGrads:
    """A model's gradients on their way to the host in fewer bytes than their parameters' dtype has, to which they are
    cast there in the order in which they were sent: on a thread, while ``device`` makes the next."""

    def __init__(self, device: torch.device) -> None:
        self._in_order, self._lock = deque[ArrivingGrad](), Lock()
        self._thread = ThreadPoolExecutor(1, "thalweg-arrivals", enter_device, (device,))

    def add(self, grad: ArrivingGrad) -> None:
        """Expect one more."""
        self._in_order.append(grad)

    def cast_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for one after the other and cast it, as the thread does or in its place."""
        while not is_done():
            with self._lock:
                if not is_done():
                    self._in_order[0].cast()  # where it fails it stays, and fails for who asks for it
                    self._in_order.popleft()

    def cast_in_background(self) -> None:
        """Cast those that have been sent."""
        if self._in_order:
            self._thread.submit(self.drain)

    def drain(self) -> None:
        """Return when all that have been sent are cast."""
        self.cast_until(lambda: not self._in_order)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class ArrivingGrad:
    """One of ``queue``: ``sent`` to the host, where it is cast to ``wide``, or added to what that has (``is_sum``)."""

    def __init__(self, event: torch.Event, sent: Tensor, wide: Tensor, is_sum: bool, queue: ArrivingGrads) -> None:
        self._event, self._sent, self._wide, self._is_sum, self._queue = event, sent, wide, is_sum, queue
        self._has_come = False
        queue.add(self)

    def synchronize(self) -> None:
        """Return when ``wide`` has its values; FSDP2 asks for it as for the event of a copy."""
        self._queue.cast_until(lambda: self._has_come)

    def cast(self) -> None:
        """Wait for the copy, and widen it."""
        self._event.synchronize()
        (self._wide.add_ if self._is_sum else self._wide.copy_)(self._sent)
        self._has_come = True
        del self._sent, self._wide  # which ``.grad`` holds, until somebody has used it up


class FSDPGroupHandle:
    """One FSDP2 parameter group: the parameters of one unit."""

    def __init__(self, name: str, module: FSDPModule, inner: Any) -> None:
        self.name, self.module, self._inner = name, module, inner
        self._has_reduction_hooks = False

    @property
    def is_sharded(self) -> bool:
        """Whether the modules hold the sharded parameters now."""
        return self._inner.is_sharded

    @property
    def params(self) -> list[FSDPParamHandle]:
        """The group's parameters, in the order in which they are communicated."""
        return [FSDPParamHandle(inner) for inner in self._inner.fsdp_params]

    def to_unsharded(self) -> None:
        """Put the unsharded parameters in place, without communication."""
        self._inner._to_unsharded()

    def to_sharded(self) -> None:
        """Put the sharded parameters in place."""
        self._inner._to_sharded()

    def keep_whole(self) -> list[WholeParameter]:
        """Stay unsharded for good: from now on the modules hold these plain parameters, at all times."""
        wholes = [param.keep_whole() for param in self.params]
        if not self._inner.is_unsharded:
            self._inner._to_unsharded()
        self._inner._to_sharded = lambda: None
        return wholes

    def regather(self) -> None:
        """Gather the shards anew, over what is unsharded; collective."""
        type(self._inner)._to_sharded(self._inner)
        self.gather()

    def gather(self) -> None:
        """Unshard, and wait for it; collective, unless it is unsharded."""
        self._inner.unshard()
        self._inner.wait_for_unshard()

    def set_backward_flags(self, reduce: bool, reshard: bool) -> None:
        """Whether the next backward reduces this unit's gradients and reshards its parameters."""
        self._inner.reduce_grads = reduce
        self._inner.all_reduce_grads = reduce
        self._inner.reshard_after_backward = reshard

    def upcast_grads(self) -> None:
        """Add gradients that autograd did not bring here by itself to those kept in the reduction's dtype."""
        for param in self._inner.fsdp_params:
            if _GRADS_STAY_IN_PLACE or not hasattr(param, "_unsharded_param"):
                continue
            if param.unsharded_accumulated_grad is not None and param._unsharded_param.grad is not None:
                param.unsharded_accumulated_grad += param._unsharded_param.grad
                param._unsharded_param.grad = None
            param.to_accumulated_grad_if_needed()

    def support_unfreezing(self, master_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Let frozen parameters of this unit begin to train in mid-run, whatever their dtype.

        FSDP2 derives the dtypes of a reduction from what trains when it starts.  A unit where nothing does
        reduces in ``reduce_dtype`` and hands over in ``master_dtype``, as the others do; one whose gradients differ in
        dtype reduces all of them in the wider one: those kept from earlier micro-batches have it already, one that
        came with the last micro-batch alone has not.
        """
        inner = self._inner
        if _GRADS_STAY_IN_PLACE:
            if inner._reduce_dtype is None:
                inner._reduce_dtype = reduce_dtype
            return
        if inner._orig_dtype is None:
            inner._orig_dtype, inner._reduce_dtype = master_dtype, reduce_dtype
        one_dtype = len({param.sharded_param.dtype for param in inner.fsdp_params}) == 1
        if one_dtype and all(param.reduce_dtype is None for param in inner.fsdp_params):
            return

        def upcast_where_mixed() -> None:
            if inner.reduce_grads and len(_grad_dtypes(inner.fsdp_params)) > 1:
                self.upcast_grads()

        self._wrap_post_backward(upcast_where_mixed)

    def _wrap_post_backward(self, before: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        original_post_backward = self._inner.post_backward

        def post_backward(*unused: Any) -> None:
            before()
            original_post_backward(*unused)
            after()

        self._inner.post_backward = post_backward

    def use_pager(self, prefetch: Callable[[], None], acquire: Callable[[], None], release: Callable[[], None]) -> None:
        """Take the place of FSDP2's gather: unsharding acquires a unit's memory, and resharding releases it."""
        inner, original_to_sharded = self._inner, self._inner._to_sharded

        def unshard(async_op: bool = False) -> None:
            if not inner.is_unsharded:
                prefetch()

        def wait_for_unshard() -> None:
            if not inner.is_unsharded:
                acquire()
                inner._to_unsharded()

        def to_sharded() -> None:
            was_unsharded = not inner.is_sharded
            original_to_sharded()
            if was_unsharded:
                release()

        inner.unshard, inner.wait_for_unshard, inner._to_sharded = unshard, wait_for_unshard, to_sharded

    def all_gather_from(
        self,
        packed_shards: Sequence[Tensor],
        acquire: Callable[[], None],
        release: Callable[[], None] | None = None,
        flat: Tensor | None = None,
    ) -> None:
        """Let FSDP2's gather read ``packed_shards`` (the group's padded shards in the compute dtype) in place of the
        sharded parameters; they hold their values from ``acquire()`` to ``release()``, or for good.

        What is released is read before it is copied to an accelerator: it goes there through page-locked memory.  Those
        that are parts of ``flat`` go there as one."""
        inner, original_unshard = self._inner, self._inner.unshard
        stages = release is not None and inner.device.type != "cpu"
        memory = None if flat is None else flat.untyped_storage().data_ptr()
        is_part = [shard.untyped_storage().data_ptr() == memory for shard in packed_shards]

        def copy_to_device(flat: Tensor, async_op: bool) -> list[Tensor]:
            stream, _ = inner.comm_ctx.get_all_gather_streams(async_op, inner._training_state)  # FSDP2's for copies
            with inner.device_handle.stream(stream):
                on_device = flat.to(inner.device, non_blocking=True)
            return [
                on_device[shard.storage_offset() :][: shard.numel()] if part else shard
                for shard, part in zip(packed_shards, is_part, strict=True)
            ]

        def unshard(async_op: bool = False) -> None:
            if inner.is_unsharded or inner._all_gather_result is not None:
                return
            acquire()
            shards = packed_shards if flat is None else copy_to_device(flat, async_op)
            saved_shards = [param._sharded_param_data for param in inner.fsdp_params]
            try:
                for param, packed_shard in zip(inner.fsdp_params, shards, strict=True):
                    param._sharded_param_data = pin(packed_shard.view(-1)) if stages else packed_shard.view(-1)
                original_unshard(async_op)
                if release is not None and inner._all_gather_process_group.size() == 1:
                    inner.wait_for_unshard()  # copies now, where a gather has copied already
            finally:
                for param, data in zip(inner.fsdp_params, saved_shards, strict=True):
                    param._sharded_param_data = data
                if release is not None:
                    release()

        inner.unshard = unshard

    def send_grads_unwidened(self, is_alone: bool, is_unscaled: Callable[[], bool], arriving: ArrivingGrads) -> None:
        """Let reduced gradients cross to the host in the dtype of their numbers; FSDP2 widens them first.

        A sum over ranks has the reduction's dtype.  The gradients of a rank that ``is_alone`` are autograd's own, but
        for those that were added up over micro-batches, or divided by a loss scale (not ``is_unscaled()``).
        """
        inner = self._inner
        sums = dict[Any, DTensor]()

        def take_sums() -> None:
            # FSDP2 would wait for each copy, in pageable memory, that it adds to a gradient which it finds.
            for param in inner.fsdp_params if inner.reduce_grads else ():
                if param.sharded_param.grad is not None:
                    sums[param], param.sharded_param.grad = param.sharded_param.grad, None

        def give_back_sums() -> None:
            for param, grad in sums.items():  # of parameters that had no part in this pass
                param.sharded_param.grad = grad
            sums.clear()
            arriving.cast_in_background()

        self._wrap_post_backward(take_sums, give_back_sums)
        for param in inner.fsdp_params:
            param.to_sharded_dtensor = partial(_cast_on_arrival, param, param.to_sharded_dtensor, sums, arriving)
        if _GRADS_STAY_IN_PLACE:  # torch 2.15 casts each to a dtype of its own; not tried
            return
        master_dtype = inner._orig_dtype

        def choose_dtype() -> None:
            dtypes, reduce_dtype = _grad_dtypes(inner.fsdp_params), inner._reduce_dtype
            if reduce_dtype is not None and not is_alone:
                dtypes = {reduce_dtype}
            held, *others = dtypes or {master_dtype}
            is_exact = not is_alone or (is_unscaled() and reduce_dtype in (None, torch.float32, held))
            narrows = is_exact and not others and held.itemsize < master_dtype.itemsize
            inner._orig_dtype = held if narrows else master_dtype

        self._wrap_post_backward(choose_dtype)

    def copy_in_early(self) -> None:
        """Let a rank alone copy its shards from the host as soon as a unit is asked for, beside what is computed.

        FSDP2 does so where ranks gather; a rank that gathers from nobody copies when it is waited for, in the
        computation's own stream.
        """
        inner = self._inner
        original_unshard, original_wait = inner.unshard, inner.wait_for_unshard
        arriving: list[tuple[list[Tensor], torch.Event]] = []

        def unshard(async_op: bool = False) -> None:
            was_asked = inner._all_gather_result is not None
            original_unshard(async_op)
            result = inner._all_gather_result
            if result is None or was_asked or result.all_gather_input_split_sizes:  # which a gather has
                return
            stream = inner.comm_ctx.all_gather_copy_in_stream
            with inner.device_handle.stream(stream), torch.no_grad():
                shards = [param.all_gather_inputs[0] for param in inner.fsdp_params]
                arriving[:] = [(shards, stream.record_event())]

        def wait_for_unshard() -> None:
            if inner._all_gather_result is None or not arriving:
                original_wait()
                return
            shards, event = arriving.pop()
            stream, outputs = inner.device_handle.current_stream(), []
            stream.wait_event(event)
            for param, shard in zip(inner.fsdp_params, shards, strict=True):
                param.init_all_gather_outputs([shard.numel()], [shard.dtype], 1, inner.device)
                outputs.append(param.all_gather_outputs[0])
                outputs[-1].untyped_storage().resize_(outputs[-1].nbytes)
            with torch.no_grad(), _ops.autograd._unsafe_preserve_version_counter(tuple(outputs)):
                _ops._foreach_copy_(outputs, shards)
            for param in inner.fsdp_params:
                param.init_unsharded_param()
            inner._to_unsharded()
            # The copying stream waits until the shards are read, and their memory can be its own.
            is_read = stream.record_event()
            inner.comm_ctx.all_gather_copy_in_stream.wait_event(is_read)
            inner.comm_ctx.all_gather_stream.wait_event(is_read)
            inner._all_gather_result = None

        inner.unshard, inner.wait_for_unshard = unshard, wait_for_unshard

    def add_reduction_hooks(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call these before and after a backward pass that has gone through this unit is reduced.

        Gradients on their way to the host have then arrived.
        """
        self._has_reduction_hooks = True

        def after_arrival() -> None:
            for param in self._inner.fsdp_params:
                if param.grad_offload_event is not None:
                    param.grad_offload_event.synchronize()
            if self._inner.device.type == "cpu":
                self._inner._all_reduce_state = None  # torch 2.15 keeps what a hook reduced, for streams, to the end
            after()

        self._wrap_post_backward(before, after_arrival)

    def sync_unused_params(self, reduce_presence: Callable[[list[bool]], list[bool]]) -> None:
        """Before each reduction ask ``reduce_presence`` which parameters have a gradient anywhere, given which have one
        here; those that have one elsewhere alone get zeros."""
        inner = self._inner

        def add_zeros() -> None:
            trained = [param for param in inner.fsdp_params if param.sharded_param.requires_grad]
            if inner.reduce_grads:
                present = [_has_unsharded_grad(param) for param in trained]
                for param, is_here, is_anywhere in zip(trained, present, reduce_presence(present), strict=True):
                    if is_anywhere and not is_here:
                        unsharded = param._unsharded_param
                        unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)

        self._wrap_post_backward(add_zeros)

    def tell_unused_params(self, collective: Any) -> None:
        """Before each reduction tell ``collective`` by its ``lacking`` which trained parameters have no gradient here:
        FSDP2 reduces the others, and ranks on which these are not the same would add up different ones."""
        params = self._inner.fsdp_params

        def tell() -> None:
            unused = [p._param_fqn for p in params if p.sharded_param.requires_grad and not _has_unsharded_grad(p)]
            collective.lacking = f" without {', '.join(unused)}" if unused else ""

        self._wrap_post_backward(tell)

    def reads_reduced_grads(self, output_dtype: torch.dtype) -> bool:
        """Whether FSDP2 would read a reduction's output, or show it to a hook, right after it."""
        inner = self._inner
        if self._has_reduction_hooks or inner._reduce_dtype == torch.float16:  # which is divided after the sum
            return True
        return any(
            param.sharded_param.grad is not None
            or getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
            or (param.orig_dtype != output_dtype and param.sharded_param.requires_grad)
            for param in inner.fsdp_params
        )

    def prefetch(self, next_group: FSDPGroupHandle) -> None:
        """Begin to gather ``next_group`` before this unit's forward, without waiting for it."""
        self.module.set_modules_to_forward_prefetch([next_group.module])
        for group in (self, next_group):
            group._inner.unshard_async_op = True

    def reduce_unsharded_grads(self) -> bool:
        """Reduce gradients that earlier backwards kept unsharded; whether there were any."""
        if not any(_has_unsharded_grad(param) for param in self._inner.fsdp_params):
            return False
        self.set_backward_flags(True, True)
        self._inner.post_backward()
        self._inner.finalize_backward()
        self.free_reduced()
        self._inner._training_state = type(self._inner._training_state).IDLE
        return True

    def free_reduced(self) -> None:
        """Wait for the reductions before, and let go of what they read."""
        comm_ctx = self._inner.comm_ctx
        for state in getattr(comm_ctx, "reduce_scatter_states", ()):
            if state.event is not None:
                self._inner.device_handle.current_stream().wait_event(state.event)
        comm_ctx.reduce_scatter_states, comm_ctx.reduce_scatter_state = [], None  # 2.11 keeps one

    def clear_unsharded_grads(self) -> None:
        """Forget gradients that were kept unsharded."""
        for param in self._inner.fsdp_params:
            if not _GRADS_STAY_IN_PLACE:
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


class FSDPParamHandle:
    """One FSDP2 parameter."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def sharded_param(self) -> nn.Parameter:
        """The sharded parameter: a DTensor."""
        return self._inner.sharded_param

    @property
    def unsharded_grad(self) -> Tensor | None:
        """This rank's gradient that no reduction has taken yet, whole."""
        if self._inner.unsharded_accumulated_grad is not None:
            return self._inner.unsharded_accumulated_grad
        return self._inner._unsharded_param.grad if hasattr(self._inner, "_unsharded_param") else None

    @property
    def gathers_what_is_updated(self) -> bool:
        """Whether FSDP2's gather reads the memory that the optimizer writes."""
        inner = self._inner
        local = inner.sharded_param._local_tensor
        return inner._sharded_param_data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """The parameter that the unit computes with; None before it is gathered for the first time."""
        return getattr(self._inner, "_unsharded_param", None)

    @property
    def locations(self) -> list[tuple[nn.Module, str]]:
        """Every module attribute that is this parameter, tied ones included."""
        info = self._inner._module_info
        first = [(info.module, info.param_name)]
        return first + list(zip(info.shared_modules, info.shared_param_names, strict=True))

    @property
    def padded_shape(self) -> torch.Size:
        """Shape of a shard with its padding: the same on every rank."""
        return self._inner.padded_sharded_param_size

    def set_shard_storage(self, padded_local: Tensor, layout: DTensorLayout | None) -> None:
        """Make ``padded_local`` (padded shard shape) the storage of the sharded parameter.

        With ``layout`` the parameter shows another one than FSDP2's own: replicated at stage 0,
        where FSDP2 knows a mesh of one rank; replicas of shards where groups of ranks shard by
        themselves (MiCS); a shard of this tensor rank's piece.
        """
        inner = self._inner
        rows = inner.sharded_size[0]
        local = padded_local.narrow(0, 0, rows)
        requires_grad = inner.sharded_param.requires_grad
        spec = inner._sharding_spec
        if layout is not None:
            full = torch.empty(layout.shape, device="meta")
            meta = spec.tensor_meta._replace(shape=full.shape, stride=full.stride(), dtype=local.dtype)
            spec = type(spec)(layout.mesh, layout.placements, tensor_meta=meta)
        elif spec.tensor_meta.dtype != local.dtype:
            meta = spec.tensor_meta._replace(dtype=local.dtype)
            spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
        inner._sharding_spec = spec
        if _GRADS_STAY_IN_PLACE:
            inner._sharding_spec_by_dtype.clear()
        # FSDP2 hands gradients over in the dtype of what trained at first; torch takes those of ``local``'s.
        param_type = type(inner)
        inner.to_sharded_dtensor = lambda tensor: param_type.to_sharded_dtensor(inner, tensor.to(local.dtype))
        inner._sharded_param_data = padded_local.view(-1)
        inner.sharded_param = _as_parameter(inner.to_sharded_dtensor(local), requires_grad)
        inner._setattr_on_modules(inner.sharded_param)
        # Called after ``load_state_dict``, which a program may call while it shows the parameters whole.
        original_reset = inner.reset_sharded_param

        def reset_sharded_param() -> None:
            if isinstance(inner.sharded_param, DTensor):
                # A shard in a swap file stays there; page-locked are the gradients alone.
                pins, inner.pin_memory = inner.pin_memory, inner.pin_memory and padded_local.is_pinned()
                original_reset()
                inner.pin_memory = pins

        inner.reset_sharded_param = reset_sharded_param

    def forward_hooks_to_unsharded(self) -> None:
        """Let ``register_hook`` of the sharded parameter see the gradients that autograd makes, this rank's."""
        inner, hooks = self._inner, OrderedDict[int, Callable[[Tensor], Tensor | None]]()
        init_unsharded_param, is_attached = inner.init_unsharded_param, False

        def run_hooks(grad: Tensor) -> Tensor:
            for hook in list(hooks.values()):
                changed = hook(grad)
                grad = grad if changed is None else changed
            return grad

        def attach() -> None:
            nonlocal is_attached
            if hooks and not is_attached and hasattr(inner, "_unsharded_param"):
                is_attached = True
                inner._unsharded_param.register_hook(run_hooks)

        def register_hook(hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
            handle = RemovableHandle(hooks)
            hooks[handle.id] = hook
            attach()
            return handle

        def init_and_attach() -> None:
            init_unsharded_param()
            attach()

        inner.init_unsharded_param, inner.sharded_param.register_hook = init_and_attach, register_hook

    def set_unsharded_storage(self, unsharded: Tensor) -> None:
        """Make ``unsharded`` (the parameter's full shape, compute dtype) the unsharded parameter."""
        inner = self._inner
        inner._unsharded_param = nn.Parameter(unsharded, requires_grad=inner.sharded_param.requires_grad)
        self.set_grad_dtype()

    def gather_integers_uncast(self) -> None:
        """Let packed weights be gathered as they are; torch 2.11 casts them to the computation's dtype."""
        if not self._inner.sharded_param.is_floating_point():
            self._inner.param_dtype = None

    def set_grad_dtype(self) -> None:
        """Let the unsharded parameter keep gradients in the reduction's dtype, once FSDP2 knows that."""
        if _GRADS_STAY_IN_PLACE and hasattr(self._inner, "reduce_dtype") and hasattr(self._inner, "_unsharded_param"):
            self._inner._unsharded_param.grad_dtype = self._inner.unsharded_grad_dtype

    def keep_whole(self) -> WholeParameter:
        """See the group's; what is unsharded now becomes the module's parameter."""
        inner = self._inner
        whole = WholeParameter(inner._unsharded_param.detach(), inner.sharded_param)
        inner._setattr_on_modules(whole)
        inner._unsharded_param = AutogradSide(whole)
        self.set_grad_dtype()
        # Nothing takes its place any more, and what ``module.to()`` has written is no new shard.
        inner._setattr_on_modules = lambda param: None
        inner.reset_sharded_param = lambda: None
        return whole


def _cast_on_arrival(
    param: Any,
    to_sharded_dtensor: Callable[[Tensor], DTensor],
    sums: dict[Any, Any],
    arriving: ArrivingGrads,
    tensor: Tensor,
) -> DTensor:
    event, total = param.grad_offload_event, sums.pop(param, None)
    is_sum = total is not None
    if event is None:  # FSDP2 has waited
        return to_sharded_dtensor(tensor) if total is None else total.add_(to_sharded_dtensor(tensor))
    if total is None:
        if tensor.dtype == param.sharded_param.dtype:
            return to_sharded_dtensor(tensor)
        wide = torch.empty_like(tensor, dtype=param.sharded_param.dtype, pin_memory=tensor.is_pinned())
        total = to_sharded_dtensor(wide)
    param.grad_offload_event = ArrivingGrad(event, tensor, total.to_local(), is_sum, arriving)
    return total


def get_fsdp_groups(root: nn.Module) -> list[FSDPGroupHandle]:
    """All parameter groups below ``root``, in module order, the root's own first."""
    groups = []
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            inner = getattr(state, "_fsdp_param_groups", None)
            if inner is None:  # torch 2.11 has at most one group a module
                inner = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
            groups += [FSDPGroupHandle(name, module, group) for group in inner]
    return groups


def _as_parameter(data: Any, requires_grad: bool) -> nn.Parameter:
    """``nn.Parameter(data, requires_grad)``, where nobody else holds ``data``: it becomes the parameter itself.

    ``nn.Parameter`` makes another tensor by ``detach``, which takes DTensor 3 ms for each layout that it has not met.
    """
    if not isinstance(data, DTensor) or not data.is_leaf:
        return nn.Parameter(data, requires_grad)
    parameter: Any = data.requires_grad_(requires_grad)
    parameter._is_param = True
    return parameter


@contextmanager
def sharding_any_dtype() -> Iterator[None]:
    """Within, FSDP2 shards parameters of whole numbers too: torch 2.11 makes each, for a moment, one that trains."""

    def make_parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return _as_parameter(data, requires_grad and data.is_floating_point())

    fsdp_param_module: Any = sys.modules[FSDPParam.__module__]
    fsdp_param_module.nn = SimpleNamespace(**{**vars(nn), "Parameter": make_parameter})
    try:
        yield
    finally:
        fsdp_param_module.nn = nn


def undo_fully_shard(root: nn.Module) -> None:
    """Take out of all modules what sharding and training have put into them, their parameters apart."""
    strip_training(root, _ATTRIBUTES, [])
    for module in root.modules():
        _module_state_mapping.pop(module, None)


def check_private_names(groups: Sequence[FSDPGroupHandle]) -> None:
    """Raise RuntimeError that names what this torch lacks, before a training run meets it."""
    for group in groups[:1]:
        inner = group._inner
        lacking = [f"FSDPParamGroup.{name}" for name in GROUP_NAMES if not hasattr(inner, name)]
        lacking += [f"FSDPParam.{name}" for name in PARAM_NAMES if not hasattr(inner.fsdp_params[0], name)]
        if lacking:
            raise RuntimeError(
                f"torch {torch.__version__} has changed what Thalweg uses of FSDP2: {', '.join(lacking)} is gone. "
                f"pip install torch=={TRIED_TORCH[-1]}.0 (tried: {', '.join(TRIED_TORCH)})"
            )


def lazy_init(root: Any, dtypes: tuple[torch.dtype, torch.dtype] | None = None) -> None:
    """Make ``root`` the root now, not at its first forward, so that groups are final.

    ``dtypes``: of masters and of reductions, see :meth:`FSDPGroupHandle.support_unfreezing`.
    """
    for module in [module for module in root.modules() if isinstance(module, FSDPModule)]:
        # Programs look models up by the name of their class (Hugging Face's loss tables, peft's targets).
        module.__class__ = _name_as_wrapped(type(module), module is root)
    root._get_fsdp_state()._lazy_init()
    assert isinstance(root, nn.Module)
    for group in get_fsdp_groups(root):
        for param in group.params:
            assert param.gathers_what_is_updated, f"FSDP2 has copied the shard of a parameter of {group.name!r}"
            param.gather_integers_uncast()
            param.set_grad_dtype()
        if torch.__version__.startswith("2.12."):  # whose loop's last value is alive until the next reduction is done
            group._wrap_post_backward(group.free_reduced)
        if dtypes is not None:
            group.support_unfreezing(*dtypes)


@cache
def _name_as_wrapped(fsdp_class: type, is_root: bool) -> type:
    """The class that ``fully_shard`` has made of a module's, under that one's name and not ``FSDP...``, which copies
    and saves as the plain model; see :mod:`thalweg.zero.plain_copy`."""
    wrapped: Any = next(base for base in fsdp_class.__mro__ if not issubclass(base, FSDPModule))
    body: dict[str, Any] = {name: getattr(wrapped, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"__deepcopy__": partialmethod(copy_plain, left_out=_ATTRIBUTES), "__reduce_ex__": _reduce_plain}
    body["_apply"] = _apply_in_training
    if is_root:

        def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            state = wrapped.state_dict(self, *args, **kwargs)
            return ShardedStateDict(state) if any(isinstance(value, DTensor) for value in state.values()) else state

        def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("state_dict") is None:
                if kwargs.get("is_main_process") is False:
                    return None  # it would write nothing, and a gathered state is there on the first rank alone
                check_whole(self.parameters(), "save_pretrained")
            return wrapped.save_pretrained(self, *args, **kwargs)

        body["state_dict"] = state_dict
        if hasattr(wrapped, "save_pretrained"):
            body["save_pretrained"] = wraps(wrapped.save_pretrained)(save_pretrained)
    return type(wrapped.__name__, fsdp_class.__bases__, body)


def _apply_in_training(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``Module._apply``, behind ``to()``, ``half()`` and ``cuda()``: masters keep their dtypes.  A cast to the one that
    the model computes in anyway, as for an evaluation, does nothing."""
    computes_in = module._get_fsdp_state()._mp_policy.param_dtype
    for dtype in {param.dtype for param in module.parameters() if param.is_floating_point()}:
        wanted = fn(torch.empty(0, dtype=dtype)).dtype
        if wanted == computes_in != dtype:
            return module
        if wanted != dtype:
            refuse_change(f"{dtype}", f"{wanted}")
    return FSDPModule._apply(module, fn, recurse)


def mark_collective_forward(root: nn.Module, is_collective: bool) -> None:
    """Say whether a forward pass needs all ranks: transformers' ``generate`` then goes on until every one has
    finished.  ``fully_shard`` has said so of each module."""
    for module in root.modules():
        module._is_fsdp_managed_module = is_collective  # type: ignore[assignment]


def _reduce_plain(module: nn.Module, protocol: Any) -> Any:
    check_whole(module.parameters(), "pickling the model")
    plain = copy_plain(module, {}, left_out=_ATTRIBUTES)
    # The usual constructor insists on the object's present class; this one, as old as pickle, does not.
    return copyreg._reconstructor, (type(plain), object, None), *plain.__reduce_ex__(2)[2:]  # type: ignore[attr-defined]


def untraced(function: Callable[..., None]) -> Callable[..., None]:
    """``function``, which ``torch.compile`` runs as it is and does not trace; nothing of it is imported until then."""

    def call(*args: Any) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(function)(*args)
        else:
            function(*args)

    # Where a forward pass is not traced itself, its hooks would be, and what they call, one by one.
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(call.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return call


def read_partial_scalars() -> None:
    """From now on the number that is read from a DTensor (``item()``, ``float()``, ``bool()``, ``int()``) is that of
    the whole tensor, put together from the ranks that have a part of it; collective.  torch gives this rank's part, in
    silence: 1.82 for a norm of 2.57.  ``torch.allclose`` compares whole tensors; torch has no rule for it."""
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is not None:
        handlers[ITEM_CALL] = handlers[ALLCLOSE_CALL] = _read_whole


def _read_whole(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    whole = []
    for arg in args:
        if isinstance(arg, DTensor):
            if not all(placement.is_replicate() for placement in arg.placements):
                arg = arg.redistribute(placements=[Replicate()] * arg.device_mesh.ndim)
            arg = arg.to_local()
        whole.append(arg)
    return operator(*whole, **kwargs)


def reset_iteration_state(root: Any) -> None:
    """Bring FSDP2 back to rest after a forward or backward that raised; gradients of earlier passes stay."""
    groups = get_fsdp_groups(root)
    owners = [tensor for group in groups for one in group.params for tensor in (one.sharded_param, one.unsharded_param)]
    kept = [(tensor, tensor.grad) for tensor in owners if tensor is not None]
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
    else:  # the same; without, the next backward passes queue no callback for their end
        state = root._get_fsdp_state()
        context, comm_ctx = state._state_ctx, state._comm_ctx
        for group in groups:
            inner = group._inner
            inner.finalize_backward()  # waits for what is under way
            inner._partial_reduce_output = None
            inner._training_state = type(inner._training_state).IDLE
            inner._to_sharded()
        comm_ctx.post_forward_order.clear()
        comm_ctx.reduce_scatter_states, comm_ctx.reduce_scatter_state, comm_ctx.all_gather_state = [], None, None
        for each in context.all_states:
            each._modules_to_run_forward.clear()
            each._training_state = type(each._training_state).IDLE
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    for tensor, grad in kept:  # which torch 2.15 forgets
        tensor.grad = grad


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass at hand has computed everything, before it returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def _grad_dtypes(params: Sequence[Any]) -> set[torch.dtype]:
    unsharded_params = (getattr(param, "_unsharded_param", None) for param in params)
    grads = [param.grad for param in unsharded_params if param is not None]
    grads += [param.unsharded_accumulated_grad for param in params]
    return {grad.dtype for grad in grads if grad is not None}


def _has_unsharded_grad(param: Any) -> bool:
    return FSDPParamHandle(param).unsharded_grad is not None
