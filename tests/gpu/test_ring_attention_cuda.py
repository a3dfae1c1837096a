"""Blocks of ring attention on CUDA: flash kernels against the formula, and their speed."""

from __future__ import annotations

import pytest
import torch

from thalweg.ops.attention.block import (
    _cuda_kernel,
    block_backward,
    block_forward,
    reference_backward,
    reference_forward,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "causal", "mask", "grouped", "grouped causal"])
def test_cuda_blocks_equal_the_formula(dtype, kind):
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 384, 64, generator=g).to("cuda", dtype) for _ in range(4))
    if "grouped" in kind:  # a head of keys for two of queries
        k, v = k[:, :2], v[:, :2]
    mask = torch.rand(2, 1, 384, 384, generator=g).cuda() < 0.5 if kind == "mask" else None
    options = {"causal": "causal" in kind, "mask": mask, "scale": 0.125}
    close = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    out, lse = block_forward(q, k, v, **options)
    wanted, sums = reference_forward(q, k, v, **options)
    assert (out - wanted).abs().max() < close and (lse - sums).abs().max() < close
    found = block_backward(grad, q, k, v, wanted, sums, **options)
    for one, other in zip(found, reference_backward(grad, q, k, v, wanted, sums, **options), strict=True):
        assert (one - other).abs().max() < 3 * close * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "heads", "rows", "columns", "width", "kind"),
    [
        ("cudnn", (4, 4), 2048, 2048, 128, "causal"),
        ("cudnn", (4, 2), 2112, 2500, 64, "none"),
        ("cudnn", (2, 1), 3000, 3000, 96, "causal"),
        ("flash", (4, 2), 517, 300, 64, "none"),
        ("flash", (2, 2), 37, 37, 40, "causal"),
        ("efficient", (4, 1), 300, 517, 64, "mask of all"),  # rows that are no multiple of what the kernel aligns
        ("efficient", (4, 4), 33, 7, 128, "mask of each head"),
        ("efficient", (2, 2), 128, 256, 16, "added"),
        (None, (2, 2), 50, 60, 20, "none"),
    ],
)
def test_each_cuda_kernel_equals_the_formula(kernel, heads, rows, columns, width, kind, dtype):
    """Laid out as slices of whole heads, as the ring has them, and with heads beside each other, as projections do."""
    g = torch.Generator().manual_seed(1)
    lengths = ((heads[0], rows), (heads[1], columns), (heads[1], columns), (heads[0], rows))
    for is_projected in (False, True):
        q, k, v, grad = (torch.randn(2, n, h, width, generator=g).to("cuda", dtype).transpose(1, 2) for h, n in lengths)
        if not is_projected:
            q, k, v, grad = (torch.cat([x, x], 2)[:, :, x.shape[2] :] for x in (q, k, v, grad))
        mask = None
        if kind.startswith("mask"):
            mask = torch.rand(2, heads[0] if "head" in kind else 1, rows, columns, generator=g).cuda() < 0.4
            mask[:, :, 5] = False  # a query without keys
        elif kind == "added":
            mask = torch.randn(1, heads[0], rows, columns, generator=g).cuda()
        options = {"causal": kind == "causal", "mask": mask, "scale": width**-0.5}
        is_for_halves = kernel in ("cudnn", "flash") and dtype == torch.float32
        assert _cuda_kernel(q, k, v, options["causal"], mask) == ("efficient" if is_for_halves else kernel)
        close = {torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
        out, lse = block_forward(q, k, v, **options)
        wanted, sums = reference_forward(q, k, v, **options)
        assert (out - wanted).abs().max() < close
        assert torch.equal(lse.isinf(), sums.isinf()) and (lse - sums).nan_to_num(0.0).abs().max() < close
        # Of two blocks together the sum is larger and the result another: gradients of a block follow those.
        sums, wanted = torch.where(sums.isinf(), torch.inf, sums + 0.5), wanted * 0.6
        found = block_backward(grad, q, k, v, wanted, sums, **options)
        for one, other in zip(found, reference_backward(grad, q, k, v, wanted, sums, **options), strict=True):
            assert one.shape == other.shape
            assert (one - other).abs().max() < close * max(1.0, float(other.abs().max()))


def _tflops(mask: torch.Tensor | None, dtype: torch.dtype) -> float:
    q, k, v = (torch.randn(4, 16, 4096, 128, device="cuda", dtype=dtype) for _ in range(3))
    block_forward(q, k, v, causal=False, mask=mask, scale=0.1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        block_forward(q, k, v, causal=False, mask=mask, scale=0.1)
    end.record()
    end.synchronize()
    return 5 * 4 * 4 * 16 * 4096**2 * 128 / start.elapsed_time(end) / 1e9


def test_kernels_of_large_blocks_are_fast():
    mask = torch.ones(1, 1, 4096, 4096, device="cuda").tril() > 0
    found = _tflops(None, torch.bfloat16), _tflops(mask, torch.bfloat16)
    assert found[0] > 50 and found[1] > 25, found
