"""The same engine on CUDA, one process; NCCL's own collectives and FSDP2's streams."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.dist.models import make_batch, tiny_gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


def _losses(stage: int, dtype: str, steps: int = 8, *, deferred: bool = False) -> list[float]:
    import thalweg

    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "log_level": "error",
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if deferred:
        torch.manual_seed(0)
        with thalweg.zero.Init():
            model = tiny_gpt()
        assert all(parameter.is_meta for parameter in model.parameters())
    else:
        model = tiny_gpt().cuda()
    engine = thalweg.initialize(model=model, config=config)[0]
    losses = []
    for step in range(steps):
        tokens, labels = (part.cuda() for part in make_batch(step, 4))
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _plain(steps: int = 8) -> list[float]:
    model = copy.deepcopy(tiny_gpt()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        tokens, labels = (part.cuda() for part in make_batch(step, 4))
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_stages_equal_a_plain_loop(stage, dtype, tolerance):
    assert _losses(stage, dtype) == pytest.approx(_plain(), abs=tolerance)


def test_a_model_without_memory_trains_as_another():
    """Built under ``zero.Init``, materialised on the device shard by shard."""
    assert _losses(3, "fp32", deferred=True) == pytest.approx(_losses(3, "fp32"), abs=1e-4)
