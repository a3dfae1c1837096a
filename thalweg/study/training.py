"""Techniques of training: the same fine-tuning, by plain PyTorch and by the engine.

Fixed batches of a dataset's rows, each as long as the longest, AdamW without warm-up: what differs between cells is
the technique alone.  Losses of techniques that do not change the arithmetic are equal to rounding.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.study.prepare import auto_class, load_tokenizer
from thalweg.study.techniques import UnsupportedTechnique, load_plain, now
from thalweg.utils.procfs import end_with_parent

_LEARNING_RATE = 1e-4
_WARMUP_STEPS = 2
_SECONDS_TO_END = 5.0  # that other ranks have, once rank 0 has ended
_IGNORED = -100  # a label that the loss passes over
# DDP's reducer keeps the GIL while, as its group's last owner, it waits for gloo's threads, and one of those may wait
# for the GIL to let its last work go (pytorch issue 56297): a cell hung so.  The process ends with the cell.
_never_freed: list[torch.nn.Module] = []
Step = Callable[[list[dict[str, Tensor]]], float]


def measure_training(spec: dict[str, Any], meter: Any) -> dict[str, Any]:
    """Return the steps of rank 0, and what ``thalweg.plan`` says of the same job.

    ``turns``: seconds of each step and its tokens on all ranks (padding is not counted); ``losses``: rank 0's of all
    steps, the first ones included.  The other ranks are forked before anything is computed.
    """
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_run_rank, args=(spec, rank)) for rank in range(1, spec["hardware"]["ranks"])]
    for process in others:
        process.start()
    try:
        measured = _train(spec, meter, 0)
        for process in others:  # the memory of a child is known once it has ended
            process.join(_SECONDS_TO_END)
    except Exception as error:
        for process in others:
            process.join(_SECONDS_TO_END)
            if process.exitcode == -signal.SIGKILL:
                raise MemoryError("another rank was killed by SIGKILL") from error
        raise
    finally:
        for process in others:
            process.kill()
    return measured | meter.end(Path(spec["scratch"]))


def _run_rank(spec: dict[str, Any], rank: int) -> None:
    """Another rank: it trains on its own batches, and tells nobody."""
    end_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    _train(spec, None, rank)


def _train(spec: dict[str, Any], meter: Any, rank: int) -> dict[str, Any]:
    world_size, device = spec["hardware"]["ranks"], spec["hardware"]["device"]
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    dataset, options = spec["dataset"], dict(spec["technique"]["options"])
    start = time.perf_counter()
    model = load_plain(spec, torch.float32)
    batches = [{key: tensor.to(device) for key, tensor in batch.items()} for batch in make_batches(spec)]
    model = _adapt(model, options)
    config = make_ds_config(dataset["batch_size"], options.pop("config", {}))
    num_micro_batches = config["gradient_accumulation_steps"]
    if options:
        raise ValueError(f"training techniques have no option {', '.join(options)}")
    planned = {} if rank else predict_training(spec, config, batches[0])
    is_plain = spec["technique"]["kind"] == "torch_train"
    step = _torch_step(model, world_size) if is_plain else _thalweg_step(model, config)
    load_seconds = time.perf_counter() - start
    turns, losses = [], []
    for number in range(spec["steps"] + _WARMUP_STEPS):
        if number == _WARMUP_STEPS and meter:
            meter.begin()
        first = number * num_micro_batches * world_size
        of_ranks = [batches[(first + i) % len(batches)] for i in range(num_micro_batches * world_size)]
        began = time.perf_counter()
        losses.append(step(of_ranks[rank::world_size]))
        if number >= _WARMUP_STEPS:
            tokens = sum(int(one["attention_mask"].sum()) for one in of_ranks)
            turns.append({"seconds": now(device) - began, "tokens": tokens})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    batch_size = dataset["batch_size"]
    return {
        "turns": turns, "losses": losses, "quality": {"last loss": losses[-1]}, "load_seconds": load_seconds,
        "samples": batch_size * num_micro_batches * world_size, "batch_size": batch_size, "plan": planned,
    }  # fmt: skip


def _adapt(model: Any, options: dict[str, Any]) -> Any:
    """Apply what a technique does to the model, and take it out of ``options``."""
    if options.pop("activation_checkpointing", False):
        model.gradient_checkpointing_enable()
    lora = options.pop("lora", None)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**lora))
    return model.train()


def make_ds_config(batch_size: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the technique's config with what all have in common."""
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "weight_decay": 0.0}},
        **given,
    }


def make_batches(spec: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return batches of ``input_ids``, ``attention_mask`` and ``labels``, (batch_size, longest) int64.

    The loss is that of the answer alone.  A last batch that would be smaller begins again with the first rows.
    """
    dataset, tokenizer = spec["dataset"], load_tokenizer(spec["model"]["path"])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    examples = []
    for row in spec["rows"]:
        prompt = tokenizer(row["input"], truncation=True, max_length=dataset["max_prompt_tokens"])["input_ids"]
        answer = tokenizer(row["output"], truncation=True, max_length=dataset["new_tokens"])["input_ids"]
        if spec["model"]["shape"]["encoder_decoder"]:
            examples.append((prompt, answer))
        else:
            examples.append((prompt + answer, [_IGNORED] * len(prompt) + answer))
    longest = [max(len(example[part]) for example in examples) for part in (0, 1)]
    batches = []
    for start in range(0, len(examples), dataset["batch_size"]):
        chosen = [examples[(start + i) % len(examples)] for i in range(dataset["batch_size"])]
        tokens = torch.tensor([one + [pad] * (longest[0] - len(one)) for one, _ in chosen])
        mask = torch.tensor([[1] * len(one) + [0] * (longest[0] - len(one)) for one, _ in chosen])
        labels = torch.tensor([one + [_IGNORED] * (longest[1] - len(one)) for _, one in chosen])
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return batches


def plan_training(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what the plan says of a cell whose machine is not here; raises UnsupportedTechnique where it has none."""
    dataset = spec["dataset"]
    config = make_ds_config(dataset["batch_size"], spec["technique"]["options"].get("config", {}))
    planned = predict_training(spec, config, make_batches(spec)[0])
    if "error" in planned:
        raise UnsupportedTechnique(f"the plan has no answer: {planned['error']}")
    samples = dataset["batch_size"] * config["gradient_accumulation_steps"] * spec["hardware"]["ranks"]
    return {"status": "planned", "plan": planned, "batch_size": dataset["batch_size"], "samples": samples}


def predict_training(spec: dict[str, Any], config: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the plan's seconds, bytes and breakdown of a step; its reason where it has none."""
    import transformers

    from thalweg.plan import plan

    model_config = transformers.AutoConfig.from_pretrained(spec["model"]["path"])
    with torch.device("meta"):
        model: Any = auto_class(model_config).from_config(model_config)
    hardware = spec["hardware"]
    try:
        machine = {"device": hardware["device"], "devices_per_node": hardware["ranks"]}
        if hardware["planned"]:
            machine["device_memory"] = hardware["memory"]
        model = _adapt(model, dict(spec["technique"]["options"]))
        found = plan(model, config, batch=batch, suggest=False, **machine)
    except Exception as error:  # the measurement is worth a row without the plan
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "seconds": found.step_seconds, "bytes": found.per_rank.total, "bottleneck": found.bottleneck,
        "fits": found.fits, "limit": found.limit,
        "time": dict(found.time_breakdown), "traffic": dict(found.traffic), "tiers": dict(found.tiers),
    }  # fmt: skip


def _torch_step(model: Any, world_size: int) -> Step:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=0.0, fused=True)
    if world_size > 1:
        torch.distributed.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
        _never_freed.append(model)

    def step(micro_batches: list[dict[str, Tensor]]) -> float:
        total = 0.0
        for number, batch in enumerate(micro_batches, 1):
            # DDP reduces once, with the last micro-batch.
            with model.no_sync() if world_size > 1 and number < len(micro_batches) else nullcontext():
                loss = model(**batch).loss / len(micro_batches)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _thalweg_step(model: Any, config: dict[str, Any]) -> Step:
    import thalweg

    engine = thalweg.initialize(model=model, config=config)[0]

    def step(micro_batches: list[dict[str, Tensor]]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            total += loss.item() / len(micro_batches)
            engine.step()  # it counts micro-batches, and updates with a window's last
        return total

    return step
