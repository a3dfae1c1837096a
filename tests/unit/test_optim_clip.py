"""Gradient norm and clipping in one process: accuracy, overflow, dtypes, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thalweg.optim.norms import clip_factor, global_grad_norm, square_sums

torch.set_num_threads(1)


def with_grads(*grads: Tensor | None) -> list[nn.Parameter]:
    params = []
    for grad in grads:
        param = nn.Parameter(torch.zeros(1) if grad is None else torch.zeros_like(grad))
        param.grad = grad
        params.append(param)
    return params


def exact(*grads: Tensor) -> float:
    return torch.cat([g.detach().double().reshape(-1) for g in grads]).norm().item()


def test_long_tensors_are_summed_accurately() -> None:
    """torch's own fp32 norm is off by 6e-5 here, which would tie clipping to how a tensor is cut."""
    grad = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    got = global_grad_norm(with_grads(grad)).item()
    assert got == pytest.approx(exact(grad), rel=2e-8)
    halves = global_grad_norm(with_grads(grad[:1_234_567], grad[1_234_567:])).item()
    assert got == pytest.approx(halves, rel=2e-8)
    assert square_sums([grad])[0].item() == pytest.approx(exact(grad) ** 2, rel=4e-8)


def test_short_tensors_are_summed_in_fp64() -> None:
    """As an accelerator's kernel does: a clip factor that differs in the last bit trains another model in 16 bits."""
    grads = [torch.randn(100, 7), torch.randn(31), torch.randn(12, 5).bfloat16() * 1e-3]

    assert global_grad_norm(with_grads(*grads)).item() == pytest.approx(exact(*grads), rel=1e-14)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=6),
    st.sampled_from([1e-30, 1e-20, 1e-3, 1.0, 1e18, 1e30, 1e37]),
)
def test_any_sizes_and_scales(sizes: list[int], scale: float) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    grads = [torch.randn(size, generator=generator) * scale for size in sizes]
    got = global_grad_norm(with_grads(*grads)).item()
    joined = torch.cat(grads).double()
    want = torch.linalg.vector_norm(joined).item() if joined.numel() else 0.0
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("size", [1, 100, 8192, 50_000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_element_shows(size: int, bad: float) -> None:
    for position in {0, size // 2, size - 1}:
        grad = torch.ones(size)
        grad[position] = bad
        assert not math.isfinite(global_grad_norm(with_grads(torch.ones(3), grad, None)))


def test_dtypes_views_and_missing_gradients() -> None:
    grads = [
        torch.randn(200, 100).t(),
        torch.randn(9000).half() * 300,
        torch.randn(9000).bfloat16(),
        torch.randn(9000, dtype=torch.float64),
        torch.randn(0, 4),
        torch.tensor(2.0),
    ]
    params = with_grads(*grads, None)
    assert global_grad_norm(params).item() == pytest.approx(exact(*grads), rel=1e-6)
    assert global_grad_norm(iter(params)).item() == global_grad_norm(params).item()
    assert global_grad_norm([]).item() == 0.0
    assert global_grad_norm(with_grads(torch.zeros(3))).item() == 0.0


def test_clipping_scales_to_the_limit_and_only_down() -> None:
    params = with_grads(torch.randn(5, 3), torch.randn(9000))
    norm = global_grad_norm(params).item()
    assert clip_factor(norm, 1e6) == 1.0
    assert clip_factor(norm, 0.25) * norm == pytest.approx(0.25, rel=1e-5)
