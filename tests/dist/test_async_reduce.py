"""Reductions over the wire during the backward pass: the same bits, whenever they are done (row 5)."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import full_tensors
from tests.marks import nightly

STEPS = 3


def _both(rank, world, stage, accumulation):
    """A run over shared memory, and one over the wire with delays."""
    return _train(rank, world, stage, accumulation, True, 0.0), _train(rank, world, stage, accumulation, False, 0.01)


def _train(rank, world, stage, accumulation, shared, delay):
    import thalweg
    from thalweg.zero.fsdp2.async_reduce import AsyncReduction

    os.environ["THALWEG_SHARED_MEMORY"] = "1" if shared else "0"
    count = 0
    submit = AsyncReduction.submit

    def slow(self, work):
        nonlocal count
        count += 1
        seconds = random.Random(1000 * rank + count).random() * delay

        def late():
            time.sleep(seconds)
            work()

        submit(self, late)

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "cpu_kernels": "torch",
    }
    patch = pytest.MonkeyPatch()
    patch.setattr(AsyncReduction, "submit", slow)
    engine = thalweg.initialize(model=tiny_gpt(), config=config)[0]
    grads = None
    for step in range(STEPS * accumulation):
        tokens, labels = make_batch(step, 2 * world)
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        if step == 0 and accumulation == 1:
            # Complete as soon as backward() has returned.
            grads = [g.flatten().tolist() for g in full_tensors(p.grad for p in engine.module.parameters())]
        engine.step()
    weights = [p.flatten().tolist() for p in full_tensors(engine.module.parameters())]
    engine.close()
    patch.undo()
    return count, grads, weights


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_delays_change_no_bit(together, stage, accumulation):
    ranks = together(_both, 2)
    known, found = ranks[0][0], [late for _, late in ranks]
    assert known[0] == 0
    assert found[0][0] > 0, "nothing was reduced in the background"
    assert found[0][1:] == found[1][1:]
    assert found[0][1] == known[1]
    assert found[0][2] == known[2]
