"""Blocks of attention put together by their log-sum-exp equal attention over all keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.ops.attention.block import block_backward, block_forward, reference_backward, reference_forward
from thalweg.parallel.sequence.ring_attention import _merge_by_lse

torch.set_num_threads(1)


def _inputs(seed, rows, columns, width=8, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, rows, width), (2, 3, columns, width), (2, 3, columns, width), (2, 3, rows, width))
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def _expected(q, k, v, grad, mask, scale):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=scale)
    return out, torch.autograd.grad(out, leaves, grad.double())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.booleans(),
)
def test_blocks_together_equal_the_whole(seed, rows, lengths, masked):
    q, k, v, grad = _inputs(seed, rows, sum(lengths))
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, rows, sum(lengths), generator=g) < 0.4 if masked else None
    if mask is not None:
        mask[:, :, 0] = False  # a query without any key
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    blocks = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    for own in blocks:
        part = None if mask is None else mask[..., own]
        _merge_by_lse(out, lse, *block_forward(q, k[:, :, own], v[:, :, own], causal=False, mask=part, scale=0.3))
    wanted, gradients = _expected(q, k, v, grad, mask, 0.3)
    assert (out - wanted).abs().max() < 1e-5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for own in blocks:
        part = None if mask is None else mask[..., own]
        found = block_backward(grad, q, k[:, :, own], v[:, :, own], out, lse, causal=False, mask=part, scale=0.3)
        dq += found[0]
        dk[:, :, own], dv[:, :, own] = found[1], found[2]
    for found, value in zip((dq, dk, dv), gradients, strict=True):
        assert (found - value).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "causal", "mask", "window", "grouped", "grouped causal"])
def test_the_fast_kernel_equals_the_formula(dtype, kind):
    q, k, v, grad = _inputs(3, 700, 700, 16, dtype)
    if "grouped" in kind:  # one head of keys for all three of queries
        k, v = k[:, :1], v[:, :1]
    mask = None
    if kind == "mask":
        mask = torch.rand(2, 1, 700, 700, generator=torch.Generator().manual_seed(1)) < 0.5
        mask[0, :, 5] = False
    if kind == "window":  # one for all rows of the batch
        mask = torch.ones(700, 700, dtype=torch.bool).tril().triu(-9)[None, None]
    options = {"causal": "causal" in kind, "mask": mask, "scale": 0.25}
    close = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    out, lse = block_forward(q, k, v, **options)
    wanted, sums = reference_forward(q, k, v, **options)
    assert torch.equal(lse == -torch.inf, sums == -torch.inf)
    assert (out - wanted).abs().max() < close
    assert (lse - sums).nan_to_num(0.0).abs().max() < max(close, 1e-5)
    found = block_backward(grad, q, k, v, wanted, sums, **options)
    lse = torch.where(sums == -torch.inf, torch.inf, sums)
    for one, other in zip(found, reference_backward(grad, q, k, v, wanted, lse, **options), strict=True):
        assert (one - other).abs().max() < 3 * close * max(1.0, float(other.abs().max()))


def test_a_ring_of_one_goes_tile_by_tile_and_skips_what_nobody_sees(monkeypatch):
    import thalweg.parallel.sequence.ring_attention as context

    q, k, v, grad = _inputs(5, 20, 20)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    documents = torch.tensor([0] * 7 + [1] * 13)

    def seen(rows, columns):
        return ((documents[rows][:, None] == documents[columns]) & (columns <= rows[:, None]))[None, None]

    calls = []
    forward = context.block_forward
    monkeypatch.setattr(context, "block_forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    spans = ((0, 5), (5, 10), (10, 15), (15, 20))
    layout = context.RingAttentionSpec((spans,), True, seen, 0.3)
    out = context.RingAttention(None).attend(*leaves, layout)
    assert len(calls) == 8  # of 16: the later tiles, and those of another document, are left out
    index = torch.arange(20)
    wanted, gradients = _expected(q, k, v, grad, seen(index, index), 0.3)
    assert (out - wanted).abs().max() < 1e-5
    for found, value in zip(torch.autograd.grad(out, leaves, grad), gradients, strict=True):
        assert (found - value).abs().max() < 2e-5


def test_forgetting_the_weights_of_blocks_is_noticed():
    q, k, v, grad = _inputs(4, 6, 10)
    wanted, _ = _expected(q, k, v, grad, None, 0.3)
    halves = [
        reference_forward(q, k[:, :, s], v[:, :, s], causal=False, mask=None, scale=0.3)[0]
        for s in (slice(5), slice(5, 10))
    ]
    assert (0.5 * (halves[0] + halves[1]) - wanted).abs().max() > 1e-2
