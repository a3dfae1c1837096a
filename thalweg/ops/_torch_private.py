"""The private names of torch that this room leans on, each touched here alone.

Every one is looked up, never assumed: where a torch build lacks it, the caller sees
``None`` or ``False`` and takes the plain operator.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import flop_counter

# oneDNN's linear layer and its one overload, or None where torch was built without it.
_ONEDNN_PACKET: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
ONEDNN_LINEAR: Any = getattr(_ONEDNN_PACKET, "default", None)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN; x (..., K), weight (N, K), in the dtype of x.

    ``weight`` may be a transposed view: its strides are passed on.  ``x`` is copied when it
    is not contiguous.  Not differentiable.
    """
    return ONEDNN_LINEAR(x, weight, bias, "none", [], "")


def _linear_flops(x_shape: Any, weight_shape: Any, *_args: Any, out_shape: Any = None, **_kwargs: Any) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]


def register_onednn_flops() -> None:
    """Tell torch's flop counter what the operator computes, as torch does for its own ones."""
    if _ONEDNN_PACKET is not None and _ONEDNN_PACKET not in flop_counter.flop_registry:
        flop_counter.register_flop_formula(_ONEDNN_PACKET)(_linear_flops)


# True inside ``torch.func`` transforms, which cannot see through an autograd.Function.
functorch_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)


# True while ``torch.jit.trace`` records.
is_jit_tracing: Callable[[], bool] = getattr(torch.jit, "is_tracing", bool)


# A context in which a tensor subclass's ``__torch_function__`` is not asked.
no_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor without values, as in a rehearsal."""
    return isinstance(tensor, FakeTensor)


def is_plain_tensor(value: object) -> bool:
    """True for a tensor of no subclass, or one without values that stands for such a tensor."""
    return type(value) is Tensor or type(value) is FakeTensor


def hook_ids(module: nn.Module) -> set[int]:
    """The identities of a module's hooks."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {id(hook) for table in tables for hook in getattr(module, table).values()}


def forward_ad_active() -> bool:
    """True inside ``torch.autograd.forward_ad.dual_level``."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def unsafe_view(x: Tensor, shape: list[int]) -> Tensor:
    """Reshape a fresh tensor that nobody else holds; unlike a view it may be changed in place anywhere."""
    return torch.ops.aten._unsafe_view.default(x, shape)


# What a ``__torch_function__`` sees where only the shape, dtype or place of a tensor is asked for.
METADATA_OPS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu")),
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_quantized", "is_meta")),
    *(getattr(Tensor, name) for name in ("size", "dim", "ndimension", "numel", "nelement", "element_size")),
    *(Tensor.__len__, Tensor.get_device, Tensor.is_floating_point, Tensor.is_complex),
    *(torch.is_floating_point, torch.is_complex),
}


# The operator behind ``tensor.item()`` and ``bool(tensor)``.
ITEM_CALL = torch.ops.aten._local_scalar_dense.default
ALLCLOSE_CALL = torch.ops.aten.allclose.default

# The slots of the C++ tensor, under what a subclass makes of them.
GRAD_SLOT: Any = torch._C.TensorBase.grad
REQUIRES_GRAD_SLOT: Any = torch._C.TensorBase.requires_grad
