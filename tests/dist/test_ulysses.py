"""Ulysses against one process: odd lengths, masked shards, uneven heads, packed documents (row 39)."""

from __future__ import annotations

import pytest
import torch

from tests.dist.sequence_parity import SequenceCase, find_mismatches, run_engine, run_plain
from tests.dist.tensor_models import build_model
from tests.dist.tensor_parity import make_config
from tests.harness import run_ranks
from tests.marks import nightly


def test_row39_odd_lengths_masks_heads_and_documents():
    pytest.importorskip("transformers")
    cases = [
        SequenceCase("llama", "plain", 10, 0, 2),
        SequenceCase("llama", "plain", 11, 3, 2),
        SequenceCase("llama, 6 heads on 3, tied", "masked", 9, 1, 2),
        SequenceCase("llama, 4 heads on 1", "padded", 13, 2, 2),
        SequenceCase("qwen3", "packed", 13, 3, 2),
        SequenceCase("gpt2", "plain", 7, 2, 2),
        SequenceCase("reference, 5 heads", "masked", 9, 3, 2),
        SequenceCase("bert", "padded", 9, 1, 2),
    ]
    for found in run_ranks(find_mismatches, 2, cases, 3, timeout=200):
        assert found == []


def _with_prefixes(rank: int, world: int, cases: list[SequenceCase]) -> list[str]:
    from peft import PrefixTuningConfig, get_peft_model

    import thalweg

    model = get_peft_model(build_model("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"needs PeftModelForCausalLM\.forward to take position_ids"):
        thalweg.initialize(model=model, config=make_config(0, 1, 1, 1, sequence_parallel_size=2))
    return find_mismatches(rank, world, cases, 3)


def test_a_model_in_the_wrapper_of_peft_is_the_model_with_its_adapters():
    """Not one with tokens of its own, of which each rank would put some before its part of the sequence."""
    pytest.importorskip("peft")
    cases = [
        SequenceCase("llama", "padded", 13, 1, 2, wrapped=True),
        SequenceCase("llama", "packed", 13, 3, context_parallel=2, wrapped=True),
    ]
    for found in run_ranks(_with_prefixes, 2, cases):
        assert found == []


def _without(rank: int, world: int) -> dict[str, float]:
    """What is lost without the token-weighted loss, or without the documents' mask."""
    import thalweg.parallel.sequence.batch_split as parts
    import thalweg.parallel.sequence.loss as rooms

    torch.set_num_threads(1)
    found, token_mean, documents_of = {}, rooms.token_mean_loss, parts.document_ids_from_positions
    for kind in ("masked", "packed"):
        case = SequenceCase("llama", kind, 9, 0, 2)
        wanted = run_plain(case, 2, world)
        rooms.token_mean_loss = (
            (lambda total, count, whole, team: total / count.clamp(min=1)) if kind == "masked" else token_mean
        )
        parts.document_ids_from_positions = documents_of if kind == "masked" else (lambda position_ids: None)
        found[kind] = run_engine(case, 2, rank, world).max_differences(wanted)["gradient"]
    return found


def test_negative_controls_fail():
    pytest.importorskip("transformers")
    for found in run_ranks(_without, 2):
        assert all(value > 1e-3 for value in found.values()), found


def _tiled(rank: int, world: int, cases: list[SequenceCase]) -> list[str]:
    import thalweg.parallel.sequence.sequence_parallel as rooms

    rooms._TILE_TOKENS = 4
    return find_mismatches(rank, world, cases, 2)


def test_masks_of_long_sequences_are_made_tile_by_tile():
    pytest.importorskip("transformers")
    cases = [
        SequenceCase("llama, 4 heads on 1", "packed", 14, 1, 2),
        SequenceCase("bert", "padded", 11, 0, 2),
        SequenceCase("mistral, window", "plain", 13, 3, 2),
    ]
    for found in run_ranks(_tiled, 2, cases):
        assert found == []


def _too_short(rank: int, world: int) -> str:
    import thalweg

    own, *_ = thalweg.initialize(
        model=build_model("reference"), config=make_config(0, 1, 1, 1, sequence_parallel_size=2)
    )
    tokens = torch.ones(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="1 token cannot be divided among 2 ranks") as caught:
        own(tokens, tokens)
    own.close()
    return str(caught.value)


def test_a_sequence_shorter_than_its_team_is_refused():
    assert all("sequence_parallel_size" in text for text in run_ranks(_too_short, 2))


@pytest.mark.parametrize("steps", [nightly(3), nightly(20)])
def test_four_ranks_and_together_with_data_and_tensor_ranks(steps):
    pytest.importorskip("transformers")
    cases = [
        SequenceCase("llama", "padded", 11, 0, 4),
        SequenceCase("llama", "plain", 9, 3, 2),
        SequenceCase("reference", "plain", 9, 2, 2, 2),
        SequenceCase("llama", "packed", 9, 1, 2, 2),
    ]
    for found in run_ranks(find_mismatches, 4, cases, steps, timeout=250):
        assert found == []
