"""Compression under the engine: two ranks at every ZeRO stage as one process, exact resumes, a plain model after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.models import make_batch, tiny_gpt
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.test_compression import technique
from thalweg.compression import init_compression, redundancy_clean
from thalweg.compression.layers import iter_compressed
from thalweg.compression.schedule import CompressionSchedule
from thalweg.optim.accumulation import StepResult

REUSE_RANKS = True
LR = 0.05


def strong_gpt(seed: int = 0) -> nn.Module:
    """A GPT whose blocks' weights are so large that what is done to them shows in the loss."""
    model = tiny_gpt(seed)
    with torch.no_grad():
        for param in model.blocks.parameters():
            if param.dim() == 2:
                param.mul_(8)
    return model


def everything() -> dict[str, Any]:
    """Weights to 4 bits by chance, static ranges, trained masks of single weights and rows."""
    bits = {"start_bits": 6, "target_bits": 4, "quantization_period": 2}
    config: dict[str, Any] = {"compression_training": {}}
    for part in (
        technique("weight_quantization", [r"blocks.*(qkv|proj|up|down)$"], bits, rounding="stochastic"),
        technique("activation_quantization", ["up$"], {"bits": 6}, range_calibration="static", schedule_offset=1),
        technique("sparse_pruning", ["down$"], {"dense_ratio": 0.5}, method="topk"),
        technique("row_pruning", ["up$"], {"dense_ratio": 0.5}, [["down$"]], method="topk", schedule_offset=1),
    ):
        config["compression_training"] |= part["compression_training"]
    return config


def _settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "cpu_kernels": "torch",
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        **everything(),
        **more,
    }


def _run_plain(steps: int, world: int, config: dict[str, Any]) -> tuple[list[float], nn.Module]:
    """One process: the whole batch, torch's SGD, the schedule told by hand."""
    model = init_compression(strong_gpt(), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    schedule, losses = CompressionSchedule(iter_compressed(model), None, None), []
    for step in range(steps):
        loss = model(*make_batch(step, 2 * world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.after_step(StepResult(torch.ones(())))
        losses.append(loss.item())
    return losses, model


def _train(engine: Any, steps: range, rank: int, world: int) -> list[float]:
    losses = []
    for step in steps:
        tokens, labels = (part[rank::world].to(engine.device) for part in make_batch(step, 2 * world))
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        losses.append(float(engine._mean_over_ranks(loss.detach().clone())))
    return losses


def _stages_as_one_process(rank: int, world: int, stages: list[int]) -> None:
    import thalweg

    steps = 4
    want, plain = _run_plain(steps, world, everything())
    control, _ = _run_plain(steps, world, technique("sparse_pruning", ["down$"], {"dense_ratio": 0.5}, method="topk"))
    assert max(abs(a - b) for a, b in zip(want, control, strict=True)) > 1e-3
    expected = dict(redundancy_clean(plain).named_parameters())
    for stage in stages:
        engine, *_ = thalweg.initialize(model=strong_gpt(), config=_settings(stage))
        assert _train(engine, range(steps), rank, world) == pytest.approx(want, abs=2e-5), stage
        cleaned = redundancy_clean(engine, engine.config)
        assert (
            type(cleaned.blocks[0].mlp.up) is nn.Linear
            and cleaned.blocks[0].mlp.up is not engine.module.blocks[0].mlp.up
        )
        parameters = dict(cleaned.named_parameters())
        assert parameters.keys() == expected.keys()
        for name, param in parameters.items():
            assert float((param.detach().cpu() - expected[name]).abs().mean()) < 1e-5, (stage, name)
        up = cleaned.blocks[0].mlp.up.weight
        assert int((up.abs().sum(1) == 0).sum()) == 48 and len(up[up.abs().sum(1) > 0].unique()) < 2**4
        _train(engine, range(1), rank, world)  # the engine is still in training
        engine.close()


@pytest.mark.parametrize("stages", [[0, 3], nightly([1, 2])])
def test_two_ranks_are_one_process_and_give_a_plain_model(stages: list[int]) -> None:
    run_ranks(_stages_as_one_process, 2, stages)


def _resume(rank: int, world: int, folder: str, other: int) -> None:
    import thalweg

    straight, *_ = thalweg.initialize(model=strong_gpt(), config=_settings(3))
    _train(straight, range(3), rank, world)
    straight.save_checkpoint(folder)
    want = _train(straight, range(3, 6), rank, world)
    for stage, exact in ((3, True), (other, False)):
        resumed, *_ = thalweg.initialize(model=strong_gpt(seed=1), config=_settings(stage))
        resumed.load_checkpoint(folder)
        got = _train(resumed, range(3, 6), rank, world)
        assert got == want if exact else got == pytest.approx(want, abs=2e-5)
        for module in resumed.module.modules():
            if hasattr(module, "switched_at"):
                module.steps = 0  # the control: where the schedule does not go on, other numbers come
        assert _train(resumed, range(3, 6), rank, world) != _train(straight, range(3, 6), rank, world)
        if stage == 3:
            straight.load_checkpoint(folder)
            _train(straight, range(3, 6), rank, world)
        resumed.close()


def test_a_resume_has_the_bits_of_a_run_that_went_on(tmp_path: Path) -> None:
    run_ranks(_resume, 2, str(tmp_path), 1)


def _moq(rank: int, world: int, stages: list[int]) -> None:
    import thalweg

    eigenvalue = {"enabled": True, "layer_name": "blocks", "layer_num": 3, "max_iter": 8, "tol": 0.05}
    moq = {
        "enabled": True,
        "quantize_bits": {"start_bits": 8, "target_bits": 5},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "eigenvalue": eigenvalue,
    }
    found = []
    for stage in stages:
        config = _settings(stage, quantize_training=moq)
        del config["compression_training"]
        engine, *_ = thalweg.initialize(model=strong_gpt(), config=config)
        losses = _train(engine, range(3), rank, world)
        state = {n: (c.compression.bits, c.compression.next_switch) for n, c in iter_compressed(engine.module).items()}
        found.append((losses, state))
        engine.close()
    for losses, state in found[1:]:
        assert losses == pytest.approx(found[0][0], abs=2e-5) and state == found[0][1]
    switches = {switch for _, switch in found[0][1].values()}
    assert len(switches) > 1 and min(switches) == 4, "no block was given more time"
    assert max(bits for bits, _ in found[0][1].values()) < 8


@pytest.mark.parametrize("stages", [[0, 3], nightly([1, 2])])
def test_moq_with_eigenvalues_is_the_same_at_every_stage(stages: list[int]) -> None:
    run_ranks(_moq, 2, stages)


def _listed_too_early(rank: int, world: int) -> None:
    import thalweg

    model = strong_gpt()
    with pytest.raises(ValueError, match="init_compression"):
        thalweg.initialize(model=model, config=_settings(0), model_parameters=model.parameters())


def test_parameters_listed_before_the_scores_exist_are_an_error() -> None:
    run_ranks(_listed_too_early, 1)
