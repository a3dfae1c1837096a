"""Experts on CUDA: the grouped kernel and the layer against the loop on the processor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from thalweg.moe import MoE
from thalweg.ops.grouped_mm import RowGroups, grouped_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_tf32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("width", [64, 60])  # 60: rows that the kernel refuses
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_grouped_products_equal_the_processor(flipped, width, dtype, tolerance):
    torch.manual_seed(0)
    counts = torch.tensor([70, 0, 130, 33])
    groups = RowGroups(counts, torch.arange(4).repeat_interleave(counts))
    x = torch.randn(233, width, dtype=dtype)
    weight = torch.randn(4, width, 48, dtype=dtype) if flipped else torch.randn(4, 48, width, dtype=dtype)
    bias = torch.randn(4, 48, dtype=dtype)
    upstream = torch.randn(233, 48, dtype=dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in (x, weight, bias)]
        placed = RowGroups(counts.to(device), groups.group_ids.to(device))
        y = grouped_linear(leaves[0], leaves[1], placed, leaves[2], in_features_first=flipped)
        results.append([y, *torch.autograd.grad(y, leaves, upstream.to(device))])
    for here, there in zip(*results, strict=True):
        scale = here.abs().max()
        assert (here - there.cpu()).abs().max() <= tolerance * scale


def test_the_layer_equals_the_processor():
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    layer = MoE(64, expert, 8, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    x = torch.randn(4, 50, 64)
    on_gpu = copy.deepcopy(layer).cuda()
    y, loss, counts = layer(x)
    z, other, there = on_gpu(x.cuda())
    assert torch.equal(counts, there.cpu()) and torch.allclose(loss, other.cpu(), atol=1e-5)
    assert torch.allclose(y, z.cpu(), atol=1e-3)
