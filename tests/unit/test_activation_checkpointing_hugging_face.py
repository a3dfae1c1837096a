"""Activation checkpointing of Hugging Face models: their caches, their own switch, their adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)

hf = pytest.importorskip("transformers")

FULL = ActivationCheckpointPolicy("full")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def build(family: str, dropout: float = 0.1) -> tuple[nn.Module, list[nn.Module]]:
    torch.manual_seed(0)
    if family == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=97, n_positions=16, **rates)
        )
        return model, list(model.transformer.h)
    if family == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 97}
        config = hf.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, attention_dropout=dropout, **sizes)
        model = hf.LlamaForCausalLM(config)
        return model, list(model.model.layers)
    config = hf.T5Config(
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        vocab_size=97,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    model = hf.T5ForConditionalGeneration(config)
    return model, [*model.encoder.block, *model.decoder.block]


def step(model: nn.Module, **kwargs: Any) -> list[Tensor]:
    model.train()
    torch.manual_seed(5)
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=tokens, labels=tokens, **kwargs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def count_runs(units: list[nn.Module]) -> list[int]:
    counts = [0] * len(units)
    for index, unit in enumerate(units):
        inner = next(module for module in unit.modules() if not list(module.children()) and list(module.parameters()))

        def count(*_args: object, i: int = index) -> None:
            counts[i] += 1

        inner.register_forward_hook(count)
    return counts


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize(
    "policy",
    [FULL, ActivationCheckpointPolicy("selective"), ActivationCheckpointPolicy("selective", every=2)],
    ids=str,
)
def test_bitwise_equal_with_dropout_and_caches(family: str, policy: ActivationCheckpointPolicy) -> None:
    plain, _ = build(family)
    model, units = build(family)
    names = [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model, units, policy)
    assert [name for name, _ in model.named_parameters()] == names
    assert same(step(model, use_cache=True), step(plain))
    assert not same(step(build(family, 0.2)[0]), step(build(family)[0]))


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_beside_their_own_switch(family: str) -> None:
    plain, _ = build(family)
    want = step(plain)
    for ours, theirs, runs in ((False, False, 1), (True, False, 2), (False, True, 2), (True, True, 2)):
        for order in ("before", "after"):
            model, units = build(family)
            if theirs and order == "before":
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if ours:
                apply_activation_checkpointing(model, units, FULL)
            if theirs and order == "after":
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            counts = count_runs(units)
            assert same(step(model), want), (ours, theirs, order)
            assert counts == [runs] * len(units), (ours, theirs, order)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generation_keeps_its_cache(family: str) -> None:
    plain, _ = build(family)
    model, units = build(family)
    apply_activation_checkpointing(model, units, FULL)
    prompt = torch.tensor([[5, 7, 11]])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    counts = count_runs(units)
    assert torch.equal(model.eval().generate(prompt, **options), plain.eval().generate(prompt, **options))
    assert counts == [8] * len(units)
    assert model(prompt).past_key_values.get_seq_length() == 3


def test_with_peft_adapters() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> tuple[nn.Module, list[nn.Module]]:
        model, units = build("llama")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        torch.manual_seed(1)
        return peft.get_peft_model(model, config), units

    plain, _ = adapted()
    model, units = adapted()
    apply_activation_checkpointing(model, units, FULL)
    grads = step(model)
    assert same(grads, step(plain)) and len(grads) == 1 + 3 * 4
