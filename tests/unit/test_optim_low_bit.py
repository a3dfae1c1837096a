"""Moments in fewer bits: exact where they must be, unbiased, independent of ranks and chunks, small."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thalweg.optim.algorithms.low_bit import LowBitAdam, LowBitLion
from thalweg.optim.algorithms.moment_codec import (
    ADAM_MOMENTS,
    BLOCK_SIZE,
    SCALE_SUFFIX,
    _dynamic_tree_codes,
    convert_moments,
    dequantize_moment,
    hash_noise,
    quantize_moment,
    read_moment_fp32,
    stochastic_round_into,
)
from thalweg.optim.build import build_optimizer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model(seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(40, 300), (7, 1000), (64, 64), (5000,), (16,), (3, 30, 60)]
    return [nn.Parameter(torch.randn(*shape, generator=g)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int, dtype: torch.dtype = torch.float32) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * 10.0 ** (step % 3 - 2)).to(dtype)


def run(kind: str, steps: int = 5, name: str = "AdamW", **hyper: Any) -> tuple[list[nn.Parameter], Any]:
    params = model()
    optimizer = build_optimizer(name, params, {"lr": 1e-2, "state_dtype": kind, **hyper})
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("extra", [{}, {"bias_correction": False, "weight_decay": 0.1, "betas": [0.8, 0.9]}], ids=str)
def test_in_fp32_the_step_is_the_fused_kernels(name: str, extra: dict[str, Any]) -> None:
    plain, _ = run("fp32", name=name, adam_w_mode=name == "AdamW", **extra)
    params = model()
    optimizer = LowBitAdam(params, lr=1e-2, state_dtype="fp32", decoupled_weight_decay=name == "AdamW", **extra)
    for step in range(5):
        give_gradients(params, step)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    with torch.no_grad():
        params[0][0, 0] += 1e-6
    assert not torch.equal(params[0], plain[0])


def test_lion_in_fp32_is_lion() -> None:
    plain, _ = run("fp32", name="Lion", weight_decay=0.1)
    params = model()
    optimizer = LowBitLion(params, lr=1e-2, weight_decay=0.1, state_dtype="fp32")
    for step in range(5):
        give_gradients(params, step)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion"])
@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 0.02), ("int8", 0.06)])
def test_close_to_fp32(name: str, kind: str, tolerance: float) -> None:
    exact, low = run("fp32", name=name)[0], run(kind, name=name)[0]
    start = model()
    for a, b, s in zip(low, exact, start, strict=True):
        moved = (b - s).norm()
        assert (a - b).norm() <= (tolerance if name != "Lion" else 0.4) * moved
    assert not torch.equal(low[0], exact[0])


def test_bytes_and_forms() -> None:
    for kind, share in (("bf16", 0.55), ("int8", 0.38)):
        params, optimizer = run(kind)
        kept = [v for p in params for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        wide = sum(8 * p.numel() for p in params)
        assert sum(v.numel() * v.element_size() for v in kept) < share * wide
        state = optimizer.state[params[0]]
        assert state["exp_avg"].shape == params[0].shape
        assert state["exp_avg"].dtype == (torch.bfloat16 if kind == "bf16" else torch.uint8)
        assert optimizer.state[params[4]]["exp_avg"].dtype == torch.float32  # small
    assert optimizer.state[params[3]]["exp_avg"].dtype == torch.float32  # a vector
    assert state["exp_avg" + SCALE_SUFFIX].shape == (40, -(-300 // BLOCK_SIZE))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 700), power=st.integers(-20, 10), seed=st.integers(0, 99))
def test_codes_are_near_and_survive_a_second_time(rows: int, columns: int, power: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for signed in (True, False):
        values = torch.randn(rows, columns, generator=g) * 2.0**power
        values = values if signed else values.square()
        codes, scales = (
            torch.empty(rows, columns, dtype=torch.uint8),
            torch.empty(rows, -(-columns // BLOCK_SIZE)),
        )
        quantize_moment(values, codes, scales, signed)
        back = torch.empty_like(values)
        dequantize_moment(codes, scales, signed, back)
        bound = scales.repeat_interleave(BLOCK_SIZE, 1)[:, :columns]
        nearest = (values.unsqueeze(-1) - bound.unsqueeze(-1) * _dynamic_tree_codes(signed)).abs().amin(-1)
        assert ((back - values).abs() <= nearest + 2.0**-7 * values.abs() + 1e-6 * bound).all()
        assert (back[values > 0] > 0).all() or signed
        again, scales_again = torch.empty_like(codes), torch.empty_like(scales)
        quantize_moment(back, again, scales_again, signed)
        third = torch.empty_like(values)
        dequantize_moment(again, scales_again, signed, third)
        assert torch.allclose(third, back, rtol=0.02, atol=1e-3 * float(bound.max()))


def test_zeros_stay_zeros() -> None:
    codes, scales = torch.empty(2, 300, dtype=torch.uint8), torch.empty(2, 2)
    quantize_moment(torch.zeros(2, 300), codes, scales, True)
    out = torch.ones(2, 300)
    dequantize_moment(codes, scales, True, out)
    assert not out.any()


def test_rounding_is_right_on_average_and_nearest_is_not() -> None:
    exact = torch.full((1 << 16,), 1.0 + 2.0**-10)  # an eighth of bf16's step above 1
    g = torch.Generator().manual_seed(0)
    grad, weight = torch.randn(1 << 16, generator=g), torch.randn(1 << 16, generator=g)
    stored = torch.empty(1 << 16, dtype=torch.bfloat16)
    means = []
    for step in range(1, 9):
        stochastic_round_into(exact.clone(), stored, hash_noise(grad, weight, step))
        assert set(stored.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
        means.append(float(stored.float().mean()))
    assert abs(sum(means) / 8 - float(exact[0])) < 2e-5 * 2.0 and max(means) - min(means) < 2e-4
    assert float(exact.bfloat16().float().mean()) == 1.0
    still = torch.zeros(1 << 16)  # no gradient: the hash has only weights and steps to go by
    ups = torch.zeros(1 << 16)
    for step in range(1, 65):
        stochastic_round_into(exact.clone(), stored, hash_noise(still, still, step))
        ups += (stored > 1.0).float()
    assert abs(float(ups.mean()) / 64 - 0.125) < 0.07


def test_a_second_moment_decays_in_bf16() -> None:
    def after(kind: str) -> float:
        params = [nn.Parameter(torch.ones(64, 64))]
        optimizer = build_optimizer("AdamW", params, {"lr": 1e-3, "state_dtype": kind, "betas": [0.9, 0.999]})
        params[0].grad = torch.ones(64, 64)
        optimizer.step()
        params[0].grad = torch.zeros(64, 64)
        for _ in range(300):
            optimizer.step()
        return float(read_moment_fp32(params[0], optimizer.state[params[0]], ADAM_MOMENTS[1]).mean())

    assert after("bf16") == pytest.approx(after("fp32"), rel=0.02)
    stuck = torch.tensor(1e-3).bfloat16()
    for _ in range(300):
        stuck = (stuck.float() * 0.999).bfloat16()
    assert float(stuck) > 0.99e-3


def test_16_bit_weights_and_gradients() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = []
        for kind in ("fp32", "bf16", "int8"):
            params = [nn.Parameter(p.detach().to(dtype)) for p in model()]
            optimizer = build_optimizer("AdamW", params, {"lr": 1e-1, "state_dtype": kind})
            for step in range(3):
                give_gradients(params, step, dtype)
                optimizer.step()
            found.append([p.detach().float() for p in params])
        for low in found[1:]:
            assert all((a - b).abs().max() < 0.1 for a, b in zip(low, found[0], strict=True))


def test_state_dicts_go_between_dtypes() -> None:
    kinds = ("fp32", "bf16", "int8")
    states = {}
    for kind in kinds:
        params, optimizer = run(kind)
        states[kind] = copy.deepcopy(optimizer.state_dict())
        for other in kinds:
            theirs = [nn.Parameter(p.detach().clone()) for p in params]
            loaded = build_optimizer("AdamW", theirs, {"lr": 1e-2, "state_dtype": other})
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"] = loaded.state_dict()["param_groups"]
            loaded.load_state_dict(saved)
            mine = [nn.Parameter(p.detach().clone()) for p in params]
            same = build_optimizer("AdamW", mine, {"lr": 1e-2, "state_dtype": kind})
            same.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for ps, one in ((theirs, loaded), (mine, same)):
                give_gradients(ps, 5)
                one.step()
            equal = all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))
            assert equal == (kind == other or (kind != "fp32" and other == "fp32"))
            assert all((a - b).abs().max() < 5e-3 for a, b in zip(theirs, mine, strict=True))


def test_conform_reads_what_it_wrote() -> None:
    params, optimizer = run("fp32")
    state = dict(optimizer.state[params[0]])
    exact = state["exp_avg"].clone()
    for kind, tolerance in (("int8", 0.05), ("bf16", 0.06), ("fp32", 0.06)):
        convert_moments(params[0], state, kind)
        assert (read_moment_fp32(params[0], state, ADAM_MOMENTS[0]) - exact).abs().max() < tolerance * exact.abs().max()


@pytest.mark.parametrize("kind", ["int8", "bf16", "fp32"])
def test_a_piece_without_rows_is_converted(kind: str) -> None:
    """A rank beyond the rows of a parameter has none of it."""
    param = nn.Parameter(torch.zeros(0, 4096))
    state = {moment: torch.zeros(0, 4096) for moment in ADAM_MOMENTS}
    convert_moments(param, state, kind)
    assert all(read_moment_fp32(param, state, moment).shape == (0, 4096) for moment in ADAM_MOMENTS)
    codes, scales = torch.zeros(0, 256, dtype=torch.uint8), torch.zeros(0, 1)
    quantize_moment(torch.zeros(0, 256), codes, scales, signed=True)
    dequantize_moment(codes, scales, True, torch.zeros(0, 256))


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("AdamW", {"state_dtype": "int4"}, "'fp32', 'bf16', 'int8'"),
        ("SGD", {"state_dtype": "int8"}, "Adam, AdamW and Lion"),
        ("AdamW", {"state_dtype": "int8", "amsgrad": True}, "no such variant"),
        ("AdamW", {"state_dtype": "int8", "betas": [1.0, 0.9]}, "betas"),
        ("AdamW", {"state_dtype": "int8", "moment": 1}, "moment"),
    ],
)
def test_what_there_is_not(name: str, hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(name, model(), hyper)
