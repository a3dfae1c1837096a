"""NF4 and int8 weights: the published numbers, half a step of error at most, products and cuts as of the numbers."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thalweg.adapt import quantized_weight
from thalweg.adapt.quantized_weight import QuantizedWeight, nf4_values, quantize_linears
from thalweg.ops import cpu_kernels
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


@pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())
@pytest.mark.parametrize("isa", [isa.name for isa in cpu_kernels.supported_isas() if isa.name != "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_bits_of_torch_s_operators(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THALWEG_CPU_ISA", isa)
    for rows, columns in ((300, 192), (3, 16), (5, 96)):  # blocks of 64, 16 and 32; enough for two threads, and not
        weight = QuantizedWeight.quantize(make_weight(rows, columns), "nf4")
        unaligned = torch.cat([weight.codes.new_zeros(1), weight.codes.flatten()])[1:].view_as(weight.codes)
        for codes in (weight.codes, unaligned):
            weight = QuantizedWeight(codes, weight.scales, "nf4", dtype)
            with torch.device("meta"):  # as where a model is being loaded
                got = weight.dequantize()
            with monkeypatch.context() as context:
                context.setattr(cpu_kernels, "unsupported_reason", lambda: "not here")
                want = weight.dequantize()
            assert got.dtype == want.dtype == dtype and torch.equal(got, want)
            with monkeypatch.context() as context:  # with other numbers in the table both are others
                context.setattr(quantized_weight, "_nf4_table", lambda dtype: np.zeros(16, np.float32))
                assert not torch.equal(weight.dequantize(), want)


def test_the_table_of_a_device_is_made_once_and_is_never_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "unsupported_reason", lambda: "not here")
    monkeypatch.setattr(quantized_weight, "_PAIRS", {})
    made: list[object] = []
    make = torch.cartesian_prod
    monkeypatch.setattr(torch, "cartesian_prod", lambda *values: (made.append(values), make(*values))[1])
    weight = QuantizedWeight.quantize(make_weight(), "nf4")
    with FakeTensorMode() as mode:
        codes, scales = mode.from_tensor(weight.codes), mode.from_tensor(weight.scales)
        fake = QuantizedWeight(codes, scales, "nf4", torch.float32).dequantize()
    assert isinstance(fake, FakeTensor) and len(made) == 1 and not quantized_weight._PAIRS
    with torch.inference_mode():
        first = weight.dequantize()
    for _ in range(3):
        assert torch.equal(weight.dequantize(), first)
    assert len(made) == 2
    weight.dequantize(torch.bfloat16)
    assert len(made) == 3  # another dtype has its own
    with FakeTensorMode() as mode:  # nor do real ones reach fake ones
        codes, scales = mode.from_tensor(weight.codes), mode.from_tensor(weight.scales)
        assert isinstance(QuantizedWeight(codes, scales, "nf4", torch.float32).dequantize(), FakeTensor)


@pytest.mark.parametrize("weight_format", ["nf4", "int8"])
def test_bytes_cut_for_tensor_ranks_are_the_numbers_pieces(weight_format: str) -> None:
    layer = nn.Linear(192, 48, bias=False)
    with torch.no_grad():
        layer.weight.copy_(make_weight())
    quantize_linears(layer, weight_format)  # type: ignore[arg-type]
    weight: Any = layer.weight
    numbers = weight.dequantize()
    unwrap_quantized_params(layer)
    rebuild, leaves = layer.parametrizations.weight[0], list(layer.parametrizations.weight.parameters())

    def piece(dim: int, spans: Any, rank: int, shifted: int = 0) -> torch.Tensor:
        cuts = weight.byte_spans(dim, spans)
        (code, *_), (scale, *_) = ([None] if cut is None else cut[rank] for cut in cuts)
        parts = [
            leaf if span is None else leaf.narrow(dim, span[0] - by, span[1] - span[0]).contiguous()
            for leaf, span, by in zip(leaves, (code, scale), (0, shifted), strict=True)
        ]
        return rebuild(*parts).dequantize()

    rows, columns = [[(0, 20)], [(20, 48)]], [[(0, 128)], [(128, 192)]]
    assert torch.equal(piece(0, rows, 1), numbers[20:])
    assert torch.equal(piece(1, columns, 0), numbers[:, :128]) and torch.equal(piece(1, columns, 1), numbers[:, 128:])
    assert not torch.equal(piece(0, rows, 1, shifted=1), numbers[20:])  # another row's scales
    within = [[(0, 96)], [(96, 192)]]
    if weight_format == "int8":
        assert torch.equal(piece(1, within, 1), numbers[:, 96:])
        return
    with pytest.raises(ValueError, match="cut at 96, within 64 that share a scale: cut it over fewer ranks"):
        weight.byte_spans(1, within)


@pytest.mark.parametrize("weight_format", ["nf4", "int8"])
def test_what_rebuilds_a_weight_keeps_no_byte_of_the_whole(weight_format: Any) -> None:
    """ZeRO and tensor ranks put pieces in the place of what is inside; the whole must go then."""
    layer = nn.Linear(192, 48, bias=False)
    quantize_linears(layer, weight_format)
    unwrap_quantized_params(layer)
    inside: Any = layer.parametrizations.weight
    wholes = [weakref.ref(parameter.untyped_storage()) for parameter in inside.parameters()]
    gc.collect()
    assert len(wholes) == 2 and all(whole() is not None for whole in wholes)  # the control: a weakref sees what is held
    for name, parameter in list(inside.named_parameters()):
        setattr(inside, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    del parameter
    gc.collect()
    assert all(whole() is None for whole in wholes)
    assert layer.weight.shape == (48, 192)  # and it is built from the pieces


def test_the_plan_counts_a_base_in_few_bits_as_its_bytes() -> None:
    import thalweg

    def planned(weight_format: Any) -> Any:
        model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1))
        if weight_format is not None:
            quantize_linears(model[:2], weight_format)
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        return thalweg.plan(model, config, batch=torch.zeros(1, 256), process_bytes=0, devices_per_node=1, device="cpu")

    nf4, int8, plain = (planned(weight_format).per_rank for weight_format in ("nf4", "int8", None))
    numbers = 1024 * (256 + 1024)
    assert nf4.parameters == numbers * 4.25 / 8 + 1025 * 4
    assert int8.parameters == numbers + 2 * 1024 * 4 + 1025 * 4
    assert plain.parameters == numbers * 4 + 1025 * 4
    # Numbers of one layer at a time, and the indices that they are looked up by: backward reads the codes again.
    one = 1024 * 1024 * 4 + 1024 * 512 * 4
    assert one <= nf4.activations < one + (1 << 16), nf4


def test_a_model_s_base_takes_the_bits_it_says_and_its_head_stays() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(8, 8))
    assert quantize_linears(model, "nf4") == ["0"]  # the other is too narrow for a block
    assert not any(p.requires_grad for p in model.parameters())
    assert unwrap_quantized_params(model) == ["0.weight"]
    held = sum(p.nbytes for p in model[0].parameters())
    assert held == 256 * 256 * 4.25 / 8
