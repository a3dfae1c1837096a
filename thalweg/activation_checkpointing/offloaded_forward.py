"""One call of a checkpointed unit whose inputs leave while it runs and come back when it runs again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from thalweg.activation_checkpointing.offload import MIN_OFFLOAD_BYTES, ActivationOffloader, OffloadedActivation
from thalweg.ops._torch_private import is_plain_tensor

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


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

    def __deepcopy__(self, memo: Any) -> OffloadState:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled unit keeps its inputs


class OffloadedForward:
    """Callable that runs ``forward`` on its arguments: first the given ones, later the fetched ones.

    Tensors that carry a gradient (the hidden states) are put away; masks, positions and the like, which all
    units share, stay.  The recomputation's own graph is thrown away, so fetched tensors need no history.
    """

    def __init__(self, offload_state: OffloadState, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._offload_state, self._forward = offload_state, forward
        self._leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]
        self._offloaded: dict[int, OffloadedActivation] = {}
        self._original_leaves: list[Any] | None = list(self._leaves)
        self.fetched_leaves: list[Any] | None = None

    def __enter__(self) -> OffloadedForward:
        for index, leaf in enumerate(self._leaves):
            if _should_offload(leaf):
                self._offloaded[index] = self._offload_state.offloader.save(leaf.detach())
        return self

    def __exit__(self, *_: Any) -> None:
        """The first run is over: let go of what was put away."""
        original_leaves, self._original_leaves = self._original_leaves, None
        assert original_leaves is not None
        for index in self._offloaded:
            self._check(index, original_leaves[index])
            self._leaves[index] = None

    def context_fn(self, inner_context_fn: Callable[[], ContextPair] | None = None) -> ContextPair:
        """``context_fn`` of torch's checkpoint: as ``inner_context_fn`` says, and what is put away is fetched before
        the second run's context begins, which would count the operators of fetching."""
        first, second = (nullcontext(), nullcontext()) if inner_context_fn is None else inner_context_fn()
        return first, _FetchContext(self, second)

    def fetch_inputs(self) -> None:
        """Bring the arguments back for one more run."""
        leaves = list(self._leaves)
        for index, offloaded in self._offloaded.items():
            leaves[index] = offloaded.fetch().detach().requires_grad_()
        for index, leaf in enumerate(self._leaves):
            self._check(index, leaf)
        self.fetched_leaves = leaves

    @property
    def device_markers(self) -> list[Tensor]:
        """An empty tensor for each device of the arguments: torch's checkpoint restores the random numbers of the
        devices of what it is given, and the arguments themselves it must not hold."""
        assert self._original_leaves is not None
        by_device = {leaf.device: leaf for leaf in self._original_leaves if isinstance(leaf, Tensor)}
        return [torch.empty(0, device=device) for device in by_device]

    def __call__(self, *_: Tensor) -> Any:
        leaves = self._original_leaves
        if leaves is None:
            leaves, self.fetched_leaves = self.fetched_leaves, None
        assert leaves is not None
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        with self._offload_state.enter():
            return self._forward(*args, **kwargs)

    def _check(self, index: int, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf._version != self._versions[index]:
            raise RuntimeError(
                "an input of a checkpointed unit was changed in place after the unit had begun, and its "
                "gradient needs the old value: use an out-of-place operation"
            )


class _FetchContext:
    """Fetches, then enters ``inner``; may be entered again."""

    def __init__(self, offloaded_forward: OffloadedForward, inner: AbstractContextManager[Any]) -> None:
        self._offloaded_forward, self._inner = offloaded_forward, inner

    def __enter__(self) -> Any:
        self._offloaded_forward.fetch_inputs()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._offloaded_forward.fetched_leaves = None  # which no run has taken
        return self._inner.__exit__(*error)


def _should_offload(value: Any) -> bool:
    return (
        is_plain_tensor(value)
        and not isinstance(value, nn.Parameter)
        and value.requires_grad
        and value.is_floating_point()
        and value.layout is torch.strided
        and value.numel() * value.element_size() >= MIN_OFFLOAD_BYTES
    )
