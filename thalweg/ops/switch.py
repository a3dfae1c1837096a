"""Move a model's linear layers over to ``ops.linear``, layer by layer, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from thalweg.ops._private import count_onednn_flops, onednn_linear_op
from thalweg.ops.linear import conv1d, linear
from thalweg.ops.subclass import Disguised, subclass_of, undisguise

MODES = ("auto", "torch")


class _Switched(Disguised):
    pass


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    return conv1d(x, self.weight, self.bias)


@cache
def _switched_class(plain: type, forward: Callable[..., Tensor]) -> type:
    return subclass_of(plain, _Switched, forward=forward)


def _forward_for(module: nn.Module) -> Callable[..., Tensor] | None:
    if type(module) is nn.Linear:
        return _linear_forward
    # Only a model that has such layers can have loaded the library that defines them.
    library = sys.modules.get("transformers.pytorch_utils")
    if library is not None and type(module) is getattr(library, "Conv1D", None):
        return _conv1d_forward
    return None


def _untouched(module: nn.Module) -> bool:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(getattr(module, table) for table in tables)
    return "forward" not in module.__dict__ and "weight" in module._parameters and not hooked


def switch_linear_layers(model: nn.Module, mode: str = "auto") -> int:
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
    count_onednn_flops()
    switched = 0
    for module in model.modules():
        forward = _forward_for(module)
        if forward is not None and _untouched(module):
            module.__class__ = _switched_class(type(module), forward)
            switched += 1
    return switched


def is_switched(layer: nn.Module) -> bool:
    """Whether this layer's kernels are chosen by measurement."""
    return isinstance(layer, _Switched)


def restore_linear_layers(model: nn.Module) -> int:
    """Undo :func:`switch_linear_layers` and return how many layers went back to their class."""
    return undisguise(model, _Switched)
