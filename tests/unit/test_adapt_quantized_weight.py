"""NF4 and int8 weights: the published numbers, half a step of error at most, products and cuts as of the numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thalweg.adapt.quantized_weight import QuantizedWeight, nf4_values, quantize_linears
from thalweg.zero.quantized_params import unwrap_quantized_params

# Dettmers et al. 2023, appendix E.
PUBLISHED = {
    0: -1.0,
    1: -0.6961928009986877,
    6: -0.09105003625154495,
    7: 0.0,
    8: 0.07958029955625534,
    14: 0.7229568362236023,
}


def make_weight(rows: int = 48, columns: int = 192) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.rand(rows, 1)


def test_the_sixteen_numbers_are_the_published_ones() -> None:
    values = nf4_values()
    assert len(values) == 16 and values[15] == 1.0
    assert all(abs(values[index] - value) < 1e-6 for index, value in PUBLISHED.items())


@pytest.mark.parametrize("weight_format", ["nf4", "int8"])
def test_a_number_becomes_the_nearest_code_of_its_block(weight_format: str) -> None:
    weight = make_weight()
    numbers = QuantizedWeight.quantize(weight, weight_format).dequantize()  # type: ignore[arg-type]
    if weight_format == "int8":
        step = weight.abs().amax(1, keepdim=True) / 127
        assert ((numbers - weight).abs() <= step / 2 + 1e-7).all()
        return
    scale = weight.view(48, 3, 64).abs().amax(2, keepdim=True).bfloat16().float()
    choices = scale[..., None] * torch.tensor(nf4_values())  # (48, 3, 1, 16)
    best = (choices - weight.view(48, 3, 64, 1)).abs().amin(3)
    torch.testing.assert_close((numbers - weight).abs().view(48, 3, 64), best, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weight_format", ["nf4", "int8"])
def test_a_product_and_its_gradient_are_those_of_the_numbers(weight_format: str) -> None:
    layer, rows = nn.Linear(192, 48), torch.randn(2, 5, 192, requires_grad=True)
    quantize_linears(layer, weight_format)  # type: ignore[arg-type]
    layer.bias.requires_grad_(True)
    y = layer(rows)
    y.square().sum().backward()
    got = rows.grad, layer.bias.grad
    numbers, other = layer.weight.dequantize(), rows.detach().clone().requires_grad_(True)
    bias = layer.bias.detach().clone().requires_grad_(True)
    want = F.linear(other, numbers, bias)
    want.square().sum().backward()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(got, (other.grad, bias.grad))
    saved = [t for t in _saved_tensors(lambda: layer(rows)) if t.shape == (48, 192)]
    assert not saved  # the numbers are gone after the product


def _saved_tensors(compute: object) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        compute()  # type: ignore[operator]
    return saved


@pytest.mark.parametrize("weight_format", ["nf4", "int8"])
def test_what_is_cut_in_whole_blocks_has_the_same_numbers(weight_format: str) -> None:
    weight = QuantizedWeight.quantize(make_weight(), weight_format)  # type: ignore[arg-type]
    numbers = weight.dequantize()
    assert torch.equal(weight[8:40].dequantize(), numbers[8:40])
    assert torch.equal(weight.narrow(1, 64, 128).dequantize(), numbers[:, 64:])
    assert torch.equal(copy.deepcopy(nn.Parameter(weight, requires_grad=False)).dequantize(), numbers)
    assert torch.equal(weight + 1, numbers + 1) and type(weight + 1) is torch.Tensor
    if weight_format == "nf4":
        with pytest.raises(ValueError, match="whole blocks of 64"):
            weight.narrow(1, 32, 64)


def test_a_model_s_base_takes_the_bits_it_says_and_its_head_stays() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(8, 8))
    assert quantize_linears(model, "nf4") == ["0"]  # the other is too narrow for a block
    assert not any(p.requires_grad for p in model.parameters())
    assert unwrap_quantized_params(model) == ["0.weight"]
    held = sum(p.nbytes for p in model[0].parameters())
    assert held == 256 * 256 * 4.25 / 8
