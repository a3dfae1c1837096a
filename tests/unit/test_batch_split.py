"""The parts of a batch cover it once, with each token's own label, position and neighbours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thalweg.data.engine_loader import SequenceSplitCollate
from thalweg.observe.step_meter import SEQUENCE_META_KEY, StepMeter
from thalweg.parallel.sequence.batch_split import build_splitter
from thalweg.parallel.sequence.partition import SequencePartition


class _HuggingFace(nn.Module):
    main_input_name = "input_ids"

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, **kwargs):
        return input_ids


def _parts(batch, context, heads):
    size = context * heads
    return [
        build_splitter(_HuggingFace(), SequencePartition(context, heads, r)).split_batch(batch) for r in range(size)
    ]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 20))
def test_every_token_is_in_one_part_with_its_next_token_as_label(context, heads, more):
    length = context * heads + more
    tokens = torch.arange(2 * length).view(2, length)
    parts = _parts({"input_ids": tokens, "labels": tokens}, context, heads)
    positions = torch.cat([part["position_ids"][0] for part in parts])
    assert sorted(positions.tolist()) == list(range(length))
    lengths = [part["input_ids"].shape[1] for part in parts]
    assert max(lengths) - min(lengths) <= 1
    for part in parts:
        own = part["position_ids"][0]
        assert torch.equal(part["input_ids"], tokens[:, own])
        following = torch.where(own + 1 < length, tokens[:, (own + 1) % length], -100)
        assert torch.equal(part["shift_labels"], following)
        assert part[SEQUENCE_META_KEY].length == length


@given(st.integers(1, 6), st.integers(0, 40))
def test_causal_work_is_even_on_the_ring(context, more):
    length = 2 * context * (1 + more)
    work = [
        sum(
            position + 1
            for start, stop in SequencePartition(context).cp_spans(length, r)
            for position in range(start, stop)
        )
        for r in range(context)
    ]
    assert max(work) == min(work)
    plain = [sum(range(r * length // context, (r + 1) * length // context)) for r in range(context)]
    assert context == 1 or max(plain) > 1.4 * min(plain)  # consecutive shares would not be


def test_masks_and_documents_are_those_of_the_whole():
    tokens = torch.arange(14).view(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    padded = _parts({"input_ids": tokens, "attention_mask": mask}, 2, 1)
    assert all(torch.equal(part[SEQUENCE_META_KEY].padding, mask.bool()) for part in padded)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = _parts({"input_ids": tokens, "position_ids": positions.expand(2, -1)}, 2, 1)
    for part in packed:
        assert part[SEQUENCE_META_KEY].documents.tolist() == [[0, 0, 0, 1, 1, 1, 1]] * 2
    assert torch.equal(packed[0]["position_ids"][0], torch.tensor([0, 1, 3]))


def test_batches_without_names_are_left_whole():
    collate = SequenceSplitCollate(
        lambda samples: tuple(samples), build_splitter(_HuggingFace(), SequencePartition(2, 1, 0))
    )
    assert collate([torch.ones(1, 4), torch.ones(1, 4)])[0].shape == (1, 4)
    with pytest.raises(ValueError, match="2 tokens cannot be divided among 3 ranks"):
        SequenceSplitCollate(lambda samples: samples, build_splitter(_HuggingFace(), SequencePartition(3, 1, 0)))(
            {"input_ids": torch.ones(1, 2)}
        )


def test_shared_rows_are_counted_once():
    seen = []
    recorder = SimpleNamespace(step=seen.append)
    meter = StepMeter(recorder, num_batch_copies=2)
    part = _parts({"input_ids": torch.ones(2, 6, dtype=torch.long)}, 2, 1)[0]
    meter.add_batch((), part)
    meter.add_batch((), {"input_ids": torch.ones(2, 6, dtype=torch.long)})
    meter.step(1, lr=0.0, grad_norm=None, loss_scale=None, skipped=False)
    assert (seen[0].samples, seen[0].tokens) == (2, 12)
