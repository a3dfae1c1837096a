"""A job of 1,024 ranks on one processor."""

from __future__ import annotations

import torch

import thalweg
from tests.harness import run_ranks
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.plan.spec.cluster import Cluster

SHAPE = GPTConfig(vocab_size=2048, n_layer=2, n_head=2, n_embd=64, block_size=32)


def config_of(stage, dtype="fp32", accumulation=1):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    return config | ({dtype: {"enabled": True}} if dtype != "fp32" else {})


def _simulate(rank, world_size, cases, ranks):
    from tests.dist.simulated_rank import simulate_rank

    tokens = torch.zeros(1, 32, dtype=torch.int64)
    batch = {"tokens_BT": tokens, "labels_BT": tokens}
    return [simulate_rank(GPT(SHAPE), config_of(*case), batch, ranks, rank=3) for case in cases]


def test_shapes_and_traffic_of_1024_ranks_are_the_plans():
    cases = [(1, "fp32", 1), (2, "bf16", 2), (3, "fp32", 1), (3, "bf16", 2)]
    (found,) = run_ranks(_simulate, 1, cases, 1024, init=False)
    cluster = Cluster(num_nodes=1024, devices_per_node=1, device="cpu")
    for case, simulated in zip(cases, found, strict=True):
        planned = thalweg.plan(SHAPE.to_dict(), config_of(*case), cluster=cluster, sequence_length=32)
        assert simulated.traffic == planned.traffic, case
        assert simulated.shard_shapes["wte.weight"] == (2, 64)
        assert simulated.shard_shapes["blocks.0.norm1.weight"] == (1,)  # 64 rows: the ranks beyond have none
