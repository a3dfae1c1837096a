"""``sparse_attention`` through ``initialize``: equal to the model under the same mask, dense; what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.models import SEQ_LEN, make_batch, tiny_gpt
from tests.dist.parity import ParityCase, run_engine, run_plain
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.config import ConfigError
from thalweg.config import load as load_config
from thalweg.nn.sparse_attention import FixedSparsityConfig

REUSE_RANKS = True
FIXED = {"mode": "fixed", "block": 2, "num_local_blocks": 2, "attention": "unidirectional"}


class MaskedAttention(nn.Module):
    """The reference GPT's attention, dense, under the mask of a layout."""

    def __init__(self, inner: nn.Module, config: FixedSparsityConfig) -> None:
        super().__init__()
        self.n_head, self.qkv, self.proj = inner.n_head, inner.qkv, inner.proj
        layout = config.make_layout(SEQ_LEN)
        mask = layout.repeat_interleave(config.block, 1).repeat_interleave(config.block, 2)
        self.register_buffer("mask", mask.tril(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (part.reshape(B, T, self.n_head, -1).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, self.mask[:, :T, :T])
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


def masked_gpt(section: dict[str, Any]) -> nn.Module:
    model = tiny_gpt()
    options = {key: value for key, value in section.items() if key != "mode"}
    for block in model.blocks:
        block.attention = MaskedAttention(block.attention, FixedSparsityConfig(2, **options))
    return model


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)


def _parity(rank: int, world: int, cases: list[ParityCase]) -> list[tuple[float, float]]:
    """Differences of losses from the masked model, and from the dense one."""
    found = []
    for case in cases:
        sparse = run_engine(tiny_gpt(), case, rank, world)
        losses = [
            run_plain(model, case, world, _adamw) for model in (masked_gpt(case.extra["sparse_attention"]), tiny_gpt())
        ]
        found.append(tuple(sparse.max_loss_difference(one) for one in losses))
    return found


@pytest.mark.parametrize(("world", "stages"), [(2, [1, 3]), nightly(2, [0, 2])])
def test_stages_equal_the_masked_model(world: int, stages: list[int]) -> None:
    per_head = {**FIXED, "different_layout_per_head": True, "num_different_global_patterns": 2}
    remat = {"activation_checkpointing": {"policy": "full"}}
    short = ParityCase(windows=(2,) * 3, accumulation=2)
    cases = [
        short.with_(stage=stage, extra={"sparse_attention": section, **more})
        for stage, section, more in zip(stages, (FIXED, per_head), ({}, remat), strict=True)
    ]
    for results in run_ranks(_parity, world, cases):
        for masked, dense in results:
            assert masked < 2e-6, "sparse attention is not attention under the mask"
            assert dense > 1e-3, "sparse attention was not used"


def _hub_model(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    small["initializer_range"] = 0.2  # wide, so that masks matter
    if family == "llama":
        config = transformers.LlamaConfig(**small, intermediate_size=48, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.2,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        **small, intermediate_size=48, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def _hub_families(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Losses and gradients against the same model with its mask given whole."""
    import thalweg

    found = {}
    length, block = 42, 4  # the last block is cut short
    tokens = torch.randint(61, (2, length), generator=torch.Generator().manual_seed(0))
    padding = torch.ones(2, length, dtype=torch.long)
    padding[1, 30:] = 0
    labels = tokens.masked_fill(padding == 0, -100)
    layout = FixedSparsityConfig(4, block, num_local_blocks=2).make_layout(44)
    whole = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :length]
    for family in ("bert", "gpt2", "llama"):
        plain = _hub_model(family)
        section = {"mode": "fixed", "block": block, "num_local_blocks": 2}
        settings = ParityCase(extra={"sparse_attention": section}).config()
        engine = thalweg.initialize(model=copy.deepcopy(plain), config=settings)[0]
        mask = whole if family == "bert" else whole.tril()
        gaps = {}
        for name, given in (("whole", None), ("padded", padding)):
            out = engine(input_ids=tokens, labels=labels, attention_mask=given)
            seen = mask[None] if given is None else mask[None] & given.bool()[:, None, None]
            want = plain(input_ids=tokens, labels=labels, attention_mask=seen)
            dense = plain(input_ids=tokens, labels=labels, attention_mask=given)
            engine.backward(out.loss)
            want.loss.backward()
            grads = [
                float((a.grad.cpu() - b.grad).abs().max())
                for a, b in zip(engine.module.parameters(), plain.parameters(), strict=True)
                if b.grad is not None
            ]
            gaps[name] = (abs(float(out.loss - want.loss)), max(grads), abs(float(out.loss - dense.loss)))
            engine.zero_grad()
            plain.zero_grad()
        if family != "bert":
            engine.eval()
            with torch.no_grad():
                first = engine(input_ids=tokens[:, :20], use_cache=True)
                last = engine(input_ids=tokens[:, 20:21], past_key_values=first.past_key_values).logits[:, -1]
                want = plain(input_ids=tokens[:, :21], attention_mask=whole.tril()[None, :, :21, :21]).logits[:, -1]
            gaps["cached"] = float((last.cpu() - want).abs().max())
        found[family] = gaps
        assert plain.config._attn_implementation == "sdpa"
        engine.close()
    return found


def test_hugging_face_families_equal_the_masked_model() -> None:
    """BERT, GPT-2 and Llama with grouped heads; padding, a last block that is cut short, a token with a cache."""
    pytest.importorskip("transformers")
    for found in run_ranks(_hub_families, 1):
        for family, gaps in found.items():
            for name in ("whole", "padded"):
                loss, gradient, from_dense = gaps[name]
                assert loss < 2e-6 and gradient < 2e-6, (family, name)
                assert from_dense > 1e-4, (family, name)
            assert gaps.get("cached", 0.0) < 1e-5, family


class OwnAttention(nn.Module):
    """A model whose attention is a formula of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.softmax(layer(x) @ x.mT, -1) @ x
        return x.square().mean()


def _refusals(rank: int, world: int) -> dict[str, str]:
    import thalweg

    found = {}

    def attempt(name: str, model: nn.Module, section: dict[str, Any], *batch: Tensor) -> None:
        settings = ParityCase(extra={"sparse_attention": section}).config()
        try:
            thalweg.initialize(model=model, config=settings)[0](*batch)
        except ValueError as error:
            found[name] = str(error)

    tokens, labels = make_batch(0, 2)
    attempt("own formula", OwnAttention(), FIXED, torch.randn(2, 4, 8))
    attempt("dropout", tiny_gpt(dropout=0.1), FIXED, tokens, labels)
    attempt("contradiction", tiny_gpt(), {"num_local_blocks": 4, "num_global_blocks": 3}, tokens, labels)
    attempt("dense", OwnAttention(), {"mode": "dense"}, torch.randn(2, 4, 8))
    return found


def test_what_is_refused_names_the_cure() -> None:
    (found,) = run_ranks(_refusals, 1)
    assert "replaced nothing in OwnAttention" in found["own formula"]
    assert "SparseSelfAttention" in found["own formula"]
    assert "set the attention dropout of GPT to 0" in found["dropout"]
    assert found["contradiction"].startswith("sparse_attention: num_local_blocks 4 must be a multiple")
    assert "dense" not in found


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sequence_parallel_size": 2}, "whole sequences"),
        ({"compile": {"enabled": True}}, "not compiled"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages to be 1"),
        ({"tensor_parallel": {"autotp_size": 2}}, "which heads"),
    ],
)
def test_what_does_not_go_together(more: dict[str, Any], said: str) -> None:
    section = {"mode": "bigbird", "different_layout_per_head": True}
    with pytest.raises(ConfigError, match=said):
        load_config({"sparse_attention": section, **more})
    load_config({"sparse_attention": {"mode": "dense", "different_layout_per_head": True}, **more})
