"""Frozen weights in few bits: NF4 (QLoRA: Dettmers et al. 2023, section 3) and int8, in plain torch.

A weight (N, K) is codes and scales::

    nf4    two codes a byte, (N, K / 2) uint8; a scale for each block of 64 inputs, bf16: 4.25 bits a number
    int8   (N, K) int8; a scale for each output, fp32

A code of four bits stands for one of sixteen quantiles of a normal distribution.  Blocks lie within a row, so rows, and
columns in whole blocks, can be cut off without a look at the numbers.  Not taken over from QLoRA: its second
quantisation, of the scales, whose blocks of blocks go across rows (0.12 bits a number).

To modules and PEFT such a weight is a tensor of its shape and dtype: ``F.linear`` turns it into numbers for the time of
a product, again in the backward pass, and every other operator sees the numbers.  ZeRO cuts what is inside
(``zero/quantized_params.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thalweg.utils.dtypes import dtype_name

WeightFormat = Literal["nf4", "int8"]
BLOCK = 64
_MIN_BLOCK = 16
_CHUNK = 1 << 22  # numbers that are quantised at once
_MIN_PARALLEL = 1 << 15  # numbers for which a second thread is asked
_PAIRS: dict[tuple[torch.device, torch.dtype], Tensor] = {}
_OFFSET = 0.9677083  # the largest quantile that QLoRA takes: as far from 1 as the sixteen of both halves ask for


@lru_cache
def nf4_values() -> tuple[float, ...]:
    """The sixteen numbers, -1 to 1: quantiles of a normal distribution, eight of each half, 0 among them."""

    def half(count: int) -> Tensor:
        return torch.special.ndtri(torch.linspace(_OFFSET, 0.5, count, dtype=torch.float64)[:-1])

    values = torch.cat([-half(8), torch.zeros(1, dtype=torch.float64), half(9)]).sort().values
    return tuple((values / values.abs().max()).tolist())


@lru_cache
def _nf4_table(dtype: torch.dtype) -> np.ndarray:
    """The sixteen numbers in fp32, each one that ``dtype`` has."""
    return torch.tensor(nf4_values(), device="cpu").to(dtype).float().numpy()


def _nf4_pairs(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The two numbers of each byte, on the device of ``codes``; made once, as their way there makes a device wait."""
    key = codes.device, dtype
    is_real = type(codes) is Tensor and not torch.compiler.is_compiling()
    if is_real and key in _PAIRS:
        return _PAIRS[key]
    with torch.inference_mode(False):
        values = torch.tensor(nf4_values(), dtype=dtype, device=codes.device)
        pairs = torch.cartesian_prod(values, values)
    if is_real and type(pairs) is Tensor:  # under a mode of fake tensors these would be fake, and stay
        _PAIRS[key] = pairs
    return pairs


class QuantizedWeight(Tensor):
    """A frozen weight (N, K) that shows ``dtype``, and holds ``codes`` and ``scales``."""

    codes: Tensor
    scales: Tensor
    weight_format: WeightFormat

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> QuantizedWeight:
        shape = len(codes), codes.shape[1] * (2 if weight_format == "nf4" else 1)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scales: Tensor, weight_format: WeightFormat, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.weight_format = codes, scales, weight_format

    @classmethod
    def quantize(cls, weight: Tensor, weight_format: WeightFormat) -> QuantizedWeight:
        """Return the weight (N, K) in few bits, to the nearest code."""
        size = _block_size(weight.shape[1]) if weight_format == "nf4" else weight.shape[1]
        rows = max(_CHUNK // weight.shape[1], 1)
        parts = [_quantize_rows(part, weight_format, size) for part in weight.detach().split(rows)]
        codes, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return cls(codes, scales, weight_format, weight.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Return the numbers, by default in the dtype that it shows."""
        dtype = dtype or self.dtype
        if self.weight_format == "int8":
            return self.codes.to(dtype) * self.scales.to(dtype)
        numbers = self.codes.new_empty(self.shape, dtype=dtype)
        if self._is_plain(numbers) and self._run_kernel(numbers):
            return numbers
        pairs = _nf4_pairs(self.codes, dtype)
        torch.index_select(pairs, 0, self.codes.flatten().int(), out=numbers.view(-1, 2))
        numbers.view(*self.scales.shape, -1).mul_(self.scales.to(dtype)[..., None])
        return numbers

    def _is_plain(self, numbers: Tensor) -> bool:
        """Whether all are memory of the host, of which a kernel sees addresses alone, in the forms that it knows."""
        if torch.compiler.is_compiling() or numbers.numel() == 0:
            return False
        is_known = numbers.dtype in (torch.float32, torch.bfloat16) and self.scales.dtype == torch.bfloat16
        tensors = self.codes, self.scales, numbers
        return is_known and all(type(t) is Tensor and t.is_contiguous() and t.is_cpu for t in tensors)

    def _run_kernel(self, numbers: Tensor) -> bool:
        from thalweg.ops import cpu_kernels  # LLVM is loaded for those who use such weights

        if cpu_kernels.unsupported_reason():
            return False
        kernels, blocks = cpu_kernels.KernelSet(), self.scales.numel()
        table = _nf4_table(numbers.dtype).ctypes.data
        arguments = self.codes, self.scales, table, numbers, blocks, numbers.numel() // blocks
        call = cpu_kernels.Instruction(kernels.dequantize_nf4(dtype_name(numbers.dtype)), arguments)
        threads = 1 if numbers.numel() < _MIN_PARALLEL else 0
        cpu_kernels.build_program([call], kernels.compile(), [], threads).run()
        return True

    @property
    def block(self) -> int:
        """Numbers of a row that share a scale; 1 where a whole row does, which may be cut anywhere."""
        return 1 if self.scales.shape[1] == 1 else self.shape[1] // self.scales.shape[1]

    def byte_spans(self, dim: int, spans: Sequence[Sequence[tuple[int, int]]]) -> list[Any]:
        """Return for the bytes of ``codes`` and of ``scales`` where they are cut if the weight is cut at ``spans`` (by
        rank) of ``dim``: spans of the same dim; None for what each rank has whole.

        Raises:
            ValueError: a span begins or ends within numbers that share a scale.
        """
        if dim == 0:
            return [spans, spans]
        block = self.block
        for place in {place for rank in spans for span in rank for place in span}:
            if place % block:
                raise ValueError(
                    f"its {self.shape[1]} inputs would be cut at {place}, within {block} that share a scale: cut it "
                    "over fewer ranks, quantise to int8, or leave it out (quantize_linears' skip)"
                )

        def scaled(inner: Tensor) -> Any:
            per_byte = self.shape[1] // (inner.shape[1] * inner.itemsize)
            return [[(start // per_byte, stop // per_byte) for start, stop in rank] for rank in spans]

        return [scaled(self.codes), None if self.scales.shape[1] == 1 else scaled(self.scales)]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.weight_format, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, *_: Any) -> QuantizedWeight:
        return cls(inner["codes"], inner["scales"], *context)

    def _map(self, change: Any, dtype: torch.dtype | None = None) -> QuantizedWeight:
        return QuantizedWeight(change(self.codes), change(self.scales), self.weight_format, dtype or self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], QuantizedWeight):
            return _Linear.apply(*args, *(kwargs or {}).values())
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        weight = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return weight._map(lambda t: t)
        if func is aten.clone.default:
            return weight._map(torch.clone)
        if func is aten._to_copy.default:
            device = kwargs.get("device", weight.device)
            return weight._map(lambda t: t.to(device, copy=True), kwargs.get("dtype"))
        if func is aten.empty_like.default:
            device = kwargs.get("device", weight.device)
            return weight._map(lambda t: torch.empty_like(t, device=device), kwargs.get("dtype"))
        if func is aten.slice.Tensor:
            return weight._slice(*args[1:])
        numbers = lambda x: x.dequantize() if isinstance(x, QuantizedWeight) else x
        return func(*pytree.tree_map(numbers, args), **pytree.tree_map(numbers, kwargs))

    def _slice(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> QuantizedWeight:
        start, end, _ = slice(start, end).indices(self.shape[dim])
        if dim % 2 == 0:
            return self._map(lambda t: t[start:end:step])

        def columns(t: Tensor) -> Tensor:
            if t.shape[1] == 1:  # a scale of the whole row
                return t
            per = self.shape[1] // t.shape[1]
            if start % per or end % per or step != 1:
                raise ValueError(f"columns {start} to {end} are not whole blocks of {per}, which have a scale each")
            return t[:, start // per : end // per]

        return self._map(columns)


class _Linear(torch.autograd.Function):
    """The product with a weight whose numbers are there for its time alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        ctx.weight = weight.detach()
        return F.linear(x, weight.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs_x, _, needs_bias = (*ctx.needs_input_grad, False)[:3]
        grad_x = grad @ ctx.weight.dequantize(grad.dtype) if needs_x else None
        return grad_x, None, *([grad.flatten(0, -2).sum(0) if needs_bias else None] * (len(ctx.needs_input_grad) - 2))


def quantize_linears(model: nn.Module, weight_format: WeightFormat, skip: Iterable[str] = ()) -> list[str]:
    """Freeze a model and put its linear layers' weights in few bits, but for the head's, those whose names end as
    ``skip`` says, and those too narrow for a block; returns their names.

    Adapters go on it after that, as they would on the plain model.
    """
    model.requires_grad_(False)
    heads: Any = getattr(model, "get_output_embeddings", lambda: None)()
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is heads or name.endswith(tuple(skip)):
            continue
        if weight_format == "nf4" and _block_size(module.in_features) < _MIN_BLOCK:
            continue
        weight = QuantizedWeight.quantize(module.weight, weight_format)
        module.weight = nn.Parameter(weight, requires_grad=False)
        names.append(name)
    return names


def _block_size(width: int) -> int:
    return math.gcd(width, BLOCK)


def _quantize_rows(weight: Tensor, weight_format: WeightFormat, size: int) -> tuple[Tensor, Tensor]:
    blocks = weight.float().unflatten(1, (-1, size))
    scale = blocks.abs().amax(2).clamp_(min=1e-30)
    if weight_format == "int8":
        scale /= 127
        return (blocks / scale[..., None]).round_().flatten(1).to(torch.int8), scale
    scale = scale.bfloat16()
    values = torch.tensor(nf4_values(), device=weight.device)
    codes = torch.bucketize(blocks / scale.float()[..., None], (values[1:] + values[:-1]) / 2, out_int32=True)
    high, low = codes.flatten(1).to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return high << 4 | low, scale
