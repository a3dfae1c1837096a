"""Position-wise modules over tiles of the sequence: equal to untiled, less memory, one gradient each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_tiled_loss import peak_of
from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)
from thalweg.nn import tiled
from thalweg.nn.tiled_mlp import find_mlps
from thalweg.nn.transformer import GPT, GPTConfig


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Mlp(nn.Module):
    """What a forward may take and give: two tensors cut alike, one whole, a tuple, dropout."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, scale: Any = 1.0) -> Any:
        y = self.drop(self.down(torch.tanh(self.up(x)))) * scale
        return y if residual is None else (y + residual, y)


def build(dropout: float = 0.0, width: int = 8) -> Mlp:
    torch.manual_seed(0)
    return Mlp(width, dropout)


def results(module: nn.Module, with_residual: bool = False, length: int = 11) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, length, 8, requires_grad=True)
    scale = torch.randn(8, requires_grad=True)
    residual = torch.randn(2, length, 8, requires_grad=True) if with_residual else None
    out = module(x, residual, scale=scale) if with_residual else module(x, scale=scale)
    outs = out if isinstance(out, tuple) else (out,)
    sum((i + 1) * o.square().sum() for i, o in enumerate(outs)).backward()
    grads = [x.grad, scale.grad, *(p.grad for p in module.parameters())]
    return [*(o.detach() for o in outs), *(g for g in grads if g is not None)]


def close(mine: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-5) -> bool:
    return len(mine) == len(theirs) and all(
        torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("tiles", [2, 3, 4, 11, 100])
@pytest.mark.parametrize("with_residual", [False, True])
def test_equal_to_untiled(tiles: int, with_residual: bool) -> None:
    want = results(build(), with_residual)
    assert close(results(tiled(build(), tiles), with_residual), want)
    other = build()
    with torch.no_grad():
        other.up.weight[0, 0] += 0.1
    assert not close(results(tiled(other, tiles), with_residual), want)


def test_no_grad_and_one_position_and_frozen_parts() -> None:
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        assert torch.allclose(tiled(build(), 3)(x), build()(x), atol=1e-6)
    assert torch.equal(tiled(build(), 3)(x[:, :1]), build()(x[:, :1]))
    plain, model = build(), tiled(build(), 3)
    for module in (plain, model):
        module.up.requires_grad_(False)  # type: ignore[union-attr]
        module(x).sum().backward()
    assert model.up.weight.grad is None  # type: ignore[union-attr]
    assert torch.allclose(model.down.weight.grad, plain.down.weight.grad, atol=1e-5)  # type: ignore


def test_dropout_is_the_same_in_the_second_run() -> None:
    model = tiled(build(dropout=0.5), 4)
    x = torch.randn(2, 12, 8, requires_grad=True)
    y = model(x)
    y.sum().backward()
    # d y_i / d bias_i of the last layer is 2 where the mask kept it: the gradient counts the kept ones.
    kept = (y != 0).sum((0, 1)) * 2.0
    assert torch.equal(model.down.bias.grad, kept)  # type: ignore[union-attr]


@pytest.mark.parametrize("nested", [False, True])
def test_in_a_checkpointed_unit_and_under_autocast(nested: bool) -> None:
    torch.manual_seed(0)
    plain = GPT(GPTConfig(vocab_size=61, n_layer=2, n_head=2, n_embd=16, block_size=12))
    model = copy.deepcopy(plain)
    for module in find_mlps(model).values():
        tiled(module, 3)
    if nested:
        apply_activation_checkpointing(model, list(model.blocks), ActivationCheckpointPolicy("full"))
    tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(3))
    found = []
    for one in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters())])
    assert close(*found, tolerance=2e-2)


def test_the_inner_activation_is_that_of_a_tile() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1024, 32)

    def peak(module: nn.Module) -> int:
        def run() -> None:
            module(x.clone().requires_grad_()).sum().backward()

        return peak_of(run)

    inner = 4 * 1024 * 128
    plain, small = peak(Mlp(32)), peak(tiled(Mlp(32), 16))
    assert plain > 2 * inner
    assert small < plain - 1.5 * inner


def test_bf16_gradients_add_up_in_fp32() -> None:
    x = torch.randn(1, 512, 8, generator=torch.Generator().manual_seed(2))
    exact = build().double()
    exact(x.double()).square().sum().backward()
    errors = []
    for tiles in (1, 128):
        module = tiled(build().bfloat16(), tiles)
        module(x.bfloat16()).square().sum().backward()
        true = exact.down.weight.grad
        errors.append(((module.down.weight.grad.double() - true).abs().max() / true.abs().max()).item())  # type: ignore
    assert errors[1] < 2 * errors[0]


def test_names_and_what_is_found() -> None:
    model = GPT(GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=8, block_size=4))
    names = [name for name, _ in model.named_parameters()]
    assert list(find_mlps(model)) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert list(find_mlps(model, ["mlp.down", "head"])) == ["blocks.0.mlp.down", "blocks.1.mlp.down", "head"]
    for module in find_mlps(model).values():
        assert tiled(module, 2) is module
    assert [name for name, _ in model.named_parameters()] == names
    with pytest.raises(ValueError, match="mlp_modules"):
        find_mlps(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expert"):
        find_mlps(model, ["expert"])


def test_what_cannot_be_tiled() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    with pytest.raises(ValueError, match="not position-wise"):
        tiled(Pool(), 2)(torch.randn(2, 6, 5, requires_grad=True))
    with pytest.raises(ValueError, match="from 1 up"):
        tiled(build(), 0)
    with pytest.raises(ValueError, match="tiled already"):
        tiled(tiled(build(), 2), 2)
