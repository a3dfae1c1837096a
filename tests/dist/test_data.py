"""Real ranks: each id once an epoch, over a restart with another number of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.harness import run_ranks
from thalweg.data.loader import build_loader

REUSE_RANKS = True


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


def _given_loader(rank, world, sizes, with_sampler):
    """The engine's sizes with a DataLoader of 4 rows a batch, and the rows that come; or the error."""
    import thalweg

    rows = TensorDataset(torch.randn(32, 4))
    sampler = DistributedSampler(rows, world, rank) if with_sampler else None
    config = {**sizes, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    try:
        engine, _, own, _ = thalweg.initialize(model=nn.Linear(4, 1), training_data=loader, config=config)
    except ValueError as error:
        return str(error)
    ((batch,), *_) = own
    return engine.train_micro_batch_size_per_gpu(), engine.train_batch_size(), len(batch)


@pytest.mark.parametrize("with_sampler", [False, True])
def test_a_dataloaders_batches_are_the_configs(with_sampler):
    cases = [{"train_micro_batch_size_per_gpu": 2}, {"train_batch_size": 8, "gradient_accumulation_steps": 2}]
    for sizes in cases:
        for said in run_ranks(_given_loader, 2, sizes, with_sampler):
            assert "batch_size 4" in said and "train_micro_batch_size_per_gpu is 2" in said
    open_ones = {"train_micro_batch_size_per_gpu": "auto"}, {"train_batch_size": 16}, {"gradient_accumulation_steps": 2}
    for sizes in (open_ones[0] | {"train_batch_size": "auto"}, *open_ones[1:]):
        whole = 8 if "auto" in sizes.values() else 16
        assert run_ranks(_given_loader, 2, sizes, with_sampler) == [(4, whole, 4)] * 2
    assert run_ranks(_given_loader, 2, {"train_micro_batch_size_per_gpu": 4}, with_sampler) == [(4, 8, 4)] * 2
