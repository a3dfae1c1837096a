"""Inputs of checkpointed units on disk, in parts, or in place: the same bits, in less memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marks import nightly
from tests.unit.test_tiled_loss import peak_of
from thalweg.activation_checkpointing import offloaded_forward
from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)
from thalweg.activation_checkpointing.offload import NvmeActivationOffloader
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.swap_file import SwapFile

FULL = ActivationCheckpointPolicy("full")


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(offloaded_forward, "MIN_OFFLOAD_BYTES", 1)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[NvmeActivationOffloader]:
    made = NvmeActivationOffloader(tmp_path, segment_bytes=1 << 20)
    yield made
    gc.collect()
    made.close()
    assert not list(tmp_path.iterdir())


def small(dropout: float = 0.0, layers: int = 5) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=97, n_layer=layers, n_head=2, n_embd=32, block_size=16, dropout=dropout))


def build(saver: Any, dropout: float = 0.0, policy: ActivationCheckpointPolicy = FULL) -> GPT:
    model = small(dropout)
    apply_activation_checkpointing(model, list(model.blocks), policy, saver)
    return model


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(7)
    found = []
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        found += [loss.detach(), *grads(model)]
    return found


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    "policy",
    [FULL, ActivationCheckpointPolicy("selective"), nightly(ActivationCheckpointPolicy("selective", every=2))],
    ids=str,
)
@pytest.mark.parametrize("dropout", [nightly(0.0), 0.3])
def test_on_disk_the_bits_are_the_same(
    saver: NvmeActivationOffloader, policy: ActivationCheckpointPolicy, dropout: float
) -> None:
    assert same(train(build(saver, dropout, policy)), train(small(dropout)))
    assert saver.num_bytes > 0

    class InPlace:
        def save(self, tensor: Tensor) -> Any:
            return SimpleNamespace(fetch=lambda: tensor)

    assert same(train(build(InPlace(), dropout, policy)), train(small(dropout)))


def test_a_disk_without_room_for_a_segment_takes_what_is_needed(tmp_path: Path) -> None:
    class SmallDisk(Disk):
        taken = 0

        def free_bytes(self, folder: Path) -> int:
            return (4 << 16) - self.taken

        def fallocate(self, handle: int, num_bytes: int, start: int = 0) -> None:
            super().fallocate(handle, num_bytes, start)
            self.taken = num_bytes

    saver = NvmeActivationOffloader(tmp_path, segment_bytes=1 << 28, disk=SmallDisk())
    assert same(train(build(saver)), train(small()))
    assert 0 < saver.num_bytes <= 4 << 16
    with pytest.raises(ValueError, match="make room"):
        saver.save(torch.zeros(1 << 17))
    gc.collect()
    saver.close()


def test_a_wrong_byte_on_disk_would_be_seen(saver: NvmeActivationOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SwapFile.read

    def wrong(self: SwapFile, offset: int, into: Tensor) -> Any:
        ticket = plain(self, offset, into)
        ticket.wait()
        into.view(-1)[0] += 1
        return ticket

    monkeypatch.setattr(SwapFile, "read", wrong)
    assert not same(train(build(saver)), train(small()))


def test_several_forwards_retained_graphs_and_the_other_order(saver: NvmeActivationOffloader) -> None:
    found = []
    for model in (small(0.2), build(saver, 0.2)):
        torch.manual_seed(3)
        losses = [model(*batch(seed)) for seed in range(3)]
        losses[0].backward(retain_graph=True)
        losses[2].backward()
        losses[0].backward()
        losses[1].backward()
        found.append(grads(model))
    assert same(*found)


def test_nested_units_and_a_unit_within_its_own_backward(saver: NvmeActivationOffloader) -> None:
    want = train(small(0.1))
    model = small(0.1)
    inner = [block.mlp for block in model.blocks]
    apply_activation_checkpointing(model, [*model.blocks, *inner], FULL, saver)
    assert same(train(model), want)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            with torch.enable_grad():
                other(*batch(9)).backward()
            return grad

    results = []
    for offload in (False, True):
        outer, other = small(), small()
        if offload:
            for one in (outer, other):
                apply_activation_checkpointing(one, list(one.blocks), FULL, saver)
        middle = outer.blocks[3]
        middle.register_forward_pre_hook(lambda _m, args: (Inner.apply(args[0]),))
        outer(*batch()).backward()
        results.append([*grads(outer), *grads(other)])
    assert same(*results)


def test_exceptions_give_the_room_back(saver: NvmeActivationOffloader) -> None:
    model = build(saver)
    model(*batch()).backward()
    grads(model)

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    handle = model.blocks[3].mlp.register_forward_pre_hook(fail)
    for _ in range(20):
        with pytest.raises(KeyError):
            model(*batch())
    handle.remove()
    handle = model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    loss = model(*batch())
    broken = model.blocks[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        loss.backward()
    broken.remove()
    del loss
    model.zero_grad()
    assert same(train(model), train(small()))
    assert saver.num_bytes == 1 << 20


def test_sequences_of_every_length_share_the_room(saver: NvmeActivationOffloader) -> None:
    model = build(saver)
    for length, rows in itertools.product(range(1, 17), range(1, 9)):
        tokens = torch.randint(97, (rows, length + 1), generator=torch.Generator().manual_seed(length))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert saver.num_bytes == 1 << 20


def test_an_input_changed_in_place_is_an_error(saver: NvmeActivationOffloader) -> None:
    unit = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    apply_activation_checkpointing(unit, [unit], FULL, saver)
    x = torch.randn(4, 64, requires_grad=True) * 1.0
    mask = torch.ones(4, 64)

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x * mask).tanh()

    other = Masked()
    apply_activation_checkpointing(other, [other], FULL, saver)
    y = other(unit(x), mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_the_peak_is_lower_by_the_inputs(saver: NvmeActivationOffloader) -> None:
    shape = GPTConfig(vocab_size=50, n_layer=16, n_head=2, n_embd=32, block_size=256)
    tokens = torch.randint(50, (16, 257), generator=torch.Generator().manual_seed(0))
    inputs = 16 * 16 * 256 * 32 * 4

    def peak(where: Any) -> int:
        torch.manual_seed(0)
        model = GPT(shape)
        apply_activation_checkpointing(model, list(model.blocks), FULL, where)
        return peak_of(lambda: model(tokens[:, :-1], tokens[:, 1:]).backward())

    here, away = peak(None), peak(saver)
    # Up to five of the sixteen are on their way: two out, two back, one in use.
    assert here - away > 11 / 16 * inputs - 100_000, (here, away, inputs)


def test_copied(saver: NvmeActivationOffloader) -> None:
    import copy
    import pickle

    model = build(saver)
    twin = copy.deepcopy(model)
    assert same(train(twin), train(small()))
    assert same(train(pickle.loads(pickle.dumps(model))), train(small()))
