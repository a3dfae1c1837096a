"""DeepSpeed's universal, pipeline and MoE folders: jobs go on from them with DeepSpeed's own losses at any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import thalweg
from tests.data.deepspeed.job import ROWS, SAVED_AFTER, STEPS, OddModel, make_batch
from tests.data.deepspeed.layouts import MICRO_BATCHES, ExpertModel, micro_batches, pipeline_model
from tests.dist.test_checkpoint_foreign import mean_losses, resume_job
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.checkpoint.deepspeed.checkpoint import ForeignCheckpoint
from thalweg.checkpoint.errors import CheckpointMismatchError, CorruptCheckpointError
from thalweg.cli import main

REUSE_RANKS = True
DATA = Path(__file__).parent.parent / "data" / "deepspeed"


def expected_losses(case: str) -> list[float]:
    return json.loads((DATA / case / "losses.json").read_text())


def config_of(world: int, stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
        "cpu_kernels": "torch",
        **sections,
    }


def resume_pipeline(rank: int, world: int, stages: int, stage: int, with_optimizer: bool = True) -> dict[str, Any]:
    sections = {"gradient_accumulation_steps": MICRO_BATCHES, "pipeline": {"stages": stages}}
    config = config_of(world, stage, **sections)
    engine = thalweg.initialize(model=pipeline_model(thalweg, stages), config=config)[0]
    engine.load_checkpoint(str(DATA / "pipeline"), load_optimizer_states=with_optimizer)
    data_ranks = world // stages
    rank = rank % data_ranks
    losses = []
    for step in range(SAVED_AFTER, STEPS):
        losses.append(float(engine.train_batch(micro_batches(step, rank, data_ranks))))
    engine.close()
    return {"losses": losses}


def resume_experts(
    rank: int, world: int, ranks: int, stage: int, with_optimizer: bool = True, case: str = "moe"
) -> dict[str, Any]:
    model = ExpertModel(thalweg.moe.MoE)
    model.mixture.ep_size = ranks
    groups = thalweg.moe.split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters())})
    engine = thalweg.initialize(model=model, model_parameters=groups, config=config_of(world, stage))[0]
    engine.load_checkpoint(str(DATA / case), load_optimizer_states=with_optimizer)
    losses = []
    for step in range(SAVED_AFTER, STEPS):
        loss = engine(*make_batch(step, rank, world))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return {"losses": losses}


@pytest.mark.parametrize(
    ("case", "world", "stage"),
    [
        ("universal1", 3, 2),
        nightly("universal3", 2, 3),
        *(nightly(f"universal{of}", world, stage) for of in (1, 3) for world in (1, 2, 3) for stage in range(4)),
    ],
)
def test_from_a_universal_folder(case: str, world: int, stage: int) -> None:
    results = run_ranks(resume_job, world, str(DATA / case), stage, case, True)
    assert mean_losses(results) == pytest.approx(expected_losses(case), abs=1e-5)
    assert results[0]["path"] == "global_step3_universal" and results[0]["client"]["epoch"] == 7


@pytest.mark.parametrize(
    ("world", "stages", "stage"),
    [
        (1, 1, 2),
        nightly(2, 2, 1),
        nightly(4, 2, 1),
        nightly(2, 1, 3),
        nightly(3, 3, 1),
    ],
)
def test_from_a_pipelines_folder(world: int, stages: int, stage: int) -> None:
    results = run_ranks(resume_pipeline, world, stages, stage)
    assert mean_losses(results) == pytest.approx(expected_losses("pipeline"), abs=1e-5)


@pytest.mark.parametrize(
    ("world", "ranks", "stage"),
    [
        (2, 2, 1),
        nightly(1, 1, 0),
        nightly(2, 1, 3),
        nightly(3, 1, 2),
        nightly(4, 2, 2),
        nightly(4, 4, 3),
    ],
)
def test_from_a_folder_with_experts(world: int, ranks: int, stage: int) -> None:
    results = run_ranks(resume_experts, world, ranks, stage)
    assert mean_losses(results) == pytest.approx(expected_losses("moe"), abs=1e-5)


@pytest.mark.nightly
def test_from_a_folder_whose_teams_are_neighbours() -> None:
    results = run_ranks(resume_experts, 2, 2, 2, True, "moe_data_first")
    assert mean_losses(results) == pytest.approx(expected_losses("moe_data_first"), abs=1e-5)


@pytest.mark.parametrize("case", ["universal1", "universal3", "pipeline", "moe", "moe_data_first"])
def test_an_export_is_the_model(case: str, tmp_path: Path) -> None:
    """`thalweg ckpt export` of it, in the plain model, gives the loss with which DeepSpeed went on."""
    assert main(["ckpt", "export", str(DATA / case), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    expected = expected_losses(case)[0]
    tokens, labels = make_batch(SAVED_AFTER, 0, 1)
    if case == "pipeline":
        loss = _loss_of_layers(weights, tokens, labels)
    else:
        model = ExpertModel(thalweg.moe.MoE) if case.startswith("moe") else OddModel()
        model.load_state_dict(weights, strict=False)
        absent = {name for name, param in model.named_parameters() if name not in weights}
        assert not absent and weights.keys() <= model.state_dict().keys()
        loss = model(tokens, labels)
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def _loss_of_layers(weights: dict[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The pipeline's layers in plain PyTorch."""
    embed = weights["layers.0.weight"]
    hidden = torch.tanh(F.linear(embed[tokens], weights["layers.1.weight"], weights["layers.1.bias"]))
    hidden = F.layer_norm(hidden, (7,), weights["layers.3.weight"], weights["layers.3.bias"])
    hidden = F.linear(hidden, weights["layers.4.weight"], weights["layers.4.bias"])
    return F.cross_entropy(hidden @ embed.T, labels)


def test_what_cannot_be_read_names_the_cure(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(DATA / "moe" / "global_step3", folder)
    expert = folder / "layer_0_expert_3_mp_rank_00_model_states.pt"
    moved = expert.rename(tmp_path / "away")
    with pytest.raises(CorruptCheckpointError, match=r"the 3 experts of mixture .* one is missing"):
        ForeignCheckpoint.from_path(folder)
    torch.save({"layers.0.experts.w1.3": torch.zeros(2)}, expert)
    with pytest.raises(CheckpointMismatchError, match=r"AutoEP .*layers.0.experts.w1.3.*ds_to_universal"):
        ForeignCheckpoint.from_path(folder)
    shutil.move(moved, expert)
    shutil.copytree(DATA / "universal1" / "global_step3_universal" / "zero", folder / "zero")
    with pytest.raises(CheckpointMismatchError, match="load the folder that it was made of"):
        ForeignCheckpoint.from_path(folder)
    shutil.rmtree(folder / "zero")
    with ForeignCheckpoint.from_path(folder) as checkpoint:
        assert checkpoint.manifest.tensors["model/mixture.experts.stack.0.weight"].shape == (4, 5, 6)


@pytest.mark.nightly
@pytest.mark.parametrize(("resume", "case"), [(resume_pipeline, "pipeline"), (resume_experts, "moe")])
def test_without_the_moments_the_losses_differ(resume: Any, case: str) -> None:
    """The control: the first loss is of the weights alone, later ones are not."""
    losses = mean_losses(run_ranks(resume, 1, 1, 1, False))
    expected = expected_losses(case)
    assert losses[0] == pytest.approx(expected[0], abs=1e-5)
    assert abs(losses[2] - expected[2]) > 1e-3
