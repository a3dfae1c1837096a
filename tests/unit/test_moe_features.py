"""Each option of the MoE layer against its definition written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.test_moe import _by_loop, _expert, _shake
from thalweg.moe import (
    MoE,
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)
from thalweg.nn.moe.experts import Experts
from thalweg.nn.moe.layer import GatePolicy, route
from thalweg.ops.grouped_mm import RowGroups, grouped_linear, sort_by_expert


def _layer(**options) -> MoE:
    torch.manual_seed(0)
    layer = MoE(8, _expert(), num_experts=4, **options)
    _shake(layer)
    return layer


def _by_capacity(experts: list[list[int]], capacity: int, probabilities: list[list[float]]) -> list[list[bool]]:
    """First choices of all tokens in order, then second ones: taken while there is room.  With more than two a token
    the most probable come first."""
    used: dict[int, int] = {}
    kept = [[False] * len(row) for row in experts]
    order = [(choice, token) for choice in range(len(experts[0])) for token in range(len(experts))]
    if len(experts[0]) > 2:
        order.sort(key=lambda place: -probabilities[place[1]][place[0]])
    for choice, token in order:
        expert = experts[token][choice]
        kept[token][choice] = used.get(expert, 0) < capacity
        used[expert] = used.get(expert, 0) + 1
    return kept


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 15), st.integers(1, 3), st.floats(0.3, 1.5), st.integers(0, 99))
def test_capacity_drops_in_order(tokens, k, factor, seed):
    torch.manual_seed(seed)
    policy = GatePolicy(k, factor, 2 * factor, min_capacity=1, use_rts=False, sample_second_expert=False)
    logits = torch.randn(tokens, 4)
    for training, used in ((True, factor), (False, 2 * factor)):
        routing = route(logits, policy, training)
        capacity = max(math.ceil(k * tokens / 4 * used), 1)
        chosen = logits.softmax(-1).gather(1, routing.experts)
        assert routing.in_capacity.tolist() == _by_capacity(routing.experts.tolist(), capacity, chosen.tolist())
        gates = logits.softmax(-1).gather(1, routing.experts) * routing.in_capacity
        if k > 1:
            gates = gates / gates.sum(1, keepdim=True).clamp(min=1e-9)
        assert torch.allclose(routing.weights, gates, atol=1e-6)


def test_random_token_selection_leaves_the_dropping_to_chance():
    logits = torch.zeros(12, 3)
    logits[:, 1] = 5.0
    kept = []
    for seed in range(40):
        torch.manual_seed(seed)
        kept.append(route(logits, GatePolicy(1, 1.0, min_capacity=1)).in_capacity[:, 0])
    share = torch.stack(kept).float().mean(0)
    assert all(int(row.sum()) == 4 for row in kept) and share.min() > 0.1 and share.max() < 0.7
    assert (
        route(logits, GatePolicy(1, 1.0, min_capacity=1), training=False).in_capacity[:, 0].tolist()
        == [True] * 4 + [False] * 8
    )
    in_order = route(logits, GatePolicy(1, 1.0, min_capacity=1, use_rts=False)).in_capacity[:, 0]
    assert in_order.tolist() == [True] * 4 + [False] * 8


@pytest.mark.parametrize("options", [{"k": 1}, {"k": 2, "top2_2nd_expert_sampling": False}])
def test_dropped_choices_give_nothing(options):
    layer = _layer(capacity_factor=0.5, min_capacity=1, use_rts=False, **options)
    x = torch.randn(10, 8, requires_grad=True)
    y, _, counts = layer(x)
    routing = route(layer.gate(x), layer.policy)
    assert not routing.in_capacity.all() and torch.equal(counts, routing.counts) and counts.sum() == 10 * layer.policy.k
    assert torch.allclose(y, _by_loop(layer, x), atol=1e-5)
    found = torch.autograd.grad(y.square().sum(), [x, *layer.experts.parameters()])
    wanted = torch.autograd.grad(_by_loop_with_gradients(layer, x).square().sum(), [x, *layer.experts.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True))


def _by_loop_with_gradients(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    routing = route(layer.gate(x), layer.policy)
    own = dict(layer.experts.stack.named_parameters())
    rows = []
    for i, token in enumerate(x):
        y = torch.zeros_like(token)
        for c, e in enumerate(routing.experts[i].tolist()):
            inner = F.gelu(F.linear(token, own["0.weight"][e], own["0.bias"][e]))
            y = y + routing.weights[i, c] * F.linear(inner, own["2.weight"][e], own["2.bias"][e])
        rows.append(y)
    return torch.stack(rows)


def test_residual_and_shared_experts():
    x = torch.randn(3, 5, 8)
    plain = _layer(drop_tokens=False)
    residual = _layer(drop_tokens=False, use_residual=True)
    residual.load_state_dict(plain.state_dict(), strict=False)
    mix = residual.coefficient(x).softmax(-1)
    expected = plain(x)[0] * mix[..., :1] + residual.residual(x) * mix[..., 1:]
    assert torch.allclose(residual(x)[0], expected, atol=1e-6)
    shared = _layer(drop_tokens=False, shared_expert=_expert())
    shared.load_state_dict(plain.state_dict(), strict=False)
    assert torch.allclose(shared(x)[0], plain(x)[0] + shared.shared(x), atol=1e-6)


def test_noisy_gates():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(6000, 3)
    torch.manual_seed(0)
    policy = GatePolicy(1, noisy_gate_policy="RSample", drop_tokens=False)
    routing = route(logits, policy)
    share = routing.counts / 6000  # Gumbel noise samples the softmax
    assert (share - logits[0].softmax(-1)).abs().max() < 0.03
    assert torch.allclose(routing.weights, logits.softmax(-1).gather(1, routing.experts))  # without noise
    assert route(logits, policy, training=False).experts.unique().tolist() == [2]
    torch.manual_seed(0)
    second = route(logits, GatePolicy(2, drop_tokens=False)).experts
    assert second[:, 0].unique().tolist() == [2] and 0.2 < (second[:, 1] == 0).float().mean() < 0.35
    jitter = _layer(drop_tokens=False, noisy_gate_policy="Jitter", k=2, top2_2nd_expert_sampling=False)
    x = torch.randn(6, 8)
    torch.manual_seed(5)
    y = jitter(x)[0]
    torch.manual_seed(5)
    seen = x * torch.empty_like(x).uniform_(0.99, 1.01)
    routing = route(jitter.gate(seen), jitter.policy)
    layer = _layer(drop_tokens=False, k=2, top2_2nd_expert_sampling=False)
    layer.load_state_dict(jitter.state_dict())
    assert torch.allclose(y, layer._run_experts(x, routing), atol=1e-6)
    assert not torch.equal(y, jitter.eval()(x)[0])


def test_losses():
    layer = _layer(drop_tokens=False, k=3, z_loss_coef=0.5)
    x = torch.randn(9, 8)
    logits = layer.gate(x)
    gates = logits.softmax(-1)
    hits = torch.zeros_like(gates).scatter_(1, gates.topk(3).indices, 1.0)
    balance = (gates.mean(0) * hits.mean(0)).sum() * 4 / 3
    assert torch.allclose(layer(x)[1], balance + 0.5 * logits.logsumexp(-1).square().mean(), atol=1e-6)


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 10), nn.Linear(8, 10, bias=False), nn.Linear(10, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.down(F.silu(self.gate(x)) * self.up(x)))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.tanh(x) * self.scale


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x - x.mean(0))


@pytest.mark.parametrize(("expert", "at_once"), [(_Gated, True), (_Scaled, False), (_Mixing, False)])
def test_any_module_is_an_expert(expert, at_once):
    torch.manual_seed(1)
    experts = Experts(expert(), 3)
    _shake(experts)
    experts.eval()
    counts = torch.tensor([4, 0, 3])
    groups = RowGroups(counts, torch.arange(3).repeat_interleave(counts))
    rows = torch.randn(7, 8)
    own = dict(experts.stack.named_parameters())
    experts._template[0].eval()
    expected = experts._forward_looped(rows, groups, own)
    assert torch.allclose(experts(rows, groups), expected, atol=1e-5)
    assert experts._use_grouped is at_once
    assert experts(rows[:0], RowGroups(counts * 0, groups.group_ids[:0])).shape == (0, 8)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5), st.booleans(), st.booleans(), st.integers(1, 5),
    st.integers(1, 5), st.integers(0, 99),
)  # fmt: skip
def test_grouped_product_equals_a_loop(sizes, flipped, biased, width, outs, seed):
    torch.manual_seed(seed)
    counts = torch.tensor(sizes)
    groups = RowGroups(counts, torch.arange(len(sizes)).repeat_interleave(counts))
    x = torch.randn(sum(sizes), width, dtype=torch.float64, requires_grad=True)
    shape = (len(sizes), width, outs) if flipped else (len(sizes), outs, width)
    weight = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(len(sizes), outs, dtype=torch.float64, requires_grad=True) if biased else None
    y = grouped_linear(x, weight, groups, bias, in_features_first=flipped)
    matrices = weight if flipped else weight.transpose(1, 2)
    expected = torch.einsum("mk,mkn->mn", x, matrices[groups.group_ids])
    if bias is not None:
        expected = expected + bias[groups.group_ids]
    leaves = [x, weight] + ([bias] if bias is not None else [])
    upstream = torch.randn_like(y)
    assert torch.allclose(y, expected)
    found, wanted = (torch.autograd.grad(value, leaves, upstream) for value in (y, expected))
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_sorting_is_undone(tokens, k, drops, seed):
    torch.manual_seed(seed)
    experts = torch.rand(tokens, 4).topk(k).indices
    kept = torch.rand(tokens, k) < 0.6 if drops else None
    choices = sort_by_expert(experts, 4, kept)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(tokens, k, dtype=torch.float64, requires_grad=True)
    y = choices.combine(choices.permute(x) * (choices.groups.group_ids[:, None] + 1), weights)
    mask = torch.ones(tokens, k) if kept is None else kept
    expected = x * ((experts + 1) * weights * mask).sum(1, keepdim=True)
    assert torch.allclose(y, expected)
    upstream = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(v, [x, weights], upstream) for v in (y, expected))
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


def test_groups_for_the_optimizer():
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, _expert(), num_experts=4))
    assert has_moe_layers(model) == (True, 4) and has_moe_layers(model[0]) == (False, 0)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": model.parameters(), "lr": 0.1})
    assert [group.get("moe", False) for group in groups] == [False, True]
    assert all(group["lr"] == 0.1 for group in groups)
    assert all(is_moe_param(p) for p in groups[1]["params"]) and len(groups[1]["params"]) == 4
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    cut = split_params_into_different_moe_groups_for_optimizer([groups[1]], max_group_size=400)
    assert len(cut) > 1 and sum(len(group["params"]) for group in cut) == 4
