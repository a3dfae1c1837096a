"""Causal language modelling with Trainer, as Hugging Face's documentation shows it: text files, blocks, perplexity.

Says nothing of DeepSpeed: `--deepspeed ds_config.json` is one of Trainer's own arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str = field(metadata={"help": "a folder, or a name on the hub"})


@dataclass
class DataArguments:
    """Which text."""

    train_file: str = field(metadata={"help": "one text per line"})
    validation_file: str = field(metadata={"help": "the same, to evaluate on"})
    block_size: int = field(default=32, metadata={"help": "tokens of a sequence"})


def compute_metrics(evaluated: Any) -> dict[str, float]:
    """How often the likeliest token is the next one."""
    predicted, labels = evaluated
    return {"accuracy": float((predicted[:, :-1] == labels[:, 1:]).mean())}


def main() -> None:
    """Train, evaluate and save as the command line says."""
    parser: Any = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))  # type: ignore[arg-type]
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw: Any = load_dataset("text", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain(*rows)) for key, rows in examples.items()}
        length = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = {
            key: [tokens[at : at + data_args.block_size] for at in range(0, length, data_args.block_size)]
            for key, tokens in joined.items()
        }
        return blocks | {"labels": [list(block) for block in blocks["input_ids"]]}

    with training_args.main_process_first(desc="tokenize"):
        tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
        blocks = tokenized.map(group_texts, batched=True)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint
        if checkpoint == "last":
            checkpoint = get_last_checkpoint(training_args.output_dir)
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = result.metrics | {"train_samples": len(blocks["train"])}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
