"""1,024 ranks, 8 stages x 16 data x 8 tensor, one rank of each stage at a time on one processor."""

from __future__ import annotations

import time

import pytest
import torch

from tests.harness import run_ranks
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.parallel.pipeline.schedules.builders import build_schedule
from thalweg.parallel.pipeline.schedules.simulate import simulate

LAYERS, WIDTH, VOCABULARY, LENGTH, ROWS, MICROS = 16, 64, 512, 16, 2, 3
SHAPE = GPTConfig(vocab_size=VOCABULARY, n_layer=LAYERS, n_head=8, n_embd=WIDTH, block_size=LENGTH, tied=False)
PIPELINE, DATA, TENSOR = 8, 16, 8
ACTIVATION = 4 * ROWS * LENGTH * WIDTH


def _config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }


def _ranks(rank: int, world: int, places: list[tuple[int, int, int, int]]) -> list:
    from tests.dist.simulated_mesh import MeshShape, simulate_mesh_rank

    torch.set_num_threads(1)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    batch = {"tokens_BT": tokens, "labels_BT": tokens}
    grid = MeshShape(PIPELINE, DATA, TENSOR)
    return [simulate_mesh_rank(GPT(SHAPE), _config(zero), batch, grid, *at) for zero, *at in places]


def _block_shape(rows: int, columns: int, by_rows: bool) -> tuple[int, int]:
    """A weight's piece: cut over tensor ranks, then by rows over data ranks."""
    rows, columns = (rows // TENSOR, columns) if by_rows else (rows, columns // TENSOR)
    return -(-rows // DATA), columns


def test_shapes_memory_and_traffic_of_1024_ranks_are_the_formulas() -> None:
    began = time.monotonic()
    places = [(1, stage, 0, 0) for stage in range(PIPELINE)] + [(3, 3, 5, 7)]
    (found,) = run_ranks(_ranks, 1, places, init=False, timeout=200)
    for (zero, stage, *_), rank in zip(places, found, strict=True):
        own = range(stage * LAYERS // PIPELINE, (stage + 1) * LAYERS // PIPELINE)
        blocks = {int(name.split(".")[1]) for name in rank.shapes if name.startswith("blocks.")}
        assert blocks == set(own), stage
        assert ("wte.weight" in rank.shapes) == (stage == 0)
        assert ("head.weight" in rank.shapes) == (stage == PIPELINE - 1)
        name = f"blocks.{own[0]}"
        assert rank.shapes[f"{name}.attention.qkv.weight"] == _block_shape(3 * WIDTH, WIDTH, True)
        assert rank.shapes[f"{name}.mlp.down.weight"] == _block_shape(WIDTH, 4 * WIDTH, False)
        # Megatron-LM: four sums of an activation a block and micro-batch, 2(n-1)/n of it from each rank.
        layers = MICROS * len(own) * 4 * ACTIVATION * 2 * (TENSOR - 1) // TENSOR
        assert rank.sent_bytes["tensor"] >= layers
        if 0 < stage < PIPELINE - 1:
            assert rank.sent_bytes["tensor"] == layers
        borders = (stage > 0) + (stage < PIPELINE - 1)
        assert rank.sent_bytes["pipeline"] == borders * MICROS * ACTIVATION
        assert rank.held_bytes["parameters"] == rank.held_bytes["gradients"]
        if zero == 1 and 0 < stage < PIPELINE - 1:
            # Weights of a block, 12 d^2, over tensor and data ranks; biases and norms in rows of their own.
            weights = len(own) * 12 * WIDTH**2 * 4 // (TENSOR * DATA)
            assert weights <= rank.held_bytes["parameters"] <= 1.1 * weights + len(own) * 4 * 13 * WIDTH
            whole = rank.sent_bytes["data"] * DATA / (DATA - 1)  # one gather, one reduce-scatter
            assert 2 * weights * DATA <= whole <= 2.2 * weights * DATA + len(own) * 8 * 13 * WIDTH
    schedule = build_schedule("1f1b", PIPELINE, 32)
    assert simulate(schedule).bubble == pytest.approx((PIPELINE - 1) / (32 + PIPELINE - 1))
    assert time.monotonic() - began < 60


def _too_many(rank: int, world: int) -> str:
    from tests.dist.simulated_mesh import MeshShape, simulate_mesh_rank

    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with pytest.raises(ValueError) as caught:
        simulate_mesh_rank(
            GPT(SHAPE), _config(1), {"tokens_BT": tokens, "labels_BT": tokens}, MeshShape(32, 4, 8), pp_rank=0
        )
    return str(caught.value)


def test_a_layout_that_does_not_fit_the_model_is_refused() -> None:
    assert "too few for 32 stages" in run_ranks(_too_many, 1, init=False)[0]
