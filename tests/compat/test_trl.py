"""TRL's trainers, which are Trainer: supervised fine-tuning, and DPO with its second model."""

from __future__ import annotations

import os
import random
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.compat.hf_support import OPTIMIZER, prepare_rank, reset_accelerate, write_config
from tests.harness import run_ranks
from tests.marks import nightly

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
REUSE_RANKS = True
TOLERANCE = 1e-4
WORDS = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqr"]


def _make_model_and_tokenizer() -> tuple[Any, Any]:
    import torch
    import transformers as library
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers: Any = library
    words: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), **sizes, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config), tokenizer


def _rows(kind: str) -> Any:
    """Equally long ones: DPO's loss is a mean over the pairs of a rank."""
    from datasets import Dataset

    draw = random.Random(5)

    def text() -> str:
        return " ".join(draw.choice(WORDS[3:]) for _ in range(8))

    if kind == "sft":
        return Dataset.from_list([{"text": text()} for _ in range(48)])
    return Dataset.from_list([{"prompt": text(), "chosen": f" {text()}", "rejected": f" {text()}"} for _ in range(48)])


def _train(rank: int, world: int, folder: str, kind: str, stage: int | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "use_cpu": True}
    if stage is None:
        os.environ["OMP_NUM_THREADS"] = "1"
        reset_accelerate()
    else:
        prepare_rank()
        settings = {"per_device_train_batch_size": 2, "accelerator_config": {"use_configured_state": True}}
        settings["deepspeed"] = write_config(folder, stage, optimizer=OPTIMIZER)
    trl: Any = import_module("trl")
    common: dict[str, Any] = {"output_dir": folder, "max_steps": 8, "gradient_accumulation_steps": 2}
    common["learning_rate"] = 5e-3
    quiet = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    config_class, trainer_class = {
        "sft": (trl.SFTConfig, trl.SFTTrainer),
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
    }[kind]
    arguments = config_class(**common, **quiet, max_length=24, seed=3, **settings)
    model, tokenizer = _make_model_and_tokenizer()
    second = {"ref_model": _make_model_and_tokenizer()[0]} if kind == "dpo" else {}
    rows = _rows(kind)
    trainer = trainer_class(model=model, **second, args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    log = trainer.state.log_history
    return {key: [entry[key] for entry in log if key in entry] for key in ("loss", "rewards/margins", "entropy")}


# At stage 3 TRL asks the parameters of its fused LM head for `ds_status`.
CASES = [nightly("sft", 1), nightly("sft", 2), ("sft", 3), nightly("dpo", 1), nightly("dpo", 2), nightly("dpo", 3)]


@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_as_plain(kind: str, stage: int, tmp_path: Path) -> None:
    plain = run_ranks(_train, 1, str(tmp_path), kind, None)[0]
    assert len(plain["loss"]) == 8 and plain["loss"][-1] < plain["loss"][0] - 10 * TOLERANCE
    for ours in run_ranks(_train, 2, str(tmp_path), kind, stage):
        for key, values in plain.items():
            assert len(ours[key]) == len(values)
            assert max((abs(a - b) for a, b in zip(ours[key], values, strict=True)), default=0) < TOLERANCE, key
