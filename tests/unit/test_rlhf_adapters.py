"""Houlsby's bottleneck adapters: where they are, how many numbers they train, save and load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.infer_models import tiny_decoder
from thalweg.rlhf.bottleneck import add_bottleneck_adapters, load_bottleneck_adapters, save_bottleneck_adapters

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


def test_they_are_saved_as_peft_lays_files_out_and_load_again(tmp_path: Path) -> None:
    model = tiny_decoder("llama").eval()
    plain = model(IDS).logits
    add_bottleneck_adapters(model, 6)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".up." in name:
                p.normal_()
    save_bottleneck_adapters(model.state_dict(), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "BOTTLENECK"
    other = tiny_decoder("llama").eval()
    load_bottleneck_adapters(other, tmp_path)
    want = model(IDS).logits
    assert torch.equal(other(IDS).logits, want) and not torch.equal(want, plain)


def test_what_has_no_place_for_them_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mixture of experts"):
        add_bottleneck_adapters(tiny_decoder("qwen2_moe"), 4)
    with pytest.raises(ValueError, match="holds no bottleneck adapter"):
        save_bottleneck_adapters(tiny_decoder("llama").state_dict(), tmp_path)
