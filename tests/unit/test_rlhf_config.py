"""Options of ``thalweg rlhf``: DeepSpeed-Chat's command lines as its scripts have them, errors that name the cure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from thalweg.cli import rlhf as command
from thalweg.rlhf import steps
from thalweg.rlhf.config import RLHFConfig, load_rlhf_config

# The three steps of DeepSpeed-Chat's scripts for one GPU and one node.
SFT = (
    "--data_path Dahoas/rm-static Dahoas/full-hh-rlhf --data_split 2,4,4 --model_name_or_path facebook/opt-1.3b "
    "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --max_seq_len 512 --learning_rate 9.65e-6 "
    "--weight_decay 0. --num_train_epochs 16 --gradient_accumulation_steps 1 --lr_scheduler_type cosine "
    "--num_warmup_steps 0 --seed 1234 --gradient_checkpointing --zero_stage 3 --lora_dim 128 "
    "--lora_module_name decoder.layers. --only_optimize_lora --deepspeed --output_dir OUT --enable_tensorboard "
    "--tensorboard_path OUT --print_loss --dtype bf16"
)
REWARD = (
    "--data_path Dahoas/rm-static --model_name_or_path facebook/opt-350m --num_padding_at_beginning 1 "
    "--weight_decay 0.1 --dropout 0.0 --gradient_accumulation_steps 4 --zero_stage 0 --enable_tensorboard "
    "--tensorboard_path OUT --deepspeed --output_dir OUT"
)
PPO = (
    "--data_path Dahoas/rm-static --data_split 2,4,4 --actor_model_name_or_path A --critic_model_name_or_path C "
    "--num_padding_at_beginning 1 --per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--generation_batches 1 --ppo_epochs 1 --max_answer_seq_len 256 --max_prompt_seq_len 256 "
    "--actor_learning_rate 9.65e-6 --critic_learning_rate 5e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.1 "
    "--num_train_epochs 1 --lr_scheduler_type cosine --gradient_accumulation_steps 1 --actor_gradient_checkpointing "
    "--critic_gradient_checkpointing --actor_dropout 0.0 --num_warmup_steps 100 --deepspeed --seed 1234 "
    "--enable_hybrid_engine --inference_tp_size 1 --release_inference_cache --actor_zero_stage 3 --critic_zero_stage 2 "
    "--actor_lora_dim 128 --actor_lora_module_name decoder.layers. --offload_reference_model --output_dir OUT"
)


def _config(step: Any, line: str, monkeypatch: pytest.MonkeyPatch, file: Path | None = None) -> RLHFConfig:
    """What the command line hands to a step."""
    parser, found = argparse.ArgumentParser(**command.PARSER_OPTIONS), []
    command.add_arguments(parser)
    monkeypatch.setattr(steps, "run_step", lambda name, config: found.append((name, config)))
    assert command.run(parser.parse_args([step, *(["--config", str(file)] if file else []), *line.split()])) == 0
    assert [name for name, _ in found] == [step]
    return found[0][1]


def test_deepspeed_chat_s_lines_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sft, reward, ppo = (
        _config(step, line, monkeypatch) for step, line in (("sft", SFT), ("reward", REWARD), ("ppo", PPO))
    )
    assert sft.data_path == ("Dahoas/rm-static", "Dahoas/full-hh-rlhf") and sft.num_train_epochs == 16
    assert (sft.learning_rate, sft.zero_stage, sft.lora_dim, sft.dtype) == (9.65e-6, 3, 128, "bf16")
    assert sft.gradient_checkpointing and sft.only_optimize_lora and not sft.offload
    assert (reward.weight_decay, reward.gradient_accumulation_steps, reward.dropout) == (0.1, 4, 0.0)
    assert (sft.dropout, ppo.dropout) == (None, 0.0)
    assert (ppo.per_device_train_batch_size, ppo.lora_dim, ppo.weight_decay) == (4, 128, 0.1)
    assert (ppo.actor_zero_stage, ppo.critic_zero_stage, ppo.critic_learning_rate) == (3, 2, 5e-6)
    assert steps._find_reward_model(ppo) == "C" and steps._find_model("ppo", ppo) == "A"


def test_a_step_s_block_goes_over_the_file_and_flags_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rlhf.json"
    file.write_text(
        json.dumps({"learning_rate": 1.0, "seed": 5, "max_seq_len": 7, "dpo": {"seed": 6, "max_seq_len": 8}})
    )
    dpo = _config("dpo", "--max_seq_len 9", monkeypatch, file)
    assert (dpo.learning_rate, dpo.seed, dpo.max_seq_len) == (1.0, 6, 9)
    assert load_rlhf_config(file, "sft").seed == 5
    assert load_rlhf_config(None, "grpo").num_generations == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learningrate": 1}, "there is no option 'learningrate', did you mean learning_rate?"),
        ({"zero_stage": 4}, "zero_stage is 4; it may be 0, 1, 2, 3"),
        ({"data_split": "2,4"}, "data_split is '2,4': give three numbers, as 2,4,4"),
        ({"generation_batches": 2}, "generation_batches is not supported yet: leave it out"),
        ({"unsup_coef": 27.8}, "unsup_coef and unsupervised_dataset_name go together"),
        ({"rollout_ranks": 3, "inference_tp_size": 2}, "3 rollout_ranks are no whole number of groups of"),
        ({"actor_weight_decay": 0.1, "critic_weight_decay": 0.2}, "which are one option: give one value"),
    ],
)
def test_errors_name_the_option_and_the_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_rlhf_config(options, "ppo")


def test_what_asks_for_nothing_is_taken() -> None:
    load_rlhf_config({"enable_ema": False, "unsup_coef": 0, "generation_batches": 1, "print_loss": True}, "ppo")
