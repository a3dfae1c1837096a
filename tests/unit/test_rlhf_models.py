"""Models of the loops as Hugging Face has them: heads that score, dropout under its names, adapters that recompute."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.rlhf_support import make_base, make_data, make_tokenizer
from tests.unit.infer_models import tiny_decoder, tiny_encoder
from thalweg.rlhf.config import RLHFConfig
from thalweg.rlhf.models import ValueModel, adapt, load_policy, load_tokenizer
from thalweg.rlhf.steps import _load_reward, run_step

IDS = torch.tensor([[5, 9, 100, 7]])


def _save_classifier(kind: str, folder: Path, num_labels: int = 1) -> Any:
    from transformers import AutoModelForSequenceClassification

    config = tiny_decoder(kind).config
    config.num_labels, config.pad_token_id = num_labels, 0
    model = AutoModelForSequenceClassification.from_config(config).eval()
    nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt_350m"])
def test_hugging_face_s_classifier_with_one_label_scores_as_it_does(kind: str, tmp_path: Path) -> None:
    want = _save_classifier(kind, tmp_path)(IDS).logits[:, 0]
    loaded = ValueModel.from_pretrained(tmp_path, needs_head=True).eval()
    torch.testing.assert_close(loaded(IDS)[:, -1], want)
    assert want.abs() > 1e-3
    loaded.save_pretrained(tmp_path / "own")
    torch.testing.assert_close(ValueModel.from_pretrained(tmp_path / "own", needs_head=True).eval()(IDS)[:, -1], want)


def test_a_reward_model_without_a_head_is_an_error_and_a_critic_gets_a_new_one(tmp_path: Path) -> None:
    tiny_decoder("llama").save_pretrained(tmp_path / "plain")
    _save_classifier("llama", tmp_path / "two", num_labels=2)
    for name in ("plain", "two"):
        config = RLHFConfig(reward_model_name_or_path=str(tmp_path / name))
        with pytest.raises(ValueError, match=f"{name} has no value head: nothing scores"), ExitStack() as engines:
            _load_reward(config, engines, make_tokenizer(), None)
        assert not ValueModel.from_pretrained(tmp_path / name).value_head.weight.any()


def test_a_reward_model_with_other_tokens_than_the_actor_s_is_an_error(tmp_path: Path) -> None:
    _save_classifier("llama", tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tokenizer.add_tokens(["<only the actor's>"])
    config = RLHFConfig(reward_model_name_or_path=str(tmp_path))
    with pytest.raises(ValueError, match="other tokens than the actor's"), ExitStack() as engines:
        _load_reward(config, engines, tokenizer, None)


@pytest.mark.parametrize("load", [load_tokenizer, load_policy, ValueModel.from_pretrained])
def test_a_mistyped_folder_is_named_and_no_hub_is_asked(load: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder \./mistyped: give the directory"):
        load("./mistyped")


def test_an_actor_that_is_no_causal_model_is_refused(tmp_path: Path) -> None:
    tiny_encoder("t5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a seq2seq model, T5ForConditionalGeneration: an actor is a causal model"):
        load_policy(tmp_path)


def test_too_few_examples_for_an_update_may_be_the_splits_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thalweg.rlhf.steps.init_distributed", lambda: None)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    data, base = make_data(tmp_path / "data.jsonl", 20), make_base(tmp_path / "base")
    config = RLHFConfig(model_name_or_path=str(base), data_path=(str(data),), output_dir=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"sft: 4 examples \(data_split 2,4,4; --data_split 1,0,0 takes all\) do not"):
        run_step("sft", config)


def test_a_model_with_narrower_outputs_than_layers_has_values() -> None:
    model = ValueModel(tiny_decoder("opt_350m").base_model)
    assert model(IDS).shape == IDS.shape and model.value_head.in_features == 24


DROPOUTS: dict[str, tuple[str, ...]] = {
    "opt": ("dropout", "attention_dropout", "activation_dropout"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "falcon7": ("hidden_dropout", "attention_dropout"),
    "starcoder2": ("residual_dropout", "attention_dropout", "embedding_dropout"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_dropout_of_0_is_meant_wherever_a_model_keeps_its_own(kind: str) -> None:
    model = tiny_decoder(kind, **dict.fromkeys(DROPOUTS[kind], 0.3))
    want = model(IDS).logits
    assert not torch.allclose(model.train()(IDS).logits, want, atol=1e-2)
    adapt(model, RLHFConfig(dropout=0.0))
    torch.testing.assert_close(model(IDS).logits, want)


@pytest.mark.parametrize("is_value_model", [True, False])
def test_adapters_alone_train_through_recomputed_layers(is_value_model: bool) -> None:
    model = ValueModel(tiny_decoder("llama").base_model) if is_value_model else tiny_decoder("llama")
    config = RLHFConfig(lora_dim=2, only_optimize_lora=True, gradient_checkpointing=True)
    adapted = adapt(model, config).train()
    if is_value_model:
        nn.init.normal_(model.value_head.weight)
    out = adapted(input_ids=IDS)
    (out if is_value_model else out.logits).sum().backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_B" in name)
