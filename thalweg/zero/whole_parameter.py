"""Below stage 3 a program sees plain whole parameters, the same objects at all times.

The picture.  Each parameter has two sides::

    what programs see    WholeParameter: plain, of the full shape, in the compute dtype; the module's own, in a pass and
                         between passes; autograd accumulates into it
    what training has    a DTensor in the master dtype: the optimizer's, FSDP2's, the checkpoint's

After an update the whole values are brought up to date at once (the gather that stage 3 makes before a forward pass),
so any read is right and needs no other rank.  A write is this rank's own, as in plain PyTorch: version counters tell
of it, and the rows that belong to this rank enter the master before the next update.  ``grad`` is the reduced
gradient, the master's; the one that autograd fills is FSDP2's business (:class:`AutogradSide`).
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from thalweg.deferred_init.tensor_swap import deepcopy_plain, reduce_plain
from thalweg.ops._torch_private import GRAD_SLOT, REQUIRES_GRAD_SLOT
from thalweg.zero.full_state_dict import distribute_like


def refuse_change(old: str, new: str) -> NoReturn:
    """Raise ValueError: the parameters of a model in training stay as they are."""
    raise ValueError(
        f"a parameter in training keeps its shape and dtype ({old}), so it cannot become {new}: change the model "
        "before initialize(); the dtype it computes in is set by fp16 and bf16 of the config"
    )


class WholeParameter(nn.Parameter):
    """A parameter of the full shape; ``sharded`` is the one that is trained: this rank's part, a DTensor."""

    sharded: nn.Parameter
    _adopted_version: int
    _published_version: int

    def __new__(cls, data: Tensor, sharded: nn.Parameter) -> WholeParameter:
        """Over the memory of ``data``, and with its version counter."""
        whole: WholeParameter = torch.Tensor._make_subclass(cls, data, sharded.requires_grad)
        whole.sharded = sharded
        whole.mark_published()
        return whole

    @property
    def is_written(self) -> bool:
        """Whether it holds what the program has written to it, and the master does not."""
        return self._version != self._adopted_version

    @property
    def has_own_values(self) -> bool:
        """Whether it has been written to, by whomever, since it was published."""
        return self._version != self._published_version

    def mark_adopted(self) -> None:
        """The master has what was written."""
        self._adopted_version = self._version

    def mark_published(self) -> None:
        """It holds what the masters of all ranks hold."""
        self._adopted_version = self._published_version = self._version

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The plain tensor; what is written through it counts as a write to the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            refuse_change(f"{tuple(self.shape)}, {self.dtype}", f"{tuple(value.shape)}, {value.dtype}")
        if value.data_ptr() != self.data_ptr():
            self.detach().copy_(value)

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The reduced gradient in the master's dtype: whole where every rank has all of it, else a DTensor."""
        grad = self.sharded.grad
        if isinstance(grad, DTensor) and not any(
            placement.is_shard() and grad.device_mesh.size(axis) > 1 for axis, placement in enumerate(grad.placements)
        ):
            return grad._local_tensor
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, DTensor) and isinstance(self.sharded, DTensor):
            value = distribute_like(value.to(self.sharded.dtype), self.sharded, src_rank=None)
        self.sharded.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.sharded.grad = None

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether it trains."""
        return REQUIRES_GRAD_SLOT.__get__(self)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        REQUIRES_GRAD_SLOT.__set__(self, requires_grad)
        self.sharded.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> WholeParameter:  # type: ignore[override]
        """Train it, or not, from the next forward pass on."""
        self.requires_grad = requires_grad
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call ``hook(parameter)`` when the reduced gradient is there."""
        return self.sharded.register_post_accumulate_grad_hook(lambda _: hook(self))

    __deepcopy__, __reduce_ex__ = deepcopy_plain, reduce_plain  # pyright: ignore[reportAssignmentType]


class AutogradSide:
    """What FSDP2 takes for its unsharded parameter: a whole one, with the gradient that autograd has put there."""

    def __init__(self, whole: WholeParameter) -> None:
        object.__setattr__(self, "whole", whole)

    @property
    def grad(self) -> Tensor | None:
        """This rank's gradient, not reduced."""
        return GRAD_SLOT.__get__(self.whole)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "grad":
            GRAD_SLOT.__set__(self.whole, value)
        else:
            setattr(self.whole, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "whole"), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(arg.whole if isinstance(arg, AutogradSide) else arg for arg in args), **(kwargs or {}))


def get_autograd_side(param: Any) -> Any:
    """The parameter whose ``grad`` is what autograd has put there; a plain one is its own."""
    return AutogradSide(param) if isinstance(param, WholeParameter) else param


def get_shard(param: Any) -> Any:
    """The parameter that training has: of a whole one its DTensor; anything else is its own."""
    return param.sharded if isinstance(param, WholeParameter) else param


class StateByParam(UserDict[Any, Any]):
    """An optimizer's state, found by the parameter that programs see or by the one that training has."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.data = state

    def __getitem__(self, param: Any) -> Any:
        return self.data[get_shard(param)]

    def __setitem__(self, param: Any, entries: Any) -> None:
        self.data[get_shard(param)] = entries

    def __delitem__(self, param: Any) -> None:
        del self.data[get_shard(param)]

    def __contains__(self, param: object) -> bool:
        return get_shard(param) in self.data


def named_shards(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """``module.named_parameters()`` as training has them."""
    for name, param in module.named_parameters(remove_duplicate=remove_duplicate):
        yield name, get_shard(param)
