"""Attention over one block of keys, with the log-sum-exp that lets blocks be put together.

Softmax over all keys is a weighted mean of the softmaxes over blocks of them; each block's weight
is the exponential of its log-sum-exp (Milakov and Gimelshein 2018; Dao et al. 2022, section 3.1):

    lse = log(sum_b exp(lse_b))        out = sum_b exp(lse_b - lse) out_b

and the backward pass of one block needs of the others only the final ``out`` and ``lse``.

Shapes: q, out (B, H, Tq, D), k and v (B, H / repeat, Tk, D), of which each serves ``repeat`` query heads, lse
(B, H, Tq) in fp32 (fp64 for fp64), -inf for a query without keys, whose output is 0; ``mask`` (B or 1, H or 1, Tq, Tk),
true for what is attended, or added to the scores.  torch's kernels do the work where they take the case (on CUDA
cuDNN's for large blocks, flash, and the memory-efficient one for masks and fp32), the plain formula, in tiles of query
rows, elsewhere and as the reference.  The CPU's kernel and the memory-efficient one need keys repeated for each query
head.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE_ROWS = 512
_MIN_CUDNN_SCORES = 2048**2  # of a head: cuDNN plans each new shape for 50 ms, and below is no faster than flash (H200)
_BIAS_ALIGNMENT = 16  # elements, of the rows of what the memory-efficient kernel adds to scores
Mask = Tensor | None


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of one block; ``causal``: query i sees keys 0 to i, without a mask."""
    assert mask is None or not causal
    if q.is_cpu and _has_cpu_flash(q):
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_to_additive_mask(mask, q), scale=scale
        )
        return _zero_empty_rows(out, lse, mask)
    kernel = _cuda_kernel(q, k, v, causal, mask)
    if kernel == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return found[0], found[1].squeeze(-1)
    if kernel == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return found[0], found[1]
    if kernel == "efficient":
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, _to_aligned_bias(mask, q, k), True, 0.0, causal, scale=scale
        )
        return _zero_empty_rows(found[0], found[1][..., : q.shape[2]], mask)  # its lengths are multiples of 32
    return reference_forward(q, k, v, causal=causal, mask=mask, scale=scale)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, mask: Mask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from this block; ``out`` and ``lse`` are those of all blocks together."""
    # With +inf in its place a query without keys has probabilities of 0, not of 0 / 0.
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    if q.is_cpu and _has_cpu_flash(q):
        strided_lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as the forward kernel lays it out
        num_heads = k.shape[1]
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out.to(q.dtype), strided_lse, 0.0, causal, attn_mask=_to_additive_mask(mask, q), scale=scale
        )
        return dq, _sum_heads(dk, num_heads), _sum_heads(dv, num_heads)
    kernel = _cuda_kernel(q, k, v, causal, mask)
    if kernel is None:
        return reference_backward(grad, q, k, v, out, lse, causal=causal, mask=mask, scale=scale)
    grad, out, lse = grad.to(q.dtype), out.to(q.dtype), lse.contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    if kernel == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], seed, seed, None, None, None, q.shape[2], k.shape[2],
            0.0, causal, scale=scale,
        )  # fmt: skip
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2],
            0.0, causal, seed.new_zeros(2, dtype=torch.uint64), seed.new_empty(0), scale=scale,
        )  # fmt: skip
    num_heads = k.shape[1]
    k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel asks for no strides: its own forward's it takes
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _to_aligned_bias(mask, q, k), out, F.pad(lse, (0, -q.shape[2] % 32), value=torch.inf),
        seed, seed, 0.0, [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, _sum_heads(dk, num_heads), _sum_heads(dv, num_heads)


def _cuda_kernel(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> Literal["cudnn", "flash", "efficient"] | None:
    """torch's kernel for a block on a CUDA device; None where it has none."""
    if not q.is_cuda or q.shape[3] % 8:
        return None
    backends = torch.backends.cuda  # whether the device, dtypes, shapes and the user's switches allow a kernel
    if mask is None:
        params = backends.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
        if q.shape[2] * k.shape[2] >= _MIN_CUDNN_SCORES and backends.can_use_cudnn_attention(params):
            return "cudnn"
        if backends.can_use_flash_attention(params):
            return "flash"
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    params = backends.SDPAParams(q, k, v, None, 0.0, causal, False)
    return "efficient" if backends.can_use_efficient_attention(params) else None


def _has_cpu_flash(q: Tensor) -> bool:
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu") and q.shape[2] > 0


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def _sum_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.unflatten(1, (num_heads, -1)).sum(2)


def _fold(x: Tensor, kv: Tensor) -> Tensor:
    """The query heads of each head of ``kv`` as more rows: (B, H, T, E) -> (B, H / repeat, repeat T, E)."""
    repeat = x.shape[1] // kv.shape[1]
    return x if repeat == 1 else x.reshape(x.shape[0], kv.shape[1], repeat * x.shape[2], x.shape[3])


def _to_additive_mask(mask: Mask, q: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask if mask is None else mask.to(q.dtype)
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)


def _to_aligned_bias(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to scores, (B, H, Tq, Tk), with rows as far apart as the memory-efficient kernel takes them."""
    bias = _to_additive_mask(mask, q)
    if bias is None:
        return None
    num_keys = k.shape[2]
    bias = F.pad(bias, (0, -num_keys % _BIAS_ALIGNMENT))[..., :num_keys]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], num_keys)


def _zero_empty_rows(out: Tensor, lse: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    if mask is None:
        return out, lse
    empty = ~(mask > -torch.inf if mask.is_floating_point() else mask).any(-1)
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """The plain formula of :func:`block_forward`."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    outs, sums = [], []
    for start in range(0, q.shape[2], _TILE_ROWS):
        scores = _scores(q, k, start, causal, mask, scale)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.where(lse == -torch.inf, torch.inf, lse)[..., None])
        outs.append((_fold(weights, v) @ v.to(acc_dtype)).view(*weights.shape[:3], v.shape[3]).to(q.dtype))
        sums.append(lse)
    if not outs:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=acc_dtype)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, mask: Mask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain formula of :func:`block_backward` (Dao et al. 2022, appendix B.4)."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=acc_dtype), torch.zeros_like(v, dtype=acc_dtype)
    dqs = []
    for start in range(0, q.shape[2], _TILE_ROWS):
        rows = slice(start, start + _TILE_ROWS)
        dy = grad[:, :, rows].to(acc_dtype)
        weights = torch.exp(_scores(q, k, start, causal, mask, scale) - lse[:, :, rows, None])
        dv += _fold(weights, v).transpose(2, 3) @ _fold(dy, v)
        delta = (dy * out[:, :, rows].to(acc_dtype)).sum(-1, keepdim=True)
        dweights = (_fold(dy, v) @ v.to(acc_dtype).transpose(2, 3)).view_as(weights)
        ds = _fold(weights * (dweights - delta) * scale, k)
        dqs.append((ds @ k.to(acc_dtype)).view(*dy.shape[:3], k.shape[3]).to(q.dtype))
        dk += ds.transpose(2, 3) @ _fold(q[:, :, rows].to(acc_dtype), k)
    return torch.cat(dqs, 2) if dqs else torch.zeros_like(q), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, start: int, causal: bool, mask: Mask, scale: float) -> Tensor:
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q[:, :, start : start + _TILE_ROWS]
    scores = _fold(rows.to(acc_dtype), k) @ k.to(acc_dtype).transpose(2, 3)
    scores = scores.view(*rows.shape[:3], k.shape[2]) * scale
    if causal:
        index = torch.arange(start, start + rows.shape[2], device=q.device)
        visible = torch.arange(k.shape[2], device=q.device) <= index[:, None]
        scores.masked_fill_(~visible, -torch.inf)
    if mask is not None:
        own = mask[:, :, start : start + _TILE_ROWS]
        scores = scores + own if own.is_floating_point() else scores.masked_fill_(~own, -torch.inf)
    return scores
