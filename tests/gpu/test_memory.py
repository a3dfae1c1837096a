"""Tiles, activation offload and low-bit state on CUDA: streams, pinned memory, fp32 accumulation."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.nn.functional as F

from thalweg.activation_checkpointing import offloaded_forward
from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)
from thalweg.activation_checkpointing.offload import CpuActivationOffloader, NvmeActivationOffloader
from thalweg.config.schema.zero import ZenFlow
from thalweg.nn import tiled, tiled_cross_entropy
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.optim.build import build_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


def _train(saver, steps=4):
    torch.manual_seed(0)
    shape = GPTConfig(vocab_size=97, n_layer=6, n_head=2, n_embd=64, block_size=64, dropout=0.1)
    model = GPT(shape).cuda()
    apply_activation_checkpointing(model, list(model.blocks), ActivationCheckpointPolicy("full"), saver)
    found = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        tokens = torch.randint(97, (4, 65), generator=g).cuda()
        torch.manual_seed(step)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found


@pytest.mark.parametrize("where", ["host", "disk"])
def test_offloaded_inputs_keep_their_bits(where, monkeypatch):
    monkeypatch.setattr(offloaded_forward, "MIN_OFFLOAD_BYTES", 1)
    want = _train(None)
    with tempfile.TemporaryDirectory() as folder:
        saver = CpuActivationOffloader(torch.device("cuda")) if where == "host" else NvmeActivationOffloader(folder)
        assert all(torch.equal(a, b) for a, b in zip(_train(saver), want, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_tiled_loss(dtype, tolerance):
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64).cuda().to(dtype), torch.randn(1000, 64).cuda().to(dtype)
    labels = torch.randint(1000, (300,)).cuda()
    labels[::7] = -100
    grads = []
    for tile in (None, 64):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if tile is None:
            loss = F.cross_entropy(F.linear(h, w).float(), labels)
        else:
            loss = tiled_cross_entropy(h, w, labels, tile_tokens=tile)
        loss.backward()
        grads.append([loss.detach(), h.grad.float(), w.grad.float()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_a_tiled_module():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)).cuda()
    x = torch.randn(2, 50, 16).cuda()
    plain(x).square().sum().backward()
    want = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    tiled(plain, 7)(x).square().sum().backward()
    assert all(torch.allclose(p.grad, g, atol=1e-3) for p, g in zip(plain.parameters(), want, strict=True))


@pytest.mark.parametrize("hyper", [{"state_dtype": "bf16"}, {"state_dtype": "int8"}, {}], ids=str)
def test_optimisers_step_as_on_the_cpu(hyper):
    delay = None if hyper else ZenFlow(topk_ratio=0.2, select_interval=3, update_interval=2, overlap_step=True)
    results = []
    for device in ("cpu", "cuda"):
        g = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(40, 300, generator=g).to(device))]
        optimizer = build_optimizer("AdamW", params, {"lr": 1e-2, **hyper}, zenflow_policy=delay)
        for _ in range(6):
            params[0].grad = torch.randn(40, 300, generator=g).to(device)
            optimizer.step()
        results.append(params[0].detach().cpu())
    assert (results[0] - results[1]).abs().max() < 1e-3
