"""One call of a checkpointed unit whose inputs leave while it runs and come back when it runs again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from thalweg.activation_checkpointing.offload import MIN_OFFLOAD_BYTES, ActivationOffloader, OffloadedActivation
from thalweg.ops._torch_private import is_plain_tensor


class OffloadState:
    """A saver, and whether a unit that uses it is under way in this thread; shared by a model's units."""

    def __init__(self, offloader: ActivationOffloader) -> None:
        self.offloader, self._thread_state = offloader, threading.local()

    @property
    def is_active(self) -> bool:
        """Whether this thread is inside of a unit whose inputs are put away already."""
        return getattr(self._thread_state, "depth", 0) > 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        self._thread_state.depth = getattr(self._thread_state, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread_state.depth -= 1

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled unit keeps its inputs


def checkpoint_offloaded(
    offload_state: OffloadState, forward: Callable[..., Any], args: Any, kwargs: Any, **options: Any
) -> Any:
    """Torch's ``checkpoint`` of ``forward(*args, **kwargs)``, whose arguments are put away until its second run.

    Tensors that carry a gradient (the hidden states) are put away; masks, positions and the like, which all
    units share, stay.  Inside of the unit checkpoint's own hooks are the ones that count.
    """
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    offloaded = [(leaf, leaf._version) for leaf in leaves if _should_offload(leaf)]

    def run(*leaves: Any) -> Any:
        args, kwargs = _pytree.tree_unflatten(leaves, spec)
        with offload_state.enter():
            return forward(*args, **kwargs)

    with saved_tensors_hooks(partial(_pack, offload_state.offloader), _unpack):
        output = checkpoint(run, *leaves, use_reentrant=False, **options)
    for leaf, version in offloaded:  # of which a copy may have been under way
        _check_unchanged(leaf, version)
    return output


def _pack(offloader: ActivationOffloader, tensor: Tensor) -> tuple[Tensor, int] | OffloadedActivation:
    return offloader.save(tensor.detach()) if _should_offload(tensor) else (tensor, tensor._version)


def _unpack(packed: tuple[Tensor, int] | OffloadedActivation) -> Tensor:
    if not isinstance(packed, tuple):
        return packed.fetch()
    _check_unchanged(*packed)
    return packed[0]


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "an input of a checkpointed unit was changed in place after the unit had begun, and its "
            "gradient needs the old value: use an out-of-place operation"
        )


def _should_offload(value: Any) -> bool:
    return (
        is_plain_tensor(value)
        and not isinstance(value, nn.Parameter)
        and value.requires_grad
        and value.is_floating_point()
        and value.layout is torch.strided
        and value.numel() * value.element_size() >= MIN_OFFLOAD_BYTES
    )
