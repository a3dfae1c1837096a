"""Pending tensors: meta tensors whose values are recorded, inside a context and after it.

A :class:`DeferredTensor` tensor is a meta tensor that remembers how its value comes about: every
operation on it passes through :func:`dispatch_deferred`, which runs it on meta, for the shapes, and
writes it down (:mod:`.op_graph`).  That goes on after ``zero.Init`` has been left, so a model
may be re-initialised, copied, cast or loaded before it is sharded, and nothing is lost.

An operation whose result is a number, or has a shape that depends on values, is computed
from the *forced* values of its arguments, by replay; so ``if weight.abs().max() > 1:`` takes
the branch that an ordinary build takes.

Inside a context a pending tensor says that it is on the CPU, as the tensor of an ordinary
build would: libraries (torch.nn.init, Transformers) treat meta tensors differently, and the
program must take the same branches.  Outside it says the truth, except to torch.nn.init,
which silently does nothing to a meta tensor; there, moving a tensor to the CPU or to a GPU
gives its real value (moving a whole module does nothing: it would break ties).  The ``device``
of a parameter is the CPU outside too: programs (peft's adapters, resized embeddings) move
modules of their own to where the model is, and on meta these would lose their values.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.deferred_init import op_graph
from thalweg.deferred_init.op_graph import is_meta, make_view_ref
from thalweg.deferred_init.pytree import CallSpec, flatten, flatten_call, unflatten, unflatten_call
from thalweg.deferred_init.replay import compute_values, pause_recording_no_grad, thread_state
from thalweg.deferred_init.tensor_swap import swap_tensors

CPU, META = torch.device("cpu"), torch.device("meta")
NO_VALUES_MESSAGE = (
    "a model built under thalweg.zero.Init has no values before thalweg.initialize: run it after that call; "
    "operations that prepare weights belong inside the `with thalweg.zero.Init():` block"
)
# Modules of torch that do nothing to a meta tensor, or say that they do nothing.
_MODULES_SHOWN_CPU = frozenset({"torch.nn.init", "torch.nn.modules.module"})
_RNG_BLOCK_NUMEL = 1 << 16  # elements drawn at a time when the generator is moved on
_SEQUENTIAL_RNG_OPS = frozenset({"aten::uniform_", "aten::normal_", "aten::random_"})


class DeferredTensor(torch.Tensor):
    """A tensor on meta whose value is recorded."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch_deferred(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CPU if thread_state.is_recording or isinstance(self, nn.Parameter) or not is_meta(self) else META

    @property
    def is_meta(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        if thread_state.is_recording or sys._getframe(1).f_globals.get("__name__") in _MODULES_SHOWN_CPU:
            return False
        return is_meta(self)

    @property
    def is_cpu(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.device == CPU

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        set_data(self, value)

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        parse = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
        device, dtype, _, memory_format = parse(*args, **kwargs)
        is_here = device in (None, META) or (device == CPU and thread_state.is_recording)
        if not is_here and not _is_called_by_module_to():
            return materialize_tensor(self).to(*args, **kwargs)
        source = self.clone() if copy else self
        return torch.Tensor.to(source, dtype=dtype or self.dtype, memory_format=memory_format)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self if _is_called_by_module_to() else self.to(CPU)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self if _is_called_by_module_to() else materialize_tensor(self).cuda(*args, **kwargs)

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CPU, **kwargs})

    def __getitem__(self, index: Any) -> Tensor:
        return torch.Tensor.__getitem__(self, _index_to_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor):  # else torch makes it on meta, without its value
            value = torch.tensor(value, dtype=self.dtype)
        torch.Tensor.__setitem__(self, _index_to_tensors(index), value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value, read only: what is written to an array could not reach the tensor."""
        array = materialize_tensor(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        return peek_value(self).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.detach().clone(memory_format=torch.preserve_format)
            copied = _of_its_kind(copied, self)
            vars(copied).update(vars(self))
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _of_its_kind(materialize_tensor(self), self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}(pending, size={tuple(self.shape)}, dtype={self.dtype}{grad})"


class DeferredParameter(DeferredTensor):
    """A pending parameter that was an ordinary one: ``isinstance(p, nn.Parameter)`` stays true."""

    _is_param = True  # what torch looks at


def _is_called_by_module_to() -> bool:
    """Whether ``Module.to`` or the like calls: a model without values has no place to be moved from."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.nn.modules.module"


def _index_to_tensors(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_index_to_tensors(item) for item in index)
    return torch.tensor(index) if isinstance(index, list) else index


def is_deferred(tensor: Any) -> bool:
    """Whether ``tensor`` is on meta with a recorded value."""
    return isinstance(tensor, DeferredTensor) and is_meta(tensor)


def peek_value(tensor: Tensor) -> Tensor:
    """Return the real value of a pending tensor, to look at: it may share memory with others."""
    return compute_values([make_view_ref(tensor)])[0]


def materialize_tensor(tensor: Tensor) -> Tensor:
    """Return the real value of a pending tensor in memory of its own."""
    with pause_recording_no_grad():
        return peek_value(tensor).clone()


def deferred_like(tensor: Tensor) -> Tensor:
    """Return a new pending tensor of the layout of ``tensor`` (zeros until something is written)."""
    return torch.Tensor._make_subclass(DeferredTensor, _meta_like(tensor))


def defer_parameter(param: Tensor, storages: dict[int, torch.UntypedStorage]) -> None:
    """Make the real ``param`` pending, its value a constant; the object stays the same.

    ``storages`` maps real storages (by address) to their stand-ins on meta, so that aliases
    stay aliases.
    """
    real = param.untyped_storage()
    if real._cdata not in storages:
        storages[real._cdata] = torch.empty(real.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
        storage_record = op_graph.get_storage_record(storages[real._cdata])
        storage_record.last_write = op_graph.RecordedOp(None, [real], None, writes=[storage_record])
    meta = torch.empty(0, dtype=param.dtype, device=META)
    meta.set_(storages[real._cdata], param.storage_offset(), param.size(), param.stride())
    become_deferred(param, meta)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Do ``tensor.data = value`` where one may be pending and the other real."""
    if is_deferred(tensor) == is_deferred(value):
        torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    elif is_deferred(value):
        become_deferred(tensor, _make_meta_alias(value))
    else:
        swap_tensors(tensor, _of_its_kind(value.detach(), tensor))


def become_deferred(tensor: Tensor, meta: Tensor) -> None:
    """Make a tensor pending, over the storage of ``meta``; the object stays the same."""
    kind = DeferredParameter if isinstance(tensor, nn.Parameter) else DeferredTensor
    swap_tensors(tensor, torch.Tensor._make_subclass(kind, meta, tensor.requires_grad))


def _of_its_kind(value: Tensor, tensor: Tensor) -> Tensor:
    """``value``, as a parameter where ``tensor`` is one."""
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def drop_record(tensor: Tensor) -> None:
    """Make a pending tensor an ordinary meta tensor that remembers nothing; the object stays the same."""
    swap_tensors(tensor, _of_its_kind(_meta_like(tensor), tensor))
    vars(tensor).pop("_is_param", None)


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tuple(tensor.size()), tuple(tensor.stride()), dtype=tensor.dtype, device=META)


def _make_meta_alias(tensor: Tensor) -> Tensor:
    """Return an ordinary meta tensor over the storage of a pending one."""
    with torch._C._DisableTorchDispatch():
        alias = torch.empty(0, dtype=tensor.dtype, device=META)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        return alias.conj() if tensor.is_conj() else alias


def dispatch_deferred(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation that has a pending argument: on meta for the shapes, and recorded."""
    traits = op_graph.get_op_traits(func)
    kwargs, device = _split_device(kwargs)
    call = _OpCall(func, traits, args, kwargs)
    if device is not None:
        run = partial(call.run, _make_meta_alias) if traits.is_shape_only else call.run_materialized
        return run(device=device)
    if any(not is_meta(tensor) for tensor in call.written):
        if any(is_deferred(tensor) for tensor in call.written):
            raise ValueError(f"{func} writes real and pending tensors at once: write them one by one")
        return call.run_materialized()
    if traits.reshapes_in_place:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
        return args[0]
    call.validate()
    rng_state = get_call_rng_state(call.leaves) if traits.is_random else None
    try:
        result = call.run(lambda tensor: _make_meta_alias(tensor) if is_deferred(tensor) else _meta_like(tensor))
        is_shape_known = all(isinstance(leaf, Tensor | None) for leaf in flatten(result)[0])
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        # No meta kernel, a shape that depends on values, or a mistake of the user: the real
        # values decide, and a mistake raises again.
        result, is_shape_known = None, False
    if not is_shape_known:
        result = call.run_materialized()
        if not call.written:
            return result
    elif rng_state is not None:
        call.advance_rng()
    return call.record(result, rng_state)


class _OpCall:
    """One call of an operator, with its arguments flattened."""

    def __init__(self, func: Any, traits: op_graph.OpTraits, args: Any, kwargs: dict[str, Any]) -> None:
        self.func, self.traits = func, traits
        self.leaves, self.spec = flatten_call(args, kwargs)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        written_values = [value for key, value in [*enumerate(args), *kwargs.items()] if key in traits.written_args]
        self.written: list[Tensor] = [leaf for leaf in flatten(written_values)[0] if isinstance(leaf, Tensor)]
        self.original_by_id: dict[int, Any] = {}  # id of what stood in for a tensor -> the tensor

    def validate(self) -> None:
        """Refuse what has no value, and a forward pass before the model has values."""
        for tensor in self.tensors:
            if is_meta(tensor) and not isinstance(tensor, DeferredTensor) and not self.traits.is_shape_only:
                raise ValueError(f"{self.func}: a meta tensor without a value meets a pending one; {NO_VALUES_MESSAGE}")
        real = any(tensor.ndim > 0 and not is_meta(tensor) for tensor in self.tensors)
        if real and not thread_state.is_recording and not self.written:
            raise ValueError(NO_VALUES_MESSAGE)

    def run(self, convert: Callable[[Tensor], Tensor], **device_kwargs: Any) -> Any:
        """Call the operator with ``convert(tensor)`` in place of each tensor (once per object)."""
        converted: dict[int, Tensor] = {}
        for tensor in self.tensors:
            if id(tensor) not in converted:
                converted[id(tensor)] = convert(tensor)
        self.original_by_id = {id(converted[id(tensor)]): tensor for tensor in self.tensors}
        leaves = [converted[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = unflatten_call(self.spec, leaves)
        with pause_recording_no_grad():
            return self.func(*args, **kwargs, **device_kwargs)

    def run_materialized(self, **device_kwargs: Any) -> Any:
        """Call the operator with forced values; what it writes of pending tensors is not kept."""
        deferred = [tensor for tensor in self.tensors if is_deferred(tensor)]
        values = {id(t): v for t, v in zip(deferred, compute_values([make_view_ref(t) for t in deferred]), strict=True)}
        written_ids = {id(tensor) for tensor in self.written}

        def convert(tensor: Tensor) -> Tensor:
            value = values.get(id(tensor), tensor)
            return value.clone() if id(tensor) in written_ids and value is not tensor else value

        result = self.run(convert, **device_kwargs)
        leaves, spec = flatten(result)
        shared_storages = {value.untyped_storage()._cdata for value in values.values()}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) in self.original_by_id:
                leaves[position] = self.original_by_id[id(leaf)]
            elif isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in shared_storages:
                leaves[position] = leaf.clone()
        return unflatten(spec, iter(leaves))

    def advance_rng(self) -> None:
        """Move the random generator on as the operation does in an ordinary build."""
        first = self.leaves[0]
        if self.func._schema.name in _SEQUENTIAL_RNG_OPS and is_deferred(first) and first.is_contiguous():
            # These operators take their numbers one after the other; normal_ takes those of 16
            # elements at a time and treats less than 16 differently, so no block may be that small.
            remaining = first.numel()
            block = torch.empty(min(remaining, _RNG_BLOCK_NUMEL + 16), dtype=first.dtype)
            while remaining:
                size = remaining if remaining < _RNG_BLOCK_NUMEL + 16 else _RNG_BLOCK_NUMEL
                chunk = block[:size]
                self.run(lambda tensor, part=chunk: part if tensor is first else tensor)
                remaining -= size
        elif self.traits.is_shape_only or self.traits.overwrites_first_arg:
            scratch = torch.empty_strided(first.size(), first.stride(), dtype=first.dtype)
            self.run(lambda tensor: scratch if tensor is first else tensor)
        else:
            self.run_materialized()

    def record(self, result: Any, rng_state: Tensor | None) -> Any:
        """Write the call down; return its result with pending tensors in the place of meta ones."""
        viewed_storages = {tensor.untyped_storage()._cdata for tensor in self.tensors if is_deferred(tensor)}
        leaves, spec = flatten(result)
        new_tensors = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or isinstance(leaf, DeferredTensor):
                continue
            if id(leaf) in self.original_by_id:
                leaves[position] = self.original_by_id[id(leaf)]
                continue
            leaves[position] = torch.Tensor._make_subclass(DeferredTensor, leaf if is_meta(leaf) else _meta_like(leaf))
            if leaf.untyped_storage()._cdata not in viewed_storages:
                new_tensors[position] = leaves[position]
        if self.written or (new_tensors and not returns_uninitialized(self.func)):
            record_op(self.func, self.leaves, self.spec, rng_state, new_tensors, self.written)
        return unflatten(spec, iter(leaves))


def record_op(
    func: Any,
    leaves: list[Any],
    spec: CallSpec,
    rng_state: Tensor | None,
    new_tensors: dict[int, Tensor],
    written: Iterable[Tensor] = (),
) -> None:
    """Append an operation to the record: ``new`` are outputs by position, ``written`` arguments."""
    with pause_recording_no_grad():
        recorded = [_to_recorded_leaf(leaf) for leaf in leaves]
    if (
        op_graph.get_op_traits(func).overwrites_first_arg
        and isinstance(recorded[0], op_graph.ViewRef)
        and recorded[0].is_full
    ):
        recorded[0] = replace(recorded[0], version=None)
    op = op_graph.RecordedOp(func, recorded, spec, rng_state)
    op.outputs = {position: make_view_ref(tensor) for position, tensor in new_tensors.items()}
    targets = (*map(make_view_ref, written), *op.outputs.values())
    op.writes = list(dict.fromkeys(ref.storage_record for ref in targets))
    for storage_record in op.writes:
        storage_record.last_write = op


def _to_recorded_leaf(leaf: Any) -> Any:
    if is_deferred(leaf):
        return make_view_ref(leaf)
    if isinstance(leaf, Tensor) and not is_meta(leaf):
        return leaf.detach().clone()  # the program may change it later
    return leaf


def get_call_rng_state(leaves: list[Any]) -> Tensor:
    """Return the state of the generator that a call with these flattened arguments uses."""
    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    return torch.get_rng_state() if generator is None else generator.get_state()


def returns_uninitialized(func: Any) -> bool:
    """Whether the values that ``func`` returns are undefined (zeros, to us)."""
    return func._schema.name.startswith(("aten::empty", "aten::new_empty"))


def _split_device(kwargs: dict[str, Any]) -> tuple[dict[str, Any], torch.device | None]:
    """Split off the device on which a real result is asked for (inside a context not the CPU)."""
    device = kwargs.get("device")
    is_real = device is not None and device != META and (device != CPU or not thread_state.is_recording)
    return {key: value for key, value in kwargs.items() if key != "device"}, device if is_real else None
