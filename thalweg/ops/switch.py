"""Move a model's linear layers over to ``ops.linear``, layer by layer, and back.

A layer is switched by giving that one object a subclass of its own class, of the same
name: torch and other models see nothing of it, parameter names, repr and state dict stay,
hooks run as before, and nothing refers back to the layer, so it dies with its model.  A
deep copy stays switched; a pickle holds the plain class.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from thalweg.ops._private import onednn_linear_op
from thalweg.ops.linear import conv1d, linear

MODES = ("auto", "torch")


class _Switched:
    """Mixin that marks a switched layer and keeps its class out of pickles."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        constructor, (_, *rest), *state = super().__reduce_ex__(protocol)  # type: ignore[misc]
        return constructor, (_plain_class(self), *rest), *state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    return conv1d(x, self.weight, self.bias)


def _plain_class(module: Any) -> type:
    return next(base for base in type(module).__mro__ if not issubclass(base, _Switched))


@cache
def _switched_class(plain: type, forward: Callable[..., Tensor]) -> type:
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Switched, plain), {"forward": forward, **names})


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
    Switch before sharding: FSDP gives the modules it wraps a class of its own.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    if mode == "torch" or onednn_linear_op() is None:
        return 0
    switched = 0
    for module in model.modules():
        forward = _forward_for(module)
        if forward is not None and _untouched(module):
            module.__class__ = _switched_class(type(module), forward)
            switched += 1
    return switched


def restore_linear_layers(model: nn.Module) -> int:
    """Undo :func:`switch_linear_layers` and return how many layers went back to their class."""
    restored = 0
    for module in model.modules():
        if type(module).__bases__[0] is _Switched:
            module.__class__ = _plain_class(module)  # type: ignore[assignment]
            restored += 1
    return restored
