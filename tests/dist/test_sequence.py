"""Ulysses against one process: odd lengths, masked shards, uneven heads, packed documents (row 39)."""

from __future__ import annotations

import pytest
import torch

from tests.dist.sequence_parity import Case, engine, failures, plain
from tests.dist.tensor_models import build
from tests.dist.tensor_parity import config_of
from tests.harness import run_ranks


def test_row39_odd_lengths_masks_heads_and_documents():
    pytest.importorskip("transformers")
    cases = [
        Case("llama", "plain", 10, 0, 2),
        Case("llama", "plain", 11, 3, 2),
        Case("llama, 6 heads on 3, tied", "masked", 9, 1, 2),
        Case("llama, 4 heads on 1", "padded", 13, 2, 2),
        Case("qwen3", "packed", 13, 3, 2),
        Case("gpt2", "plain", 7, 2, 2),
        Case("reference, 5 heads", "masked", 9, 3, 2),
        Case("bert", "padded", 9, 1, 2),
    ]
    for found in run_ranks(failures, 2, cases, 3, timeout=200):
        assert found == []


def _without(rank: int, world: int) -> dict[str, float]:
    """What is lost without the token-weighted loss, or without the documents' mask."""
    import thalweg.parallel.losses as rooms
    import thalweg.parallel.parts as parts

    torch.set_num_threads(1)
    found, token_mean, documents_of = {}, rooms.token_mean_loss, parts.document_ids_from_positions
    for kind in ("masked", "packed"):
        case = Case("llama", kind, 9, 0, 2)
        wanted = plain(case, 2, world)
        rooms.token_mean_loss = (
            (lambda total, count, whole, team: total / count.clamp(min=1)) if kind == "masked" else token_mean
        )
        parts.document_ids_from_positions = documents_of if kind == "masked" else (lambda position_ids: None)
        found[kind] = engine(case, 2, rank, world).differences(wanted)["gradient"]
    return found


def test_negative_controls_fail():
    pytest.importorskip("transformers")
    for found in run_ranks(_without, 2):
        assert all(value > 1e-3 for value in found.values()), found


def _tiled(rank: int, world: int, cases: list[Case]) -> list[str]:
    import thalweg.parallel.sequence as rooms

    rooms._TILE_TOKENS = 4
    return failures(rank, world, cases, 2)


def test_masks_of_long_sequences_are_made_tile_by_tile():
    pytest.importorskip("transformers")
    cases = [
        Case("llama, 4 heads on 1", "packed", 14, 1, 2),
        Case("bert", "padded", 11, 0, 2),
        Case("mistral, window", "plain", 13, 3, 2),
    ]
    for found in run_ranks(_tiled, 2, cases):
        assert found == []


def _too_short(rank: int, world: int) -> str:
    import thalweg

    own, *_ = thalweg.initialize(
        model=build("reference"), config=config_of(0, 1, 1, 1, sequence_parallel_size=2)
    )
    tokens = torch.ones(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="1 token cannot be divided among 2 ranks") as caught:
        own(tokens, tokens)
    own.close()
    return str(caught.value)


def test_a_sequence_shorter_than_its_team_is_refused():
    assert all("sequence_parallel_size" in text for text in run_ranks(_too_short, 2))


def test_four_ranks_and_together_with_data_and_tensor_ranks():
    pytest.importorskip("transformers")
    cases = [
        Case("llama", "padded", 11, 0, 4),
        Case("llama", "plain", 9, 3, 2),
        Case("reference", "plain", 9, 2, 2, 2),
        Case("llama", "packed", 9, 1, 2, 2),
    ]
    for found in run_ranks(failures, 4, cases, 20, timeout=250):
        assert found == []
