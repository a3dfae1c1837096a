"""Options of ``thalweg rlhf``: DeepSpeed-Chat's command lines as its scripts have them, errors that name the cure."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.infer_models import tiny_decoder
from thalweg.cli import rlhf as command
from thalweg.rlhf import models, policy, steps
from thalweg.rlhf.config import ROLE_OPTIONS, RLHFConfig, load_rlhf_config
from thalweg.utils.env import DEVICE_VARIABLE

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


def test_the_device_is_what_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "before")
    _config("sft", SFT, monkeypatch)
    assert os.environ[DEVICE_VARIABLE] == "before"  # auto: as the environment says
    _config("sft", f"{SFT} --device cpu", monkeypatch)
    assert os.environ[DEVICE_VARIABLE] == "cpu"


def test_deepspeed_chat_s_lines_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sft, reward, ppo = (
        _config(step, line, monkeypatch) for step, line in (("sft", SFT), ("reward", REWARD), ("ppo", PPO))
    )
    assert sft.data_path == ("Dahoas/rm-static", "Dahoas/full-hh-rlhf") and sft.num_train_epochs == 16
    assert (sft.learning_rate, sft.zero_stage, sft.lora_dim, sft.dtype) == (9.65e-6, 3, 128, "bf16")
    assert sft.gradient_checkpointing and sft.only_optimize_lora and not sft.offload
    assert (reward.weight_decay, reward.gradient_accumulation_steps, reward.dropout) == (0.1, 4, 0.0)
    assert (sft.dropout, ppo.dropout) == (None, 0.0)
    actor, critic = ppo.of("actor"), ppo.of("critic")
    assert (ppo.per_device_train_batch_size, ppo.num_mini_batches, actor.weight_decay) == (4, 1, 0.1)
    assert (actor.zero_stage, critic.zero_stage, critic.learning_rate, critic.weight_decay) == (3, 2, 5e-6, 0.1)
    assert (actor.lora_dim, actor.lora_module_name, critic.lora_dim) == (128, "decoder.layers.", 0)
    assert steps._find_reward_model(ppo) == "C" and steps._find_model("ppo", ppo) == "A"


# Every option of the parsers of its three steps and of its DPO (microsoft/DeepSpeedExamples, 83757d9c), and what it
# sets here; nothing: it does not change what a step does; a text: the error, which names the way.
EVERY: dict[str, Any] = {
    "--data_path a.jsonl b.jsonl": {"data_path": ("a.jsonl", "b.jsonl")},
    "--data_split 6,2,2": {"data_split": "6,2,2"},
    "--data_output_path /tmp/x": {},
    "--per_device_train_batch_size 4": {"per_device_train_batch_size": 4},
    "--per_device_eval_batch_size 4": {},
    "--max_seq_len 64": {"max_seq_len": 64},
    "--learning_rate 1e-3": {"learning_rate": 1e-3},
    "--weight_decay 0.1": {"weight_decay": 0.1},
    "--num_train_epochs 2": {"num_train_epochs": 2},
    "--gradient_accumulation_steps 2": {"gradient_accumulation_steps": 2},
    "--lr_scheduler_type linear": {"lr_scheduler_type": "linear"},
    "--num_warmup_steps 10": {"num_warmup_steps": 10},
    "--output_dir out": {"output_dir": "out"},
    "--seed 7": {"seed": 7},
    "--local_rank 0": {},
    "--offload": {"offload": True},
    "--dtype bf16": {"dtype": "bf16"},
    "--only_optimize_lora": {"only_optimize_lora": True},
    "--compute_fp32_loss": {},
    "--enable_tensorboard": {"enable_tensorboard": True},
    "--tensorboard_path tb": {"tensorboard_path": "tb"},
    "--add_eot_token": "add_eot_token has no counterpart: an answer ends with the tokenizer's eos_token",
    "--deepspeed": {},
    "--deepscale": {},
    "--deepspeed_config ds.json": {"deepspeed_config": "ds.json"},
    "--deepscale_config ds.json": {"deepspeed_config": "ds.json"},
}
SUPERVISED = EVERY | {
    "--model_name_or_path m": {"model_name_or_path": "m"},
    "--gradient_checkpointing": {"gradient_checkpointing": True},
    "--dropout 0.1": {"dropout": 0.1},
    "--zero_stage 2": {"zero_stage": 2},
    "--lora_dim 8": {"lora_dim": 8},
    "--lora_module_name layers.": {"lora_module_name": "layers."},
    "--lora_learning_rate 5e-4": {"lora_learning_rate": 5e-4},
}
FLAGS: dict[str, dict[str, Any]] = {
    "sft": SUPERVISED
    | {
        "--sft_only_data_path c.jsonl d.jsonl": {"sft_only_data_path": ("c.jsonl", "d.jsonl")},
        "--eot_token <end>": "eot_token has no counterpart: an answer ends with the tokenizer's eos_token",
        "--print_loss": {},
    },
    "reward": SUPERVISED
    | {
        "--num_padding_at_beginning 1": {},
        "--eval_interval 0": {},
        "--eval_interval 5": "eval_interval has no counterpart: nothing is evaluated while it trains; metrics.jsonl",
        "--eval_iters 10": {},
    },
    "dpo": SUPERVISED
    | {
        "--beta 0.3": {"beta": 0.3},
        "--label_smoothing 0.1": {"label_smoothing": 0.1},
        "--offload_reference_model": {"offload_reference_model": True},
        "--print_loss": {},
    },
    "ppo": {flag: sets for flag, sets in EVERY.items() if "accumulation" not in flag}
    | {
        "--unsupervised_dataset_name w": {"unsupervised_dataset_name": "w", "unsup_coef": 27.8},
        "--unsupervised_dataset_name w --unsupervised_dataset_config_name w-2 --unsup_coef 3": {
            "unsupervised_dataset_name": "w", "unsupervised_dataset_config_name": "w-2", "unsup_coef": 3.0,
        },
        "--actor_model_name_or_path a": {"actor_model_name_or_path": "a"},
        "--critic_model_name_or_path c": {"critic_model_name_or_path": "c"},
        "--num_padding_at_beginning 1": {},
        "--per_device_generation_batch_size 4": {"per_device_generation_batch_size": 4},
        "--per_device_training_batch_size 4": {"per_device_train_batch_size": 4},
        "--per_device_training_batch_size 2 --gradient_accumulation_steps 2": {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_mini_batches": 2,
        },
        "--generation_batches 2": {"generation_batches": 2},
        "--ppo_epochs 2": {"ppo_epochs": 2},
        "--max_prompt_seq_len 64": {"max_prompt_seq_len": 64},
        "--max_answer_seq_len 64": {"max_answer_seq_len": 64},
        "--actor_learning_rate 1e-3": {"actor_learning_rate": 1e-3},
        "--critic_learning_rate 1e-3": {"critic_learning_rate": 1e-3},
        "--actor_weight_decay 0.1": {"actor_weight_decay": 0.1},
        "--critic_weight_decay 0.1": {"critic_weight_decay": 0.1},
        "--preprocessing_num_workers 4": {},
        "--enable_hybrid_engine": {},
        "--unpin_actor_parameters": {},
        "--release_inference_cache": {},
        "--inference_tp_size 2": {"inference_tp_size": 2},
        "--tp_gather_partition_size 8": {},
        "--offload_reference_model": {"offload_reference_model": True},
        "--offload_reward_model": {"offload_reward_model": True},
        "--actor_zero_stage 3": {"actor_zero_stage": 3},
        "--critic_zero_stage 3": {"critic_zero_stage": 3},
        "--reference_zero_stage 3": {"reference_zero_stage": 3},
        "--actor_gradient_checkpointing": {"actor_gradient_checkpointing": True},
        "--critic_gradient_checkpointing": {"critic_gradient_checkpointing": True},
        "--actor_dropout 0.1": {"actor_dropout": 0.1},
        "--critic_dropout 0.1": {"critic_dropout": 0.1},
        "--disable_actor_dropout": {"actor_dropout": 0.0},
        "--actor_lora_dim 8": {"actor_lora_dim": 8},
        "--actor_lora_module_name layers.": {"actor_lora_module_name": "layers."},
        "--critic_lora_dim 8": {"critic_lora_dim": 8},
        "--critic_lora_module_name layers.": {"critic_lora_module_name": "layers."},
        "--actor_lora_learning_rate 5e-4": {"actor_lora_learning_rate": 5e-4},
        "--critic_lora_learning_rate 5e-4": {"critic_lora_learning_rate": 5e-4},
        "--enable_ema": {"enable_ema": True},
        "--enable_mixed_precision_lora": {"enable_mixed_precision_lora": True},
        "--align_overflow": {},
        "--align_overflow --dtype fp16": "align_overflow: actor and critic leave out an update each by itself; in bf16",
        "--print_answers": {"print_answers": True},
        "--print_answers_interval 5": {"print_answers_interval": 5},
        "--enable_test_mode --test_stop_step 5": {"enable_test_mode": True, "test_stop_step": 5},
        "--test_stop_step 5": {"test_stop_step": 5},
    },
}  # fmt: skip


@pytest.mark.parametrize("step", FLAGS)
def test_every_option_of_deepspeed_chat_sets_what_it_is_for_and_nothing_else(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = vars(_config(step, "", monkeypatch))
    for flag, sets in FLAGS[step].items():
        if isinstance(sets, str):
            with pytest.raises(ValueError, match=sets):
                _config(step, flag, monkeypatch)
            continue
        for line in (flag, " ".join(x.replace("_", "-") if x.startswith("--") else x for x in flag.split())):
            config = vars(_config(step, line, monkeypatch))
            assert {name: value for name, value in config.items() if value != plain[name]} == sets, line


def test_no_field_of_a_role_is_forgotten() -> None:
    """Each option that is PPO's actor's or critic's alone goes over the shared one, to that role and not the other."""
    shared = {"lora_module_name": "x", "lora_learning_rate": 1.0, "weight_decay": 0.5}
    values = {"gradient_checkpointing": True, "lora_module_name": "y"}
    for name in ROLE_OPTIONS:
        for role, other in (("actor", "critic"), ("critic", "actor")):
            value = values.get(name, 3)
            plain, config = RLHFConfig(**shared), RLHFConfig(**shared, **{f"{role}_{name}": value})
            assert getattr(config.of(role), name) == value != getattr(plain.of(role), name)
            assert getattr(config.of(other), name) == getattr(plain.of(other), name)
    roles = {name.partition("_")[2] for name in vars(RLHFConfig()) if name.startswith(("actor_", "critic_"))}
    assert roles == {*ROLE_OPTIONS, "model_name_or_path"}
    quantized = RLHFConfig(lora_dim=4, only_optimize_lora=True, quantize_base="nf4", enable_mixed_precision_lora=True)
    actor, critic = quantized.of("actor"), quantized.of("critic")
    assert (actor.lora_dim, actor.quantize_base, actor.enable_mixed_precision_lora) == (4, "nf4", True)
    assert (critic.lora_dim, critic.quantize_base, critic.enable_mixed_precision_lora) == (0, "", False)


def test_e2e_rlhf_s_options_reach_their_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(line: str) -> dict[str, RLHFConfig]:
        parser, found = argparse.ArgumentParser(**command.PARSER_OPTIONS), {}
        command.add_arguments(parser)
        monkeypatch.setattr(steps, "run_step", lambda name, config: found.update({name: config}))
        assert command.run(parser.parse_args(["all", *line.split()])) == 0
        return found

    whole = run(
        "--actor-model A --reward-model R --actor-zero-stage 2 --reward-zero-stage 1 --output-dir O "
        "--deployment-type single_node"
    )
    assert list(whole) == ["sft", "reward", "ppo"] and {config.output_dir for config in whole.values()} == {"O"}
    assert (whole["sft"].model_name_or_path, whole["sft"].zero_stage) == ("A", 2)
    assert (whole["reward"].reward_model_name_or_path, whole["reward"].zero_stage) == ("R", 1)
    assert [whole["ppo"].of(role).zero_stage for role in ("actor", "critic")] == [2, 1]
    assert whole["ppo"].actor_model_name_or_path == ""  # it begins with SFT's result
    assert list(run("--step 1")) == ["sft"] and list(run("--step 2 3")) == ["reward", "ppo"]
    with pytest.raises(ValueError, match="step 2 has nothing to do: dpo has no reward model to train"):
        run("--step 2 --algorithm dpo")
    with pytest.raises(ValueError, match="--step chooses of `thalweg rlhf all`: leave it out of sft"):
        _config("sft", "--step 1", monkeypatch)


def test_a_file_names_the_algorithm_and_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(line: str, **options: Any) -> list[Any]:
        file = tmp_path / "rlhf.json"
        file.write_text(json.dumps(options))
        parser, found = argparse.ArgumentParser(**command.PARSER_OPTIONS), []
        command.add_arguments(parser)
        monkeypatch.setattr(command, "_launch", lambda nproc: found.append(nproc) or 0)
        monkeypatch.setattr(steps, "run_step", lambda name, config: found.append(name))
        assert command.run(parser.parse_args(["all", "--config", str(file), *line.split()])) == 0
        return found

    assert run("", algorithm="dpo") == ["sft", "dpo"]
    assert run("--algorithm grpo", algorithm="dpo", reward_function="f.py:f") == ["sft", "grpo"]
    assert run("", algorithm="dpo", nproc=2) == [2] and run("--nproc 1", algorithm="dpo", nproc=2) == ["sft", "dpo"]
    with pytest.raises(ValueError, match="algorithm is 'rloo'; it may be ppo, dpo, grpo"):
        run("", algorithm="rloo")
    with pytest.raises(ValueError, match="there is no option 'learning_rat', did you mean learning_rate"):
        run("", nproc=2, learning_rat=1.0)  # said before any rank starts


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_is_an_error(bad: Any) -> None:
    def score(prompts: list[str], completions: list[str]) -> list[Any]:
        return [bad if "b" in text else 1.0 for text in completions]

    reward = policy.reward_from_function(score)
    assert reward(None, ["p", "p"], ["a", "c"], [{}, {}]).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=f"the reward function gave {bad} for the response 'b'"):
        reward(None, ["p", "p"], ["a", "b"], [{}, {}])


@pytest.mark.parametrize("takes_all", [True, False])
def test_a_reward_function_gets_the_columns_of_all_examples(takes_all: bool) -> None:
    """Blended files have columns of their own; None where a row has it not."""

    def score(prompts: list[str], completions: list[str], word: list[Any], more: int = 2) -> list[float]:
        assert word == [None, "x"] and more == 2
        return [1.0, 2.0]

    reward = policy.reward_from_function((lambda **given: score(**given)) if takes_all else score)
    examples = [{}, {"word": "x"}]
    assert reward(None, ["p", "p"], ["a", "c"], examples).tolist() == [1.0, 2.0]


def test_a_deepspeed_config_is_over_the_options_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its "auto" is what the options say, as a Hugging Face program's; what the loop counts by is said once."""
    found: list[dict[str, Any]] = []
    engine = SimpleNamespace(meshes=SimpleNamespace(sequence=None))
    monkeypatch.setattr(models, "initialize", lambda **given: (found.append(given["config"]), engine)[1:])

    def build(given: dict[str, Any]) -> dict[str, Any]:
        config = replace(
            load_rlhf_config({}, "sft", learning_rate=1e-5, zero_stage=2, dtype="bf16"), deepspeed_config=given
        )
        models.build_engine(tiny_decoder("llama"), config, num_updates=10, accumulation=4)
        return found[-1]

    plain = build({})
    assert plain["optimizer"]["params"]["lr"] == 1e-5 and plain["bf16"] == {"enabled": True}
    auto = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}},
        "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto", "scheduler": "auto", "zero_optimization": {"stage": "auto", "overlap_comm": True},
    }  # fmt: skip
    got = build(auto)
    assert got["optimizer"]["params"] == {**plain["optimizer"]["params"], "eps": 1e-6}
    assert got["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    unchanged = plain.keys() - {"optimizer", "zero_optimization"}
    assert {key: got[key] for key in unchanged} == {key: plain[key] for key in unchanged}
    assert got.keys() == plain.keys()
    assert build({"gradient_accumulation_steps": 4, "checkpoint": {"keep": 1}})["checkpoint"] == {"keep": "all"}
    assert build({"optimizer": {"type": "adamw"}})["optimizer"]["params"] == plain["optimizer"]["params"]
    sgd = build({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}})["optimizer"]
    assert sgd == {"type": "SGD", "params": {"lr": 1e-5, "weight_decay": 0.0, "momentum": 0.5}}
    for key, value in (
        ("train_micro_batch_size_per_gpu", 64), ("gradient_accumulation_steps", 1),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{key} is counted by the options"):
            build({key: value})


def test_options_reach_the_engine_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    engine = SimpleNamespace(eval=lambda: None, meshes=SimpleNamespace(sequence=None))
    monkeypatch.setattr(models, "initialize", lambda **given: (found.append(given), engine)[1:])
    line = (
        "--learning_rate 1e-3 --critic_learning_rate 2e-3 --critic_weight_decay 0.2 --actor_zero_stage 3 --offload "
        "--critic_zero_stage 1 --actor_lora_dim 4 --critic_lora_dim 2 --critic_lora_module_name layers.1. "
        "--critic_lora_learning_rate 5e-4 --enable_mixed_precision_lora --critic_dropout 0.1 --seed 9 --dtype bf16 "
        "--actor_gradient_checkpointing --per_device_training_batch_size 4 --enable_tensorboard --tensorboard_path TB "
        "--lr_scheduler_type linear --num_warmup_steps 4 --lora_alpha 1 --lora_variant dora --max_answer_seq_len 5"
    )
    config, built = _config("ppo", line, monkeypatch), {}
    for role in ("actor", "critic"):
        model = tiny_decoder("llama") if role == "actor" else models.ValueModel(tiny_decoder("llama").model)
        built[role] = models.adapt(model, config.of(role))
        models.build_engine(built[role], config.of(role), num_updates=10, name=role)
    (actor, critic), offload = found, {"device": "cpu"}
    assert actor["config"]["optimizer"]["params"] == {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}
    assert critic["config"]["optimizer"]["params"] == {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.2}
    assert actor["config"]["zero_optimization"] == {
        "stage": 3, "offload_optimizer": offload, "offload_param": offload, "zero_quantized_nontrainable_weights": True,
    }  # fmt: skip
    assert critic["config"]["zero_optimization"] == {"stage": 1, "offload_optimizer": offload}
    for role, given in (("actor", actor), ("critic", critic)):
        assert given["config"]["tensorboard"] == {"enabled": True, "output_path": "TB", "job_name": role}
        assert (given["config"]["seed"], given["config"]["bf16"]["enabled"]) == (9, True)
        assert given["config"]["train_micro_batch_size_per_gpu"] == 4
    assert actor["model_parameters"] is None
    groups = critic["model_parameters"]
    assert "lr" not in groups[0] and groups[1]["lr"] == 5e-4 and len(groups) == 2
    names = {id(param): name for name, param in built["critic"].named_parameters()}
    rest, lora = ([names[id(param)] for param in group["params"]] for group in groups)
    assert lora and all(".layers.1." in name and ".lora_" in name for name in lora)
    assert not any(".lora_" in name for name in rest) and any("value_head" in name for name in rest)
    # As DeepSpeed-Chat's: an adapted layer's own weight rests even where all else trains.
    frozen = {name for name, param in built["critic"].named_parameters() if not param.requires_grad}
    assert frozen == {name for name in names.values() if name.endswith(".base_layer.weight")} and len(frozen) == 7
    lora_config = built["actor"].peft_config["default"]
    assert (lora_config.r, lora_config.lora_alpha, lora_config.use_dora, lora_config.use_rslora) == (4, 1, True, False)
    assert built["actor"].is_gradient_checkpointing and not built["critic"].backbone.is_gradient_checkpointing
    dropouts = [m.attention_dropout for m in built["critic"].modules() if hasattr(m, "attention_dropout")]
    assert dropouts and set(dropouts) == {0.1}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = actor["lr_scheduler"](optimizer)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    models.build_frozen_engine(tiny_decoder("llama"), config.of("critic"), offload=True)
    assert found[2]["config"]["zero_optimization"] == {"stage": 3, "offload_param": offload}
    models.build_frozen_engine(tiny_decoder("llama"), config.of("critic"))
    assert found[3]["config"]["zero_optimization"] == {"stage": 1}


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
        ({"unsup_coef": 27.8}, "unsup_coef and unsupervised_dataset_name go together"),
        ({"rollout_ranks": 3, "inference_tp_size": 2}, "3 rollout_ranks are no whole number of groups of"),
        ({"reward_zero_stage": 1, "critic_zero_stage": 2}, "which are one option: give one value"),
        ({"enable_test_mode": True}, "enable_test_mode ends after test_stop_step: set it to 1 or more"),
        ({"align_overflow": True, "dtype": "fp16"}, "in bf16 nothing overflows"),
        (
            {"gradient_accumulation_steps": 3},
            "an update of 24 responses on each rank, and an iteration has 8; set gene",
        ),
    ],
)
def test_errors_name_the_option_and_the_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_rlhf_config(options, "ppo")


def test_what_asks_for_nothing_is_taken() -> None:
    load_rlhf_config({"enable_ema": False, "unsup_coef": 0, "generation_batches": 1, "print_loss": True}, "ppo")
