"""Hugging Face's Trainer with `deepspeed=ds_config.json`: plain Trainer's losses, save, resume, evaluate."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.compat.hf_support import (
    ACCUMULATION,
    MICRO_BATCH,
    NUM_STEPS,
    OPTIMIZER,
    make_dataset,
    make_model,
    prepare_rank,
    reset_accelerate,
    write_config,
)
from tests.harness import run_ranks
from tests.marks import nightly

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs transformers and accelerate")
REUSE_RANKS = True
TOLERANCE = 1e-4


def _trainer(folder: str, build: Callable[[], Any] = make_model, **options: Any) -> Any:
    """The arguments come first, as Hugging Face asks: at stage 3 they change how a model is built."""
    from transformers import Trainer, TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": NUM_STEPS,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": 5e-3,
        "warmup_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    arguments = TrainingArguments(**settings | options)
    return Trainer(
        model=build(),
        args=arguments,
        train_dataset=make_dataset(),
        eval_dataset=make_dataset(8, seed=2, masked=False),
    )


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _plain(rank: int, world: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """One process without DeepSpeed that sees the batches of both ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    reset_accelerate()
    batch = 2 * MICRO_BATCH
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    trainer = _trainer(folder, use_cpu=True, **sizes, **options)
    trainer.train()
    return {"losses": _losses(trainer), "eval": trainer.evaluate()["eval_loss"], "loss": _loss_of(trainer.model)}


def _loss_of(model: Any) -> float:
    """The plain model's own loss on the data of the evaluation."""
    import torch

    rows = make_dataset(8, seed=2, masked=False)
    with torch.no_grad():
        return float(model.eval()(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss)


def _under_deepspeed(
    rank: int, world: int, folder: str, stage: int, sections: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    import torch

    prepare_rank()
    common = {
        "deepspeed": write_config(folder, stage, **sections),
        "accelerator_config": {"use_configured_state": True},
        "per_device_train_batch_size": 2 * MICRO_BATCH // world,
        "per_device_eval_batch_size": 2 * MICRO_BATCH // world,
        **options,
    }
    trainer = _trainer(folder, **common, save_strategy="steps", save_steps=NUM_STEPS // 2)
    trainer.train()
    result = {"losses": _losses(trainer), "eval": trainer.evaluate()["eval_loss"]}
    result["stage"] = trainer.deepspeed.zero_optimization_stage()
    result["norms"] = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]

    trainer.save_model(f"{folder}/final")
    from transformers import GPT2LMHeadModel

    torch.distributed.barrier()
    if rank == 0:
        import transformers.integrations.deepspeed as integration

        integration.unset_hf_deepspeed_config()  # a plain program reads it
        saved = GPT2LMHeadModel.from_pretrained(f"{folder}/final")
        result["saved"] = _loss_of(saved)

    prepare_rank()
    again = _trainer(folder, partial(make_model, 7), **common)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{NUM_STEPS // 2}")
    result["resumed"] = _losses(again)
    return result


def _from_pretrained(rank: int, world: int, folder: str, saved: str) -> dict[str, Any]:
    """Hugging Face builds the model under zero.Init, and reads the file on rank 0 alone."""
    prepare_rank()
    from transformers import GPT2LMHeadModel

    trainer = _trainer(
        folder,
        partial(GPT2LMHeadModel.from_pretrained, saved),
        deepspeed=write_config(folder, 3, optimizer=OPTIMIZER),
        accelerator_config={"use_configured_state": True},
        per_device_train_batch_size=MICRO_BATCH,
        per_device_eval_batch_size=MICRO_BATCH,
    )
    on_meta = all(param.is_meta for param in trainer.model.parameters())
    trainer.train()
    return {"losses": _losses(trainer), "on_meta": on_meta, "eval": trainer.evaluate()["eval_loss"]}


def _save_plain(rank: int, world: int, folder: str) -> None:
    make_model().save_pretrained(folder)


@pytest.mark.nightly
def test_from_pretrained_at_stage_3(tmp_path: Path) -> None:
    run_ranks(_save_plain, 1, str(tmp_path / "saved"))
    plain = run_ranks(_plain, 1, str(tmp_path / "plain"), {})[0]
    for result in run_ranks(_from_pretrained, 2, str(tmp_path), str(tmp_path / "saved")):
        assert result["on_meta"]
        assert _difference(result["losses"], plain["losses"]) < TOLERANCE
        assert abs(result["eval"] - plain["eval"]) < TOLERANCE


def _difference(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second) > 0
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def _compare(folder: Path, stage: int, sections: dict[str, Any], options: dict[str, Any], world: int = 2) -> None:
    plain = run_ranks(_plain, 1, str(folder / "plain"), options)[0]
    (folder / "ds").mkdir()
    ours = run_ranks(_under_deepspeed, world, str(folder / "ds"), stage, sections, options)
    for result in ours:
        assert result["stage"] == stage
        assert _difference(result["losses"], plain["losses"]) < TOLERANCE
        assert abs(result["eval"] - plain["eval"]) < TOLERANCE
        assert _difference(result["resumed"][-NUM_STEPS // 2 :], plain["losses"][NUM_STEPS // 2 :]) < TOLERANCE
    assert abs(ours[0]["saved"] - plain["loss"]) < TOLERANCE
    assert all(norm > 0 for norm in ours[0]["norms"])


@pytest.mark.parametrize(
    ("stage", "world"), [nightly(1, 2), nightly(2, 2), (3, 2), nightly(1, 1), nightly(2, 1), nightly(3, 1)]
)
def test_config_optimizer(stage: int, world: int, tmp_path: Path) -> None:
    """The config's optimizer, Hugging Face's schedule."""
    _compare(tmp_path, stage, {"optimizer": OPTIMIZER}, {}, world)


@pytest.mark.parametrize("stage", [nightly(2), nightly(3)])
def test_trainer_optimizer(stage: int, tmp_path: Path) -> None:
    """Hugging Face's optimizer and schedule, with weight decay."""
    _compare(tmp_path, stage, {}, {"weight_decay": 0.1})


def _train(rank: int, world: int, folder: str, stage: int | None, options: dict[str, Any]) -> list[float]:
    """Train and no more: without DeepSpeed for the stage None."""
    if stage is None:
        os.environ["OMP_NUM_THREADS"] = "1"
        reset_accelerate()
        options = {"use_cpu": True, "per_device_train_batch_size": 2 * MICRO_BATCH, **options}
    else:
        prepare_rank()
        ours = {"deepspeed": write_config(folder, stage), "accelerator_config": {"use_configured_state": True}}
        options = {"per_device_train_batch_size": MICRO_BATCH, **ours, **options}
    trainer = _trainer(folder, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(warning.message) for warning in caught if "optimizer.step()" in str(warning.message)]
    assert not said, "the schedule steps at its time"
    return _losses(trainer)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_label_smoothing(stage: int, tmp_path: Path) -> None:
    """Trainer shifts the labels of models whose class it knows by name."""
    options = {"label_smoothing_factor": 0.2, "max_steps": 6}
    plain = run_ranks(_train, 1, str(tmp_path), None, options)[0]
    for losses in run_ranks(_train, 2, str(tmp_path), stage, options):
        assert _difference(losses, plain) < TOLERANCE
    assert _difference(run_ranks(_train, 1, str(tmp_path), None, {"max_steps": 6})[0], plain) > TOLERANCE


def test_a_wrong_rate_is_seen(tmp_path: Path) -> None:
    plain = run_ranks(_plain, 1, str(tmp_path / "a"), {"max_steps": 4, "warmup_steps": 0})[0]
    other = run_ranks(_plain, 1, str(tmp_path / "b"), {"max_steps": 4, "warmup_steps": 0, "learning_rate": 4e-3})[0]
    assert _difference(plain["losses"], other["losses"]) > TOLERANCE
