"""Around Trainer's loop: the best model at the end, predict, generation in evaluation, LoRA, gradient checkpointing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.compat.hf_support import (
    LENGTH,
    MICRO_BATCH,
    VOCAB,
    make_dataset,
    make_model,
    prepare_rank,
    reset_accelerate,
    write_config,
)
from tests.harness import run_ranks
from tests.marks import nightly

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs transformers, accelerate and peft")
REUSE_RANKS = True
TOLERANCE = 1e-4
Run = Callable[[str, dict[str, Any]], dict[str, Any]]

STAGES = [nightly(1), nightly(2), 3]


def _arguments(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    common: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 12,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "save_strategy": "no",
    }
    return common | settings


def _run(rank: int, world: int, folder: str, stage: int | None, run: Run) -> dict[str, Any]:
    """``run`` under DeepSpeed's name at ``stage`` on two ranks, or without it on one that sees both ranks' batches."""
    if stage is None:
        os.environ["OMP_NUM_THREADS"] = "1"
        reset_accelerate()
        sizes, settings = 2 * MICRO_BATCH, {"use_cpu": True}
    else:
        prepare_rank()
        config = write_config(folder, stage)
        sizes, settings = MICRO_BATCH, {"deepspeed": config, "accelerator_config": {"use_configured_state": True}}
    return run(folder, {"per_device_train_batch_size": sizes, "per_device_eval_batch_size": sizes, **settings})


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _compare(folder: Path, stage: int, run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results of plain Trainer and of each rank; losses and what was evaluated are equal."""
    import numpy

    for name in ("plain", "ds"):
        (folder / name).mkdir()
    plain = run_ranks(_run, 1, str(folder / "plain"), None, run)[0]
    ours = run_ranks(_run, 2, str(folder / "ds"), stage, run)
    for result in ours:
        for key, value in plain["close"].items():
            numpy.testing.assert_allclose(result["close"][key], value, atol=TOLERANCE, err_msg=key)
        assert result["same"] == plain["same"]
    return plain, ours


def _find_best(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Noise is learnt by heart: the loss of the evaluation rises again soon."""
    from transformers import Trainer, TrainingArguments

    options = {"load_best_model_at_end": True, "gradient_checkpointing": True, "max_steps": 18, **settings}
    options |= {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6}
    arguments = TrainingArguments(**_arguments(folder, options))
    rows = make_dataset(12, seed=2, masked=False)
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=make_dataset(), eval_dataset=rows)
    trainer.train()
    state = trainer.state
    predicted: Any = trainer.predict(rows)
    logits, labels = predicted.predictions, predicted.label_ids
    evaluations = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
    assert isinstance(state.best_model_checkpoint, str)
    return {
        "close": {
            "losses": _losses(trainer),
            "best": state.best_metric,
            "evaluations": evaluations,
            "after": trainer.evaluate()["eval_loss"],
            "test": predicted.metrics["test_loss"],
            "logits": logits,
        },
        "same": {"checkpoint": Path(state.best_model_checkpoint).name, "labels": labels.tolist()},
    }


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_best_model_at_end_and_predict(stage: int, tmp_path: Path) -> None:
    plain, _ = _compare(tmp_path, stage, _find_best)
    close = plain["close"]
    assert close["after"] == pytest.approx(close["best"], abs=TOLERANCE)
    assert close["evaluations"][-1] > close["best"] + 10 * TOLERANCE, "the last model is not the best one"
    assert close["logits"].shape == (12, LENGTH, VOCAB)


def _train_lora(folder: str, settings: dict[str, Any], checkpointing: bool = False) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM")
    arguments = TrainingArguments(**_arguments(folder, {"gradient_checkpointing": checkpointing, **settings}))
    model = get_peft_model(make_model(), lora)  # type: ignore[arg-type]
    rows = make_dataset(8, seed=2, masked=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=make_dataset(), eval_dataset=rows)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/adapter")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    unset_hf_deepspeed_config()  # a plain program reads it
    loaded = PeftModel.from_pretrained(make_model(), f"{folder}/adapter").eval()
    with torch.no_grad():
        again = float(loaded(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss)
    adapter = {name: value.detach().numpy() for name, value in loaded.named_parameters() if "lora" in name}
    assert all(abs(value).max() > 0 for value in adapter.values())
    files = sorted(path.name for path in Path(f"{folder}/adapter").glob("adapter*"))
    return {
        "close": {"losses": _losses(trainer), "eval": evaluated, "again": again, **adapter},
        "same": {"files": files, "frozen": _is_plain_base(loaded)},
    }


def _is_plain_base(loaded: Any) -> bool:
    import torch

    before = dict(make_model().named_parameters())
    found = loaded.get_base_model().named_parameters()
    named = {name.replace(".base_layer", ""): value for name, value in found if "lora" not in name}
    return all(torch.equal(before[name], value) for name, value in named.items())


def _prepare_loaded(rank: int, world: int, folder: str) -> None:
    """What a program does between `from_pretrained` and training, each with the plain model's results."""
    import torch

    prepare_rank()
    deepspeed = importlib.import_module("deepspeed")
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    target: Any = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    rows = torch.tensor([range(2, 10)])

    def look(model: Any) -> Any:
        with torch.no_grad():
            return model.eval()(input_ids=rows).logits[..., :VOCAB]

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes))
    expected = look(plain)
    if rank == 0:
        plain.save_pretrained(f"{folder}/base")
        torch.manual_seed(1)
        adapted = get_peft_model(plain, LoraConfig(init_lora_weights=False, **target))
        adapted.save_pretrained(f"{folder}/adapter")
        torch.save(look(adapted), f"{folder}/adapted.pt")
    torch.distributed.barrier()
    adapted_logits = torch.load(f"{folder}/adapted.pt")
    assert (adapted_logits - expected).abs().max() > 0.01
    settings = HfDeepSpeedConfig(config)
    kinds: dict[str, Any] = {
        "fresh": lambda model: get_peft_model(model, LoraConfig(**target)),
        "pissa": lambda model: get_peft_model(model, LoraConfig(init_lora_weights="pissa", **target)),
        "loaded": lambda model: PeftModel.from_pretrained(model, f"{folder}/adapter", is_trainable=True),
        "resized": lambda model: (model.resize_token_embeddings(VOCAB + 4), model)[1],
    }
    for kind, prepare in kinds.items():
        torch.manual_seed(2)
        model = prepare(AutoModelForCausalLM.from_pretrained(f"{folder}/base"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        found = look(engine)
        assert (found - (adapted_logits if kind == "loaded" else expected)).abs().max() < TOLERANCE, kind
        if kind == "resized":
            added = model.get_input_embeddings().weight.full_tensor()[VOCAB:]
            assert len(added) == 4 and 0.001 < added.std() < 1
        else:
            assert sum(parameter.numel() for parameter in trained) == 2 * 2 * 2 * 4 * 32
        engine.destroy()
    del settings
    unset_hf_deepspeed_config()


def test_a_loaded_model_at_stage_3_is_adapted_and_resized(tmp_path: Path) -> None:
    run_ranks(_prepare_loaded, 2, str(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_lora_is_saved_for_peft(stage: int, tmp_path: Path) -> None:
    _, ours = _compare(tmp_path, stage, _train_lora)
    assert ours[0]["same"]["files"] == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lora_with_gradient_checkpointing(stage: int, tmp_path: Path) -> None:
    _compare(tmp_path, stage, partial(_train_lora, checkpointing=True))
