"""The run of ``rlhf.py learning``: a small GPT on real text, SFT, then PPO and GRPO on a written reward, and a control.

The reward is of brackets: 1 where a response closes what it opens, less for each that has no partner, 0 without any.
The control trains on the same rewards dealt out to other responses.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thalweg.data.corpus import split_held_out, stdlib_documents
from thalweg.data.tokenizer import END_TOKEN, train_tokenizer
from thalweg.infer import EngineConfig, SamplingParams, load_engine
from thalweg.rlhf.config import load_rlhf_config
from thalweg.rlhf.losses import token_logprobs
from thalweg.rlhf.models import load_policy, load_tokenizer
from thalweg.rlhf.rollout import Rollout, generate_rollout
from thalweg.rlhf.steps import run_step

ANSWER_TOKENS, PROMPT_TOKENS, NUM_HELD_OUT = 24, 48, 192
PAIRS = {"(": ")", "[": "]", "{": "}"}


def bracket_reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The part of a response's brackets that have their partner; 0 where there are none."""
    rewards = []
    for text in completions:
        stack, paired, brackets = [], 0, 0
        for character in text:
            if character in PAIRS:
                stack.append(PAIRS[character])
                brackets += 1
            elif character in PAIRS.values():
                brackets += 1
                if stack and stack[-1] == character:
                    stack.pop()
                    paired += 2
        rewards.append(paired / brackets if brackets else 0.0)
    return rewards


def shuffled_reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The control: the same numbers, dealt out to other responses."""
    rewards = bracket_reward(prompts, completions)
    random.Random("".join(completions)).shuffle(rewards)
    return rewards


def prepare(folder: Path) -> None:
    """Write the tokenizer, a model with random weights, text to pretrain on, prompts and held-out prompts."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    training, held_out = split_held_out(stdlib_documents(tests=False), 20)
    byte_pairs = train_tokenizer([document.text for document in training[::4]], 1024)
    byte_pairs.save(folder / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END_TOKEN, pad_token=END_TOKEN
    )
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    shape = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": end, "eos_token_id": end}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape, **dropout))
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    draw = random.Random(0)
    for name, documents in (("train", training), ("held_out", held_out)):
        examples, texts = [], []
        for document in documents:
            lines = [line for line in document.text.splitlines() if line.strip()]
            for _ in range(6):
                at = draw.randrange(max(len(lines) - 6, 1))
                examples.append(
                    {"prompt": "\n".join(lines[at : at + 3]) + "\n", "chosen": "\n".join(lines[at + 3 : at + 6])}
                )
                start = draw.randrange(max(len(document.text) - 400, 1))
                texts.append({"text": document.text[start : start + 400]})
        draw.shuffle(examples)
        _write(folder / f"{name}.jsonl", examples)
        _write(folder / f"{name}_text.jsonl", texts)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_learning(folder: Path, seeds: Sequence[int], iterations: int, runs: Sequence[str]) -> dict[str, Any]:
    """Pretrain and fine-tune once, then each run with each seed; returns held-out rewards, their errors, and KL."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    if not (folder / "held_out.jsonl").is_file():
        prepare(folder)
    common = {
        "seed": 0, "data_split": "1,0,0", "max_seq_len": 96, "per_device_train_batch_size": 16, "num_warmup_steps": 10,
    }  # fmt: skip
    base = run_step("sft", load_rlhf_config(common | {
        "model_name_or_path": str(folder / "base"), "data_path": str(folder / "train_text.jsonl"),
        "output_dir": str(folder / "pretrained"), "learning_rate": 3e-3, "num_train_steps": 500,
    }, "sft"))  # fmt: skip
    sft = run_step("sft", load_rlhf_config(common | {
        "model_name_or_path": str(base), "data_path": str(folder / "train.jsonl"), "output_dir": str(folder / "tuned"),
        "learning_rate": 5e-4, "num_train_steps": 150,
    }, "sft"))  # fmt: skip
    found: dict[str, Any] = {
        "seconds_to_sft": time.perf_counter() - begun,
        "sft": evaluate(sft, sft, folder),
        "runs": [],
    }
    for seed in seeds:
        for name in runs:
            begun = time.perf_counter()
            step: Any = "ppo" if name == "ppo" else "grpo"
            options = {
                "seed": seed, "data_split": "0,0,1", "data_path": str(folder / "train.jsonl"),
                "output_dir": str(folder / f"{name}-{seed}"), "model_name_or_path": str(sft),
                "reward_function": f"_rlhf_learning:{'shuffled' if name == 'shuffled' else 'bracket'}_reward",
                "max_prompt_seq_len": PROMPT_TOKENS, "max_answer_seq_len": ANSWER_TOKENS,
                "per_device_generation_batch_size": 16, "num_generations": 8, "per_device_train_batch_size": 32,
                "num_mini_batches": 2, "num_train_steps": iterations, "learning_rate": 3e-4,
                "critic_learning_rate": 1e-3, "lr_scheduler_type": "constant", "beta": 0.2, "kl_coef": 0.05,
                "kl_target": 6.0, "kl_horizon": 2000,
            }  # fmt: skip
            model = run_step(step, load_rlhf_config(options, step))
            ended = evaluate(model, sft, folder)
            gain = ended["reward"] - found["sft"]["reward"]
            error = (ended["error"] ** 2 + found["sft"]["error"] ** 2) ** 0.5
            seconds = time.perf_counter() - begun
            found["runs"].append(
                {"run": name, "seed": seed, **ended, "gain_in_errors": gain / error, "seconds": seconds}
            )
    return found


def draw_curves(folder: Path, seeds: Sequence[int], runs: Sequence[str], picture: Path) -> None:
    """Reward and KL of each run's rollouts by iteration, as one picture."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, colour in zip(runs, plt.get_cmap("tab10").colors, strict=False):  # type: ignore[attr-defined]
        for seed in seeds:
            (file,) = (folder / f"{name}-{seed}").glob("*/metrics.jsonl")
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            for axis, key in zip(axes, ("reward", "kl"), strict=True):
                label = {"ppo": "PPO", "grpo": "GRPO", "shuffled": "GRPO, rewards shuffled"}[name]
                steps, values = [row["step"] for row in rows], [row[key] for row in rows]
                axis.plot(steps, values, color=colour, label=label if seed == seeds[0] else None)
    for axis, title in zip(axes, ("reward of the rollouts", "KL to the SFT model, nats a response"), strict=True):
        axis.set(title=title, xlabel="iteration of 128 responses")
    axes[0].legend()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


@torch.no_grad()
def evaluate(path: Path, reference: Path, folder: Path) -> dict[str, float]:
    """A model's reward on held-out prompts with its standard error, and the KL of a response to ``reference``."""
    tokenizer, model, base = load_tokenizer(path), load_policy(path).eval(), load_policy(reference).eval()
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    prompts = [prompt for prompt in prompts if len(prompt) <= PROMPT_TOKENS][:NUM_HELD_OUT]
    core: Any = load_engine(model, EngineConfig(dtype="fp32", max_num_seqs=64))
    params = SamplingParams(max_tokens=ANSWER_TOKENS, stop_token_ids=(tokenizer.eos_token_id,), ignore_eos=True)
    rollout = generate_rollout(core, prompts, params, seed=1, pad_id=tokenizer.eos_token_id)
    core.close()
    rewards = bracket_reward([], tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True))
    kl = _summed(model, rollout) - _summed(base, rollout)
    return {
        "reward": statistics.mean(rewards), "error": statistics.stdev(rewards) / len(rewards) ** 0.5,
        "kl": float(kl.mean()), "length": float(rollout.mask.sum(1).float().mean()),
    }  # fmt: skip


def _summed(model: Any, rollout: Rollout) -> torch.Tensor:
    logits = model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask).logits
    return token_logprobs(logits, rollout.input_ids).masked_fill(~rollout.mask, 0.0).sum(1)
