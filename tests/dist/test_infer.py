"""Inference under a launcher: ranks share a model's work and all get its result."""

from __future__ import annotations

import time
from typing import Any

import torch

import thalweg
from tests.harness import run_ranks
from tests.unit.infer_models import tiny_decoder
from thalweg.infer.parallel.process_group import WorkerDiedError

DEGREES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tensor_parallel": {"tp_size": 2}}),
    ("qwen2_moe", {"tensor_parallel": {"tp_size": 1}, "moe": {"enabled": True, "ep_size": 2}}),
    ("gpt2", {"tensor_parallel": {"tp_size": 2}, "pipeline_parallel": 2}),
]
PROMPT = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]


def _generate(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for kind, degrees in DEGREES:
        engine = thalweg.init_inference(tiny_decoder(kind), degrees, dtype="fp32")
        tokens = torch.tensor(PROMPT)
        got = engine.generate(tokens, max_new_tokens=8, do_sample=False)
        want = engine.module.generate(tokens, max_new_tokens=8, do_sample=False)
        torch.manual_seed(rank)  # draws are rank 0's of each group
        drawn = engine.generate(tokens, max_new_tokens=8, do_sample=True)
        found.append((torch.equal(got, want), drawn.tolist()))
        engine.close()
    return found


def test_two_groups_of_two_give_the_model_s_tokens_on_every_rank() -> None:
    results = run_ranks(_generate, 4)
    assert all(equal for found in results for equal, _ in found)
    for number in range(len(DEGREES)):
        drawn = [found[number][1] for found in results]
        assert drawn[0] == drawn[1] and drawn[2] == drawn[3]


def _die(rank: int, world: int) -> str:
    engine = thalweg.init_inference(tiny_decoder("llama"), mp_size=2, dtype="fp32")
    tokens = torch.tensor(PROMPT)
    engine.generate(tokens, max_new_tokens=2, do_sample=False)
    if rank == 1:
        engine.close()  # it leaves the group as it would by its death
        return "left"
    begun = time.monotonic()
    try:
        for _ in range(1000):
            engine.generate(tokens, max_new_tokens=20, do_sample=False)
    except WorkerDiedError as error:
        assert time.monotonic() - begun < 20
        return str(error)
    return "nothing happened"


def test_a_rank_that_leaves_ends_the_others_generation() -> None:
    error, left = run_ranks(_die, 2)
    assert left == "left" and "rank 1 of 2 is gone" in error
