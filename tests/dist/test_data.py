"""Real ranks: each id once an epoch, over a restart with another number of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from tests.harness import run_ranks
from thalweg.data.loader import build_loader


def _some_steps(rank, world, size, batch, num_steps, state):
    loader = build_loader(
        TensorDataset(torch.arange(size)),
        batch_size=batch,
        rank=rank,
        world_size=world,
        seed=11,
        num_workers=rank % 2,
    )
    if state is not None:
        loader.load_state_dict(state)
    ids = []
    for number, (batch_ids,) in enumerate(loader):
        dist.all_reduce(torch.ones(1))  # hangs, and the test fails, if a rank had fewer batches
        assert batch_ids.tolist() == loader.last_sample_ids
        ids.append(loader.last_sample_ids)
        if number + 1 == num_steps:
            break
    return ids, loader.state_dict()


@pytest.mark.parametrize(("size", "worlds"), [(61, (1, 2, 3, 4)), (64, (4, 2, 1, 3))])
def test_exactly_once_over_real_ranks_and_changes_of_their_number(size, worlds):
    seen: Counter = Counter()
    state = None
    for world, num_steps in zip(worlds, (3, 2, 2, -1), strict=True):
        results = run_ranks(_some_steps, world, size, 3, num_steps, state)
        states = [state for _, state in results]
        assert all(other == states[0] for other in states)
        state = states[0]
        assert len({len(ids) for ids, _ in results}) == 1
        seen.update(i for ids, _ in results for step in ids for i in step)
    assert seen == Counter(range(size))
    assert state["epoch"] == 1
