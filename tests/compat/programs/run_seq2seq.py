"""Fine-tuning FLAN-T5 to summarise, as Hugging Face's documentation shows it: prompts, padding, generation."""

from __future__ import annotations

import argparse
from typing import Any

import numpy
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


def parse_args() -> argparse.Namespace:
    """The options of the script, most of which are handed to Trainer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_id", default="google/flan-t5-small")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--generation_max_length", type=int, default=12)
    parser.add_argument("--generation_num_beams", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--deepspeed", default=None)
    parser.add_argument("--accelerator_config", default=None)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--use_cpu", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Fine-tune, evaluate by generating, save."""
    args = parse_args()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_id)
    data: Any = load_dataset("json", data_files={"train": args.train_file, "test": args.validation_file})

    def preprocess(rows: dict[str, list[str]]) -> dict[str, Any]:
        inputs = tokenizer(["summarize: " + text for text in rows["dialogue"]], max_length=24, truncation=True)
        inputs["labels"] = tokenizer(text_target=rows["summary"], max_length=12, truncation=True)["input_ids"]
        return dict(inputs)

    tokenized = data.map(preprocess, batched=True, remove_columns=["dialogue", "summary"])
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model_id, use_cache=not args.gradient_checkpointing)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100, pad_to_multiple_of=8)

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        predictions, labels = evaluated
        predictions = numpy.where(predictions != -100, predictions, tokenizer.pad_token_id)
        labels = numpy.where(labels != -100, labels, tokenizer.pad_token_id)
        said = tokenizer.batch_decode(predictions, skip_special_tokens=True)
        wanted = tokenizer.batch_decode(labels, skip_special_tokens=True)
        shared = [len(set(a.split()) & set(b.split())) / len(set(b.split())) for a, b in zip(said, wanted, strict=True)]
        lengths = [numpy.count_nonzero(row != tokenizer.pad_token_id) for row in predictions]
        return {"recall": float(numpy.mean(shared)), "gen_len": float(numpy.mean(lengths))}

    training_args = Seq2SeqTrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        predict_with_generate=True,
        generation_max_length=args.generation_max_length,
        generation_num_beams=args.generation_num_beams,
        bf16=args.bf16,
        learning_rate=args.lr,
        num_train_epochs=args.epochs,
        deepspeed=args.deepspeed,
        accelerator_config=args.accelerator_config,
        gradient_checkpointing=args.gradient_checkpointing,
        use_cpu=args.use_cpu,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to="none",
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        data_collator=collator,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()


if __name__ == "__main__":
    main()
