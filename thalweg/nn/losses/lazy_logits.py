"""Logits that are not computed before somebody looks: a model's own loss becomes a tiled one.

The picture: a causal language model ends in ``logits = head(hidden); loss = cross_entropy(logits, labels)``
with some reshaping, shifting, scaling or capping in between.  The head of *this* model (by instance, see
``ops/dynamic_subclass.py``) answers with a :class:`LazyLogits`: hidden, and what was done to the logits since.
Operations on rows (view, flatten, a shifting slice) are done to hidden; elementwise ones (float, a scale,
tanh) are noted; ``cross_entropy`` runs tile by tile (``tiled_cross_entropy.py``).  Anything else computes the real
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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from thalweg.nn.losses.tiled_cross_entropy import LogitTransform, tiled_cross_entropy
from thalweg.ops._torch_private import METADATA_OPS, hook_ids, is_plain_tensor, no_torch_function
from thalweg.ops.losses import LossCall, leading_shape, leaves_last_dim


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

    def trust_current_hooks(self) -> None:
        """Take the hooks that the head has now for harmless (sharding's own); later ones are a user's."""
        head = None if self.head is None else self.head()
        if head is not None:
            self.known_hooks = frozenset(hook_ids(head))

    def invalidate(self, *_: object) -> None:
        """The weights have changed."""
        self.generation += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"tile_tokens": self.tile_tokens, "depth": 0, "generation": 0, "handles": []}


@dataclass
class HeadCall:
    """The call of the head that was put off; shared by everything derived from it."""

    head: Any
    autocast_context: Any
    generation: int
    measured_kernels: bool
    has_loss: bool = False

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's real output for ``hidden``."""
        tiling: LossTiling = self.head._thalweg_tiling
        if tiling.generation != self.generation:
            raise RuntimeError(
                "these logits were not computed before the optimizer's step, and the weights they belong to "
                "are gone: read output.logits before step(), or set tiling.loss to false"
            )
        weight = self.head.weight
        with self.autocast_context():
            if isinstance(weight, DTensor):
                return self._gathered_logits(hidden, weight)
            return self.head(hidden, None)  # a second argument: to be computed now

    def _gathered_logits(self, hidden: Tensor, weight: DTensor) -> Tensor:
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


class LazyLogits(Tensor):
    """A tensor (..., V) that stands for ``curve(head(hidden))``; real from the first operation on it."""

    _head_call: HeadCall
    _hidden: Tensor
    _transforms: tuple[LogitTransform, ...]
    _parent: tuple[LazyLogits, LogitTransform, bool] | None
    _value: Tensor | None
    _hooks: OrderedDict[int, Callable[[Tensor], Any]]

    @staticmethod
    def __new__(
        cls: Any,
        head_call: HeadCall,
        hidden: Tensor,
        dtype: torch.dtype,
        transforms: tuple[LogitTransform, ...] = (),
        parent: tuple[LazyLogits, LogitTransform, bool] | None = None,
    ) -> LazyLogits:
        """``parent``: what this was made of, by which function, and whether of its rows some are left out."""
        shape = (*hidden.shape[:-1], head_call.head.out_features)
        requires_grad = torch.is_grad_enabled() and (hidden.requires_grad or head_call.head.weight.requires_grad)
        lazy = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=requires_grad
        )
        lazy._head_call, lazy._hidden, lazy._transforms, lazy._parent = head_call, hidden, transforms, parent
        lazy._value, lazy._hooks = None, OrderedDict()
        return lazy

    def materialize(self) -> Tensor:
        """The logits themselves, computed once."""
        if self._value is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() or self.requires_grad):
                value = self._compute()
                for hook in self._hooks.values() if value.requires_grad else ():
                    value.register_hook(hook)
                self._value = value
        return self._value

    def _compute(self) -> Tensor:
        if self._parent is not None:
            parent, derive, is_slice = self._parent
            if not is_slice or parent._value is not None or parent._hooks:
                return derive(parent.materialize())
        return _apply_all(self._transforms, self._head_call.logits(self._hidden))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with no_torch_function():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first._value is None and not contains_lazy_logits((args[1:], kwargs)):
            result = _lazy_result(first, func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = _pytree.tree_map_only(LazyLogits, LazyLogits.materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _pytree.tree_map_only(LazyLogits, LazyLogits.materialize, (args, kwargs or {}))
        return func(*args, **kwargs)


def contains_lazy_logits(value: Any) -> bool:
    """Whether a tree holds a :class:`LazyLogits`."""
    return any(isinstance(leaf, LazyLogits) for leaf in _pytree.tree_leaves(value))


_METADATA = METADATA_OPS | {getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "_base")}


# What may be done without computing anything


def _lazy_result(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``func(lazy, *args, **kwargs)`` where that needs no logits, else NotImplemented."""
    head_call, hidden, dtype, transforms = lazy._head_call, lazy._hidden, lazy.dtype, lazy._transforms
    if func is Tensor.contiguous:
        return lazy
    if func is Tensor.register_hook:
        handle = RemovableHandle(lazy._hooks)
        lazy._hooks[handle.id] = args[0]
        return handle
    if func in _RESHAPES and not kwargs and (shape := leading_shape(func, lazy, args, {})) is not None:
        parent = (lazy, lambda logits: func(logits, *args), False)
        return LazyLogits(head_call, hidden.reshape(*shape, hidden.shape[-1]), dtype, transforms, parent)
    if func is Tensor.__getitem__ and leaves_last_dim(args[0], lazy.dim()):
        parent = (lazy, lambda logits: logits[args[0]], True)
        return LazyLogits(head_call, hidden[args[0]], dtype, transforms, parent)
    if func in _ELEMENTWISE:  # conversions, and arithmetic with numbers; noted for later
        plain_types = (int, float, torch.dtype, torch.device, str)
        if not all(isinstance(argument, plain_types) for argument in (*args, *kwargs.values())):
            return NotImplemented
        probe = func(torch.empty(0, dtype=dtype, device=lazy.device), *args, **kwargs)
        if probe.device != lazy.device:
            return NotImplemented
        if probe.dtype == dtype and func in _CONVERSIONS:
            return lazy

        def transform(logits: Tensor) -> Tensor:
            return func(logits, *args, **kwargs)

        return LazyLogits(head_call, hidden, probe.dtype, (*transforms, transform), (lazy, transform, False))
    return _cross_entropy(lazy, LossCall(func, (lazy, *args), kwargs)) if func is F.cross_entropy else NotImplemented


def _apply_all(transforms: tuple[LogitTransform, ...], logits: Tensor) -> Tensor:
    for transform in transforms:
        logits = transform(logits)
    return logits


def _with_ancestors(lazy: LazyLogits) -> Iterator[LazyLogits]:
    yield lazy
    while lazy._parent is not None:
        lazy = lazy._parent[0]
        yield lazy


def _cross_entropy(lazy: LazyLogits, loss: LossCall) -> Any:
    target = loss.arguments["target"]
    if loss.arguments["weight"] is not None or not is_plain_tensor(target) or target.is_floating_point():
        return NotImplemented
    if lazy.dim() > 2 or lazy.dim() != target.dim() + 1 or any(one._hooks for one in _with_ancestors(lazy)):
        return NotImplemented
    head_call, transforms = lazy._head_call, lazy._transforms
    autocast = torch.is_autocast_enabled(lazy.device.type)
    loss_dtype = torch.float32 if autocast else lazy.dtype  # autocast takes losses in fp32

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return tiled_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            ignore_index=loss.arguments["ignore_index"],
            reduction=loss.reduction,
            label_smoothing=loss.arguments["label_smoothing"],
            logit_transform=(lambda logits: _apply_all(transforms, logits)) if transforms else None,
            tile_tokens=head_call.head._thalweg_tiling.tile_tokens,
            measured_kernels=head_call.measured_kernels,
        ).to(loss_dtype)

    head_call.has_loss = True
    with head_call.autocast_context():
        return head_call.head(lazy._hidden, compute)


_RESHAPES = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape}
_CONVERSIONS = {Tensor.float, Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.double}
_ELEMENTWISE = {
    *(*_CONVERSIONS, Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.add),
    *(Tensor.tanh, torch.tanh, F.tanh, Tensor.__add__, Tensor.__sub__, torch.mul, torch.div),
}
