"""Each sample id once an epoch over all ranks, also when the world changes in mid-epoch (rows 37, R8)."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.data.sampler import EpochSampler, permutation, rank_slice_bounds

worlds = st.integers(1, 5)
batches = st.integers(1, 5)


def plans(size: int, world: int, batch: int, **options) -> list[EpochSampler]:
    return [EpochSampler(size, batch, rank=rank, world_size=world, **options) for rank in range(world)]


def steps(size: int, world: int, batch: int, position: int = 0, epoch: int = 0, **options):
    """The shares of all ranks, step by step; fails when ranks get different numbers of batches."""
    each = [list(plan.iter_slices(epoch, position)) for plan in plans(size, world, batch, **options)]
    return list(zip(*each, strict=True))


@given(st.integers(1, 120), worlds, batches, st.booleans(), st.integers(0, 3), st.integers(-5, 1 << 70))
@settings(deadline=None, max_examples=300)
def test_an_epoch_gives_each_id_once(size, world, batch, shuffle, epoch, seed):
    if size < world:
        with pytest.raises(ValueError, match=f"{size} samples for world size {world}"):
            plans(size, world, batch)
        return
    rows = steps(size, world, batch, epoch=epoch, shuffle=shuffle, seed=seed)
    shares = [share for row in rows for share in row]
    fresh = [i for share in shares if not share.num_duplicates for i in share.ids]
    assert Counter(fresh) == Counter(range(size))
    assert all(1 <= len(share.ids) <= batch for share in shares)
    repeated = sum(share.num_duplicates for share in shares)
    assert repeated == (-size % world if batch == 1 else 0)
    assert len(rows) == len(plans(size, world, batch)[0])
    for row in rows:
        assert len({(share.start, share.stop) for share in row}) == 1
        lengths = [len(share.ids) for share in row]
        assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 120), worlds, batches)
@settings(deadline=None)
def test_drop_last_leaves_out_less_than_a_step(size, world, batch):
    if size < world * batch:
        with pytest.raises(ValueError, match=r"cannot fill one step.*drop_last"):
            plans(size, world, batch, drop_last=True)
        return
    rows = steps(size, world, batch, drop_last=True)
    ids = [i for row in rows for share in row for i in share.ids]
    assert len(ids) == len(set(ids)) == size // (world * batch) * world * batch
    assert all(len(share.ids) == batch for row in rows for share in row)


@given(
    st.integers(5, 150),
    st.lists(st.tuples(worlds, batches, st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=300)
def test_changing_world_and_batch_in_mid_epoch_keeps_the_ids(size, stages, seed):
    """A job that stops and comes back otherwise divided goes on in the same order."""
    order = permutation(size, seed, 0).tolist()
    position, seen = 0, []
    for world, batch, num_steps in [*stages, (1, 4, size)]:
        for row in steps(size, world, batch, position, seed=seed)[:num_steps]:
            start, stop = row[0].start, row[0].stop
            assert start == position
            fresh = [i for share in row if not share.num_duplicates for i in share.ids]
            assert fresh == order[start:stop]
            assert sum(share.num_duplicates for share in row) == max(0, world - (stop - start))
            seen += fresh
            position = stop
    assert seen == order


@pytest.mark.parametrize(("world", "batch", "accumulation"), [(1, 8, 1), (2, 4, 1), (4, 1, 2), (2, 1, 4), (8, 1, 1)])
def test_the_ids_of_a_global_batch_do_not_depend_on_its_division(world, batch, accumulation):
    rows = steps(64, world, batch, seed=3)
    order = permutation(64, 3, 0).tolist()
    for number in range(64 // 8):
        window = rows[number * accumulation : (number + 1) * accumulation]
        assert [i for row in window for s in row for i in s.ids] == order[number * 8 : number * 8 + 8]


@given(st.integers(0, 500), worlds)
@settings(deadline=None)
def test_shares_are_contiguous_and_even(total, world):
    bounds = [rank_slice_bounds(total, rank, world) for rank in range(world)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def test_the_permutation_is_frozen_and_shuffles():
    # These numbers must never change: a checkpoint of any version resumes by them.
    assert permutation(10, seed=0, epoch=0).tolist() == [1, 4, 0, 9, 6, 5, 3, 7, 8, 2]
    assert permutation(10, seed=1234, epoch=7).tolist() == [7, 3, 1, 9, 4, 5, 0, 2, 8, 6]
    assert permutation(0, 0, 0).tolist() == []
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64
    # Each of the 24 orders of four turns up about 1/24 of the time: a chi-square far below its 1e-6 quantile.
    counts = Counter(tuple(permutation(4, 0, epoch)) for epoch in range(4800))
    chi2 = sum((counts[order] - 200) ** 2 / 200 for order in counts)
    assert len(counts) == 24
    assert chi2 < 73
    ranks = permutation(20_000, 0, 0)
    assert abs(np.corrcoef(ranks, np.arange(20_000))[0, 1]) < 0.03


def test_wrong_ranks_and_sizes_are_refused():
    for options in ({"batch_size": 0}, {"rank": 2, "world_size": 2}, {"world_size": 0}, {"rank": -1}):
        with pytest.raises(ValueError, match="at least 1"):
            EpochSampler(**({"num_samples": 9, "batch_size": 1} | options))
