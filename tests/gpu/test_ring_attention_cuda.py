"""Blocks of ring attention on CUDA: flash kernels against the formula, and their speed."""

from __future__ import annotations

import pytest
import torch

from thalweg.ops.attention.block import block_backward, block_forward, reference_backward, reference_forward

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


def test_the_flash_kernel_is_used_and_fast():
    q, k, v = (torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    block_forward(q, k, v, causal=False, mask=None, scale=0.1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        block_forward(q, k, v, causal=False, mask=None, scale=0.1)
    end.record()
    end.synchronize()
    tflops = 5 * 4 * 4 * 16 * 4096**2 * 128 / start.elapsed_time(end) / 1e9
    assert tflops > 50, tflops
