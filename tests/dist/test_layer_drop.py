"""Progressive layer drop: its schedule and draws, equal to a loop that drops by hand, the same layers on all ranks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.models import VOCAB_SIZE, make_batch, tiny_gpt
from tests.dist.parity import ParityCase, bitwise_equal, full_tensors
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.nn.layer_drop import ProgressiveLayerDrop

REUSE_RANKS = True
DROP = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 0.5}, "seed": 3}
STEPS, ACCUMULATION = 6, 2


def test_theta_and_the_probabilities_of_layers() -> None:
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.1, num_layers=4)
    assert drop.get_theta() == 1.0 and drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    drop.draw()
    assert drop.kept == [True] * 4, "something was dropped at the first step"
    drop.update_state(10)
    theta = 0.5 * math.exp(-1) + 0.5
    assert drop.get_theta() == pytest.approx(theta)
    drop.draw()
    assert drop.keep_probabilities == pytest.approx([1 - i / 4 * (1 - theta) for i in (1, 2, 3, 4)])


def test_layers_are_dropped_as_often_as_their_probability_says() -> None:
    drop = ProgressiveLayerDrop(theta=0.5, gamma=100.0, num_layers=4)
    counts = torch.zeros(4)
    for step in range(1, 2001):
        drop.update_state(step)
        drop.draw()
        counts += torch.tensor(drop.kept)
    expected = torch.tensor([0.875, 0.75, 0.625, 0.5])
    deviation = (expected * (1 - expected) / 2000).sqrt()
    assert ((counts / 2000 - expected).abs() < 4 * deviation).all()


class DropByHand(nn.Module):
    """The reference GPT, whose layers are left out by a loop of its own."""

    def __init__(self, inner: nn.Module, drop: ProgressiveLayerDrop) -> None:
        super().__init__()
        self.inner, self.drop = inner, drop
        self.num_dropped = 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        gpt = self.inner
        self.drop.draw()
        x = gpt.wte(tokens) + gpt.wpe(torch.arange(tokens.shape[1]))
        for block, kept, p in zip(gpt.blocks, self.drop.kept, self.drop.keep_probabilities, strict=True):
            self.num_dropped += not kept
            if kept:
                x = x + (block(x) - x) / p
        logits = gpt.head(gpt.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _by_hand(world: int) -> tuple[list[float], int]:
    drop = ProgressiveLayerDrop(0.3, 0.5, num_layers=3, seed=3)
    model = DropByHand(tiny_gpt(), drop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        drop.update_state(step)
        total = 0.0
        for i in range(ACCUMULATION):
            loss = model(*make_batch(step * ACCUMULATION + i, world * 2)) / ACCUMULATION
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.num_dropped


def _settings(stage: int, **extra: Any) -> dict[str, Any]:
    return ParityCase(
        stage=stage, accumulation=ACCUMULATION, optimizer="SGD", params={"lr": 0.1}, extra={**DROP, **extra}
    ).config()


def _train(engine: Any, rank: int, world: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        total = torch.zeros(())
        for i in range(ACCUMULATION):
            tokens, labels = make_batch(step * ACCUMULATION + i, world * 2)
            loss = engine(tokens[rank::world], labels[rank::world])
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu() / ACCUMULATION
        if world > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / world)
    return losses


def _parity(rank: int, world: int, stages: list[int], folder: str) -> list[tuple[list[float], list[float], bool]]:
    """Of each stage: the losses of a whole run, those of one that was resumed half way, the same weights at the end?"""
    import thalweg

    found = []
    for stage in stages:
        more = {"activation_checkpointing": {"policy": "full"}} if stage == 3 else {}
        engine = thalweg.initialize(model=tiny_gpt(), config=_settings(stage, **more))[0]
        losses = _train(engine, rank, world, range(STEPS))
        engine.eval()
        with torch.no_grad():  # every layer, whatever was drawn last
            tokens, labels = make_batch(0, 2)
            plain = tiny_gpt()
            plain.load_state_dict({k: v for k, v in engine.state_dict().items() if k in plain.state_dict()})
            assert abs(float(engine(tokens, labels)) - float(plain(tokens, labels))) < 1e-6
        first = thalweg.initialize(model=tiny_gpt(), config=_settings(stage, **more))[0]
        resumed = _train(first, rank, world, range(STEPS // 2))
        first.save_checkpoint(f"{folder}/{stage}")
        second = thalweg.initialize(model=tiny_gpt(seed=1), config=_settings(stage, **more))[0]
        second.load_checkpoint(f"{folder}/{stage}")
        resumed += _train(second, rank, world, range(STEPS // 2, STEPS))
        weights = [full_tensors(one.module.parameters()) for one in (engine, second)]
        found.append((losses, resumed, bitwise_equal(*weights)))
        for one in (engine, first, second):
            one.close()
    return found


@pytest.mark.parametrize(("world", "stages"), [(2, [3]), nightly(2, [0, 1, 2]), nightly(1, [0, 3])])
def test_stages_equal_a_loop_that_drops_by_hand(world: int, stages: list[int], tmp_path: Path) -> None:
    by_hand, num_dropped = _by_hand(world)
    assert num_dropped > 6, "the case drops too little to show anything"
    for results in run_ranks(_parity, world, stages, str(tmp_path)):
        for losses, resumed, same_weights in results:
            assert losses == pytest.approx(by_hand, abs=2e-6)
            assert resumed == losses and same_weights
    without = [float(loss) for loss in _undropped(world)]
    assert without != pytest.approx(by_hand, abs=1e-3), "dropping changes nothing"


def _undropped(world: int) -> list[float]:
    model, losses = tiny_gpt(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        parts = [model(*make_batch(step * ACCUMULATION + i, world * 2)) for i in range(ACCUMULATION)]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Told(nn.Module):
    """A model that drops by itself, as DeepSpeed's examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.told = nn.Linear(4, 1), []

    def forward(self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        self.told.append((progressive_layer_drop, pld_theta))
        return self.layer(x).square().mean()


class NoLayers(nn.Linear):
    """A model without a list of layers."""


def _count(calls: list[int], *_: Any) -> None:
    calls.append(1)


def _others(rank: int, world: int) -> dict[str, Any]:
    import transformers

    import thalweg

    found: dict[str, Any] = {}
    engine = thalweg.initialize(model=Told(), config=_settings(0, gradient_accumulation_steps=1))[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    engine.eval()
    engine(torch.ones(2, 4))
    found["told"] = engine.module.told
    try:
        thalweg.initialize(model=NoLayers(4, 4), config=_settings(0))
    except ValueError as error:
        found["no layers"] = str(error)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=8, num_attention_heads=2, intermediate_size=32,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    for name, model in {
        "bert": transformers.BertForMaskedLM(config),
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=8, n_head=2)
        ),
    }.items():
        calls: list[int] = []
        layers = model.bert.encoder.layer if name == "bert" else model.transformer.h
        for layer in layers:
            next(layer.children()).register_forward_hook(partial(_count, calls))
        engine = thalweg.initialize(model=model, config=_settings(0, gradient_accumulation_steps=1))[0]
        counts = []
        tokens, labels = (x.contiguous() for x in make_batch(0, 2))
        for _ in range(4):
            calls.clear()
            engine.backward(engine(input_ids=tokens, labels=labels).loss)
            engine.step()
            counts.append(len(calls))
        found[name] = counts
        engine.close()
    return found


def test_other_models() -> None:
    """One that is told theta, Hugging Face's lists of layers, and one that has no layers."""
    pytest.importorskip("transformers")
    (found,) = run_ranks(_others, 1)
    theta = 0.7 * math.exp(-0.5) + 0.3
    assert found["told"] == [(True, 1.0), (True, pytest.approx(theta)), (False, 1.0)]
    assert "pld_theta" in found["no layers"]
    for name in ("bert", "gpt2"):
        assert found[name][0] == 8 and min(found[name]) < 8, name
