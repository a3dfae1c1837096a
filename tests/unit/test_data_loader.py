"""The loader's place survives any interruption, and torch's own DataLoader is taken over faithfully."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from thalweg.data.batch_feed import cycle
from thalweg.data.loader import build_loader
from thalweg.data.wrap_loader import PassthroughLoader, wrap_dataloader


class Squares(Dataset):
    """Sample i is (i, i * i); loading one draws from torch's global generator, as augmentations do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(index * index)


class Counting(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def loaders(size, world, batch, dataset=Squares, **options):
    return [
        build_loader(dataset(size), batch_size=batch, rank=rank, world_size=world, **options) for rank in range(world)
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_position_counts_what_was_handed_over_not_what_was_fetched(num_workers):
    loader = build_loader(Squares(40), batch_size=4, seed=5, num_workers=num_workers)
    iterator = iter(loader)
    for count in range(1, 4):
        x, y = next(iterator)
        assert torch.equal(x * x, y)
        assert loader.last_sample_ids == x.tolist()
        assert loader.state_dict()["position"] == 4 * count
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [x.tolist() for x, _ in iterator]
    fresh = build_loader(Squares(40), batch_size=4, seed=5, num_workers=2 - num_workers)
    fresh.load_state_dict(state)
    assert [x.tolist() for x, _ in fresh] == rest
    assert len(rest) == 7


@given(
    st.integers(5, 60),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_no_sample_is_lost_or_doubled_over_restarts_at_other_worlds(size, stages, shuffle):
    """Two epochs, interrupted anywhere, each time at another world size and micro-batch."""
    state = None
    seen: dict[int, Counter] = {0: Counter(), 1: Counter()}
    for world, batch, num_steps in [*stages, (2, 3, 10**6)]:
        group = loaders(size, world, batch, seed=9, shuffle=shuffle)
        for loader in group:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(2):
            if group[0].state_dict()["epoch"] > 1 or num_steps <= 0:
                break
            iterators = [iter(loader) for loader in group]
            while num_steps > 0:
                batch_of_each = [next(iterator, None) for iterator in iterators]
                assert len({b is None for b in batch_of_each}) == 1, "a rank ran out before the others"
                if batch_of_each[0] is None:
                    break
                num_steps -= 1
                for loader in group:
                    if not loader.last_num_duplicates:
                        seen[loader.epoch].update(loader.last_sample_ids)
        states = [loader.state_dict() for loader in group]
        assert all(other == states[0] for other in states), "the state must not depend on the rank"
        state = states[0]
    assert seen[0] == Counter(range(size))
    if state["epoch"] > 1:
        assert seen[1] == Counter(range(size))


@pytest.mark.parametrize("changes", [(1, 2, 3, 4), (4, 3, 2, 1), (2, 2, 2, 2), (3, 1, 4, 2)])
def test_row_37_resume_does_not_repeat_data(changes):
    """PAIN_POINTS 37: identical ids at another world size, step by step of the global batch of 12."""
    (alone,) = loaders(96, 1, 12, seed=1)
    reference = [sorted(alone.last_sample_ids) for _ in alone]
    got, state = [], None
    for world in changes:
        group = loaders(96, world, 12 // world, seed=1)
        for loader in group:
            if state:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in group]
        for _ in range(2):
            for iterator in iterators:
                next(iterator)
            got.append(sorted(i for loader in group for i in loader.last_sample_ids))
        state = group[0].state_dict()
    assert got == reference


def test_without_its_state_the_data_does_repeat():
    """Negative control of the test above."""
    first = build_loader(Squares(96), batch_size=12, seed=1)
    next(iter(first))
    second = build_loader(Squares(96), batch_size=12, seed=1)
    next(iter(second))
    assert first.last_sample_ids == second.last_sample_ids


def test_epochs_differ_and_set_epoch_names_one():
    loader = build_loader(Squares(30), batch_size=7)
    passes = [[i for _ in loader for i in loader.last_sample_ids] for _ in range(3)]
    assert all(sorted(ids) == list(range(30)) for ids in passes)
    assert len({tuple(ids) for ids in passes}) == 3
    assert loader.state_dict()["epoch"] == 3
    loader.set_epoch(1)
    assert [i for _ in loader for i in loader.last_sample_ids] == passes[1]
    loader.set_epoch(1)
    assert [i for _ in loader for i in loader.last_sample_ids] == passes[1]


def test_set_epoch_keeps_a_restored_position_and_drops_an_interrupted_one():
    loader = build_loader(Squares(30), batch_size=6)
    loader.set_epoch(4)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    state = loader.state_dict()
    rest = [x.tolist() for x, _ in iterator]
    resumed = build_loader(Squares(30), batch_size=6)
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert [x.tolist() for x, _ in resumed] == rest
    resumed.load_state_dict(state)
    resumed.set_epoch(5)
    assert len(list(resumed)) == 5
    resumed.load_state_dict(state)
    next(iter(resumed))
    resumed.set_epoch(4)
    assert len(list(resumed)) == 5


def test_a_broken_off_pass_is_followed_by_a_whole_one():
    loader = build_loader(Squares(20), batch_size=5, shuffle=False)
    first = [next(iter(loader))[0].tolist() for _ in range(3)]
    assert first == [[0, 1, 2, 3, 4]] * 3


def test_state_taken_in_the_last_batch_resumes_at_the_next_epoch():
    loader = build_loader(Squares(10), batch_size=4, drop_last=True)
    states = [loader.state_dict() for _ in loader]
    assert [(s["epoch"], s["position"]) for s in states] == [(0, 4), (1, 0)]
    fresh = build_loader(Squares(10), batch_size=4, drop_last=True)
    fresh.load_state_dict(states[-1])
    assert len(list(fresh)) == 2
    assert fresh.state_dict()["epoch"] == 2


def test_a_stale_iterator_says_so():
    loader = build_loader(Squares(20), batch_size=5)
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(RuntimeError, match="stale"):
        next(old)
    assert len(list(new)) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_global_random_state_is_left_alone(num_workers):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = build_loader(Squares(20), batch_size=5, num_workers=num_workers)
    for _ in loader:
        pass
    list(build_loader(Counting(20), batch_size=5, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_collate_and_torch_options_are_passed_on():
    loader = build_loader(
        Squares(8), batch_size=4, shuffle=False, collate_fn=lambda samples: [int(x) for x, _ in samples]
    )
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with_workers = build_loader(
        Squares(8), batch_size=4, shuffle=False, num_workers=1, persistent_workers=True, prefetch_factor=3
    )
    for _ in range(2):
        with_workers.set_epoch(0)
        assert [x.tolist() for x, _ in with_workers] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_changed_dataset_seed_or_version_is_refused():
    state = build_loader(Squares(20), batch_size=4, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"num_samples was 20 .* and is 21 now"):
        build_loader(Squares(21), batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"seed was 1 .* and is 2 now"):
        build_loader(Squares(20), batch_size=4, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="version"):
        build_loader(Squares(20), batch_size=4).load_state_dict({})


def test_a_world_that_the_data_cannot_fill_is_refused_at_once():
    class Untouchable(Squares):
        def __getitem__(self, index):
            raise AssertionError("nothing may be loaded")

    with pytest.raises(ValueError, match=r"3 samples for world size 4: use at most 3 ranks"):
        build_loader(Untouchable(3), batch_size=2, rank=0, world_size=4)
    with pytest.raises(ValueError, match=r"20 samples, but world size 4 x micro-batch 8 = 32"):
        build_loader(Untouchable(20), batch_size=8, rank=1, world_size=4, drop_last=True)
    with pytest.raises(ValueError, match="not a dataset"):
        build_loader(3, batch_size=8)


@given(st.integers(4, 60), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_a_stream_gives_each_sample_once_and_resumes(size, world, batch, num_steps, world_after):
    group = loaders(size, world, batch, Counting)
    seen: Counter = Counter()
    iterators = [iter(loader) for loader in group]
    for _ in range(num_steps):
        items = [next(iterator, None) for iterator in iterators]
        assert len({item is None for item in items}) == 1
        if items[0] is None:
            break
        for loader, item in zip(group, items, strict=True):
            assert item.tolist() == loader.last_sample_ids
            if not loader.last_num_duplicates:
                seen.update(loader.last_sample_ids)
    state = json.loads(json.dumps(group[0].state_dict()))
    group = loaders(size, world_after, batch, Counting)
    counts = set()
    for loader in group:
        loader.load_state_dict(state)
        number = 0
        for _ in loader:
            number += 1
            if not loader.last_num_duplicates and state["epoch"] == 0:
                seen.update(loader.last_sample_ids)
        counts.add(number)
    assert len(counts) == 1
    assert seen == Counter(range(size))


def test_limits_of_streams_are_said():
    with pytest.raises(ValueError, match="use num_workers 0 or 1"):
        build_loader(Counting(9), batch_size=2, num_workers=3)
    with pytest.raises(ValueError, match="shuffle inside it"):
        build_loader(Counting(9), batch_size=2, shuffle=True)
    with pytest.raises(TypeError):
        len(build_loader(Counting(9), batch_size=2))
    assert [b.tolist() for b in build_loader(Counting(5), batch_size=2, drop_last=True)] == [[0, 1], [2, 3]]
    with_worker = build_loader(Counting(5), batch_size=2, num_workers=1)
    assert [b.tolist() for b in with_worker] == [[0, 1], [2, 3], [4]]


def test_forever_goes_on_and_ends_on_nothing():
    loader = build_loader(Squares(4), batch_size=2)
    batches = cycle(loader)
    ids = [next(batches)[0].tolist() for _ in range(6)]
    assert sorted(i for pair in ids for i in pair) == sorted([*range(4)] * 3)
    assert loader.epoch == 2
    assert list(cycle([])) == []
    # A stream whose state was saved at its very end is empty once, and then starts again.
    stream = build_loader(Counting(4), batch_size=2)
    stream.load_state_dict(stream.state_dict() | {"position": 4})
    assert next(cycle(stream)).tolist() == [0, 1]


@pytest.mark.parametrize("dataset", [Squares, Counting])
@pytest.mark.parametrize(("size", "drop_last", "number"), [(10, False, 3), (10, True, 2), (8, False, 2)])
def test_the_last_batch_of_an_epoch_is_known_as_such(dataset, size, drop_last, number):
    loader = build_loader(dataset(size), batch_size=4, drop_last=drop_last)
    for _ in range(2):
        assert [loader.at_epoch_end for _ in loader] == [False] * (number - 1) + [True]
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states][-1] == (3, 0)


def user_loader(**options):
    return DataLoader(TensorDataset(torch.arange(21)), **({"batch_size": 4} | options))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_users_dataloader_is_dealt_out(shuffle):
    seen: Counter = Counter()
    orders = []
    for rank in range(2):
        loader = wrap_dataloader(user_loader(shuffle=shuffle), rank=rank, world_size=2, seed=3)
        ids = [x for (batch,) in loader for x in batch.tolist()]
        assert loader.batch_size == 4
        orders.append(ids)
        seen.update(ids)
    assert seen == Counter(range(21))
    assert (orders[0] != sorted(orders[0])) == shuffle


def test_a_weighted_sampler_keeps_its_weights_on_every_rank():
    weights = [0.0] * 11 + [1.0] * 10
    drawn = []
    for rank in range(3):
        torch.manual_seed(rank)
        sampler = WeightedRandomSampler(weights, num_samples=30)
        loader = wrap_dataloader(user_loader(sampler=sampler), rank=rank, world_size=3)
        assert len(loader) == 3
        drawn.append([x for (batch,) in loader for x in batch.tolist()])
    assert [len(ids) for ids in drawn] == [10, 10, 10]
    assert all(x >= 11 for ids in drawn for x in ids)
    # One draw dealt out, not three: two ranks are dealt the same thirty.
    samplers = [WeightedRandomSampler(weights, num_samples=30) for _ in range(2)]
    pair = [wrap_dataloader(user_loader(sampler=one), rank=rank, world_size=2) for rank, one in enumerate(samplers)]
    again = [x for loader in pair for (batch,) in loader for x in batch.tolist()]
    assert Counter(again) == Counter(x for ids in drawn for x in ids)


def test_a_users_dataloader_alone_keeps_its_order_and_resumes_by_counting():
    torch.manual_seed(0)
    plain = [batch.tolist() for (batch,) in user_loader(shuffle=True)]
    torch.manual_seed(0)
    loader = wrap_dataloader(user_loader(shuffle=True))
    assert isinstance(loader, PassthroughLoader)
    assert len(loader) == 6
    got, states = [], []
    for (batch,) in loader:
        got.append(batch.tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert got == plain
    torch.manual_seed(0)
    resumed = wrap_dataloader(user_loader(shuffle=True))
    resumed.load_state_dict(states[2])
    assert [batch.tolist() for (batch,) in resumed] == plain[3:]
    resumed.load_state_dict(states[-1])
    assert resumed.state_dict() == {"version": 1, "epoch": 1, "batches": 0, "samples": 0}
    of_no_size = wrap_dataloader(DataLoader(Squares(4), batch_sampler=[[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match="counts samples"):
        of_no_size.load_state_dict(build_loader(Squares(4), batch_size=1).state_dict())


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_users_workers_that_stay_do_not_change_the_order_of_a_resumed_pass(is_persistent):
    """torch draws the workers' seed where it makes them: for each pass, or for the first alone."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": 1, "persistent_workers": is_persistent}
    torch.manual_seed(0)
    plain = user_loader(**options)
    passes = [[batch.tolist() for (batch,) in plain] for _ in range(3)]
    torch.manual_seed(0)
    loader, got, states = wrap_dataloader(user_loader(**options)), [], []
    for _ in passes:
        for (batch,) in loader:
            got.append(batch.tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert got == list(itertools.chain(*passes))
    for number, batches in enumerate(passes[:2]):
        again = wrap_dataloader(user_loader(**options))
        for resumed in (again, loader):  # a new process; and one whose workers there are
            torch.manual_seed(7)
            resumed.load_state_dict(states[6 * number + 2])
            assert [batch.tolist() for (batch,) in resumed] == batches[3:]


def _wrapped(world: int, batch_size: int, sampler: Any = None, **options: Any) -> list[Any]:
    """A user's loader of the numbers below 24, as each rank has it."""
    data = TensorDataset(torch.arange(24))
    return [
        wrap_dataloader(
            DataLoader(data, batch_size, sampler=sampler and sampler(rank, world), **options),
            rank=rank,
            world_size=world,
        )
        for rank in range(world)
    ]


def _distributed(rank: int, world: int) -> DistributedSampler:
    return DistributedSampler(range(24), num_replicas=world, rank=rank, shuffle=True, seed=3)


def _take(loaders: list[Any], steps: int | None = None) -> list[int]:
    """The samples of so many steps of all ranks, or of the epoch's rest."""
    return [x for loader in loaders for (batch,) in itertools.islice(iter(loader), steps) for x in batch.tolist()]


LAYOUTS = [((1, 4), (2, 2)), ((1, 4), (4, 1)), ((2, 2), (1, 4)), ((3, 4), (1, 2)), ((1, 3), (1, 4))]  # ranks, batch


@pytest.mark.parametrize("sampler", [None, _distributed])
@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_a_users_dataloader_resumes_with_other_ranks(before, after, sampler, caplog):
    """As elastic training does: what was not handed over comes once, whatever the batches were."""
    first = _wrapped(*before, sampler)
    done = _take(first, 12 // (before[0] * before[1]))
    state = json.loads(json.dumps(first[0].state_dict()))
    second = _wrapped(*after, sampler)
    for loader in second:
        loader.load_state_dict(state)
    assert len(done) == 12 and sorted(done + _take(second)) == list(range(24))
    assert not caplog.records
    for loader in second:  # the control
        loader.load_state_dict({**state, **dict.fromkeys({"samples", "position"} & set(state), 8)})
    assert sorted(done + _take(second)) != list(range(24))


@pytest.mark.parametrize(("before", "after"), [((1, 4), (2, 2)), ((2, 2), (1, 4))])
def test_where_the_order_is_another_a_resume_says_so(before, after, caplog):
    first, second = _wrapped(*before, shuffle=True), _wrapped(*after, shuffle=True)
    _take(first, 3)
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
    assert "epoch 0 has another order" in caplog.text
    assert len(_take(second)) == 12 and sorted(_take(second)) == list(range(24))


def test_part_of_a_batch_comes_again(caplog):
    (first,), (second,) = _wrapped(1, 3), _wrapped(1, 4)
    _take([first], 2)
    second.load_state_dict(first.state_dict())
    assert _take([second]) == list(range(4, 24)) and "epoch 0 has another order" in caplog.text


def test_a_sampler_may_draw_more_than_there_is():
    drawn = [WeightedRandomSampler([1.0, 1.0], num_samples=30) for _ in range(3)]
    data = TensorDataset(torch.arange(2))
    loaders = [
        wrap_dataloader(DataLoader(data, 2, sampler=one), rank=rank, world_size=3) for rank, one in enumerate(drawn)
    ]
    assert len(_take(loaders)) == 30


def test_a_users_distributed_sampler_is_believed():
    sampler = DistributedSampler(range(21), num_replicas=2, rank=1, shuffle=True)
    loader = wrap_dataloader(user_loader(sampler=sampler), rank=1, world_size=2)
    assert isinstance(loader, PassthroughLoader)
    first = [batch.tolist() for (batch,) in loader]
    second = [batch.tolist() for (batch,) in loader]
    assert first != second, "set_epoch must reach the user's sampler"


def test_a_custom_batch_sampler_cannot_be_divided():
    class Mine(BatchSampler):
        pass

    data = TensorDataset(torch.arange(21))
    loader = DataLoader(data, batch_sampler=Mine(SequentialSampler(data), 4, False))
    with pytest.raises(ValueError, match="give the batch sampler its rank"):
        wrap_dataloader(loader, rank=0, world_size=2)
    assert len(list(wrap_dataloader(loader))) == 6
