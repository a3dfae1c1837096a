"""Ring attention against one process: balance, masks, documents, odd lengths, with every other axis (row 39)."""

from __future__ import annotations

import pytest
import torch

from tests.dist.sequence_parity import Case, engine, failures, plain
from tests.dist.tensor_models import build
from tests.dist.tensor_parity import config_of
from tests.harness import run_ranks


def test_row39_a_ring_of_two():
    pytest.importorskip("transformers")
    cases = [
        Case("llama", "plain", 10, 0, context=2),
        Case("llama", "plain", 11, 3, context=2),
        Case("llama, 6 heads on 3, tied", "masked", 9, 1, context=2),
        Case("llama, 4 heads on 1", "padded", 13, 2, context=2),
        Case("qwen3", "packed", 13, 3, context=2),
        Case("gpt2", "plain", 3, 2, context=2),
        Case("reference, 5 heads", "masked", 9, 3, context=2),
        Case("bert", "padded", 9, 1, context=2),
        Case("bert", "plain", 7, 1, context=2),
    ]
    for found in run_ranks(failures, 2, cases, 3, timeout=200):
        assert found == []


def test_a_ring_of_four_and_with_every_other_axis():
    pytest.importorskip("transformers")
    recomputed = (("activation_checkpointing", {"policy": "full"}),)
    cases = [
        Case("llama", "plain", 15, 0, context=4),
        Case("llama, 4 heads on 1", "padded", 14, 3, context=4),
        Case("reference", "plain", 9, 1, context=2),
        Case("qwen3", "packed", 13, 2, context=2, sequence=2, extra=recomputed),
        Case("reference, 5 heads", "masked", 11, 3, context=2, tensor=2),
    ]
    for found in run_ranks(failures, 4, cases, 20, timeout=250):
        assert found == []


def _controls(rank: int, world: int) -> dict[str, float]:
    """What is lost without the late keys of a rank, without documents, or without the way home of gradients."""
    import thalweg.parallel.context as ring
    import thalweg.parallel.parts as parts

    torch.set_num_threads(1)
    found = {}
    merge, documents_of, summed = ring._merge, parts.documents_of, ring._summed_groups

    def unweighted(out, lse, new_out, new_lse):
        out.add_(new_out * 0.5)

    for name, kind in (("merge", "plain"), ("documents", "packed"), ("gradients", "plain")):
        case = Case("llama", kind, 9, 0, context=2)
        wanted = plain(case, 2, world)
        ring._merge = unweighted if name == "merge" else merge
        parts.documents_of = (lambda positions: None) if name == "documents" else documents_of
        ring._summed_groups = (lambda x, repeat: 0.99 * summed(x, repeat)) if name == "gradients" else summed
        found[name] = engine(case, 2, rank, world).differences(wanted)["gradient"]
    return found


def test_negative_controls_fail():
    pytest.importorskip("transformers")
    for found in run_ranks(_controls, 2):
        assert all(value > 1e-3 for value in found.values()), found


def _refusals(rank: int, world: int) -> list[str]:
    import thalweg

    texts = []
    for changes in ({}, {"dropout": 0.5}):
        model = build("reference")
        for block in model.blocks:
            block.attention.dropout = changes.get("dropout", 0.0)
        own, *_ = thalweg.initialize(model=model, config=config_of(0, 1, 1, 1, context_parallel_size=2))
        length = 8 if changes else 1
        tokens = torch.ones(1, length, dtype=torch.long)
        with pytest.raises(ValueError) as caught:
            own(tokens, tokens)
        own.close()
        texts.append(str(caught.value))
    return texts


def test_too_short_sequences_and_dropped_weights_are_refused():
    for short, dropped in run_ranks(_refusals, 2):
        assert "1 token cannot be divided among 2 ranks" in short
        assert "attention dropout to 0" in dropped
