"""ZeRO++ on CUDA: the codes are those of the CPU, and every mix trains over NCCL."""

from __future__ import annotations

import os

import pytest
import torch

from tests.dist.models import make_batch, tiny_gpt
from tests.harness import run_ranks
from thalweg.comm.quantization import BlockQuantizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]
MIXES = {
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "LoCo": {"zero_quantized_gradients": True, "zeropp_loco_param": {}},
    "both": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
}


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_the_cpu(bits):
    quantizer, values = BlockQuantizer(bits), torch.randn(5000)
    payloads = []
    for device in ("cpu", "cuda"):
        payload = torch.zeros(quantizer.num_bytes(5000), dtype=torch.uint8, device=device)
        quantizer.quantize(values.to(device), payload)
        out = torch.empty(5000, device=device)
        quantizer.dequantize(payload, out)
        payloads.append((payload.cpu(), out.cpu()))
    assert torch.equal(payloads[0][0], payloads[1][0])
    assert torch.equal(payloads[0][1], payloads[1][1])


def _losses(rank: int, world: int, mix: dict, hosts: bool) -> list[float]:
    import thalweg

    if hosts:
        os.environ["THALWEG_HOST"] = f"host {rank // 2}"
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **mix},
        "log_level": "error",
    }
    engine = thalweg.initialize(model=tiny_gpt().cuda(), config=config)[0]
    losses = []
    for step in range(6):
        tokens, labels = (part.cuda() for part in make_batch(step, 2 * world))
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MIXES)
def test_mixes_over_nccl(name):
    plain = run_ranks(_losses, 2, {}, False, device="cuda")
    mixed = run_ranks(_losses, 2, MIXES[name], False, device="cuda")
    for a, b in zip(plain, mixed, strict=True):
        assert a == pytest.approx(b, abs=6e-2)
        assert a != b


@pytest.mark.parametrize(
    ("mix", "tolerance"),
    [
        ({"zero_hpz_partition_size": 2}, 1e-5),
        ({"mics_shard_size": 2}, 1e-5),
        ({"zero_hpz_partition_size": 2, **MIXES["both"]}, 6e-2),
    ],
)
def test_groups_over_nccl(mix, tolerance):
    plain = run_ranks(_losses, 4, {}, True, device="cuda")
    mixed = run_ranks(_losses, 4, mix, True, device="cuda")
    for a, b in zip(plain, mixed, strict=True):
        assert a == pytest.approx(b, abs=tolerance)
