"""One rank of SFT, DPO or GRPO by this package or by TRL: the same model, data, batches and steps; seconds of each.

    RANK=0 WORLD_SIZE=2 ... python bench/_trl_job.py thalweg|trl sft|dpo|grpo FOLDER STEPS

Both run fp32 on their CPU ranks with AdamW, clipped, without packing and without gradient checkpointing.  Rank 0 prints
a JSON object: when each step ended, by the clock and in this process's seconds of processor time.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BATCH, PROMPTS, GENERATIONS, ANSWER, LENGTH = 8, 2, 8, 48, 128
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


def prepare(folder: Path) -> None:
    """Write the model, a token for each byte, and preferences of words."""
    from tests.rlhf_support import make_base

    make_base(folder / "base", **SIZES)
    draw = random.Random(0)
    words = ["red", "blue", "green", "one", "two", "sun", "sea", "hill", "river", "stone"]
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for _ in range(1200):
            texts = [" ".join(draw.choices(words, k=draw.randint(3, 10))) for _ in range(3)]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))) + "\n")


def score(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The part of a response that is vowels."""
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]


def now() -> tuple[float, float]:
    """By the clock, and processor time."""
    return time.perf_counter(), time.process_time()


def run_thalweg(method: str, folder: Path, steps: int) -> list[tuple[float, float]]:
    """Run the step as the command does; when each update or iteration ended."""
    from thalweg.rlhf.config import load_rlhf_config
    from thalweg.rlhf.report import RunLog
    from thalweg.rlhf.steps import run_step

    ends, add = [], RunLog.add

    def timed_add(self: RunLog, *args: Any) -> None:
        ends.append(now())
        add(self, *args)

    RunLog.add = timed_add  # type: ignore[method-assign]
    options: dict[str, Any] = {
        "model_name_or_path": str(folder / "base"), "data_path": str(folder / "data.jsonl"), "data_split": "1,0,0",
        "output_dir": str(folder / f"out-{os.environ['MASTER_PORT']}"), "num_train_steps": steps, "max_seq_len": LENGTH,
        "per_device_train_batch_size": BATCH, "learning_rate": 1e-5,
    }  # fmt: skip
    if method != "sft":
        options["data_split"] = "0,0,1"
    if method == "grpo":
        options |= {
            "per_device_train_batch_size": PROMPTS * GENERATIONS, "per_device_generation_batch_size": PROMPTS,
            "num_generations": GENERATIONS, "max_answer_seq_len": ANSWER, "reward_function": f"{__file__}:score",
        }  # fmt: skip
    run_step(method, load_rlhf_config(options, method))  # type: ignore[arg-type]
    return ends


def run_trl(method: str, folder: Path, steps: int) -> list[tuple[float, float]]:
    """Train by TRL; when each step ended."""
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    data = load_dataset("json", data_files=str(folder / "data.jsonl"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "max_steps": steps, "per_device_train_batch_size": BATCH, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "logging_strategy": "no", "learning_rate": 1e-5, "disable_tqdm": True, "ddp_backend": "gloo",
    }  # fmt: skip
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": [Clock()]}
    if method == "sft":
        data = data.remove_columns("rejected").rename_column("chosen", "completion")
        trainer: Any = trl.SFTTrainer(args=trl.SFTConfig(max_length=LENGTH, **arguments), train_dataset=data, **common)
    elif method == "dpo":
        trainer = trl.DPOTrainer(args=trl.DPOConfig(max_length=LENGTH, **arguments), train_dataset=data, **common)
    else:
        arguments["per_device_train_batch_size"] = PROMPTS * GENERATIONS
        config = trl.GRPOConfig(num_generations=GENERATIONS, max_completion_length=ANSWER, beta=0.1, **arguments)
        data = data.remove_columns(["chosen", "rejected"])
        trainer = trl.GRPOTrainer(args=config, train_dataset=data, reward_funcs=score, **common)
    trainer.train()
    return ends


def main() -> None:
    """Run one side of one method."""
    side, method, folder, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    ends = (run_thalweg if side == "thalweg" else run_trl)(method, folder, steps)
    if os.environ["RANK"] == "0":
        print(json.dumps(ends))


if __name__ == "__main__":
    main()
