"""Delayed updates on shards and under the engine: one selection for all ranks, stopped and gone on with."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import full_tensors
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.config.schema.zero import ZenFlow
from thalweg.optim.build import build_optimizer

REUSE_RANKS = True

SHAPES = [(13, 40), (40, 16), (5, 6, 7), (60,), (1, 24), (2, 3, 8)]  # the last leave some ranks without rows


def _sharded(rank: int, world: int, overlap: bool, update: Any) -> float:
    """The largest difference of shards stepped to whole parameters stepped."""
    policy = ZenFlow(topk_ratio=0.2, select_interval=5, update_interval=update, overlap_step=overlap)
    mesh = init_device_mesh("cpu", (world,))
    g = torch.Generator().manual_seed(0)
    whole = [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]
    cut = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
    optimizers = [build_optimizer("AdamW", params, {"lr": 1e-2}, zenflow_policy=policy) for params in (whole, cut)]
    for _ in range(9):
        for p, q in zip(whole, cut, strict=True):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    return max(float((p - q.full_tensor()).abs().max()) for p, q in zip(whole, cut, strict=True))


@pytest.mark.parametrize("world", [2, nightly(3)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("update", [3, "auto"])
def test_shards_are_stepped_as_the_whole(together: Any, world: int, overlap: bool, update: Any) -> None:
    assert max(together(_sharded, world)) < 1e-6


ZENFLOW = {"topk_ratio": 0.25, "select_interval": 5, "update_interval": 3, "overlap_step": True}


def _engine(stage: int, zenflow: dict[str, Any] | None, **zero: Any) -> Any:
    import thalweg

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **zero} | ({"zenflow": zenflow} if zenflow else {}),
        "log_level": "error",
    }
    return thalweg.initialize(model=copy.deepcopy(tiny_gpt()), config=config)[0]


def _train(engine: Any, rank: int, world: int, first: int, last: int) -> list[Any]:
    for step in range(first, last):
        tokens, labels = make_batch(step, 2 * world)
        engine.backward(engine(tokens[rank::world], labels[rank::world]))
        engine.step()
    return [p.numpy() for p in full_tensors(engine.module.parameters())]


def _stop_and_go_on(rank: int, world: int, stage: int, folder: str) -> tuple[bool, bool, bool]:
    whole = _train(_engine(stage, ZENFLOW), rank, world, 0, 9)
    exact = all((a == b).all() for a, b in zip(
        _train(_engine(stage, {"topk_ratio": 1.0}), rank, world, 0, 4),
        _train(_engine(stage, None), rank, world, 0, 4), strict=True))  # fmt: skip
    first = _engine(stage, ZENFLOW)
    _train(first, rank, world, 0, 6)
    first.save_checkpoint(folder, tag="here")
    second = _engine(stage, ZENFLOW)
    second.load_checkpoint(folder, tag="here")
    gone_on = _train(second, rank, world, 6, 9)
    plain = _train(_engine(stage, None), rank, world, 0, 9)
    same = all((a == b).all() for a, b in zip(whole, gone_on, strict=True))
    return exact, same, any((a != b).any() for a, b in zip(whole, plain, strict=True))


@pytest.mark.parametrize(("world", "stage"), [(2, 3), nightly(1, 0)])
def test_the_config_and_a_run_that_stopped(world: int, stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(_stop_and_go_on, world, stage, folder) == [(True, True, True)] * world


def _on_a_disk(rank: int, world: int, folder: str) -> list[bool]:
    """Masters that lie in the swap file are stepped together: one column's turn depends on another's."""
    paged = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2}
    same = []
    for update in (2, "auto"):
        policy = {**ZENFLOW, "update_interval": update}
        plain = _train(_engine(3, policy), rank, world, 0, 6)
        engine = _engine(3, policy, offload_param=paged)
        same.append(all((a == b).all() for a, b in zip(plain, _train(engine, rank, world, 0, 6), strict=True)))
        engine.close()
    return same


def test_with_parameters_on_a_disk(tmp_path: Path) -> None:
    assert run_ranks(_on_a_disk, 1, str(tmp_path)) == [[True, True]]
