"""Low-bit state on shards and in checkpoints: no byte depends on the ranks, any dtype loads any other."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.dist.models import make_batch
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.optim.build import build_optimizer

REUSE_RANKS = True

SHAPES = [(13, 700), (40, 128), (5, 3000), (6000,)]


def _sharded(rank: int, world: int, name: str, kind: str) -> bool:
    """Whether shards are stepped to the bits of whole parameters, state included."""
    mesh = init_device_mesh("cpu", (world,))
    g = torch.Generator().manual_seed(0)
    whole = [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]
    cut = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
    hyper = {"lr": 1e-2, "state_dtype": kind}
    optimizers = [build_optimizer(name, params, hyper) for params in (whole, cut)]
    for _ in range(4):
        for p, q in zip(whole, cut, strict=True):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    same = True
    for p, q in zip(whole, cut, strict=True):
        same &= torch.equal(p, q.full_tensor())
        for key, value in optimizers[0].state[p].items():
            theirs = optimizers[1].state[q][key]
            assert value.dim() == 0 or isinstance(theirs, DTensor)
            same &= torch.equal(value, theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
    return same


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("world", [2, nightly(3)])
def test_shards_have_the_bits_of_the_whole(together: Any, world: int, kind: str, name: str) -> None:
    assert all(together(_sharded, world))


def _config(stage: int, kind: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "state_dtype": kind}},
        "zero_optimization": {"stage": stage},
        "log_level": "error",
        **extra,
    }


def _engine(stage: int, kind: str, **extra: Any) -> Any:
    import thalweg

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=61, n_layer=2, n_head=2, n_embd=64, block_size=12))
    return thalweg.initialize(model=model, config=_config(stage, kind, extra))[0]


def _train(engine: Any, rank: int, world: int, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        tokens, labels = make_batch(step, 2 * world)
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    return losses


def _full_state(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in engine.module.named_parameters():
        for key, value in engine.optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                value = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{name}/{key}"] = value.clone()
    return found


def _save(rank: int, world: int, folder: str, kind: str, stage: int) -> Any:
    engine = _engine(stage, kind)
    _train(engine, rank, world, 0, 3)
    engine.save_checkpoint(folder, tag="here")
    state = {key: value.numpy() if value.dtype != torch.bfloat16 else value.view(torch.int16).numpy()
             for key, value in ((key, value.cpu()) for key, value in _full_state(engine).items())}  # fmt: skip
    losses = _train(engine, rank, world, 3, 2)
    engine.close()
    return state, losses


def _load(rank: int, world: int, folder: str, kind: str, stage: int) -> Any:
    engine = _engine(stage, kind)
    engine.load_checkpoint(folder, tag="here")
    state = {key: value.numpy() if value.dtype != torch.bfloat16 else value.view(torch.int16).numpy()
             for key, value in ((key, value.cpu()) for key, value in _full_state(engine).items())}  # fmt: skip
    losses = _train(engine, rank, world, 3, 2)
    engine.close()
    return state, losses


@pytest.mark.parametrize("kind", [nightly("bf16"), "int8"])
def test_a_checkpoint_of_any_layout_loads_into_any_other(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved, after = run_ranks(_save, 2, folder, kind, 3)[0]
        assert any(key.endswith("_scale") for key in saved) == (kind == "int8")
        for world, stage in ((2, 3), (1, 0), (3, 1)):
            loaded, losses = run_ranks(_load, world, folder, kind, stage)[0]
            assert loaded.keys() == saved.keys()
            assert all((loaded[key] == saved[key]).all() for key in saved)
            if world == 2:
                assert losses == after


@pytest.mark.parametrize(("kind", "other"), [("int8", "fp32"), ("bf16", "int8")])
def test_a_checkpoint_of_any_dtype_loads_into_any_other(kind: str, other: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, after = run_ranks(_save, 2, folder, kind, 1)[0]
        _, losses = run_ranks(_load, 2, folder, other, 3)[0]
    assert abs(losses[0] - after[0]) < 1e-5 and abs(losses[1] - after[1]) < 0.02


def _bf16_states(rank: int, world: int) -> set[str]:
    engine = _engine(2, "fp32", bf16={"enabled": True, "bf16_optimizer_states": True},
                     optimizer={"type": "AdamW", "params": {"lr": 1e-2}})  # fmt: skip
    _train(engine, rank, world, 0, 2)
    p = next(p for n, p in engine.module.named_parameters() if n.endswith("mlp.up.weight"))
    found = {str(engine.optimizer.state[p][key].dtype) for key in ("exp_avg", "exp_avg_sq")}
    engine.close()
    return found


def test_the_key_of_the_config() -> None:
    assert run_ranks(_bf16_states, 2) == [{"torch.bfloat16"}] * 2
