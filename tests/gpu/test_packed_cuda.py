"""Weights in int8 and int4 on CUDA: the product of few rows and that of many against the numbers that the bytes are."""

from __future__ import annotations

import pytest
import torch

from thalweg.ops.linear import packed
from thalweg.ops.linear.packed import pack_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_tf32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
# 77: no groups, and rows that no vector loads.  8224: inputs are not shared among programs.
SHAPES = [(256, 512), (131, 192), (70, 77), (8224, 64)]


def _whole(weight: torch.Tensor, form: str, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that packed weights stand for, in fp64."""
    if form == "int8" or weight.shape[1] % 32:
        scale = (weight.abs().amax(1, keepdim=True) / 127).to(dtype).float()
        return (weight / scale).round().clamp(-127, 127).double() * scale.double()
    numbers, table = packed._quantize_int4(weight)
    scale, offset = table.double().permute(2, 1, 0)[..., None]
    return ((numbers.view(len(weight), -1, 32) - 8) * scale + offset).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_numbers(
    shape: tuple[int, int], form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """With fp64, and with the plain form; every way of cutting the rows, and more rows than the kernel takes."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    weight, bias = torch.randn(shape) * 0.05, torch.randn(shape[0])
    layer = pack_linear(weight.cuda(), bias.cuda(), form, dtype)
    assert layer.kernel_name == ("int8" if shape[1] % 32 else form)
    with monkeypatch.context() as without:
        without.setattr(packed, "_triton_product", lambda *_: (None, ()))
        without.setattr(packed, "_take_fused", lambda name, fused, counts, plain, like, bias: plain)
        plain = packed._DEVICE_PACKERS[form](weight.cuda(), None, dtype)
    whole = _whole(weight, form, dtype)
    for rows in (1, 3, 8, 16, 32, 33, 64, 65, 200):
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = x.double() @ whole.t() + bias.to(dtype).double()
        got = layer(x.cuda())
        assert got.dtype == dtype and got.shape == expected.shape
        tolerance = TOLERANCES[dtype] * expected.norm()
        assert (got.cpu().double() - expected).norm() < tolerance, rows
        assert (plain(x.cuda()).cpu().double() + bias.to(dtype).double() - expected).norm() < tolerance, rows
        assert (layer(x.cuda().roll(1, 1)).cpu().double() - expected).norm() > 3 * tolerance, "negative control"
    assert layer(torch.zeros(0, shape[1], dtype=dtype, device="cuda")).shape == (0, shape[0])


def test_many_rows_take_the_device_s_own_product(monkeypatch: pytest.MonkeyPatch):
    triton_packed = pytest.importorskip("thalweg.ops.linear.triton_packed")
    layer = pack_linear(torch.randn(256, 512, device="cuda"), None, "int8", torch.bfloat16)
    unpacked: list[int] = []
    original = triton_packed.unpack
    monkeypatch.setattr(triton_packed, "unpack", lambda *given: (unpacked.append(given[2]), original(*given))[1])
    most = triton_packed.BLOCKS[1][-1].max_rows
    for rows, expected in ((1, []), (most, []), (most + 1, [512])):
        layer(torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16))
        assert unpacked == expected


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_product_does_not_wait_for_the_device(form: str):
    pytest.importorskip("triton")
    layer = pack_linear(torch.randn(256, 512, device="cuda"), None, form, torch.bfloat16)
    inputs = [torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in (1, 8, 64, 200)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in inputs:
            layer(x)
        with pytest.raises(RuntimeError, match="synchroniz"):  # negative control
            inputs[0].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_whole_numbers_do_not_overflow_fp16():
    """Rows and weights whose sums before the scale are beyond 65504, and after it are not."""
    weight = torch.full((64, 512), 0.01, device="cuda")
    for rows in (1, 8, 200):
        y = pack_linear(weight, None, "int8", torch.float16)(torch.full((rows, 512), 20.0, device="cuda").half())
        assert torch.allclose(y.float(), torch.full_like(y, 102.4, dtype=torch.float32), rtol=5e-3)
