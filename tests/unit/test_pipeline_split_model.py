"""Cutting models that nobody wrote for a pipeline: Hugging Face's families, stage by stage in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from thalweg.parallel.pipeline.split_model import SplitModelStages, find_blocks, partition_blocks

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OLDER = {"vocab_size": 97, "hidden_size": 32, "n_layer": 5, "n_head": 4}
FAMILIES = {
    "GPT2": {"vocab_size": 97, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64},
    "Llama": SIZES,
    "Mistral": SIZES,
    "Qwen2": SIZES,
    "Qwen3": {**SIZES, "head_dim": 8},
    "Gemma2": {**SIZES, "head_dim": 8},
    "Phi": SIZES,
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": OLDER,
    "GPTNeoX": SIZES,
    "Falcon": {**SIZES, "alibi": False},
    "Mixtral": {**SIZES, "num_local_experts": 4},
}
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout")


def build(family: str) -> nn.Module:
    """A small model of that family with random weights."""
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    config.use_cache = False
    for key in DROPOUTS:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def batch_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, the second padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 97, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def losses_and_grads(model: nn.Module, num_stages: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss through stages cut from copies of ``model``, and the sum of all stages' gradients."""
    batch = batch_of()
    anatomy = find_blocks(model, batch)
    cuts = partition_blocks(model, anatomy, num_stages)
    stages = [SplitModelStages(copy.deepcopy(model), anatomy, cuts, [stage]) for stage in range(num_stages)]
    value = None
    for index, stage in enumerate(stages):
        value = stage.run(index, value, batch)
    value.backward()
    # On a stage of its own a tied head goes by its own name.
    owner = {name: first for first, *others in _tied(model) for name in others}
    grads: dict[str, torch.Tensor] = {}
    for index, stage in enumerate(stages):
        named = dict(stage.module.named_parameters())
        assert set(map(id, stage.parameters(index))) == set(map(id, named.values()))
        for name, parameter in named.items():
            key = owner.get(name, name)
            if parameter.grad is not None:
                grads[key] = parameter.grad + grads[key] if key in grads else parameter.grad
    return value.item(), grads


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_a_family_are_the_whole_model(family):
    model = build(family)
    loss = model(**batch_of()).loss
    staged_loss, grads = losses_and_grads(model, 3)
    assert staged_loss == loss.item()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_stage_that_is_skipped_shows():
    model = build("Llama")
    loss = float(model(**batch_of()).loss)
    model.model.layers[2].mlp.down_proj.weight.data.mul_(1.01)
    assert losses_and_grads(model, 3)[0] != loss


def test_what_cannot_be_cut_says_so():
    model = build("Llama")
    anatomy = find_blocks(model, batch_of())
    sizes = {"vocab_size": 97, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4}
    two_stacks = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(ValueError, match="5 blocks, too few for 6 stages"):
        partition_blocks(model, anatomy, 6)
    with pytest.raises(ValueError, match="no ModuleList of blocks"):
        find_blocks(nn.Linear(2, 2), {"input": torch.ones(1, 2)})
    with pytest.raises(ValueError, match="or two: write it as a PipelineModule"):
        find_blocks(two_stacks, batch_of())

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            for layer in reversed(list(self.layers)):
                x = layer(x)
            return x

    class Outside(Backwards):
        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    with pytest.raises(ValueError, match="something between its blocks 0 and 1"):
        find_blocks(Outside(), {"x": torch.ones(1, 2)})
    with pytest.raises(ValueError, match=r"order \[2, 1, 0\]"):
        find_blocks(Backwards(), {"x": torch.ones(1, 2)})


def test_a_loss_over_all_routers_is_refused():
    model = build("Mixtral")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits to false"):
        find_blocks(model, batch_of())
