"""Which modules become units, for models that nobody wrote with sharding in mind."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from thalweg.nn.moe.layer import MoE
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.parallel.pipeline.module import LayerSpec, LocalLayers, TiedLayerSpec
from thalweg.zero.units import UnitPolicy, find_units, with_large_leaves


def gpt(tied=True):
    return GPT(GPTConfig(vocab_size=50, n_layer=3, n_head=2, n_embd=8, block_size=8, tied=tied))


def test_the_model_s_own_blocks():
    assert list(find_units(gpt())) == ["blocks.0", "blocks.1", "blocks.2"]


def test_large_leaves_outside_of_blocks_but_not_tied_ones():
    model = gpt(tied=False)
    assert set(with_large_leaves(model, find_units(model))) - set(find_units(model)) == {"wte", "head"}
    model = gpt(tied=True)
    assert set(with_large_leaves(model, find_units(model))) == set(find_units(model))


def test_children_of_lists_where_no_block_is_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.single = nn.ModuleList([nn.Linear(4, 4)])

    assert list(find_units(Two())) == [*(f"encoder.{i}" for i in range(3)), "decoder.0", "decoder.1"]


def test_by_size_where_there_is_no_list():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)))
    units = find_units(model)
    assert units
    assert all(name and not isinstance(module, nn.ModuleList) for name, module in units.items())


def test_units_that_share_a_parameter_go_to_the_root():
    model = gpt()
    model.blocks[2].mlp.up.weight = model.blocks[0].mlp.up.weight
    assert list(find_units(model)) == ["blocks.1"]
    model = gpt()
    model.extra = nn.Linear(8, 24)
    model.extra.weight = model.blocks[1].attention.qkv.weight
    assert list(find_units(model)) == ["blocks.0", "blocks.2"]


def test_the_user_s_leaves_and_least_size():
    model = gpt()
    assert find_units(model, UnitPolicy(min_num_params=10**9)) == {}
    leaf = find_units(model, UnitPolicy(leaf_names=("norm",)))
    assert "norm" in leaf
    assert "blocks.0" in leaf


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "bert"])
def test_hugging_face_families(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, **small)
        model = transformers.GPT2LMHeadModel(config)
        expected = {"transformer.h.0", "transformer.h.1"}
    elif kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, **small
        )
        model = transformers.LlamaForCausalLM(config)
        expected = {"model.layers.0", "model.layers.1"}
    elif kind == "t5":
        config = transformers.T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, **small)
        model = transformers.T5ForConditionalGeneration(config)
        expected = {"encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"}
    else:
        config = transformers.BertConfig(
            hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, **small
        )
        model = transformers.BertModel(config)
        expected = {"encoder.layer.0", "encoder.layer.1"}
    assert expected <= set(find_units(model))


def test_a_layer_of_experts_is_not_split():
    """It reads weights of the modules in it without calling them, which a unit of its own would not gather."""
    experts = MoE(64, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), num_experts=2)
    model = nn.ModuleDict({"embed": nn.Embedding(9, 64), "mixture": experts, "head": nn.Linear(64, 9)})
    model = nn.Sequential(OrderedDict(model.items()))
    assert [name for name in find_units(model) if name.startswith("mixture")] == ["mixture"]
    experts._is_one_unit = False  # the control
    assert len([name for name in find_units(model) if name.startswith("mixture")]) > 1


def test_a_tied_layer_that_a_function_reads_is_the_root_s():
    """Also where a stage has no other layer, and units are looked for by size."""
    tied, plain = (
        TiedLayerSpec("embed", nn.Embedding, 9, 64, forward_fn=lambda layer, x: x),
        LayerSpec(nn.Linear, 64, 64),
    )
    built = {4: nn.Linear(64, 64), 5: nn.Embedding(9, 64)}
    specs = [plain] * 5 + [tied]
    assert list(find_units(LocalLayers(specs, built))) == ["layers.4"]
    assert list(find_units(LocalLayers(specs, {5: built[5]}))) == []
    assert list(find_units(LocalLayers([plain] * 6, {5: built[5]}))) == ["layers.5"]  # the control: called as it is
