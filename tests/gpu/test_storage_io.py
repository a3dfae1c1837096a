"""The buffers and the streamed update where parameters compute on a GPU."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from thalweg.optim.algorithms.elementwise import AdamW
from thalweg.optim.offload.nvme_step import NvmeStep
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapFile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


def test_a_ring_is_page_locked() -> None:
    ring = BufferRing(2, 1 << 20, pin=True)
    assert ring.pinned and ring[0].is_pinned()
    there = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    ring[1].random_()
    there.copy_(ring[1], non_blocking=True)
    assert torch.equal(there.cpu(), ring[1])
    del ring
    again = BufferRing(2, 1 << 20, pin=True)  # whose pages may be those that the first one has unlocked
    assert again.pinned and again[0].is_pinned()


def test_the_update_writes_copies_on_the_device(tmp_path: Path) -> None:
    values = [torch.randn(n) for n in (100_003, 17)]
    plain = [nn.Parameter(v.clone()) for v in values]
    params = [nn.Parameter(v.clone()) for v in values]
    copies = {p: torch.zeros(p.shape, dtype=torch.bfloat16, device="cuda") for p in params}
    reference, optimizer = AdamW(plain, lr=1e-2, fused=True), AdamW(params, lr=1e-2, fused=True)
    with closing(SwapFile(tmp_path, 8 << 20)) as swap:
        update = NvmeStep(optimizer, swap, BufferRing(3, 1 << 20, pin=True), compute_copies=copies)
        for _ in range(3):
            for a, b in zip(plain, params, strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            reference.step()
            update.apply()
        for a, b in zip(plain, params, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(copies[b].cpu(), a.to(torch.bfloat16))
