"""Pending tensors: meta tensors whose values are recorded, inside a context and after it.

A :class:`Pending` tensor is a meta tensor that remembers how its value comes about: every
operation on it passes through :func:`perform`, which runs it on meta, for the shapes, and
writes it down (:mod:`.record`).  That goes on after ``zero.Init`` has been left, so a model
may be re-initialised, copied, cast or loaded before it is sharded, and nothing is lost.

An operation whose result is a number, or has a shape that depends on values, is computed
from the *forced* values of its arguments, by replay; so ``if weight.abs().max() > 1:`` takes
the branch that an ordinary build takes.

Inside a context a pending tensor says that it is on the CPU, as the tensor of an ordinary
build would: libraries (torch.nn.init, Transformers) treat meta tensors differently, and the
program must take the same branches.  Outside it says the truth, except to torch.nn.init,
which silently does nothing to a meta tensor; there, moving a tensor to the CPU or to a GPU
gives its real value (moving a whole module does nothing: it would break ties).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.zero.exchange import exchange
from thalweg.zero.flat import CallSpec, flatten, flatten_call, leaves_of, rebuild, rebuild_call
from thalweg.zero.record import Facts, Op, Ref, cells, facts_of, is_meta, ref_of
from thalweg.zero.replay import local, quiet, values_of

CPU, META = torch.device("cpu"), torch.device("meta")
REMEDY = (
    "a model built under thalweg.zero.Init has no values before thalweg.initialize: run it after that call; "
    "operations that prepare weights belong inside the `with thalweg.zero.Init():` block"
)
# Modules of torch that do nothing to a meta tensor, or say that they do nothing.
_DECEIVED = frozenset({"torch.nn.init", "torch.nn.modules.module"})
_BLOCK = 1 << 16  # elements drawn at a time when the generator is moved on
_SEQUENTIAL = frozenset({"aten::uniform_", "aten::normal_", "aten::random_"})


class Pending(torch.Tensor):
    """A tensor on meta whose value is recorded."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CPU if local.recording or not is_meta(self) else META

    @property
    def is_meta(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        if local.recording or sys._getframe(1).f_globals.get("__name__") in _DECEIVED:
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
        stays = device is None or device == META or _moves_a_module() or (device == CPU and local.recording)
        if not stays:
            return value_of(self).to(*args, **kwargs)
        source = self.clone() if copy else self
        return torch.Tensor.to(source, dtype=dtype or self.dtype, memory_format=memory_format)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self if _moves_a_module() else self.to(CPU)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self if _moves_a_module() else value_of(self).cuda(*args, **kwargs)

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CPU, **kwargs})

    def __getitem__(self, index: Any) -> Tensor:
        return torch.Tensor.__getitem__(self, _real_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor):  # else torch makes it on meta, without its value
            value = torch.tensor(value, dtype=self.dtype)
        torch.Tensor.__setitem__(self, _real_index(index), value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value, read only: what is written to an array could not reach the tensor."""
        array = value_of(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        return force(self).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                twin = self.detach().clone(memory_format=torch.preserve_format)
            if isinstance(self, nn.Parameter):
                twin = nn.Parameter(twin, self.requires_grad)
            vars(twin).update(vars(self))
            memo[id(self)] = twin
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = value_of(self)
        whole = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        return whole.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}(pending, size={tuple(self.shape)}, dtype={self.dtype}{grad})"


class PendingParameter(Pending):
    """A pending parameter that was an ordinary one: ``isinstance(p, nn.Parameter)`` stays true."""

    _is_param = True  # what torch looks at


def _moves_a_module() -> bool:
    """Whether ``Module.to`` or the like calls: a model without values has no place to be moved from."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.nn.modules.module"


def _real_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_real_index(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def is_pending(tensor: Any) -> bool:
    """Whether ``tensor`` is on meta with a recorded value."""
    return isinstance(tensor, Pending) and is_meta(tensor)


def force(tensor: Tensor) -> Tensor:
    """Return the real value of a pending tensor, to look at: it may share memory with others."""
    return values_of([ref_of(tensor)])[0]


def value_of(tensor: Tensor) -> Tensor:
    """Return the real value of a pending tensor in memory of its own."""
    with quiet():
        return force(tensor).clone()


def pending_like(tensor: Tensor) -> Tensor:
    """Return a new pending tensor of the layout of ``tensor`` (zeros until something is written)."""
    return _as_pending(_meta_like(tensor))


def adopt(param: Tensor, storages: dict[int, torch.UntypedStorage]) -> None:
    """Make the real ``param`` pending, its value a constant; the object stays the same.

    ``storages`` maps real storages (by address) to their stand-ins on meta, so that aliases
    stay aliases.
    """
    real = param.untyped_storage()
    if real._cdata not in storages:
        storages[real._cdata] = torch.empty(real.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
        cell = cells.of(storages[real._cdata])
        cell.head = Op(None, [real], None, writes=[cell])
    meta = torch.empty(0, dtype=param.dtype, device=META)
    meta.set_(storages[real._cdata], param.storage_offset(), param.size(), param.stride())
    exchange(param, torch.Tensor._make_subclass(PendingParameter, meta, param.requires_grad))


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Do ``tensor.data = value`` where one may be pending and the other real."""
    if is_pending(tensor) == is_pending(value):
        torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    elif is_pending(value):
        kind = PendingParameter if isinstance(tensor, nn.Parameter) else Pending
        exchange(tensor, torch.Tensor._make_subclass(kind, _alias(value), tensor.requires_grad))
    else:
        whole = nn.Parameter(value.detach(), tensor.requires_grad)
        exchange(tensor, whole if isinstance(tensor, nn.Parameter) else value.detach())


def make_pending(tensor: Tensor) -> None:
    """Make an ordinary meta tensor pending, its value zeros so far; the object stays the same."""
    kind = PendingParameter if isinstance(tensor, nn.Parameter) else Pending
    exchange(tensor, torch.Tensor._make_subclass(kind, tensor.detach(), tensor.requires_grad))


def settle(tensor: Tensor) -> None:
    """Make a pending tensor an ordinary meta tensor that remembers nothing; the object stays the same."""
    meta = _meta_like(tensor)
    exchange(tensor, nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta)
    vars(tensor).pop("_is_param", None)


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tuple(tensor.size()), tuple(tensor.stride()), dtype=tensor.dtype, device=META)


def _as_pending(tensor: Tensor) -> Tensor:
    return torch.Tensor._make_subclass(Pending, tensor)


def _alias(tensor: Tensor) -> Tensor:
    """Return an ordinary meta tensor over the storage of a pending one."""
    with torch._C._DisableTorchDispatch():
        alias = torch.empty(0, dtype=tensor.dtype, device=META)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        return alias.conj() if tensor.is_conj() else alias


def perform(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation that has a pending argument: on meta for the shapes, and recorded."""
    facts = facts_of(func)
    kwargs, elsewhere = _without_device(kwargs)
    call = _Call(func, facts, args, kwargs)
    if elsewhere is not None:
        where = {"device": elsewhere}
        return call.run(_alias, **where) if facts.blind else call.run_real(**where)
    if any(not is_meta(tensor) for tensor in call.written):
        if any(is_pending(tensor) for tensor in call.written):
            raise ValueError(f"{func} writes real and pending tensors at once: write them one by one")
        return call.run_real()
    if facts.reshapes:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
        return args[0]
    call.check()
    state = random_state(call.leaves) if facts.random else None
    try:
        result = call.run(lambda tensor: _alias(tensor) if is_pending(tensor) else _meta_like(tensor))
        known = all(isinstance(leaf, Tensor | None) for leaf in leaves_of(result))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        # No meta kernel, a shape that depends on values, or a mistake of the user: the real
        # values decide, and a mistake raises again.
        result, known = None, False
    if not known:
        result = call.run_real()
        if not call.written:
            return result
    elif state is not None:
        call.draw()
    return call.record(result, state)


class _Call:
    """One call of an operator, with its arguments flattened."""

    def __init__(self, func: Any, facts: Facts, args: Any, kwargs: dict[str, Any]) -> None:
        self.func, self.facts = func, facts
        self.leaves, self.spec = flatten_call(args, kwargs)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        chosen = [value for key, value in [*enumerate(args), *kwargs.items()] if key in facts.written]
        self.written: list[Tensor] = [leaf for leaf in leaves_of(chosen) if isinstance(leaf, Tensor)]
        self.origin: dict[int, Any] = {}  # id of what stood in for a tensor -> the tensor

    def check(self) -> None:
        """Refuse what has no value, and a forward pass before the model has values."""
        for tensor in self.tensors:
            if is_meta(tensor) and not isinstance(tensor, Pending) and not self.facts.blind:
                raise ValueError(f"{self.func}: a meta tensor without a value meets a pending one; {REMEDY}")
        real = any(tensor.ndim > 0 and not is_meta(tensor) for tensor in self.tensors)
        if real and not local.recording and not self.written:
            raise ValueError(REMEDY)

    def run(self, convert: Callable[[Tensor], Tensor], **where: Any) -> Any:
        """Call the operator with ``convert(tensor)`` in place of each tensor (once per object)."""
        swapped: dict[int, Tensor] = {}
        for tensor in self.tensors:
            if id(tensor) not in swapped:
                swapped[id(tensor)] = convert(tensor)
        self.origin = {id(swapped[id(tensor)]): tensor for tensor in self.tensors}
        leaves = [swapped[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = rebuild_call(self.spec, leaves)
        with quiet():
            return self.func(*args, **kwargs, **where)

    def run_real(self, **where: Any) -> Any:
        """Call the operator with forced values; what it writes of pending tensors is not kept."""
        pending = [tensor for tensor in self.tensors if is_pending(tensor)]
        forced = {id(t): v for t, v in zip(pending, values_of([ref_of(t) for t in pending]), strict=True)}
        written = {id(tensor) for tensor in self.written}

        def convert(tensor: Tensor) -> Tensor:
            value = forced.get(id(tensor), tensor)
            return value.clone() if id(tensor) in written and value is not tensor else value

        result = self.run(convert, **where)
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        shared = {value.untyped_storage()._cdata for value in forced.values()}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) in self.origin:
                leaves[position] = self.origin[id(leaf)]
            elif isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in shared:
                leaves[position] = leaf.clone()
        return rebuild(spec, iter(leaves))

    def draw(self) -> None:
        """Move the random generator on as the operation does in an ordinary build."""
        first = self.leaves[0]
        if self.func._schema.name in _SEQUENTIAL and is_pending(first) and first.is_contiguous():
            self._draw_in_blocks(first)
        elif self.facts.blind or self.facts.overwrites:
            scratch = torch.empty_strided(first.size(), first.stride(), dtype=first.dtype)
            self.run(lambda tensor: scratch if tensor is first else tensor)
        else:
            self.run_real()

    def _draw_in_blocks(self, target: Tensor) -> None:
        # These operators take their numbers one after the other; normal_ takes those of 16
        # elements at a time and treats less than 16 differently, so no block may be that small.
        left = target.numel()
        block = torch.empty(min(left, _BLOCK + 16), dtype=target.dtype)
        while left:
            size = left if left < _BLOCK + 16 else _BLOCK
            part = block[:size]
            self.run(lambda tensor, part=part: part if tensor is target else tensor)
            left -= size

    def record(self, result: Any, state: Tensor | None) -> Any:
        """Write the call down; return its result with pending tensors in the place of meta ones."""
        view_of = {tensor.untyped_storage()._cdata for tensor in self.tensors if is_pending(tensor)}
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        new = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or isinstance(leaf, Pending):
                continue
            if id(leaf) in self.origin:
                leaves[position] = self.origin[id(leaf)]
                continue
            leaves[position] = _as_pending(leaf if is_meta(leaf) else _meta_like(leaf))
            if leaf.untyped_storage()._cdata not in view_of:
                new[position] = leaves[position]
        if self.written or (new and not _is_empty(self.func)):
            record_op(self.func, self.leaves, self.spec, state, new, self.written)
        return rebuild(spec, iter(leaves))


def record_op(
    func: Any,
    leaves: list[Any],
    spec: CallSpec,
    state: Tensor | None,
    new: dict[int, Tensor],
    written: Iterable[Tensor] = (),
) -> None:
    """Append an operation to the record: ``new`` are outputs by position, ``written`` arguments."""
    with quiet():
        recorded = [_leaf(leaf) for leaf in leaves]
    if facts_of(func).overwrites and isinstance(recorded[0], Ref) and recorded[0].covers:
        first = recorded[0]
        recorded[0] = Ref(first.cell, None, first.dtype, first.size, first.stride, first.offset, first.conj)
    op = Op(func, recorded, spec, state)
    targets = [*(ref_of(tensor) for tensor in written)]
    for position, tensor in new.items():
        op.outputs[position] = ref_of(tensor)
        targets.append(op.outputs[position])
    op.writes = list(dict.fromkeys(ref.cell for ref in targets))
    for cell in op.writes:
        cell.head = op


def _leaf(leaf: Any) -> Any:
    if is_pending(leaf):
        return ref_of(leaf)
    if isinstance(leaf, Tensor) and not is_meta(leaf):
        return leaf.detach().clone()  # the program may change it later
    return leaf


def random_state(leaves: list[Any]) -> Tensor:
    """Return the state of the generator that a call with these flattened arguments uses."""
    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    return torch.get_rng_state() if generator is None else generator.get_state()


def _is_empty(func: Any) -> bool:
    """Whether the values that ``func`` returns are undefined (zeros, to us)."""
    return func._schema.name.startswith(("aten::empty", "aten::new_empty"))


def _without_device(kwargs: dict[str, Any]) -> tuple[dict[str, Any], torch.device | None]:
    """Split off the device on which a real result is asked for (inside a context not the CPU)."""
    device = kwargs.get("device")
    real = device is not None and device != META and (device != CPU or not local.recording)
    return {key: value for key, value in kwargs.items() if key != "device"}, device if real else None
