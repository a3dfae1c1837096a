"""What DeepSpeed-Chat's flags do in a run: PPO's models by their own options, joined rollouts, an early end, events."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.dist.test_rlhf_steps import OPTIONS
from tests.harness import run_ranks
from tests.rlhf_support import make_base, make_data
from tests.unit.infer_models import tiny_decoder
from thalweg.engine import Engine
from thalweg.rlhf import data, models, steps
from thalweg.rlhf.config import RLHFConfig, load_rlhf_config

REUSE_RANKS = True

PPO = {
    "actor_zero_stage": 2, "critic_zero_stage": 1, "reference_zero_stage": 0, "actor_weight_decay": 0.1,
    "critic_weight_decay": 0.2, "actor_learning_rate": 1e-3, "critic_learning_rate": 2e-3, "critic_lora_dim": 4,
    "critic_lora_module_name": "layers.1.", "critic_lora_learning_rate": 3e-3, "only_optimize_lora": True,
    "offload_reward_model": True, "generation_batches": 2, "gradient_accumulation_steps": 1, "print_answers": True,
    "print_answers_interval": 2, "unsupervised_dataset_config_name": "one", "unsup_coef": 0.5, "enable_test_mode": True,
    "test_stop_step": 2, "enable_tensorboard": True, "lr_scheduler_type": "constant",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("chat")
    texts = str(make_data(folder / "data.jsonl"))
    shared = {name: value for name, value in OPTIONS.items() if name not in ("sft", "reward", "ppo", "grpo", "dpo")}
    return shared | {"model_name_or_path": str(make_base(folder / "base")), "data_path": texts, "save_interval": 0}


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _run(rank: int, world: int, step: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A step, and what its engines were: parameter groups, ZeRO, states before and after; what was read and printed."""
    engines: dict[str, Engine] = {}
    before: dict[str, dict[str, Tensor]] = {}
    found: dict[str, Any] = {"read": [], "lines": []}
    build, build_frozen, save, load = (
        models.build_engine,
        models.build_frozen_engine,
        models.save_model,
        data._load_rows,
    )

    def build_engine(*args: Any, name: str, **kwargs: Any) -> Engine:
        engines[name] = build(*args, name=name, **kwargs)
        before[name] = {key: value.clone() for key, value in engines[name].state_dict().items()}
        return engines[name]

    def build_frozen_engine(model: Any, *args: Any, **kwargs: Any) -> Engine:
        name = "reward" if isinstance(model, models.ValueModel) else "reference"
        engines[name] = build_frozen(model, *args, **kwargs)
        return engines[name]

    def load_rows(path: str, config_name: str | None) -> list[Any]:
        found["read"].append((path, config_name))
        return load(path, config_name)

    def save_model(*args: Any) -> None:
        for name, engine in engines.items():
            zero = engine.config.zero_optimization
            found[name] = {"stage": zero.stage, "offload_param": str(zero.offload_param and zero.offload_param.device)}
            if name in before:
                now = engine.state_dict()
                groups = engine.optimizer.inner.param_groups
                found[name] |= {
                    "groups": [(group["lr"], group["weight_decay"]) for group in groups],
                    "changed": {key for key in now if not torch.equal(now[key], before[name][key])},
                    "all": set(now),
                }
        save(*args)

    handler = logging.Handler()
    handler.emit = lambda record: found["lines"].append(record.getMessage())  # type: ignore[method-assign]
    level = steps.log.level
    steps.log.addHandler(handler)
    steps.log.setLevel(logging.INFO)
    with ExitStack() as stack:
        for new in (build_engine, build_frozen_engine, save_model):
            stack.enter_context(patch.object(models, new.__name__, new))
        stack.enter_context(patch.object(data, "_load_rows", load_rows))
        steps.run_step(step, load_rlhf_config(options, step))
    steps.log.removeHandler(handler)
    steps.log.setLevel(level)
    return found


def _events(folder: Path, kind: str = "scalars") -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()[kind])


@pytest.mark.nightly
def test_ppo_s_models_have_options_of_their_own(base: dict[str, Any], tmp_path: Path) -> None:
    options = base | PPO | {"output_dir": str(tmp_path), "unsupervised_dataset_name": base["data_path"]}
    models.ValueModel.from_pretrained(base["model_name_or_path"]).save_pretrained(tmp_path / "score")
    options |= {"reward_model_name_or_path": str(tmp_path / "score")}
    found = run_ranks(_run, 2, "ppo", options)[0]
    actor, critic = found["actor"], found["critic"]
    assert [found[name]["stage"] for name in ("actor", "critic", "reference", "reward")] == [2, 1, 0, 3]
    assert [found[name]["offload_param"] for name in ("reference", "reward")] == ["none", "cpu"]
    assert actor["groups"] == [(1e-3, 0.1)]
    assert sorted(critic["groups"]) == [(2e-3, 0.2), (3e-3, 0.2)]  # its head, which is new, and its adapters
    assert actor["changed"] == actor["all"] and not any("lora" in name for name in actor["all"])
    trained = {name for name in critic["all"] if "lora_" in name or "value_head" in name}
    assert critic["changed"] == trained and all("layers.1." in name for name in trained if "lora_" in name)
    assert (base["data_path"], "one") in found["read"] and (base["data_path"], None) in found["read"]
    rows = _rows(tmp_path / "ppo")
    assert len(rows) == 2 and (tmp_path / "ppo" / "model").is_dir()  # of 3: test_stop_step
    assert len(rows[0]["samples"]) == 4  # two batches of two prompts
    answers = [line for line in found["lines"] if "(reward " in line]
    assert answers == [f"{s['prompt']}|{s['response']} (reward {s['reward']:.4g})" for s in rows[1]["samples"]]
    assert {"ppo/reward", "ppo/kl", "train/loss"} <= _events(tmp_path / "tensorboard" / "actor")
    assert "train/loss" in _events(tmp_path / "tensorboard" / "critic")
    texts = {f"ppo/sample {number}/text_summary" for number in range(4)}
    assert _events(tmp_path / "tensorboard" / "actor", "tensors") == texts


@pytest.mark.nightly
def test_rollouts_are_joined_before_an_update(base: dict[str, Any], tmp_path: Path) -> None:
    """Two batches of one prompt are a batch of two; one of them alone, and two updates in place of one, are not."""
    more = {"reward_function": "tests.rlhf_support:score_vowels", "num_train_steps": 2, "num_generations": 2}
    cases = {
        "whole": {"per_device_generation_batch_size": 2},
        "joined": {"per_device_generation_batch_size": 1, "generation_batches": 2},
        "one": {"per_device_generation_batch_size": 1},
        "apart": {"per_device_generation_batch_size": 2, "gradient_accumulation_steps": 1},
    }
    rows = {}
    for name, options in cases.items():
        run_ranks(_run, 1, "grpo", base | more | options | {"output_dir": str(tmp_path / name)})
        rows[name] = _rows(tmp_path / name / "grpo")
    assert rows["joined"] == rows["whole"]
    assert rows["one"][0]["samples"] == rows["whole"][0]["samples"][:1] and rows["one"] != rows["whole"]
    assert rows["apart"][0]["samples"] == rows["whole"][0]["samples"] and rows["apart"][1] != rows["whole"][1]


def test_sft_of_data_that_are_its_own_with_adapters_at_their_own_rate(base: dict[str, Any], tmp_path: Path) -> None:
    """``data_split`` leaves SFT none of ``data_path``."""
    options = base | {
        "output_dir": str(tmp_path), "data_split": "0,1,1", "sft_only_data_path": base["data_path"], "lora_dim": 4,
        "lora_learning_rate": 0.0, "enable_tensorboard": True, "tensorboard_path": str(tmp_path / "tb"),
        "zero_stage": 1, "enable_test_mode": True, "test_stop_step": 1, "lr_scheduler_type": "constant",
        "weight_decay": 0.3,
    }  # fmt: skip
    found = run_ranks(_run, 1, "sft", options)[0]["sft"]
    assert found["groups"] == [(3e-3, 0.3), (0.0, 0.3)]
    assert len(_rows(tmp_path / "sft")) == 1
    rests = {name for name in found["all"] if "lora_" in name or name.endswith(".base_layer.weight")}
    assert len(rests) == 3 * 14 and found["changed"] == found["all"] - rests  # a rate of 0, and what is adapted
    assert "sft/loss" in _events(tmp_path / "tb" / "sft")
    with pytest.raises(Exception, match="leaves no example"):
        run_ranks(_run, 1, "sft", options | {"sft_only_data_path": (), "output_dir": str(tmp_path / "none")})


def _score_frozen(rank: int, world: int, offload: bool) -> tuple[int, int, Tensor]:
    model = tiny_decoder("llama")
    num_numbers = sum(param.numel() for param in model.parameters())
    engine = models.build_frozen_engine(model, RLHFConfig(zero_stage=1), offload=offload)
    held = sum(
        param.to_local().numel() if hasattr(param, "to_local") else param.numel() for param in model.parameters()
    )
    with torch.no_grad():
        logits = engine(torch.tensor([[5, 9, 100, 7]])).logits
    engine.close()
    return num_numbers, held, logits


def test_a_frozen_model_below_stage_3_is_offloaded_all_the_same() -> None:
    """A rank then holds its half, in the host's memory; what the model says is the same."""
    want = tiny_decoder("llama")(torch.tensor([[5, 9, 100, 7]])).logits
    for offload in (True, False):
        for num_numbers, held, logits in run_ranks(_score_frozen, 2, offload):
            assert (held <= num_numbers * 0.6) == offload and (held == num_numbers) != offload
            assert (logits - want).abs().max() < 1e-6
