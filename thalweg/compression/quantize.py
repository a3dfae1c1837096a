"""Numbers in few bits, by groups: the codes, and the same rounded values that gradients pass through.

A group of ``n`` neighbours ``w`` shares one scale (and one zero point):

    bits >= 3, symmetric    code = round(w / s),      s = max|w| / (2^(bits-1) - 1)
    bits >= 3, asymmetric   code = round(w / s) + z,  s = (max w - min w) / (2^bits - 1),  z = -round(min w / s)
    2 bits                  -a, 0, a      a = mean |w| of those above 0.7 mean |w|   (Li and Liu 2016)
    1 bit                   -a, a         a = mean |w|                               (Rastegari et al. 2016)

The symmetric form with a group for each output is the int8 of :mod:`thalweg.ops.linear.packed`: what was trained
with it is packed for inference without another rounding.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.ops.autograd import with_backward

_TINY = torch.finfo(torch.float32).tiny


class Quantized(NamedTuple):
    """``codes`` (groups, n), whole numbers in fp32; ``scale`` and ``zero_point`` (groups, 1)."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def dequantize(self) -> Tensor:
        """The values, (groups, n) in fp32."""
        return (self.codes - self.zero_point) * self.scale


def quantize(
    values: Tensor,
    bits: int,
    num_groups: int = 1,
    symmetric: bool = True,
    noise: Tensor | None = None,
    bounds: Tensor | None = None,
) -> Quantized:
    """Quantise a tensor in ``num_groups`` runs of neighbours.

    ``noise``: uniform in [0, 1), (groups, n), with which numbers are rounded up or down by chance, so that their mean
    is kept.  ``bounds``: the least and the largest value (2,), where the groups' own are not to count.

    Raises:
        ValueError: the groups do not divide the tensor, or 1 or 2 bits are asked for asymmetrically or by chance.
    """
    if values.numel() % num_groups:
        raise ValueError(f"{num_groups} groups do not divide a tensor of {tuple(values.shape)}: take a divisor of it")
    rows = values.detach().float().reshape(num_groups, -1)
    zero = rows.new_zeros(num_groups, 1)
    if bits <= 2:
        if not symmetric or noise is not None:
            raise ValueError(
                f"{bits} bits are quantized symmetrically and to the nearest value; set them so, or 3 bits"
            )
        return _quantize_by_mean(rows, bits, zero)
    if symmetric:
        top = 2 ** (bits - 1) - 1
        largest = rows.abs().amax(1, keepdim=True) if bounds is None else bounds.float().abs().amax().expand_as(zero)
        scale = (largest / top).clamp(min=_TINY)
        return Quantized(_round(rows / scale, noise).clamp(-top, top), scale, zero)
    low, high = rows.aminmax(dim=1, keepdim=True) if bounds is None else (b.expand_as(zero) for b in bounds.float())
    low, high = low.clamp(max=0), high.clamp(min=0)  # zero stays zero: padding and masked weights
    scale = ((high - low) / (2**bits - 1)).clamp(min=_TINY)
    zero = -torch.round(low / scale)
    return Quantized((_round(rows / scale, noise) + zero).clamp(0, 2**bits - 1), scale, zero)


def _quantize_by_mean(rows: Tensor, bits: int, zero: Tensor) -> Quantized:
    size = rows.abs()
    kept = size > 0.7 * size.mean(1, keepdim=True) if bits == 2 else torch.ones_like(rows, dtype=torch.bool)
    scale = (size * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    codes = torch.where(rows < 0, -1.0, 1.0) * kept
    return Quantized(codes, scale, zero)


def _round(x: Tensor, noise: Tensor | None) -> Tensor:
    return x.round() if noise is None else (x + noise).floor()


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """``value`` in x's dtype, whose gradient is x's: as if nothing had been done (Bengio et al. 2013)."""
    return with_backward(x, lambda _: value.to(x.dtype), lambda grad: grad)


def fake_quantize(x: Tensor, bits: int, num_groups: int = 1, symmetric: bool = True, **how: Any) -> Tensor:
    """x as ``bits`` bits hold it, in its own shape and dtype; gradients pass straight through.

    ``how``: ``noise`` and ``bounds`` of :func:`quantize`.
    """
    return straight_through(x, quantize(x, bits, num_groups, symmetric, **how).dequantize().view(x.shape))
