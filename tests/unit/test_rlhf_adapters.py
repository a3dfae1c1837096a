"""Houlsby's bottleneck adapters: where they are, how many numbers they train, what is saved, loaded and served."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from tests.unit.infer_models import greedy_generate, tiny_decoder
from thalweg.infer import EngineConfig, load_engine
from thalweg.infer.bottleneck import add_bottleneck_adapters, with_bottleneck_adapters
from thalweg.infer.engine.engine import LLMEngine
from thalweg.rlhf.config import RLHFConfig
from thalweg.rlhf.models import ValueModel, adapt, load_policy

IDS = torch.tensor([[5, 9, 100, 7, 3]])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_two_in_each_layer_begin_as_nothing_and_train_2md_d_m_numbers_each(kind: str) -> None:
    model = tiny_decoder(kind).eval()
    before, d = model(IDS).logits, model.config.hidden_size
    names = add_bottleneck_adapters(model, 6)
    assert len(names) == 2 * model.config.num_hidden_layers
    assert torch.equal(model(IDS).logits, before)
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    assert sum(trained) == len(names) * (2 * 6 * d + d + 6)


def test_what_save_pretrained_writes_loads_as_the_model_that_it_was_and_is_served(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    model = tiny_decoder("llama").eval()
    plain = model(IDS).logits
    add_bottleneck_adapters(model, 6)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".up." in name:
                p.normal_()
    model.save_pretrained(tmp_path)
    want, config = model(IDS), AutoConfig.from_pretrained(tmp_path)
    loaded = with_bottleneck_adapters(AutoModelForCausalLM, config).from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, want.logits) and not torch.allclose(want.logits, plain, atol=0.1)
    assert type(loaded).__name__ == type(model).__name__ and copy.deepcopy(loaded)(IDS).logits.equal(want.logits)
    states = model.base_model(IDS).last_hidden_state
    backbone = with_bottleneck_adapters(AutoModel, config).from_pretrained(tmp_path)
    assert torch.equal(backbone(IDS).last_hidden_state, states)
    engine = load_engine(tmp_path, EngineConfig(device="cpu", dtype="fp32", max_model_len=32, max_num_seqs=1))
    assert isinstance(engine, LLMEngine)
    (answer,) = greedy_generate(engine, [IDS[0].tolist()], 5)
    engine.close()
    greedy = model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answer == greedy[0, IDS.shape[1] :].tolist()

    # The control: a config that does not say it, as of a model saved by other means, is an error and no random weights.
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("bottleneck_adapters")["width"] == 6
    (tmp_path / "config.json").write_text(json.dumps(written))
    for load in (load_policy, ValueModel.from_pretrained):
        with pytest.raises(ValueError, match=r"its files have nothing for 6 of the model's tensors"):
            load(tmp_path)


def test_a_loaded_model_goes_on_with_its_adapters_or_says_why_not(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    names = add_bottleneck_adapters(model, 6)
    model.save_pretrained(tmp_path)
    for loaded, heads in ((load_policy(tmp_path), 0), (ValueModel.from_pretrained(tmp_path), 1)):
        adapt(loaded, RLHFConfig(bottleneck_dim=6))
        trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
        assert len(trained) == 4 * len(names) + heads
        assert all(".down." in name or ".up." in name or name == "value_head.weight" for name in trained)
    adapt(fresh := ValueModel(tiny_decoder("llama").base_model), RLHFConfig(bottleneck_dim=6))
    assert {name for name, p in fresh.named_parameters() if p.requires_grad} == trained
    with pytest.raises(ValueError, match="adapters of width 6, not 4"):
        load_policy(tmp_path, RLHFConfig(bottleneck_dim=4))
    with pytest.raises(ValueError, match="lora_dim: the model has bottleneck adapters"):
        load_policy(tmp_path, RLHFConfig(lora_dim=4))


def test_what_has_no_place_for_them_says_so() -> None:
    with pytest.raises(ValueError, match="mixture of experts"):
        add_bottleneck_adapters(tiny_decoder("qwen2_moe"), 4)
