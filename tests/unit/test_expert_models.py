"""Models with experts, spread over a team of one: what the exchange carries is what the model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.dist.moe_models import MODELS, NUM_EXPERTS, build_model, compute_loss, make_batch
from thalweg.config.schema.parallel import ExpertParallel
from thalweg.ops.grouped_mm import RowGroups
from thalweg.parallel.expert.detect import find_experts
from thalweg.parallel.expert.expert_parallel import local_rows
from thalweg.parallel.expert.module_list import ExpertModuleList
from thalweg.parallel.tensor.plan import UnshardableModelError


class LocalDispatcher:
    """An exchange that keeps all rows, and remembers how many came."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.rows = 0

    def dispatch(self, rows: Tensor, groups: RowGroups):
        self.rows += len(rows)
        assert groups.counts_list == groups.group_ids.bincount(minlength=len(groups.counts)).tolist()
        assert (groups.group_ids.diff() >= 0).all()
        return rows, groups, lambda results: results * self.factor

    def local_weight(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return local_rows(parameter, dtype)


def _gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = compute_loss(model, tokens)
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def _largest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    scale = max(float(value.abs().max()) for value in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / scale


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_spread_layers_compute_what_the_model_does(name, grouped):
    torch.set_num_threads(1)
    if not grouped and name in ("list", "switch"):
        pytest.skip("lists have one form")
    model = build_model(name)
    spread = copy.deepcopy(model)
    tokens = make_batch(0, 3)
    loss, wanted = _gradients(model, tokens)
    layers = find_experts(spread, ExpertParallel(use_grouped_mm=grouped))
    assert layers and all(layer.num_experts in (NUM_EXPERTS, 6) for layer in layers.values())
    exchanges = []
    for layer in layers.values():
        exchanges.append(LocalDispatcher())
        layer.attach_dispatcher(exchanges[-1])
    found_loss, found = _gradients(spread, tokens)
    assert all(exchange.rows > 0 for exchange in exchanges)
    assert torch.allclose(found_loss, loss, rtol=1e-6)
    assert _largest(found, wanted) < 1e-5
    wrong = copy.deepcopy(model)
    for layer in find_experts(wrong, ExpertParallel(use_grouped_mm=grouped)).values():
        layer.attach_dispatcher(LocalDispatcher(1.01))
    assert not torch.allclose(compute_loss(wrong, tokens).detach(), loss, rtol=1e-6)


def test_patterns_choose_layers():
    model = build_model("mixtral")
    assert list(find_experts(model, ExpertParallel(moe_layer_pattern=r"layers\.1\."))) == ["model.layers.1.mlp.experts"]
    assert not find_experts(model, ExpertParallel(expert_pattern="^others$"))


def test_dense_models_and_routers_have_no_experts():
    from tests.dist.tensor_models import build_model as build_dense

    assert not find_experts(build_dense("llama")) and not find_experts(nn.ModuleList([nn.Linear(2, 2)] * 3))


def test_a_stack_that_computes_something_else_is_refused():
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 3
            self.down_proj = nn.Parameter(torch.randn(3, 4, 4))

        def forward(self, hidden, index, weights):
            terms = torch.einsum("nkij,nj->nki", self.down_proj[index], hidden)
            return (terms * weights[..., None] ** 2).sum(1)

    with pytest.raises(UnshardableModelError, match="not the weighted sum"):
        find_experts(nn.Sequential(Squared()))


def test_a_rank_without_tokens_still_takes_part():
    torch.manual_seed(0)
    model = build_model("list")
    experts = find_experts(model)["layers.0.experts"]
    assert isinstance(experts, ExpertModuleList)
    experts.attach_dispatcher(LocalDispatcher())
    hidden = torch.randn(0, 16, requires_grad=True)
    y, _ = model.layers[0](hidden)
    assert y.shape == (0, 16) and y.requires_grad
