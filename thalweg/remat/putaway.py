"""One call of a checkpointed unit whose inputs leave while it runs and come back when it runs again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from thalweg.ops._private import is_plain
from thalweg.remat.offload import LEAST_BYTES, Kept, Marker, Saver

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass
class Storage:
    """A saver, and whether a unit that uses it is under way in this thread; shared by a model's units."""

    saver: Saver
    marker: Marker = field(default_factory=Marker)

    def __deepcopy__(self, memo: Any) -> Storage:
        return self

    def __reduce__(self) -> Any:
        return _no_storage, ()


def _no_storage() -> None:
    return None


class PutAway:
    """Callable that runs ``forward`` on its arguments: first the given ones, later the fetched ones.

    Tensors that carry a gradient (the hidden states) are put away; masks, positions and the like, which all
    units share, stay.  The recomputation's own graph is thrown away, so fetched tensors need no history.
    """

    def __init__(self, storage: Storage, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._storage, self._forward = storage, forward
        self._leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]
        self._kept: dict[int, Kept] = {}
        self._given: list[Any] | None = list(self._leaves)
        self._fetched: list[Any] | None = None

    def __enter__(self) -> PutAway:
        for index, leaf in enumerate(self._leaves):
            if _leaves(leaf):
                self._kept[index] = self._storage.saver.save(leaf.detach())
        return self

    def __exit__(self, *_: Any) -> None:
        """The first run is over: let go of what was put away."""
        given, self._given = self._given, None
        assert given is not None
        for index in self._kept:
            self._check(index, given[index])
            self._leaves[index] = None

    def contexts(self, choose: Callable[[], Contexts] | None = None) -> Contexts:
        """``context_fn`` of torch's checkpoint: as ``choose`` says, and what is put away is fetched before
        the second run's context begins, which would count the operators of fetching."""
        first, second = (nullcontext(), nullcontext()) if choose is None else choose()
        return first, _Fetching(self, second)

    def fetch(self) -> None:
        """Bring the arguments back for one more run."""
        leaves = list(self._leaves)
        for index, kept in self._kept.items():
            leaves[index] = kept.fetch().detach().requires_grad_()
        for index, leaf in enumerate(self._leaves):
            self._check(index, leaf)
        self._fetched = leaves

    def __call__(self) -> Any:
        leaves = self._given
        if leaves is None:
            leaves, self._fetched = self._fetched, None
        assert leaves is not None
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        with self._storage.marker.unit():
            return self._forward(*args, **kwargs)

    def drop(self) -> None:
        """Let go of fetched arguments that no run has taken."""
        self._fetched = None

    def _check(self, index: int, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf._version != self._versions[index]:
            raise RuntimeError(
                "an input of a checkpointed unit was changed in place after the unit had begun, and its "
                "gradient needs the old value: use an out-of-place operation"
            )


class _Fetching:
    """Fetches, then enters ``inner``; may be entered again."""

    def __init__(self, away: PutAway, inner: AbstractContextManager[Any]) -> None:
        self._away, self._inner = away, inner

    def __enter__(self) -> Any:
        self._away.fetch()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._away.drop()
        return self._inner.__exit__(*error)


def _leaves(value: Any) -> bool:
    return (
        is_plain(value)
        and not isinstance(value, nn.Parameter)
        and value.requires_grad
        and value.is_floating_point()
        and value.layout is torch.strided
        and value.numel() * value.element_size() >= LEAST_BYTES
    )
