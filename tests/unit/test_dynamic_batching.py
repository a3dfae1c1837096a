"""Micro-batches by tokens: none too large, every sample once, as many on each rank, the rate as the samples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import thalweg
from thalweg.data.dynamic_batching import DynamicBatchSampler, pad_collate
from thalweg.data.loader import StatefulLoader


def _sampler(lengths: list[int], max_tokens: int = 50, **options: Any) -> DynamicBatchSampler:
    defaults: dict[str, Any] = {"batch_size": 1, "num_samples": len(lengths), "lengths": np.array(lengths)}
    return DynamicBatchSampler(**{**defaults, "max_tokens": max_tokens, **options})


def _shares(lengths: list[int], world: int, **options: Any) -> list[list[Any]]:
    return [list(_sampler(lengths, rank=rank, world_size=world, **options).iter_slices(0)) for rank in range(world)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=80),
    st.integers(1, 4),
    st.sampled_from(["dataloader", "random", "seqlen"]),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_every_rank_gets_as_many_and_no_batch_is_too_large(
    lengths: list[int], world: int, order: str, largest: int | None
) -> None:
    ranks = _shares(lengths, world, picking_order=order, max_batch_size=largest)
    assert len({len(slices) for slices in ranks}) == 1
    batches = [batch.ids for slices in ranks for batch in slices]
    assert all(batch and sum(lengths[i] for i in batch) <= 50 and len(batch) <= (largest or 80) for batch in batches)
    seen = Counter(i for batch in batches for i in batch)
    fitting = {i for i, length in enumerate(lengths) if length <= 50}
    assert set(seen) <= fitting and set(seen.values()) <= {1} and len(fitting - set(seen)) < world
    assert all(b.is_last == (k == len(slices) - 1) for slices in ranks for k, b in enumerate(slices))


def test_batches_are_filled_and_the_tail_is_shared() -> None:
    lengths = [10] * 23
    first, second = _shares(lengths, 2)
    assert [len(batch.ids) for batch in first] == [5, 5, 1] and [len(batch.ids) for batch in second] == [5, 5, 2]
    assert [batch.stop - batch.start for batch in first] == [10, 10, 3]
    dropped, _ = _shares(lengths, 2, drop_last=True)
    assert [len(batch.ids) for batch in dropped] == [5, 5] and dropped[-1].is_last


def test_small_batches_are_left_out_and_orders_are_those_of_their_names() -> None:
    (slices,) = _shares([40, 40, 10, 10, 30], 1, min_batch_size=2)
    assert [batch.ids for batch in slices] == [[1, 2], [3, 4]]  # the first stands alone: 80 tokens are too many
    ascending = [i for batch in _shares([9, 3, 7, 1], 1, picking_order="seqlen")[0] for i in batch.ids]
    assert ascending == [3, 1, 2, 0]
    sampler = _sampler([1] * 40, picking_order="random")
    orders = [[i for batch in sampler.iter_slices(epoch) for i in batch.ids] for epoch in (0, 1)]
    assert orders[0] != orders[1] != sorted(orders[1]) == list(range(40))


def test_a_run_goes_on_with_what_was_not_handed_over_at_another_world_size() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 50, 120)]

    def run(world: int, num_batches: int | None, state: Any) -> tuple[list[int], Any]:
        loaders = [
            StatefulLoader(list(range(120)), _sampler(lengths, rank=rank, world_size=world, picking_order="random"))
            for rank in range(world)
        ]
        ids: list[int] = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        streams = [iter(loader) for loader in loaders]
        for _ in range(len(loaders[0]) if num_batches is None else num_batches):
            batches = [next(stream, None) for stream in streams]
            assert len({batch is None for batch in batches}) == 1
            ids += [i for batch in batches if batch is not None for i in batch.tolist()]
        return ids, loaders[0].state_dict()

    first, state = run(3, 7, None)
    second, state = run(2, 9, state)
    third, _ = run(4, None, state)
    assert Counter(first + second + third) == Counter(range(120))
    assert len(set(first) & set(run(2, 9, None)[0])) > 0  # the control: from the start they are the same again


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        assert (labels == -100).sum() == (input_ids == 0).sum()
        return self.weight  # a gradient of 1: an update tells the rate


def _engine(method: str, accumulation: int, lengths: list[int], **config: Any) -> Any:
    rows = [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n, dtype=torch.long)} for n in lengths]
    dynamic = {"enabled": True, "max_tokens": 50, "lr_scaling_method": method}
    return thalweg.initialize(
        model=Summing(),
        training_data=rows,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": dynamic}},
            **config,
        },
    )[0]


@pytest.mark.parametrize(("method", "power"), [("linear", 1.0), ("sqrt", 0.5), ("none", 0.0)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_update_takes_the_rate_of_its_samples(method: str, power: float, accumulation: int) -> None:
    """10 tokens five times, 25 twice, 50 once; the rate is that of train_batch_size samples."""
    engine = _engine(method, accumulation, [10] * 5 + [25] * 2 + [50] + [50])
    steps = []
    for batch in engine.training_dataloader:
        before = float(engine.module.weight.detach())
        engine.backward(engine(**batch))
        engine.step()
        if engine.was_step_applied():
            steps.append(before - float(engine.module.weight.detach()))
            assert engine.get_lr() == [0.5]
    samples = [5, 2, 1, 1] if accumulation == 1 else [7, 2]
    expected = [0.5 * (count / (2 * accumulation)) ** power for count in samples]
    assert steps == pytest.approx(expected)


def test_a_schedule_goes_on_under_the_scaled_rate() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = _engine("linear", 1, [50] * 4 + [25] * 4, scheduler=scheduler)
    steps = []
    for batch in engine.training_dataloader:
        before = float(engine.module.weight.detach())
        engine.backward(engine(**batch))
        engine.step()
        steps.append(before - float(engine.module.weight.detach()))
    assert steps == pytest.approx([0, 0.0, 0.05, 0.1, 0.3, 0.4], abs=1e-7)  # one sample is half the rate, two all of it


def test_data_that_cannot_be_batched_is_said() -> None:
    with pytest.raises(ValueError, match="leaves no batch for 1 ranks: 0 of 3 samples fit in max_tokens 50"):
        _engine("none", 1, [60] * 3)
    sampling = {"enabled": True, "dynamic_batching": {"enabled": True}}
    with pytest.raises(thalweg.config.errors.ConfigError, match="max_tokens"):  # type: ignore[attr-defined]
        thalweg.load_config({"data_efficiency": {"enabled": True, "data_sampling": sampling}})


def test_padding_is_at_the_end_of_each_field() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": np.array([4, 5, 6]), "n": 1}, {"input_ids": [7], "labels": [8], "n": 2}]
    batch = pad_collate(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [7, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, 6], [8, -100, -100]] and batch["n"].tolist() == [1, 2]
    assert pad_collate([(torch.ones(2), 1), (torch.ones(1), 0)])[0].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("name", ["labels", "labels_BT", "chosen_labels"])
def test_padding_of_labels_is_no_token_whatever_their_field_is_called(name: str) -> None:
    short, long = torch.tensor([5]), torch.tensor([5, 6, 7])
    batch = pad_collate([{"tokens_BT": one, name: one} for one in (long, short)])
    assert batch["tokens_BT"].tolist() == [[5, 6, 7], [5, 0, 0]] and batch[name].tolist() == [
        [5, 6, 7],
        [5, -100, -100],
    ]


def test_of_a_pair_the_second_is_labels_where_it_is_whole_numbers() -> None:
    rows = torch.tensor([5, 6, 7]), torch.tensor([5])
    assert pad_collate([(one, one) for one in rows])[1].tolist() == [[5, 6, 7], [5, -100, -100]]
    assert pad_collate([(one, one.float()) for one in rows])[1].tolist() == [[5, 6, 7], [5, 0, 0]]
    assert pad_collate([(one, one.ne(0)) for one in rows])[1].tolist() == [[True] * 3, [True, False, False]]
    assert pad_collate([(one, one, one) for one in rows])[2].tolist() == [[5, 6, 7], [5, 0, 0]]  # of three nobody knows
