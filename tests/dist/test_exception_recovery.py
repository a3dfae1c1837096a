"""After an exception in forward or backward the engine is at rest, and training goes on as if it had not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import bitwise_equal, full_tensors
from tests.marks import nightly


class _Fuse(torch.autograd.Function):
    """The identity, whose backward pass raises while ``fuse.burns``."""

    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.fuse.burns == "backward":
            raise FloatingPointError("burnt in backward")
        return grad, None


class Fused(nn.Module):
    """A block that fails on request."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.burns = block, ""

    def forward(self, x):
        if self.burns == "forward":
            raise FloatingPointError("burnt in forward")
        return _Fuse.apply(self.block(x), self)


def _train(rank, world, stage, burns, when, accumulation=1):
    import thalweg

    model = copy.deepcopy(tiny_gpt())
    fuse = model.blocks[1] = Fused(model.blocks[1])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "cpu_kernels": "torch",
    }
    engine, *_ = thalweg.initialize(model=model, config=config)
    raised, position = 0, 0
    while position < 4 * accumulation:
        tokens, labels = make_batch(position, 2 * world)
        fuse.burns = burns if position == when and not raised else ""
        try:
            engine.backward(engine(tokens[rank::world], labels[rank::world]))
        except FloatingPointError:
            raised += 1
            if burns == "backward":  # the window begins anew
                position -= position % accumulation
            continue
        engine.step()
        position += 1
    parameters = full_tensors(engine.module.parameters())
    engine.close()
    return raised, parameters


def _resumes(rank, world, stage, burns):
    torch.set_num_threads(1)
    equal = []
    for accumulation, when in ((1, 2), (2, 3)):
        raised, with_failure = _train(rank, world, stage, burns, when, accumulation)
        _, without = _train(rank, world, stage, "", when, accumulation)
        equal.append(raised == 1 and bitwise_equal(with_failure, without))
    return equal


@pytest.mark.parametrize("burns", ["forward", "backward"])
@pytest.mark.parametrize("stage", [nightly(0), nightly(1), nightly(2), 3])
def test_the_next_step_equals_a_run_that_never_failed(together, stage, burns):
    for equal in together(_resumes, 2):
        assert equal == [True, True]
