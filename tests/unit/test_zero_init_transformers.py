"""zero.Init with Transformers' models, whose initialisation goes its own ways."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.zero_init_support import build_plain_and_recorded, matches_plain, materialized_values
from thalweg.deferred_init.context import has_meta_tensors
from thalweg.zero import Init

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
torch.set_num_threads(1)

_LM = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200}
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MLP = {"intermediate_size": 80}
_KV = {"num_key_value_heads": 2}


def _configs() -> dict[str, tuple[Any, Any]]:
    t = transformers
    lm, seq, base = t.AutoModelForCausalLM, t.AutoModelForSeq2SeqLM, t.AutoModel
    return {
        "gpt2": (lm, t.GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=200, **_IDS)),
        "llama": (lm, t.LlamaConfig(**_LM, **_MLP, **_KV, **_IDS)),
        "mixtral": (lm, t.MixtralConfig(**_LM, **_MLP, **_KV, **_IDS, num_local_experts=4)),
        "qwen2_tied": (lm, t.Qwen2Config(**_LM, **_MLP, **_KV, **_IDS, tie_word_embeddings=True)),
        "mamba": (lm, t.MambaConfig(hidden_size=48, num_hidden_layers=2, vocab_size=200, **_IDS)),
        "bloom": (lm, t.BloomConfig(hidden_size=48, n_layer=2, n_head=4, vocab_size=200, **_IDS)),
        "t5": (seq, t.T5Config(d_model=48, d_ff=80, d_kv=12, num_layers=2, num_heads=4, vocab_size=200)),
        "bert": (t.AutoModelForMaskedLM, t.BertConfig(**_LM, **_MLP, pad_token_id=0)),
        "vit": (base, t.ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, **_MLP)),
        "swin": (
            base,
            t.SwinConfig(image_size=32, embed_dim=24, depths=[1, 1], num_heads=[2, 2], window_size=4),
        ),
    }


CONFIGS = _configs()


def _from_config(name: str, **options: Any) -> nn.Module:
    kind, config = CONFIGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind.from_config(copy.deepcopy(config), **options)


@pytest.mark.parametrize("small", [0, 4096])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_config_gives_the_values_of_an_ordinary_build(name: str, small: int) -> None:
    plain, model = build_plain_and_recorded(lambda: _from_config(name), small)
    assert all(p.is_meta for p in model.parameters()) and has_meta_tensors(model)
    assert matches_plain(plain, model)


def test_from_config_in_bfloat16() -> None:
    plain, model = build_plain_and_recorded(lambda: _from_config("llama", dtype=torch.bfloat16), 64)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert matches_plain(plain, model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_resized_embeddings(name: str) -> None:
    """Looks at mean and covariance of the weights, and draws from a distribution made of them."""

    def build() -> nn.Module:
        model = _from_config(name)
        model.resize_token_embeddings(210)  # type: ignore[operator]
        return model

    assert matches_plain(*build_plain_and_recorded(build, 64))
    # After the context; what draws from the values needs them: an error, not a silent loss.

    def resize(model: Any) -> None:
        model.resize_token_embeddings(210, mean_resizing=False)

    plain, model = build_plain_and_recorded(lambda: _from_config(name), 64, after_build=resize)
    assert matches_plain(plain, model) and len(model.get_input_embeddings().weight) == 210
    _, model = build_plain_and_recorded(lambda: _from_config(name), 64)
    with pytest.raises(RuntimeError, match="meta tensors"):
        model.resize_token_embeddings(210)


@pytest.mark.parametrize("kind", ["lora", "trained", "dora", "modules_to_save"])
def test_peft_s_adapters_after_the_context(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra [hf] is not installed")
    options: dict[str, Any] = {
        "lora": {},
        "trained": {"init_lora_weights": False},
        "dora": {"use_dora": True},
        "modules_to_save": {"modules_to_save": ["lm_head"]},
    }[kind]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)

    def adapt(model: nn.Module) -> None:
        if kind != "trained":
            peft.get_peft_model(model, copy.deepcopy(config))
        elif tmp_path.joinpath("adapter_config.json").exists():
            peft.PeftModel.from_pretrained(model, tmp_path)
        else:
            peft.get_peft_model(model, config).save_pretrained(tmp_path)

    if kind == "trained":
        adapt(_from_config("llama"))
    plain, model = build_plain_and_recorded(lambda: _from_config("llama"), 64, after_build=adapt)
    assert any("lora_" in name for name, _ in plain.named_parameters())
    assert matches_plain(plain, model)


def test_from_pretrained_inside_the_context(tmp_path: Path) -> None:
    kind, _ = CONFIGS["llama"]
    saved = _from_config("llama")
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    with Init():
        model = kind.from_pretrained(tmp_path)
    found = materialized_values(model)
    assert all(torch.equal(found[name], p) for name, p in saved.named_parameters())


def test_save_pretrained_before_initialize(tmp_path: Path) -> None:
    kind, _ = CONFIGS["gpt2"]
    plain, model = build_plain_and_recorded(lambda: _from_config("gpt2"), 64)
    model.save_pretrained(tmp_path)
    loaded = dict(kind.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in plain.named_parameters())
    assert matches_plain(plain, model)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_meta_device_models_are_initialised(name: str) -> None:
    torch.manual_seed(7)
    plain = _from_config(name)
    torch.manual_seed(7)
    with torch.device("meta"):
        model = _from_config(name)
    assert matches_plain(plain, model)
