"""Two tensor objects exchange what they are; each keeps its identity and its attributes.

``torch.utils.swap_tensors`` does this for objects with equal slots only, and it poisons the
AccumulateGrad node of a tensor that is part of a live graph.  Here the exchange is undone
later (or the tensor was in no graph), so such a node finds the tensor that it knows again.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_DTENSOR_SLOTS: tuple[str, ...] = tuple(DTensor.__slots__)


def deepcopy_plain(self: Tensor, memo: dict[int, Any]) -> nn.Parameter:
    """The ``__deepcopy__`` of parameters that training shows: a plain one, which knows nothing of training."""
    if id(self) not in memo:
        memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
    return memo[id(self)]


def reduce_plain(self: Tensor, proto: Any) -> Any:
    """Their ``__reduce_ex__``: the pickle of a plain one."""
    return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(proto)


class FullParameter(torch.Tensor):
    """A plain tensor with DTensor's slots, so that Python lets an object change between the two."""

    __slots__ = _DTENSOR_SLOTS
    # As nn.Parameter: what is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return "Parameter containing:\n" + repr(self.detach())

    __deepcopy__, __reduce_ex__ = deepcopy_plain, reduce_plain


def swap_tensors(a: Tensor, b: Tensor) -> None:
    """Exchange class and content of ``a`` and ``b``.

    Where one is a DTensor both have its slots afterwards: FSDP2 looks at the local tensor of
    the user's object when a forward runs while that object is full.
    """
    if isinstance(a, DTensor) or isinstance(b, DTensor):
        for slot in _DTENSOR_SLOTS:
            value = getattr(a, slot) if hasattr(a, slot) else getattr(b, slot)
            setattr(a, slot, value)
            setattr(b, slot, value)
    type_a = type(a)
    object.__setattr__(a, "__class__", type(b))
    object.__setattr__(b, "__class__", type_a)
    torch._C._swap_tensor_impl(a, b)
