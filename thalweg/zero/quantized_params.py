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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

RebuildFn = Callable[[list[Tensor]], Tensor]


def unwrap_quantized_params(model: nn.Module) -> list[str]:
    """Put the plain tensors inside of wrapper parameters in their place; returns the names of those found.

    Raises:
        ValueError: such a parameter is to be trained.
    """
    locations_by_id: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, state = f"{path}.{key}".lstrip("."), getattr(parameter, "quant_state", None)
            if state is not None and getattr(module, "quant_state", None) is None:
                module.quant_state = state  # what bitsandbytes hangs on its parameter stays on the layer
            if type(parameter).__name__ == "Int8Params":
                raise ValueError(
                    f"{name} is an Int8Params, whose scales are lost when it is sharded: load the base in 4 bits "
                    "(load_in_4bit), or in 8 bits of torchao's"
                )
            if _is_tensor_wrapper(parameter):
                locations_by_id.setdefault(id(parameter), []).append((name, module, key))
    names = []
    for locations in locations_by_id.values():
        (name, module, key), *others = locations
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
        leaves, build = _flatten_wrapper(parameter)
        parametrize.register_parametrization(module, key, _SubclassParametrization(leaves, build), unsafe=True)
        names.append(name)
    return names


class _SubclassParametrization(nn.Module):
    """Between a wrapper and what it holds."""

    def __init__(self, inner_tensors: list[Tensor], rebuild: RebuildFn) -> None:
        super().__init__()
        self._inner_tensors: list[Tensor] | None = inner_tensors
        self._rebuild = rebuild

    def right_inverse(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The plain tensors inside; asked for once."""
        if self._inner_tensors is None:
            raise ValueError("a quantised weight cannot be assigned to once the engine is made")
        leaves, self._inner_tensors = self._inner_tensors, None
        return tuple(leaves)

    def forward(self, *leaves: Tensor) -> Tensor:
        """The wrapper around them."""
        return self._rebuild([leaf.detach() for leaf in leaves])


def _is_tensor_wrapper(tensor: Tensor) -> bool:
    kind: Any = type(tensor)
    return hasattr(kind, "__tensor_flatten__") and not isinstance(tensor, DTensor)


def _flatten_wrapper(tensor: Any) -> tuple[list[Tensor], RebuildFn]:
    """The plain tensors inside of a wrapper, of wrappers within it too, and what puts them together."""
    if not _is_tensor_wrapper(tensor):
        # Bytes: mixed precision leaves them alone, and every transport takes them.
        shape, dtype = tensor.shape, tensor.dtype
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel() == 1:
            flat = flat.as_strided((1,), (1,))  # one element may have any stride, and bytes may not
        # Not the shape of before: a tensor rank's piece of the bytes has another one.
        in_bytes = flat.view(shape or (1,)).view(torch.uint8)
        return [in_bytes], lambda one: one[0].view(dtype).squeeze(0 if not shape else ())
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()
    names, context = tensor.__tensor_flatten__()
    flattened = [_flatten_wrapper(getattr(tensor, name)) for name in names]
    # What rebuilds lives as long as the model, and must not hold the whole tensors that ZeRO cuts.
    inner_rebuilds = [(name, len(leaves), inner) for name, (leaves, inner) in zip(names, flattened, strict=True)]

    def rebuild(leaves: list[Tensor]) -> Tensor:
        inner_tensors, start = {}, 0
        for name, count, inner in inner_rebuilds:
            inner_tensors[name] = inner(leaves[start : start + count])
            start += count
        return kind.__tensor_unflatten__(inner_tensors, context, size, stride)

    return [leaf for leaves, _ in flattened for leaf in leaves], rebuild
