"""The MoE layer against a loop over tokens and experts."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thalweg.nn.moe.experts import Experts
from thalweg.nn.moe.layer import GatePolicy, MoE, route
from thalweg.ops.grouped_mm import RowGroups


def _expert(width: int = 8, inner: int = 12, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner, bias=bias), nn.GELU(), nn.Linear(inner, width, bias=bias))


def _shake(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def _by_loop(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Every token, every choice, plain modules."""
    routing = route(layer.gate(x), layer.policy, layer.training)
    experts = []
    for index in range(layer.num_experts):
        single = copy.deepcopy(layer.experts._template[0]).to_empty(device="cpu")
        values = {name: p[index] for name, p in layer.experts.stack.named_parameters()}
        single.load_state_dict(values)
        experts.append(single)
    rows = []
    for i, token in enumerate(x):
        terms = [routing.weights[i, c] * experts[int(routing.experts[i, c])](token) for c in range(layer.policy.k)]
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("inner", [12, 10])  # 10: rows that the grouped product refuses
def test_output_equals_a_loop(k, inner):
    torch.manual_seed(k)
    layer = MoE(8, _expert(inner=inner), num_experts=5, k=k, drop_tokens=False, top2_2nd_expert_sampling=False)
    _shake(layer)
    x = torch.randn(7, 8)
    y, balance, counts = layer(x)
    assert torch.allclose(y, _by_loop(layer, x), atol=1e-5)
    assert counts.sum() == 7 * k and balance > 0
    layer.experts._shake = None
    with torch.no_grad():
        layer.gate.weight.mul_(-1.0)
    assert not torch.allclose(layer(x)[0], y, atol=1e-3)


def test_grouped_product_equals_the_loop_with_gradients():
    torch.manual_seed(0)
    experts = Experts(_expert(), 4)
    _shake(experts)
    rows, counts = torch.randn(9, 8), torch.tensor([4, 0, 5, 0])
    counts = RowGroups(counts, torch.arange(4).repeat_interleave(counts))
    grouped = experts(rows, counts)
    grads = torch.autograd.grad(grouped.square().sum(), list(experts.parameters()))
    experts._use_grouped = False
    plain = experts(rows, counts)
    expected = torch.autograd.grad(plain.square().sum(), list(experts.parameters()))
    assert torch.allclose(grouped, plain, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(grads, expected, strict=True))
    assert all(grad[1].abs().max() == 0 for grad in grads)  # an expert without tokens


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 6),
    k=st.integers(1, 4),
    factor=st.floats(0.2, 2.0),
    seed=st.integers(0, 99),
    training=st.booleans(),
)
def test_capacity_holds_and_nothing_is_dropped_without_need(tokens, experts, k, factor, seed, training):
    k = min(k, experts)
    torch.manual_seed(seed)
    policy = GatePolicy(k, factor, factor, min_capacity=1)
    routing = route(torch.randn(tokens, experts), policy, training)
    capacity = policy.capacity(tokens, experts, training)
    assert capacity is not None
    chosen = torch.bincount(routing.experts.reshape(-1), minlength=experts)
    taken = torch.bincount(routing.experts[routing.in_capacity], minlength=experts)
    assert torch.equal(taken, chosen.clamp(max=capacity))
    assert all(len(set(row.tolist())) == k for row in routing.experts)
    assert torch.equal(routing.counts, chosen)
    assert (routing.weights[~routing.in_capacity] == 0).all()


def test_first_choices_come_before_second_ones():
    logits = torch.tensor([[0.0, 3.0], [3.0, 0.0], [0.0, 3.0]])
    policy = GatePolicy(2, 0.1, min_capacity=2, sample_second_expert=False)
    routing = route(logits, policy)
    assert routing.in_capacity[:, 0].all()  # expert 1 twice and expert 0 once
    assert routing.in_capacity[:, 1].tolist() == [True, False, False]


def test_balance_is_one_where_all_are_chosen_alike_and_more_elsewhere():
    even = route(20.0 * torch.eye(4), GatePolicy(1, drop_tokens=False)).balance_loss
    skewed = route(20.0 * torch.eye(4)[[0, 0, 0, 1]], GatePolicy(1, drop_tokens=False)).balance_loss
    assert abs(even - 1.0) < 1e-5 and skewed > 2.0


def test_variants():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    for options in (
        {"use_residual": True},
        {"shared_expert": _expert(), "z_loss_coef": 1e-3},
        {"noisy_gate_policy": "RSample"},
        {"noisy_gate_policy": "Jitter", "k": 2},
    ):
        layer = MoE(8, _expert(), num_experts=4, **options)
        y, loss, counts = layer(x, torch.ones(12))
        (y.sum() + loss).backward()
        assert y.shape == x.shape and counts.shape == (4,)
        assert all(p.grad is not None for name, p in layer.named_parameters() if "gate" not in name)
    left_out = torch.tensor([True] * 6 + [False] * 6)
    assert MoE(8, _expert(), num_experts=4)(x, left_out)[0][1].abs().max() == 0
    with pytest.raises(ValueError, match="multiple of ep_size"):
        MoE(8, _expert(), num_experts=4, ep_size=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gate_computes_in_fp32(dtype: torch.dtype):
    torch.manual_seed(0)
    layer = MoE(64, _expert(64), num_experts=32, k=1, drop_tokens=False).to(dtype)
    x = torch.randn(8192, 64).to(dtype)
    _, _, counts = layer(x)
    chosen = (x.float() @ layer.gate.weight.float().T).argmax(-1)
    rounded = (x @ layer.gate.weight.T).argmax(-1)
    assert torch.equal(counts.long(), chosen.bincount(minlength=32))
    assert not torch.equal(chosen, rounded)  # so that a gate in 16 bits would be noticed
