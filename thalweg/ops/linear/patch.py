"""Move a model's linear layers over to ``ops.linear``, layer by layer, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from thalweg.ops._torch_private import onednn_linear_op, register_onednn_flops
from thalweg.ops.dynamic_subclass import DynamicSubclass, make_subclass, restore_class
from thalweg.ops.linear.functional import conv1d, linear

MODES = ("auto", "torch")


class _PatchedLinear(DynamicSubclass):
    pass


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    return conv1d(x, self.weight, self.bias)


@cache
def _patched_class(base_class: type, forward: Callable[..., Tensor]) -> type:
    return make_subclass(base_class, _PatchedLinear, forward=forward)


def _forward_for(module: nn.Module) -> Callable[..., Tensor] | None:
    if type(module) is nn.Linear:
        return _linear_forward
    # Only a model that has such layers can have loaded the library that defines them.
    library = sys.modules.get("transformers.pytorch_utils")
    if library is not None and type(module) is getattr(library, "Conv1D", None):
        return _conv1d_forward
    return None


def _is_unmodified(module: nn.Module) -> bool:
    hook_dicts = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    has_hooks = any(getattr(module, table) for table in hook_dicts)
    return "forward" not in module.__dict__ and "weight" in module._parameters and not has_hooks


def patch_linear_layers(model: nn.Module, mode: str = "auto") -> int:
    """Let the model's linear layers choose their kernels and return how many were switched.

    ``"auto"`` switches every ``nn.Linear`` and Hugging Face ``Conv1D`` in the model whose type
    is exactly that, and that has neither hooks nor a replaced forward nor a computed weight;
    ``"torch"`` switches none.  Layers that are not on a CPU go on through torch's operator.
    Switch before sharding: FSDP gives the modules it wraps a class of its own.  Raises
    ValueError for another mode.
    """
    if mode not in MODES:
        raise ValueError(f"cpu_kernels is {mode!r}; it must be one of {', '.join(map(repr, MODES))}")
    if mode == "torch" or onednn_linear_op() is None:
        return 0
    register_onednn_flops()
    num_patched = 0
    for module in model.modules():
        forward = _forward_for(module)
        if forward is not None and _is_unmodified(module):
            module.__class__ = _patched_class(type(module), forward)
            num_patched += 1
    return num_patched


def is_patched(layer: nn.Module) -> bool:
    """Whether this layer's kernels are chosen by measurement."""
    return isinstance(layer, _PatchedLinear)


def restore_linear_layers(model: nn.Module) -> int:
    """Undo :func:`patch_linear_layers` and return how many layers went back to their class."""
    return restore_class(model, _PatchedLinear)
