"""Replicas that drift apart by a bit are found within `health.replica_check_steps`, and named (R17)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import thalweg
from tests.dist.models import make_batch, tiny_gpt
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.zero.replica_check import ReplicasDifferError
from thalweg.zero.whole_parameter import get_shard

REUSE_RANKS = True
EVERY, STEPS = 3, 6
BITS = {4: torch.int32, 2: torch.int16}
# ZeRO stage, further options, ranks on one host: which of them have copies, and of what.
CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "stage 0": (0, {}, 2),
    "stage 1, bf16": (1, {"bf16": {"enabled": True}}, 2),
    "stage 2": (2, {}, 3),
    "copies of shards": (3, {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, 4),
    "tensor ranks": (1, {"tensor_parallel": {"autotp_size": 2}}, 2),
}


def _start(stage: int, more: dict[str, Any], every: int | None = EVERY) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage}, "log_level": "error", "health": {"replica_check_steps": every}, **more,
    }  # fmt: skip
    torch.manual_seed(0)
    return thalweg.initialize(model=tiny_gpt(), config=config)[0]


def _step(engine: Any, step: int) -> None:
    rank, size = engine.meshes.dp.get_local_rank(), engine.meshes.dp.size()
    engine.backward(engine(*(t.to(engine.device)[rank::size] for t in make_batch(step, 2 * size))))
    engine.step()


def _flip(engine: Any, draw: random.Random) -> str:
    """Turn one bit of what this rank has a copy of; the parameter's name."""
    name, param = draw.choice([(name, p) for name, p in engine.module.named_parameters() if _has_copies(p)])
    local = param._local_tensor if param is get_shard(param) else param.detach()
    bits = local.view(BITS[local.itemsize]).view(-1)
    at, bit = draw.randrange(len(bits)), draw.randrange(8 * local.itemsize - 1)
    bits[at] = bits[at] ^ (1 << bit)
    return name


def _has_copies(param: Any) -> bool:
    shard = get_shard(param)
    axes = zip(shard.placements, shard.device_mesh.shape, strict=True)
    return shard is not param or any(size > 1 and placement.is_replicate() for placement, size in axes)


def _drift(rank: int, world: int, case: str, seed: int, folder: str) -> tuple[str, dict[str, list[str]]]:
    """Which parameter the last rank has changed, and what each way of finding it said."""
    stage, more, _ = CASES[case]
    said: dict[str, list[str]] = {}
    flipped = ""
    for way in ("intact", "in a step", "before a save", "no check"):
        engine = _start(stage, more, None if way == "no check" else EVERY)
        draw, publish = random.Random(seed), engine.sharded_model.publish_params
        said[way] = []

        def corrupt(publish=publish, engine=engine, draw=draw, way=way) -> None:  # what arrives is not what was sent
            nonlocal flipped
            publish()
            if way in ("in a step", "no check") and rank == world - 1 and engine.global_steps == EVERY - 1:
                flipped = _flip(engine, draw)

        engine.sharded_model.publish_params = corrupt
        try:
            for step in range(STEPS):
                _step(engine, step)
            if way == "before a save" and rank == world - 1:
                flipped = _flip(engine, draw)
            if way != "no check":
                engine.save_checkpoint(folder, tag=way)
        except ReplicasDifferError as error:
            said[way] = [str(error)]
        said[way].append(f"{engine.global_steps} steps")
        engine.close()
    return flipped, said


@pytest.mark.parametrize(
    ("case", "seed"), [(case, 0) for case in CASES] + [nightly(case, seed) for case in CASES for seed in (1, 2)]
)
def test_a_bit_that_one_rank_has_otherwise_is_found_and_named(tmp_path: Path, case: str, seed: int) -> None:
    world = CASES[case][2]
    results = run_ranks(_drift, world, case, seed, str(tmp_path), device="sim")
    name = results[-1][0]
    others = [world - 3] if case == "copies of shards" else [*range(world - 1)]
    odd = f": {name}, ranks {others} and [{world - 1}]. "
    for _, said in results:
        assert said["intact"] == said["no check"] == [f"{STEPS} steps"]
        (in_step, steps), (before_save, all_steps) = said["in a step"], said["before a save"]
        assert in_step.startswith(f"after step {EVERY}, ranks that should hold the same") and odd in in_step, in_step
        assert before_save.startswith("before checkpoint before a save, ") and odd in before_save, before_save
        assert (steps, all_steps) == (f"{EVERY} steps", f"{STEPS} steps")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"intact"}  # what drifted was not written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_hash_sees_each_bit(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole, num_bits = torch.hash_tensor(values), 8 * dtype.itemsize
    for bit in range(num_bits):
        bits = values.clone().view(BITS[dtype.itemsize])
        bits[bit] ^= torch.tensor(-(1 << bit) if bit == num_bits - 1 else 1 << bit, dtype=bits.dtype)
        assert torch.hash_tensor(bits.view(dtype)) != whole, bit


def _local_sites(rank: int, world: int) -> list[str]:
    """Sites that go on by themselves between their meetings are no fault."""
    more = {"outer_optimizer": {"sync_every": 4, "site_size": 1}}
    engine = _start(0, more, every=1)
    weight = next(p for p in engine.module.parameters() if p.dim() > 1)
    for step in range(2):
        _step(engine, step)
    return [str(float(weight.detach().double().sum()))]


def test_sites_of_their_own_may_differ() -> None:
    one, other = run_ranks(_local_sites, 2)
    assert one != other  # which a check would have called a fault
