"""Curricula, batches by tokens and random-LTD in an engine: sharded as whole, and resumed as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.models import token_rows, write_length_index
from tests.harness import run_ranks

REUSE_RANKS = True
T, VOCAB, SIZE = 16, 64, 48


def _build(stage: int, features: dict[str, Any], rows: Any = None, **config: Any) -> Any:
    import thalweg
    from thalweg.nn.transformer import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCAB, n_layer=4, n_head=2, n_embd=16, block_size=T))
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    return thalweg.initialize(model=model, config={**base, **features, **config}, training_data=rows)[0]


def _ltd(seed: int = 1234) -> dict[str, Any]:
    schedule = {"min_value": 6, "max_value": T, "schedule_config": {"require_steps": 8, "seq_per_step": 2}}
    ltd = {"enabled": True, "total_layer_num": 4, "random_ltd_layer_id": [1, 2], "random_ltd_schedule": schedule}
    return {"data_efficiency": {"enabled": True, "seed": seed, "data_routing": {"enabled": True, "random_ltd": ltd}}}


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB, (2, T + 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def _train(engine: Any, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(*_batch(step, rank))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def _routed(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    recompute = {"activation_checkpointing": {"policy": "full"}}
    found = {"stage 0": _train(_build(0, _ltd()), range(4), rank)}
    found["stage 3"] = _train(_build(3, _ltd(), **recompute), range(4), rank)
    found["other tokens"] = _train(_build(0, _ltd(seed=5)), range(4), rank)
    engine = _build(3, _ltd())
    _train(engine, range(2), rank)
    engine.save_checkpoint(folder)
    resumed = _build(1, _ltd())
    resumed.load_checkpoint(folder)
    found["resumed"] = _train(resumed, range(2, 4), rank)
    return found


def test_routed_tokens_sharded_recomputed_and_resumed(tmp_path: Path) -> None:
    for found in run_ranks(_routed, 2, str(tmp_path)):
        assert found["stage 3"] == pytest.approx(found["stage 0"], abs=2e-6)
        assert found["resumed"] == pytest.approx(found["stage 0"][2:], abs=2e-6)
        assert found["other tokens"] != pytest.approx(found["stage 0"], abs=1e-4)


def _rows() -> list[dict[str, torch.Tensor]]:
    return token_rows(SIZE, T, VOCAB)


def _sampling(kind: str, index: str) -> dict[str, Any]:
    pace = {"total_curriculum_step": 10, "difficulty_step": 1}
    metric = {"clustering_type": "schedule_based", "min_difficulty": 6, "max_difficulty": T, "schedule_config": pace}
    metric |= {f"index_to_{of}_path": f"{index}/seqlen/seqlen_index_to_{of}" for of in ("sample", "metric")}
    curriculum = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": metric}}}
    dynamic = {"dynamic_batching": {"enabled": True, "max_tokens": 40, "metrics_path": index}}
    sampling = {"enabled": True, "num_epochs": 2, **(curriculum if kind == "curriculum" else dynamic)}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}, "train_batch_size": 8}


def _sampled(
    rank: int, world: int, kind: str, index: str, folder: str, load: bool, num_batches: int
) -> list[list[int]]:
    """The lengths of the samples of each batch of this rank; a rank with another number of batches would hang."""
    from thalweg.data.dynamic_batching import pad_collate

    rows = _rows()
    engine = _build(3, _sampling(kind, index), rows)
    engine.training_dataloader.collate_fn = pad_collate
    if load:
        engine.load_checkpoint(folder)
    seen = []
    for number, batch in enumerate(engine.training_dataloader, 1):
        seen.append(sorted(engine.training_dataloader.last_sample_ids))
        engine.backward(engine(**batch))
        engine.step()
        if number == num_batches:
            break
    dist.barrier()
    engine.save_checkpoint(folder)
    return seen


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_length_index(_rows(), str(tmp_path_factory.mktemp("index")))


@pytest.mark.parametrize("kind", ["curriculum", "dynamic"])
def test_sampled_batches_go_on_at_another_world_size(kind: str, index: str, tmp_path: Path) -> None:
    whole = run_ranks(_sampled, 1, kind, index, str(tmp_path / "whole"), False, 12)[0]
    first = run_ranks(_sampled, 2, kind, index, str(tmp_path), False, 4)
    second = run_ranks(_sampled, 1, kind, index, str(tmp_path), True, 4)[0]
    joined = [ids for pair in zip(*first, strict=True) for ids in pair] + second
    assert joined == whole
    lengths = [[len(_rows()[i]["tokens_BT"]) for i in ids] for ids in whole]
    if kind == "curriculum":
        assert max(map(max, lengths[:4])) <= 7 < max(map(max, lengths[8:]))  # the first global batch has difficulty 7
    else:
        assert all(sum(batch) <= 40 for batch in lengths) and len({len(batch) for batch in lengths}) > 1
