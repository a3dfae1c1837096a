"""The plan against real ranks: traffic as the ledger counts it; jobs around a limit."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_ranks
from thalweg.nn.transformer import GPT, GPTConfig

SHAPE = GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=64, block_size=32)


def config_of(stage, dtype="fp32", accumulation=1, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return config | ({dtype: {"enabled": True}} if dtype != "fp32" else {})


def train(engine, steps, accumulation, rank):
    for _ in range(steps * accumulation):
        tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(rank))
        engine.backward(engine(tokens, tokens))
        engine.step()


def _ledger(rank, world_size, cases, hosts):
    import os

    import thalweg

    if hosts > 1:
        os.environ["THALWEG_HOST"] = f"host{rank * hosts // world_size}"
    found = []
    for stage, dtype, accumulation in cases:
        torch.manual_seed(1)
        engine, *_ = thalweg.initialize(model=GPT(SHAPE), config=config_of(stage, dtype, accumulation))
        train(engine, 2, accumulation, rank)
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        before = {kind: engine.ledger.total(kind).sent_bytes for kind in kinds}
        train(engine, 1, accumulation, rank)
        after = {kind: engine.ledger.total(kind).sent_bytes for kind in kinds}
        found.append({kind: after[kind] - before[kind] for kind in kinds if after[kind] > before[kind]})
        engine.close()
    return found


CASES = [(stage, dtype, n) for stage in range(4) for dtype, n in (("fp32", 1), ("bf16", 2))]


@pytest.mark.parametrize(("world_size", "hosts"), [(2, 1), (2, 2)])
def test_traffic_is_what_the_ledger_counts(world_size, hosts):
    import thalweg
    from thalweg.plan.cluster import Cluster

    cluster = Cluster(num_nodes=hosts, devices_per_node=world_size // hosts, device="cpu")
    for found in run_ranks(_ledger, world_size, CASES, hosts):
        for (stage, dtype, accumulation), counted in zip(CASES, found, strict=True):
            config = config_of(stage, dtype, accumulation)
            planned = thalweg.plan(SHAPE.to_dict(), config, cluster=cluster, sequence_length=32).traffic
            assert planned == counted, (stage, dtype, accumulation)


def _around_the_limit(rank, world_size, widths, limit):
    """(width, refused, peak, planned total) of jobs of growing size under one limit."""
    import gc

    import thalweg
    from thalweg.plan import preflight
    from thalweg.observe import resident_mib
    from thalweg.plan.preflight import DoesNotFit

    preflight._SEARCH_SECONDS = 0.1  # what would fit instead is not asked here
    found = []
    for width in widths:
        shape = GPTConfig(vocab_size=2048, n_layer=2, n_head=2, n_embd=width, block_size=64)
        model = GPT(shape)
        config = config_of(1, memory={"host_limit": limit})
        try:
            engine, *_ = thalweg.initialize(model=model, config=config)
            tokens = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(rank))
            for _ in range(2):
                engine.backward(engine(tokens, tokens))
                engine.step()
            found.append((width, False, resident_mib(peak=True), None))
            engine.close()
            del engine
        except DoesNotFit as error:
            total = error.plan.per_rank.total / 2**20 if error.plan else None
            found.append((width, True, resident_mib(peak=True), total))
        del model
        gc.collect()
    return found


def test_rows_21_22_thirty_sizes_around_a_limit_none_exceeds_it():
    # Each size in a process of its own would be purer and thirty times the imports.
    limit = 640
    widths = list(range(64, 64 + 30 * 32, 32))
    (found,) = run_ranks(_around_the_limit, 1, widths, f"{limit}MiB", timeout=280)
    ran = [entry for entry in found if not entry[1]]
    refused = [entry for entry in found if entry[1]]
    assert len(found) == 30
    assert ran
    assert refused
    assert max(peak for _, _, peak, _ in ran) <= 1.05 * limit
    # Sizes grow, so the refused ones are the last ones.
    assert max(width for width, *_ in ran) < min(width for width, *_ in refused)
    assert all(total is None or total > 0.9 * limit for *_, total in refused)


def _regardless(rank, world_size, modes):
    import thalweg
    from thalweg.plan.preflight import DoesNotFit

    found = []
    for mode in modes:
        try:
            config = config_of(0, memory={"host_limit": "10MiB", "preflight": mode})
            engine, *_ = thalweg.initialize(model=GPT(SHAPE), config=config)
            train(engine, 1, 1, rank)
            engine.close()
            found.append("ran")
        except DoesNotFit as error:
            found.append(str(error))
    return found


def test_the_user_may_go_on_regardless():
    for refused, warned, off in run_ranks(_regardless, 2, ["refuse", "warn", "off"]):
        assert warned == off == "ran"
        assert "does not fit" in refused
        assert "optimizer" in refused
        assert '"preflight": "warn"' in refused
