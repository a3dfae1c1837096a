"""A model's own loss taken tile by tile; logits still come out where they are asked for."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.test_tiled_loss import peak_of
from thalweg.nn.losses.lazy_logits import LazyLogits
from thalweg.nn.losses.lm_head import find_lm_head, make_logits_lazy
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.ops.dynamic_subclass import DynamicSubclass, make_subclass


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


VOCABULARY = 97


def gpt(tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=16, block_size=16, tied=tied))


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].clone()


def outcome(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss = call(model)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads]


def close(mine: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-6) -> bool:
    return len(mine) == len(theirs) and all(
        torch.allclose(a, b, atol=tolerance, rtol=1e-5) for a, b in zip(mine, theirs, strict=True)
    )


class Watch:
    """Counts how often a real product of the head with many rows is made."""

    def __init__(self, head: nn.Module) -> None:
        self.head, self.rows = head, 0

    def __enter__(self) -> Watch:
        self.handle = self.head.register_forward_hook(self._note)
        return self

    def _note(self, _module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 0:
            self.rows += output.numel() // VOCABULARY

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def watched(model: nn.Module, tiling: Any, call: Callable[[], Any]) -> int:
    """Rows of full logits that the head made during ``call``."""
    head = find_lm_head(model)
    assert head is not None
    with Watch(head) as watch:
        tiling.trust_current_hooks()
        call()
    return watch.rows


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tile", [1, 7, 47])
def test_the_reference_gpt(tied: bool, tile: int) -> None:
    tokens, labels = batch()
    labels[0, 3:9] = -100
    want = outcome(gpt(tied), lambda m: m(tokens, labels))
    model = gpt(tied)
    tiling = make_logits_lazy(model, tile_tokens=tile)
    assert close(outcome(model, lambda m: m(tokens, labels)), want)
    assert watched(model, tiling, lambda: model(tokens, labels)) == 0
    logits = model(tokens)
    assert type(logits) is Tensor and torch.equal(logits, gpt(tied)(tokens))
    assert watched(model, tiling, lambda: model(tokens)) == tokens.numel()


def test_the_loss_outside_of_the_model_is_as_always() -> None:
    tokens, labels = batch()

    def call(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    model = gpt()
    make_logits_lazy(model, tile_tokens=4)
    assert close(outcome(model, call), outcome(gpt(), call), 0.0)


class Custom(nn.Module):
    """A model that nobody has foreseen: its own shift, scale, cap, auxiliary use of the logits."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
        self.way = way

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(torch.tanh(self.embed(tokens)))
        if self.way == "shift":
            shifted = logits[..., :-1, :].contiguous().float()
            loss = nn.CrossEntropyLoss()(shifted.view(-1, VOCABULARY), labels[..., 1:].reshape(-1))
        elif self.way == "cap":
            logits = 5.0 * torch.tanh(logits / 5.0)
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), label_smoothing=0.1)
        elif self.way == "sum":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()
        elif self.way == "none":
            rows = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            loss = (rows * torch.linspace(0, 1, rows.numel())).mean()
        elif self.way == "transposed":
            loss = F.cross_entropy(logits.transpose(1, 2), labels)
        elif self.way == "log_softmax":
            loss = F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())
        elif self.way == "class weights":
            weights = torch.linspace(0.5, 1.5, VOCABULARY)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weights)
        elif self.way == "auxiliary":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-2 * logits.square().mean()
        else:
            loss = F.cross_entropy(logits[:, -3:].flatten(0, 1), labels[:, -3:].flatten())
            loss = loss + F.cross_entropy(logits[1], labels[1]) + F.cross_entropy(logits[0, 2], labels[0, 2])
        return loss, logits


WAYS = ["shift", "cap", "sum", "none", "transposed", "log_softmax", "class weights", "auxiliary", "parts"]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_nobody_has_foreseen(way: str) -> None:
    tokens, labels = batch()
    want = outcome(Custom(way), lambda m: m(tokens, labels)[0])
    model = Custom(way)
    tiling = make_logits_lazy(model, tile_tokens=2)
    assert close(outcome(model, lambda m: m(tokens, labels)[0]), want)
    rows = watched(model, tiling, lambda: model(tokens, labels))
    real = way in ("transposed", "log_softmax", "class weights", "auxiliary")
    assert rows == (tokens.numel() if real else 0)
    mine, theirs = model(tokens, labels)[1], Custom(way)(tokens, labels)[1]
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.requires_grad
    assert torch.equal(mine.argmax(-1), theirs.argmax(-1)) and torch.equal(mine.detach(), theirs.detach())
    assert torch.allclose(mine[0, 1].softmax(-1), theirs[0, 1].softmax(-1))


def test_a_loss_and_the_returned_logits_together() -> None:
    tokens, labels = batch()

    def call(model: nn.Module) -> Tensor:
        loss, logits = model(tokens, labels)
        return loss + 1e-2 * logits.square().mean()

    model = Custom("shift")
    make_logits_lazy(model, tile_tokens=2)
    assert close(outcome(model, call), outcome(Custom("shift"), call))


def test_logits_read_after_the_weights_have_moved_are_an_error() -> None:
    tokens, labels = batch()
    model = Custom("shift")
    tiling = make_logits_lazy(model, tile_tokens=2)
    loss, logits = model(tokens, labels)
    loss.backward()
    early = model(tokens, labels)[1]
    assert early.float().sum().isfinite()
    tiling.invalidate()
    assert early.float().sum().isfinite()  # was computed in time
    assert logits.shape == (3, 16, VOCABULARY)
    with pytest.raises(RuntimeError, match="before step"):
        logits.sum()


def test_hooks_of_a_user_see_real_logits() -> None:
    tokens, labels = batch()
    model = gpt()
    make_logits_lazy(model, tile_tokens=4)
    seen: list[torch.Size] = []
    model.head.register_forward_hook(lambda _m, _a, out: seen.append(out.shape))
    want = outcome(gpt(), lambda m: m(tokens, labels))
    assert close(outcome(model, lambda m: m(tokens, labels)), want, 0.0)
    assert seen == [torch.Size((3, 16, VOCABULARY))]


def test_direct_calls_few_rows_exceptions_copies_and_death() -> None:
    tokens, labels = batch()
    model = gpt()
    tiling = make_logits_lazy(model, tile_tokens=16)
    hidden = torch.randn(2, 40, 16)
    assert type(model.head(hidden)) is Tensor
    with pytest.raises(IndexError):
        model(tokens + VOCABULARY, labels)
    assert tiling.depth == 0
    assert close(
        outcome(copy.deepcopy(model), lambda m: m(tokens, labels)),
        outcome(gpt(), lambda m: m(tokens, labels)),
    )
    assert type(pickle.loads(pickle.dumps(model)).head) is nn.Linear
    gc.collect()
    gc.disable()
    try:
        model(tokens, labels).backward()
        watch = weakref.ref(model.head)
        del model
        assert watch() is None
    finally:
        gc.enable()


def test_the_peak_without_logits() -> None:
    torch.manual_seed(0)
    shape = GPTConfig(vocab_size=4000, n_layer=1, n_head=2, n_embd=16, block_size=256)
    tokens = torch.randint(4000, (2, 257), generator=torch.Generator().manual_seed(0))

    def peak(defer: bool) -> int:
        model = GPT(shape)
        if defer:
            make_logits_lazy(model, tile_tokens=32)
        return peak_of(lambda: model(tokens[:, :-1], tokens[:, 1:]).backward())

    logits = 4 * 512 * 4000
    plain, small = peak(False), peak(True)
    assert plain > 2 * logits
    assert small < 0.5 * logits


def test_under_autocast_and_in_bf16() -> None:
    tokens, labels = batch()
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for defer in (False, True):
            model = gpt().to(dtype)
            if defer:
                make_logits_lazy(model, tile_tokens=5)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
                found.append(outcome(model, lambda m: m(tokens, labels)))
        assert abs(float(found[0][0]) - float(found[1][0])) < 1e-4
        assert close(found[1], found[0], 3e-3)


def test_models_without_one_head_are_told() -> None:
    with pytest.raises(ValueError, match=r"tiling.*head"):
        make_logits_lazy(nn.Linear(3, 3))
    model = gpt()
    model.head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="without hooks"):
        make_logits_lazy(model)
    split = gpt()
    split.head.__class__ = make_subclass(nn.Linear, DynamicSubclass, forward=lambda self, x: None)
    with pytest.raises(ValueError, match="whole"):
        make_logits_lazy(split)


transformers = pytest.importorskip("transformers")


def hugging_face(kind: str) -> nn.Module:
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 24, "max_position_embeddings": 32}  # fmt: skip
    if kind == "gpt2":
        still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, **still)
        return transformers.GPT2LMHeadModel(config)
    if kind == "t5":
        shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
        config = transformers.T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **shape, **tokens)
        return transformers.T5ForConditionalGeneration(config)
    if kind == "bert":
        config = transformers.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return transformers.BertForMaskedLM(config)
    if kind == "gemma2":
        config = transformers.Gemma2Config(**small, head_dim=8, num_key_value_heads=1, final_logit_softcapping=3.0)
        return transformers.Gemma2ForCausalLM(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=1))
    if kind == "cohere":
        return transformers.CohereForCausalLM(transformers.CohereConfig(**small, logit_scale=0.3))
    config = transformers.PhiConfig(**small, resid_pdrop=0.0)
    return transformers.PhiForCausalLM(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "cohere", "phi", "t5", "bert"])
def test_hugging_face_models(kind: str) -> None:
    tokens, labels = batch()
    labels[1, 4:] = -100
    plain = hugging_face(kind)
    model = copy.deepcopy(plain)
    tiling = make_logits_lazy(model, tile_tokens=8)

    def call(m: nn.Module) -> Tensor:
        return m(input_ids=tokens, labels=labels).loss

    assert close(outcome(model, call), outcome(plain, call), 2e-6)
    assert watched(model, tiling, lambda: call(model)) == 0
    asked, want = model(input_ids=tokens, labels=labels), plain(input_ids=tokens, labels=labels)
    assert isinstance(asked.logits, LazyLogits) and asked.logits.shape == want.logits.shape
    assert torch.allclose(asked.logits.float(), want.logits, atol=1e-6)
    assert torch.allclose(asked[1], want[1], atol=1e-6)
    if kind not in ("t5", "bert"):
        free = model(input_ids=tokens)
        assert type(free.logits) is Tensor and torch.allclose(free.logits, want.logits, atol=1e-6)
        model.eval()
        generated = model.generate(tokens[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
        plain.eval()
        assert torch.equal(generated, plain.generate(tokens[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0))
