"""Frozen parameters that are tensors of a class of their own: taken apart, so that ZeRO can cut them.

Quantisers (torchao's, say) keep a weight as a *wrapper*: a tensor that shows one shape and dtype and holds
plain tensors inside, codes and scales.  Nobody but the wrapper knows how to cut it.  Its insides are plain,
though, and frozen: cut anywhere, gathered before use and put together again they are the same bytes.  So ::

    weight (wrapper)    ->   parametrizations.weight.original0, original1, ...     plain, sharded, offloaded
    module.weight       ->   the wrapper, built around the gathered tensors whenever the layer asks for it

by torch's own parametrizations, whose names checkpoints then hold.

bitsandbytes goes another way: the parameter is of a class of its own that *is* the packed codes, and what
they mean hangs on it as attributes, which are lost when ZeRO puts a plain parameter in its place.  Its 4-bit
layers look for them on the layer then; its 8-bit ones do not, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

Build = Callable[[list[Tensor]], Tensor]


def unwrap_parameters(model: nn.Module) -> list[str]:
    """Put the plain tensors inside of wrapper parameters in their place; returns the names of those found.

    Raises:
        ValueError: such a parameter is to be trained.
    """
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                _keep_attributes(module, parameter, f"{path}.{key}".lstrip("."))
            if parameter is not None and _is_wrapper(parameter):
                found.setdefault(id(parameter), []).append((f"{path}.{key}".lstrip("."), module, key))
    names = []
    for places in found.values():
        (name, module, key), *others = places
        parameter = module._parameters[key]
        assert parameter is not None
        kind = type(parameter).__name__
        if parameter.requires_grad:
            raise ValueError(
                f"{name} is a {kind}, which has no gradient that an optimizer could use: freeze it "
                "(requires_grad_(False)) and train adapters beside it, or replace it by its dequantised "
                "value before initialize()"
            )
        if others:
            raise ValueError(
                f"{name} is a {kind} and shared with {others[0][0]}: shared weights cannot be quantised "
                "here; keep this one in 16 bits"
            )
        leaves, build = _take_apart(parameter)
        parametrize.register_parametrization(module, key, _Wrapped(leaves, build), unsafe=True)
        names.append(name)
    return names


def _keep_attributes(module: nn.Module, parameter: Any, name: str) -> None:
    """Leave on the layer what bitsandbytes hangs on its parameter."""
    state = getattr(parameter, "quant_state", None)
    if state is not None and getattr(module, "quant_state", None) is None:
        module.quant_state = state
    if type(parameter).__name__ == "Int8Params":
        raise ValueError(
            f"{name} is an Int8Params, whose scales are lost when it is sharded: load the base in 4 bits "
            "(load_in_4bit), or in 8 bits of torchao's"
        )


class _Wrapped(nn.Module):
    """Between a wrapper and what it holds."""

    def __init__(self, leaves: list[Tensor], build: Build) -> None:
        super().__init__()
        self._leaves: list[Tensor] | None = leaves
        self._build = build

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The plain tensors inside; asked for once."""
        if self._leaves is None:
            raise ValueError("a quantised weight cannot be assigned to once the engine is made")
        leaves, self._leaves = self._leaves, None
        return tuple(leaves)

    def forward(self, *leaves: Tensor) -> Tensor:
        """The wrapper around them."""
        return self._build([leaf.detach() for leaf in leaves])


def _is_wrapper(tensor: Tensor) -> bool:
    kind: Any = type(tensor)
    return hasattr(kind, "__tensor_flatten__") and not isinstance(tensor, DTensor)


def _take_apart(whole: Any) -> tuple[list[Tensor], Build]:
    """The plain tensors inside of a wrapper, of wrappers within it too, and what puts them together."""
    if not _is_wrapper(whole):
        # Bytes: mixed precision leaves them alone, and every transport takes them.
        shape, dtype = whole.shape, whole.dtype
        flat = whole.detach().contiguous().view(-1)
        if flat.numel() == 1:
            flat = flat.as_strided((1,), (1,))  # one element may have any stride, and bytes may not
        return [flat.view(shape or (1,)).view(torch.uint8)], lambda one: one[0].view(dtype).view(shape)
    kind, size, stride = type(whole), whole.size(), whole.stride()
    names, context = whole.__tensor_flatten__()
    parts = [_take_apart(getattr(whole, name)) for name in names]
    counts = [len(leaves) for leaves, _ in parts]

    def build(leaves: list[Tensor]) -> Tensor:
        held, start = {}, 0
        for name, count, (_, inner) in zip(names, counts, parts, strict=True):
            held[name] = inner(leaves[start : start + count])
            start += count
        return kind.__tensor_unflatten__(held, context, size, stride)

    return [leaf for leaves, _ in parts for leaf in leaves], build
