"""Linear layers with weights packed once, by the kernels that the torch wheel holds (not differentiable).

fp32 and bf16 by oneDNN's own layout, int8 with a scale per output and rows quantised on the fly, int4 in
groups of 32 with a scale and an offset in bf16.  Where a build of torch lacks an operator, or a shape does
not suit it, the layer computes the same with plain operators.

On an accelerator int8 and int4 have the same numbers, and rows stay as they are.  The plain form turns a layer's bytes
into numbers of the rows' dtype for the time of its product, which is then the device's own: a byte read, two written
and two read again for each int8 weight, however many rows there are.  On CUDA and ROCm Triton kernels do better
(``triton_packed``): few rows read the bytes alone.  Elsewhere torch's products for packed weights do, where the device
has them.  Either is taken if it agrees with the plain form.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.utils.log import get_logger

log = get_logger(__name__)
LinearFn = Callable[[Tensor], Tensor]
_INT4_GROUP_SIZE = 32


@dataclass(frozen=True)
class PackedLinear:
    """A layer and the ``kernel_name`` that computes it: ``onednn``, ``int8``, ``int4`` or ``torch``."""

    kernel_name: str
    linear_fn: LinearFn

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        return self.linear_fn(x)


def pack_linear(
    weight: Tensor, bias: Tensor | None, weight_format: str, dtype: torch.dtype = torch.bfloat16
) -> PackedLinear:
    """Return ``x -> x @ weight.T + bias`` with the weight (N, K) kept as fp32, bf16, fp16, int8 or int4.

    x (M, K) and the result (M, N) have the form's dtype; fp32 for int8 and int4, on an accelerator ``dtype``.  Raises
    ValueError for another form.
    """
    if weight_format not in _PACKERS:
        raise ValueError(f"weights cannot be packed as {weight_format!r}; known: {', '.join(_PACKERS)}")
    if weight.device.type != "cpu" and weight_format in _DEVICE_PACKERS:
        bias = None if bias is None else bias.detach().to(dtype)
        return _DEVICE_PACKERS[weight_format](weight.detach().float(), bias, dtype)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(weight_format, torch.float32)
    weight = weight.detach().to(dtype)
    bias = None if bias is None else bias.detach().to(dtype)
    try:
        return _PACKERS[weight_format](weight, bias)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        _log_once("weights in %s stay with torch's own product: %s", weight_format, reason)
        return _pack_plain(weight, bias)


def _with_bias(kernel_name: str, linear_fn: LinearFn, bias: Tensor | None) -> PackedLinear:
    return PackedLinear(kernel_name, linear_fn if bias is None else lambda x: linear_fn(x) + bias)


def _pack_plain(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return PackedLinear("torch", lambda x: F.linear(x, weight, bias))


def _pack_onednn(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    reorder = torch.ops.mkldnn._reorder_linear_weight.default
    try:
        packed = reorder(weight.contiguous())
    except (RuntimeError, NotImplementedError):  # other versions of torch take their own kind of tensor
        packed = reorder(weight.contiguous().to_mkldnn())
    product = torch.ops.mkldnn._linear_pointwise.default
    layer = lambda x: product(x, packed, bias, "none", [], "")
    layer(weight.new_zeros(1, weight.shape[1]))  # refuses here what it would refuse later
    return PackedLinear("onednn", layer)


def _pack_int8(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    scale = weight.abs().amax(1).div(127).clamp(min=1e-12).double()
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    quantised = torch.quantize_per_channel(weight.contiguous(), scale, zeros, 0, torch.qint8)
    packed: Any = torch.ops.quantized.linear_prepack(quantised, None)
    # Without VNNI the products of two bytes are added in 16 bits, which 7 of 8 bits do not overflow.
    narrow = "AVX512" not in torch.backends.cpu.get_cpu_capability()
    product = torch.ops.quantized.linear_dynamic
    # The kernel has one scale for all rows, by the range of all.  Each row is brought to a largest magnitude
    # of 1, and rows of 1 and -1 are added: the range is always the same, no row's result depends on others.
    edges = torch.ones(2, weight.shape[1])
    edges[1] = -1

    def layer(x: Tensor) -> Tensor:
        size = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
        return product(torch.cat([x / size, edges]), packed, narrow)[: len(x)] * size

    return _with_bias("int8", layer, bias)


def _pack_int4(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    outputs, inputs = weight.shape
    if inputs % _INT4_GROUP_SIZE or outputs % 32:
        _log_int8_instead(outputs, inputs, "either number is no multiple of 32")
        return _pack_int8(weight, bias)
    nibbles, table = _quantize_int4(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(nibbles, 1)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    layer = lambda x: product(x.bfloat16(), packed, _INT4_GROUP_SIZE, table).to(x.dtype)
    layer(weight.new_zeros(1, inputs))
    return _with_bias("int4", layer, bias)


@functools.cache  # the layers of a model have a few shapes
def _log_once(message: str, *args: object) -> None:
    log.warning(message, *args)


def _log_int8_instead(outputs: int, inputs: int, reason: str) -> None:
    _log_once("int4 weights of %d outputs and %d inputs are kept in int8: %s", outputs, inputs, reason)


def _quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers 0 to 15, int32 (N, K), and bf16 (K / group, N, 2): w = (number - 8) * scale + offset."""
    groups = weight.view(len(weight), -1, _INT4_GROUP_SIZE)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).clamp(min=1e-7).bfloat16().float()
    offset = (low + 8 * scale).bfloat16().float()
    nibbles = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32)
    return nibbles.flatten(1), torch.stack([scale, offset], -1).transpose(0, 1).contiguous().bfloat16()


def _pack_int8_on_device(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
    # The scale is rounded first: the numbers are made for the one that they are multiplied by.
    smallest = 1e-7 if dtype == torch.float16 else 1e-12
    scale = weight.abs().amax(1).div(127).clamp(min=smallest).to(dtype)
    packed = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    # Scaled before the product: one launch less than after it, and sums of whole numbers do not overflow fp16.
    plain = lambda x: F.linear(x, packed * scale[:, None])
    fused, row_counts = _triton_product(packed, scale, weight.shape[1])
    if weight.device.type != "cuda":  # CUDA's kernel computes one result at a time, slower than the plain form
        fused = lambda x: torch.ops.aten._weight_int8pack_mm.default(x, packed, scale)
    return _take_fused("int8", fused, row_counts, plain, weight.new_empty(0, weight.shape[1], dtype=dtype), bias)


def _pack_int4_on_device(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
    outputs, inputs = weight.shape
    if inputs % _INT4_GROUP_SIZE:
        _log_int8_instead(outputs, inputs, f"the inputs do not go into groups of {_INT4_GROUP_SIZE}")
        return _pack_int8_on_device(weight, bias, dtype)
    nibbles, table = _quantize_int4(weight)
    first, last = (nibbles - 8).to(torch.int8).chunk(2, 1)
    packed = first << 4 | last & 15
    scales = table.permute(2, 1, 0).to(dtype).contiguous()

    def plain(x: Tensor) -> Tensor:
        numbers = torch.stack([packed >> 4, packed << 4 >> 4], 1).view(outputs, -1, _INT4_GROUP_SIZE)
        scale, offset = scales[..., None]
        return F.linear(x, torch.addcmul(offset, numbers, scale).flatten(1))

    fused, row_counts = _triton_product(packed, scales, inputs)
    tiles = next((tiles for tiles in (8, 4, 2) if inputs % (16 * tiles) == 0), 0)
    if fused is None and dtype == torch.bfloat16 and tiles:
        # For all rows, though many are slow: with the plain form's bytes beside the tiles there would be twice as many.
        pairs = nibbles.to(torch.uint8).view(outputs, -1, 2)
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            tiled = torch.ops.aten._convert_weight_to_int4pack.default(pairs[..., 0] << 4 | pairs[..., 1], tiles)
            fused = lambda x: torch.ops.aten._weight_int4pack_mm.default(x, tiled, _INT4_GROUP_SIZE, table)
    return _take_fused("int4", fused, row_counts, plain, weight.new_empty(0, inputs, dtype=dtype), bias)


def _triton_product(packed: Tensor, table: Tensor, inputs: int) -> tuple[LinearFn | None, tuple[int, ...]]:
    """Return a product by Triton, with the numbers of rows to try it with.

    None without CUDA or ROCm, or Triton, or for weights that the kernel does not take.
    """
    if packed.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from thalweg.ops.linear import triton_packed

        if counts := triton_packed.row_counts(packed, table.dtype, inputs):
            return lambda x: triton_packed.linear(x, packed, table), counts
    return None, (4,)


def _take_fused(
    name: str, fused: LinearFn | None, row_counts: tuple[int, ...], plain: LinearFn, like: Tensor, bias: Tensor | None
) -> PackedLinear:
    """Return the device's own product if there is one that gives what the plain form gives, else that.

    ``like``: rows of the kind that will come.  A wrong layout of the weights is far off, rounding is not.
    ``row_counts``: how many it is tried with: one for each way in which Triton compiles it.
    """
    layer = plain
    if fused is not None:
        generator = torch.Generator().manual_seed(0)
        try:
            samples = [torch.randn(rows, like.shape[1], generator=generator).to(like) for rows in row_counts]
            pairs = [(fused(x).float(), plain(x).float()) for x in samples]
            if all((y - expected).norm() < 0.02 * expected.norm() for y, expected in pairs):
                layer = fused
        except Exception as error:  # no operator; Triton's are of many kinds: no C compiler, an unknown device
            if like.device.type == "cuda":
                _log_once("%s weights become numbers for each product, which is slow: %s", name, str(error))
    return _with_bias(name if layer is fused else "torch", layer, bias)


_DEVICE_PACKERS = {"int8": _pack_int8_on_device, "int4": _pack_int4_on_device}
_PACKERS = {"fp32": _pack_onednn, "bf16": _pack_onednn, "fp16": _pack_plain, "int8": _pack_int8, "int4": _pack_int4}
