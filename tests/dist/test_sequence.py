"""Ulysses against one process: odd lengths, masked shards, uneven heads, packed documents (row 39)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.parity import full
from tests.dist.tensor_models import build
from tests.dist.tensor_parity import Run, config_of
from tests.harness import run_ranks

TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}
VOCABULARY = 67


def _batch(kind: str, step: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of a Hugging Face model; labels are shifted inside of it."""
    generator = torch.Generator().manual_seed(90 + step)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    batch = {"input_ids": tokens, "labels": labels}
    if kind == "masked":  # the later shards have no target at all, and one row fewer than the other
        labels[:, length // 3 :] = -100
        labels[0, : length // 4] = -100
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        labels[0, length - 3 :] = -100
        batch["attention_mask"] = mask
    if kind == "packed":
        cut = length // 2 + 1
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        batch["position_ids"] = positions.expand(rows, -1).contiguous()
        labels[:, cut] = -100
    return batch


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inner = getattr(model, "module", model)
    if hasattr(inner, "main_input_name"):
        # With a key-value cache, its default, Hugging Face does not look for packed documents.
        return model(**batch, use_cache=False).loss if "position_ids" in batch else model(**batch).loss
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return model(batch["input_ids"], labels)


def _plain(name: str, kind: str, length: int, steps: int, rows: int) -> Run:
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        loss = _loss(model, _batch(kind, step, rows, length))
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


def _engine(
    name: str, kind: str, length: int, steps: int, rank: int, world: int, stage: int, sequence: int, tensor: int
) -> Run:
    import thalweg

    ranks = world // (sequence * tensor)
    rows = 2 * ranks
    own = slice(rank // (sequence * tensor), None, ranks)
    config = config_of(stage, tensor, rows, ranks, sequence_parallel_size=sequence)
    engine, *_ = thalweg.initialize(model=copy.deepcopy(build(name)), config=config)
    engine.train()
    losses, gradients = [], {}
    for step in range(steps):
        batch = {key: value[own] for key, value in _batch(kind, step, rows, length).items()}
        loss = _loss(engine, batch)
        engine.backward(loss)
        if step == 0:
            engine._parts.sharded.finish_window()
            gradients = {n: full(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    parameters = {n: full(p) for n, p in engine.module.named_parameters()}
    engine.close()
    return Run(losses, gradients, parameters)


def _cases(rank: int, world: int, cases: list[tuple[str, str, int, int, int, int]], steps: int) -> list[str]:
    torch.set_num_threads(1)
    failures = []
    for name, kind, length, stage, sequence, tensor in cases:
        plain = _plain(name, kind, length, steps, 2 * (world // (sequence * tensor)))
        found = _engine(name, kind, length, steps, rank, world, stage, sequence, tensor)
        differences = found.differences(plain)
        if any(not value <= TOLERANCE[key] for key, value in differences.items()):
            failures.append(f"{name} {kind} {length} stage {stage} sp {sequence} tp {tensor}: {differences}")
    return failures


def test_row39_odd_lengths_masks_heads_and_documents():
    pytest.importorskip("transformers")
    cases = [
        ("llama", "plain", 10, 0, 2, 1),
        ("llama", "plain", 11, 3, 2, 1),
        ("llama, 6 heads on 3, tied", "masked", 9, 1, 2, 1),
        ("llama, 4 heads on 1", "padded", 13, 2, 2, 1),
        ("qwen3", "packed", 13, 3, 2, 1),
        ("gpt2", "plain", 7, 2, 2, 1),
        ("reference, 5 heads", "masked", 9, 3, 2, 1),
        ("bert", "padded", 9, 1, 2, 1),
    ]
    for failures in run_ranks(_cases, 2, cases, 3, timeout=200):
        assert failures == []


def _without(rank: int, world: int) -> dict[str, float]:
    """What is lost without the token-weighted loss, or without the documents' mask."""
    import thalweg.parallel.sequence as rooms

    torch.set_num_threads(1)
    found, token_mean, documents_of = {}, rooms.token_mean, rooms.documents_of
    for kind in ("masked", "packed"):
        plain = _plain("llama", kind, 9, 2, 2)
        rooms.token_mean = (lambda total, count, team: total / count.clamp(min=1)) if kind == "masked" else token_mean
        rooms.documents_of = documents_of if kind == "masked" else (lambda position_ids: None)
        found[kind] = _engine("llama", kind, 9, 2, rank, world, 0, 2, 1).differences(plain)["gradient"]
    return found


def test_negative_controls_fail():
    pytest.importorskip("transformers")
    for found in run_ranks(_without, 2):
        assert all(value > 1e-3 for value in found.values()), found


def _too_short(rank: int, world: int) -> str:
    import thalweg

    engine, *_ = thalweg.initialize(
        model=build("reference"), config=config_of(0, 1, 1, 1, sequence_parallel_size=2)
    )
    tokens = torch.ones(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="1 token cannot be divided among 2 ranks") as caught:
        engine(tokens, tokens)
    engine.close()
    return str(caught.value)


def test_a_sequence_shorter_than_its_team_is_refused():
    assert all("sequence_parallel_size" in text for text in run_ranks(_too_short, 2))


def test_four_ranks_and_together_with_data_and_tensor_ranks():
    pytest.importorskip("transformers")
    cases = [
        ("llama", "padded", 11, 0, 4, 1),
        ("llama", "plain", 9, 3, 2, 1),
        ("reference", "plain", 9, 2, 2, 2),
        ("llama", "packed", 9, 1, 2, 2),
    ]
    for failures in run_ranks(_cases, 4, cases, 20, timeout=250):
        assert failures == []
