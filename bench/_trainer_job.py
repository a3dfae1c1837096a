"""A program with Hugging Face's Trainer and `--deepspeed ds_config.json`, which knows nothing of who stands behind it.

Fine-tunes the model of a folder, evaluates, saves, loads what was saved, and writes what it saw to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # without a GPU Hugging Face asks for this and for gloo

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LENGTH = 64
# Where a step's time is its products, and where it is what each parameter costs.
MODELS: dict[str, dict[str, Any]] = {
    "small": {"vocab_size": 2048, "n_embd": 256, "n_layer": 4, "n_head": 4},
    "wide": {"vocab_size": 8192, "n_embd": 512, "n_layer": 6, "n_head": 8},
}


def make_rows(number: int, seed: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Sequences in which a token often tells the next one, some of them with tokens that do not count."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(number):
        tokens = torch.randint(0, vocabulary, (LENGTH,), generator=draw)
        for at in range(1, LENGTH):
            if float(torch.rand((), generator=draw)) < 0.8:
                tokens[at] = (tokens[at - 1] * 7 + 3) % vocabulary
        labels = tokens.clone()
        labels[: int(torch.randint(0, LENGTH // 2, (), generator=draw))] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def save_initial_model(folder: str, name: str) -> None:
    """The GPT-2 that is fine-tuned, without dropout: its draws differ between frameworks."""
    set_seed(0)
    none: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_positions=LENGTH, **MODELS[name], **none, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)


def loss_of(model: Any, rows: list[dict[str, torch.Tensor]]) -> float:
    """The loss of the rows at once."""
    with torch.no_grad():
        return float(model.eval()(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss)


class StepClock(TrainerCallback):
    """Seconds of each optimiser step, by the clock and of this process."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.cpu: list[float] = []
        self._began = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        clock, cpu = self._began
        self.clock.append(time.perf_counter() - clock)
        self.cpu.append(time.process_time() - cpu)


def main() -> None:
    """Train as the command line says."""
    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    parser.add_argument("--model", required=True)
    parser.add_argument("--report", required=True)
    arguments, own = parser.parse_args_into_dataclasses()
    assert isinstance(own, argparse.Namespace)
    model = AutoModelForCausalLM.from_pretrained(own.model)
    vocabulary = model.config.vocab_size
    train: Any
    held: Any
    train, held, clock = make_rows(512, 1, vocabulary), make_rows(32, 2, vocabulary), StepClock()
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=held, callbacks=[clock])
    began = time.perf_counter()
    trainer.train()
    trained = time.perf_counter()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    torch.distributed.barrier()
    seconds = {
        "train": trained - began,
        "evaluate and save": time.perf_counter() - trained,
        "steps": clock.clock,
        "steps_cpu": clock.cpu,
    }
    if arguments.process_index == 0:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # what was saved is read as a plain program does
        saved = AutoModelForCausalLM.from_pretrained(arguments.output_dir)
        engine: Any = trainer.deepspeed
        log, state = trainer.state.log_history, trainer.state
        report = {
            "losses": [entry["loss"] for entry in log if "loss" in entry],
            "norms": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
            "optimizer_steps": state.global_step,
            "engine": f"{type(engine).__module__}.{type(engine).__qualname__}",
            "engine_steps": engine.global_steps,
            "eval_loss": evaluated,
            "saved_loss": loss_of(saved, held),
            "seconds": seconds,
        }
        Path(own.report).write_text(json.dumps(report))


if __name__ == "__main__":
    PartialState(backend="gloo")
    main()
