"""Bytes that a rank sends in a step, by the ledger, against the textbook's formula for each axis."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.comm.collectives.wire import AllReduceSum
from thalweg.comm.comms_logger import CollectiveCall
from thalweg.nn.transformer import GPT, GPTConfig

LAYERS, WIDTH, ROWS, LENGTH = 4, 32, 4, 16
ACTIVATION = 4 * ROWS * LENGTH * WIDTH  # bytes, of the whole batch
STATES = ("wire", "shared")


@dataclass(frozen=True)
class Axis:
    """``sent`` by all ``n`` ranks together, for ``parameters`` bytes of which ``units`` are in layers."""

    config: dict[str, Any]
    counts: Callable[[Any], bool]
    sent: Callable[[int, int, int], float]


def _zero(stage: int, gathers_again: bool = False) -> Axis:
    return Axis(
        {"zero_optimization": {"stage": stage}},
        lambda entry: entry.transport in STATES,
        lambda n, parameters, units: (n - 1) * (2 * parameters + (units if gathers_again else 0)),
    )


AXES = {
    **{f"stage {stage}": _zero(stage, stage == 3) for stage in range(4)},
    "tp": Axis(
        {"tensor_parallel": {"autotp_size": 4}},
        lambda entry: entry.transport == "tensor" and "blocks." in entry.module,
        lambda n, *_: n * 4 * LAYERS * ACTIVATION * 2 * (n - 1) / n,
    ),
    "sp": Axis(
        {"sequence_parallel_size": 4},
        lambda entry: entry.module == "attention" and entry.kind == "all_to_all",
        lambda n, *_: n * LAYERS * 8 * ACTIVATION / n * (n - 1) / n,
    ),
    "cp": Axis(
        {"context_parallel_size": 4},
        lambda entry: entry.module == "attention" and entry.kind == "send",
        lambda n, *_: n * LAYERS * 6 * ACTIVATION / n * (n - 1),
    ),
    "pp": Axis(
        {"pipeline": {"stages": 4}, "gradient_accumulation_steps": ROWS},
        lambda entry: entry.transport == "pipeline" and entry.kind == "send",  # without headers
        lambda n, *_: (n - 1) * 2 * ACTIVATION,
    ),
}


def _measure(rank: int, world: int) -> dict[str, tuple[int, int, int]]:
    """By axis: bytes that this rank sends in the second step, and bytes of parameters, all and in layers."""
    import thalweg

    os.environ["THALWEG_HOST"] = f"host{rank}"
    found = {}
    for name, axis in AXES.items():
        torch.manual_seed(0)
        shape = GPTConfig(vocab_size=64, n_layer=LAYERS, n_head=4, n_embd=WIDTH, block_size=LENGTH, tied=False)
        model = GPT(shape)
        parameters = 4 * sum(p.numel() for p in model.parameters())
        units = 4 * sum(p.numel() for p in model.blocks.parameters())
        by_rank, micros = name.startswith("stage"), axis.config.get("gradient_accumulation_steps", 1)
        config = {
            "train_micro_batch_size_per_gpu": ROWS // (world if by_rank else micros),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "log_level": "error",
            **axis.config,
        }
        engine, *_ = thalweg.initialize(model=model, config=config)
        tokens = torch.randint(0, 64, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        tokens = (tokens[rank::world] if by_rank else tokens)[:, :LENGTH]
        before = 0
        for _ in range(2):
            before = sum(entry.sent_bytes for entry in engine.ledger.entries() if axis.counts(entry))
            if name == "pp":
                engine.train_batch(itertools.cycle((row, row) for row in tokens.split(1)))
            else:
                engine.backward(engine(tokens, tokens))
                engine.step()
        after = sum(entry.sent_bytes for entry in engine.ledger.entries() if axis.counts(entry))
        found[name] = (after - before, parameters, units)
        engine.close()
    return found


def test_each_axis_sends_what_the_textbook_says() -> None:
    world = 4
    ranks = run_ranks(_measure, world)
    for name, axis in AXES.items():
        sent = sum(found[name][0] for found in ranks)
        assert sent == pytest.approx(axis.sent(world, *ranks[0][name][1:]), rel=1e-6), name
    by_stage = [sum(found[f"stage {stage}"][0] for found in ranks) for stage in range(4)]
    assert by_stage[0] == by_stage[1] == by_stage[2]
    assert by_stage[3] == pytest.approx(1.5 * by_stage[0], rel=0.03)  # all but the root, which is kept


def _sums(rank: int, world: int, dtype: torch.dtype) -> list[tuple[bool, bool, int]]:
    """For each size: whether it is the sum in rank order, whether what lies beside is untouched, bytes sent."""
    found = []
    for numel in (1, 2, 5, 6, 60, 1001):
        generator = torch.Generator().manual_seed(numel)
        every = [torch.randn(numel, generator=generator).to(dtype) for _ in range(world)]
        expected = every[0].clone()
        for other in every[1:]:
            expected += other
        memory = torch.full((numel + 8,), 7.0, dtype=dtype)
        given = memory[4:-4].copy_(every[rank])
        call = CollectiveCall()
        AllReduceSum(dist.group.WORLD)(given, call, 0.5)
        beside = torch.cat([memory[:4], memory[-4:]])
        found.append((torch.equal(given, expected * 0.5), bool((beside == 7.0).all()), call.inter_bytes))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, nightly(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("world", [2, 3, nightly(4)])
def test_a_sum_between_hosts_lies_where_its_parts_lay(world: int, dtype: torch.dtype) -> None:
    """Also of numbers that the ranks do not divide; what travels is what a ring sends, and the few left over."""
    for found in run_ranks(_sums, world, dtype):
        assert all(same and beside for same, beside, _ in found), found
        for (_, _, sent), numel in zip(found, (1, 2, 5, 6, 60, 1001), strict=True):
            rows = 2 * (numel // world) + numel % world
            assert sent == rows * dtype.itemsize * (world - 1), (numel, sent)
