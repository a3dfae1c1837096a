"""The engine's checkpoints: any stage, dtype and world size resumes any other, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import thalweg
from tests.dist.models import OddShapesModel, make_batch, tiny_gpt
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.checkpoint import Checkpoint, CheckpointNotFoundError
from thalweg.zero.whole_parameter import named_shards

REUSE_RANKS = True

ROWS = 24  # 1, 2, 3, 4 and 8 ranks share them evenly
CLIENT = {"epoch": 3, "tuple": (1, {"x"}), "tensor": torch.arange(3), 7: b"\x80"}
CASES = {
    "adamw": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}},
    "adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
}


def engine_of(model_name: str, seed: int, stage: int, world: int, case: str, extra: dict):
    model = tiny_gpt(seed) if model_name == "gpt" else OddShapesModel(seed)
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // world,
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
        "cpu_kernels": "torch",
        **CASES[case],
        **extra,
    }
    return thalweg.initialize(model=model, config=config)[0]


def steps(engine, rank: int, world: int, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        tokens, labels = make_batch(step, ROWS)
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def fingerprint(engine) -> dict[str, str]:
    found = {}
    names = {parameter: name for name, parameter in named_shards(engine.module)}
    entries = [(name, parameter) for parameter, name in names.items()]
    for parameter, state in engine.optimizer.state.items():
        entries += [(f"{names[parameter]} {k}", v) for k, v in state.items() if isinstance(v, torch.Tensor)]
    for name, tensor in entries:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        found[name] = hashlib.sha256(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return {**found, "lr": repr(engine.get_lr()), "steps": repr(engine.global_steps)}


def save_job(rank: int, world: int, folder: str, model: str, stage: int, case: str, extra: dict):
    engine = engine_of(model, 0, stage, world, case, extra)
    steps(engine, rank, world, 0, 3)
    path = engine.save_checkpoint(folder, client_state=CLIENT)
    assert Path(path).name == "global_step3"
    found = fingerprint(engine)
    losses = steps(engine, rank, world, 3, 2)
    engine.close()
    return found, losses


def load_job(rank: int, world: int, folder: str, model: str, stage: int, case: str, extra: dict):
    engine = engine_of(model, 9, stage, world, case, extra)
    steps(engine, rank, world, 50, 1)  # an engine in use, to be set back
    path, client = engine.load_checkpoint(folder)
    assert Path(path).name == "global_step3"
    assert client.keys() == CLIENT.keys() and client["tuple"] == CLIENT["tuple"] and client[7] == b"\x80"
    found = fingerprint(engine)
    losses = steps(engine, rank, world, 3, 2)
    engine.close()
    return found, losses


PLAIN = [("gpt", "adamw", "fp32"), ("odd", "adamw", "fp32")]
OTHERS = [
    ("gpt", "adamw", "bf16"),
    ("gpt", "adamw", "fp16"),
    ("odd", "lion", "fp32"),
    ("gpt", "lamb", "fp32"),
    ("gpt", "muon", "fp32"),
    ("odd", "adagrad", "fp32"),
]
Kind = tuple[str, str, str]  # model, case, dtype


def jobs(rank: int, world: int, job, folder: str, kinds: list[Kind], stages: list[int]):
    """``job`` for each kind at each stage."""
    return {
        (kind, stage): job(rank, world, f"{folder}/{'-'.join(kind)}", kind[0], stage, kind[1], extra_of(kind))
        for kind in kinds
        for stage in stages
    }


def extra_of(kind: Kind) -> dict:
    return {kind[2]: {"enabled": True}} if kind[2] != "fp32" else {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint of each kind, made by 4 ranks at stage 3, and what it holds."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(jobs, 4, save_job, folder, [*PLAIN, *OTHERS], [3])


@pytest.mark.parametrize(("world", "stages"), [(1, [0]), (2, [1]), nightly(3, [2]), (4, [3]), nightly(8, [1, 2])])
def test_row01_an_engine_resumes_at_another_world_and_stage(saved, world, stages):
    """PAIN_POINTS 1: parameters, moments, schedule and step count bit-equal; the loss goes on."""
    folder, expected = saved
    for rank, results in enumerate(run_ranks(jobs, world, load_job, folder, PLAIN, stages)):
        for (kind, stage), (found, losses) in results.items():
            assert found == expected[0][kind, 3][0], (kind, stage)
            assert world != 4 or losses == expected[rank][kind, 3][1], (kind, stage)


@pytest.mark.parametrize(("world", "stage"), [(2, 2), nightly(4, 3)])
def test_other_dtypes_and_optimizers_reshard(saved, world, stage):
    folder, expected = saved
    for rank, results in enumerate(run_ranks(jobs, world, load_job, folder, OTHERS, [stage])):
        for (kind, _), (found, losses) in results.items():
            assert found == expected[0][kind, 3][0], kind
            assert world != 4 or losses == expected[rank][kind, 3][1], kind


def test_row34_a_tied_model_keeps_its_tie(saved):
    checkpoint = Checkpoint.open(f"{saved[0]}/gpt-adamw-fp32")
    assert len(checkpoint.manifest.aliases) == 1
    alias, name = next(iter(checkpoint.manifest.aliases.items()))
    assert torch.equal(checkpoint.read(alias), checkpoint.read(name))


def missing_job(rank: int, world: int, folder: str) -> list[str]:
    engine = engine_of("gpt", 0, 3, world, "adamw", {})
    assert engine.load_checkpoint(folder) == (None, None)
    with pytest.raises(CheckpointNotFoundError) as caught:
        engine.load_checkpoint(folder, tag="global_step7")
    must = engine_of("gpt", 0, 2, world, "adamw", {"checkpoint": {"resume": "must"}})
    with pytest.raises(CheckpointNotFoundError, match="must"):
        must.load_checkpoint(folder)
    return [str(caught.value)]


def test_nothing_to_load(tmp_path):
    first, second = run_ranks(missing_job, 2, str(tmp_path))
    assert first == second and "global_step7" in first[0]
