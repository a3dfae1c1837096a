"""Logits that are not computed before somebody looks: a model's own loss becomes a tiled one.

The picture: a causal language model ends in ``logits = head(hidden); loss = cross_entropy(logits, labels)``
with some reshaping, shifting, scaling or capping in between.  The head of *this* model (by instance, see
``ops/subclass.py``) answers with a :class:`DeferredLogits`: hidden, and what was done to the logits since.
Operations on rows (view, flatten, a shifting slice) are done to hidden; elementwise ones (float, a scale,
tanh) are noted; ``cross_entropy`` runs tile by tile (``tiled_loss.py``).  Anything else computes the real
logits, once.

Invariants:

- Inside of the model's forward alone.  Logits that no loss was taken of leave the model as a plain tensor.
- Logits that a loss was taken of and that are returned beside it are computed when first looked at, from the
  weights of that forward pass; after the optimizer's step that would be other weights, so it is an error.
- The head's own ``__call__`` computes both, so that hooks (FSDP2's gathers and reductions) run around it.
- A head with other hooks, under tracing, compiling or ``torch.func``, or with few enough rows for one tile,
  is called as always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from thalweg.nn.tiled_loss import Curve, tiled_cross_entropy
from thalweg.ops._private import as_plain_tensors, is_plain

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class LossTiling:
    """What the head and the model it belongs to know of one another.

    ``tile_tokens``: rows of a tile, None for the default.  ``depth``: how many forward passes of the model
    are under way.  ``generation`` grows with each update of the weights.
    """

    tile_tokens: int | None = None
    head: weakref.ref[nn.Module] | None = None
    depth: int = 0
    generation: int = 0
    known_hooks: frozenset[int] = frozenset()
    handles: list[Any] = field(default_factory=list)

    def settle(self) -> None:
        """Take the hooks that the head has now for harmless (sharding's own); later ones are a user's."""
        head = None if self.head is None else self.head()
        if head is not None:
            self.known_hooks = frozenset(hook_ids(head))

    def expire(self) -> None:
        """The weights have changed."""
        self.generation += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"tile_tokens": self.tile_tokens, "depth": 0, "generation": 0, "handles": []}


def hook_ids(module: nn.Module) -> Iterator[int]:
    """The identities of a module's hooks."""
    for table in _HOOKS:
        yield from (id(hook) for hook in getattr(module, table).values())


@dataclass
class Source:
    """The call of the head that was put off; shared by everything derived from it."""

    head: Any
    hidden: Tensor
    context: Any
    generation: int
    measured: bool
    used: bool = False

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's real output for ``hidden``."""
        tiling: LossTiling = self.head._thalweg_tiling
        if tiling.generation != self.generation:
            raise RuntimeError(
                "these logits were not computed before the optimizer's step, and the weights they belong to "
                "are gone: read output.logits before step(), or set tiling.loss to false"
            )
        weight = self.head.weight
        with self.context():
            if isinstance(weight, DTensor):
                return self._gathered(hidden, weight)
            return self.head(hidden, NOW)

    def _gathered(self, hidden: Tensor, weight: DTensor) -> Tensor:
        """Outside of the model's forward a sharded head is gathered; collective."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise RuntimeError(
                "these logits are wanted with a gradient after the head's weight was freed: call the model "
                "without labels and take the loss of its logits, or set tiling.loss to false"
            )
        full = weight.full_tensor().to(hidden.dtype)
        bias = self.head.bias
        if isinstance(bias, DTensor):
            bias = bias.full_tensor().to(hidden.dtype)
        return F.linear(hidden, full, bias)


class Now:
    """Asks the head for its real output, or with a ``compute`` for a loss of hidden, weight and bias."""

    def __init__(self, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None) -> None:
        self.compute = compute


NOW = Now()


class DeferredLogits(Tensor):
    """A tensor (..., V) that stands for ``curve(head(hidden))``; real from the first operation on it."""

    _source: Source
    _hidden: Tensor
    _curves: tuple[Curve, ...]
    _parent: tuple[DeferredLogits, Curve, bool] | None
    _value: Tensor | None
    _hooks: list[Callable[[Tensor], Any]]

    @staticmethod
    def __new__(
        cls: Any,
        source: Source,
        hidden: Tensor,
        dtype: torch.dtype,
        curves: tuple[Curve, ...] = (),
        parent: tuple[DeferredLogits, Curve, bool] | None = None,
    ) -> DeferredLogits:
        """``parent``: what this was made of, by which function, and whether of its rows some are left out."""
        shape = (*hidden.shape[:-1], source.head.out_features)
        wants = torch.is_grad_enabled() and (hidden.requires_grad or source.head.weight.requires_grad)
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=wants
        )
        made._source, made._hidden, made._curves, made._parent = source, hidden, curves, parent
        made._value, made._hooks = None, []
        return made

    def real(self) -> Tensor:
        """The logits themselves, computed once."""
        if self._value is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() or self._source_wants_grad()):
                value = self._compute()
                for hook in self._hooks if value.requires_grad else ():
                    value.register_hook(hook)
                self._value = value
        return self._value

    def _compute(self) -> Tensor:
        if self._parent is not None:
            parent, derive, is_part = self._parent
            if not is_part or parent._value is not None or parent._hooks:
                return derive(parent.real())
        value = self._source.logits(self._hidden)
        for curve in self._curves:
            value = curve(value)
        return value

    def _source_wants_grad(self) -> bool:
        with as_plain_tensors():
            return self.requires_grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with as_plain_tensors():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and first._value is None:
            handler = _handlers().get(func)
            if handler is not None and not any(holds_deferred(a) for a in (*args[1:], *kwargs.values())):
                made = handler(first, func, args, kwargs)
                if made is not NotImplemented:
                    return made
        args, kwargs = _pytree.tree_map_only(DeferredLogits, DeferredLogits.real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _pytree.tree_map_only(DeferredLogits, DeferredLogits.real, (args, kwargs or {}))
        return func(*args, **kwargs)


def holds_deferred(value: Any) -> bool:
    """Whether a tree holds a :class:`DeferredLogits`."""
    return any(isinstance(leaf, DeferredLogits) for leaf in _pytree.tree_leaves(value))


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_METADATA = {
    *(_getter(name) for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")),
    *(_getter(name) for name in ("is_cpu", "is_leaf", "is_sparse", "is_quantized", "is_meta", "_base")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
    Tensor.nelement, Tensor.element_size, Tensor.ndimension, Tensor.get_device,
}  # fmt: skip


# What may be done without computing anything


def _reshaped(deferred: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``view``, ``reshape`` and ``flatten`` that leave the last dim alone."""
    if kwargs:
        return NotImplemented
    vocabulary, width = deferred.shape[-1], deferred._hidden.shape[-1]
    try:
        shape = func(torch.empty(tuple(deferred.shape), device="meta"), *args[1:]).shape
    except (RuntimeError, TypeError, IndexError):
        return NotImplemented
    if not shape or shape[-1] != vocabulary:
        return NotImplemented
    hidden = deferred._hidden.reshape(*shape[:-1], width)
    parent = (deferred, lambda logits: func(logits, *args[1:]), False)
    return DeferredLogits(deferred._source, hidden, deferred.dtype, deferred._curves, parent)


def _sliced(deferred: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``logits[..., :-1, :]`` and the like: slices and whole numbers that leave the last dim alone."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(type(part) not in (slice, int) and part is not Ellipsis for part in index):
        return NotImplemented
    named = sum(part is not Ellipsis for part in index)
    at_the_end = named == deferred.dim() or (named < len(index) and index[-1] is not Ellipsis)
    if named > deferred.dim() or (at_the_end and index[-1] != slice(None)):
        return NotImplemented
    hidden = deferred._hidden[args[1]]
    parent = (deferred, lambda logits: logits[args[1]], True)
    return DeferredLogits(deferred._source, hidden, deferred.dtype, deferred._curves, parent)


def _elementwise(deferred: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Conversions, and arithmetic with numbers; noted for later."""
    rest = args[1:]
    plain = (int, float, torch.dtype, torch.device, str)
    if not all(isinstance(argument, plain) for argument in (*rest, *kwargs.values())):
        return NotImplemented
    probe = func(torch.empty(0, dtype=deferred.dtype, device=deferred.device), *rest, **kwargs)
    if probe.device != deferred.device:
        return NotImplemented
    if probe.dtype == deferred.dtype and func in _CONVERSIONS:
        return deferred

    def curve(logits: Tensor) -> Tensor:
        return func(logits, *rest, **kwargs)

    curves = (*deferred._curves, curve)
    return DeferredLogits(deferred._source, deferred._hidden, probe.dtype, curves, (deferred, curve, False))


def _same(deferred: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    return deferred


def _note_hook(deferred: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    deferred._hooks.append(args[1])
    return _Handle(deferred._hooks, args[1])


@dataclass
class _Handle:
    hooks: list[Any]
    hook: Any

    def remove(self) -> None:
        """Take the hook off again."""
        if self.hook in self.hooks:
            self.hooks.remove(self.hook)


def _line(deferred: DeferredLogits) -> Iterator[DeferredLogits]:
    yield deferred
    while deferred._parent is not None:
        deferred = deferred._parent[0]
        yield deferred


def _cross_entropy(deferred: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(_LOSS_ARGUMENTS, args, strict=False)) | kwargs
    target = given["target"]
    plain = all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
    if not plain or not is_plain(target) or target.is_floating_point() or deferred.dim() > 2:
        return NotImplemented
    if deferred.dim() != target.dim() + 1 or any(one._hooks for one in _line(deferred)):
        return NotImplemented
    source, curves = deferred._source, deferred._curves
    autocast = torch.is_autocast_enabled(deferred.device.type)
    loss_dtype = torch.float32 if autocast else deferred.dtype  # autocast takes losses in fp32

    def curve(logits: Tensor) -> Tensor:
        for one in curves:
            logits = one(logits)
        return logits

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return tiled_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            ignore_index=given.get("ignore_index", -100),
            reduction=given.get("reduction", "mean"),
            label_smoothing=given.get("label_smoothing", 0.0),
            curve=curve if curves else None,
            tile_tokens=source.head._thalweg_tiling.tile_tokens,
            measured_kernels=source.measured,
        ).to(loss_dtype)

    source.used = True
    with source.context():
        return source.head(deferred._hidden, Now(compute))


_LOSS_ARGUMENTS = (
    *("input", "target", "weight", "size_average"),
    *("ignore_index", "reduce", "reduction", "label_smoothing"),
)
_CONVERSIONS = {Tensor.float, Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.double}


@cache
def _handlers() -> Mapping[Any, Callable[..., Any]]:
    arithmetic = (Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.add)
    tanh = (Tensor.tanh, torch.tanh, F.tanh, Tensor.__add__, Tensor.__sub__, torch.mul, torch.div)
    found = dict.fromkeys((*_CONVERSIONS, *arithmetic, *tanh), _elementwise)
    found |= dict.fromkeys(
        (Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape), _reshaped
    )
    found |= {Tensor.__getitem__: _sliced, Tensor.contiguous: _same, F.cross_entropy: _cross_entropy}
    return found | {Tensor.register_hook: _note_hook}
