"""A loop of the user's own on Accelerate, as its documentation shows it: prepare, accumulate, save and resume."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_scheduler,
)


def main() -> None:
    """Train a classifier, leave a checkpoint at each epoch, go on from one if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lr_scheduler_type", default="constant")
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    raw: Any = load_dataset("json", data_files={"train": args.train_file})
    with accelerator.main_process_first():
        data = raw["train"].map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    data = data.remove_columns(["text"]).rename_column("label", "labels")
    loader = DataLoader(data, batch_size=args.batch_size, collate_fn=DataCollatorWithPadding(tokenizer))
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, num_labels=2)

    steps = len(loader) * args.num_epochs // 2
    plugin = accelerator.state.deepspeed_plugin
    config = {} if plugin is None else plugin.deepspeed_config
    # Where the config has an optimizer or a scheduler of its own, dummies stand for them.
    if "optimizer" in config:
        from accelerate.utils import DummyOptim

        optimizer: Any = DummyOptim(model.parameters(), lr=args.lr, weight_decay=0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    if "scheduler" in config:
        from accelerate.utils import DummyScheduler

        scheduler: Any = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=2)
    else:
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, num_warmup_steps=2, num_training_steps=steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    first = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        first = int(Path(args.resume_from_checkpoint).name.removeprefix("epoch_")) + 1
    losses, right, number = [], 0.0, 0
    for epoch in range(first, args.num_epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            gathered: Any = accelerator.gather(loss.detach().reshape(1))
            losses.append(gathered.mean().item())
        model.eval()
        right, number = 0.0, 0
        for batch in loader:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(dim=-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
            right, number = right + float((predicted == labels).sum()), number + len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {right / number}")
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{args.output_dir}/model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        report = {"losses": losses, "accuracy": right / number, "distributed": str(accelerator.distributed_type)}
        Path(args.output_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
