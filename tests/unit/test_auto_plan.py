"""The derived plan: what it cuts, what it leaves whole, and how it finds parts of features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.auto_plan_models import SHARDABLE_MODELS, UNSHARDABLE_VARIANTS, build_model
from thalweg.parallel.tensor.auto_plan.channel_deps import ChannelDependence
from thalweg.parallel.tensor.auto_plan.infer_plan import infer_plan

torch.set_num_threads(1)


@pytest.mark.parametrize("name", [name for name in SHARDABLE_MODELS if name != "tower"])
def test_every_product_of_a_made_up_block_is_cut(name):
    model = build_model(name)
    plan = infer_plan(model, 2, 0)
    assert plan is not None
    cut = {name for name, layer in plan.layers.items() if layer.kind in ("row", "column")}
    assert cut == {
        name
        for name, module in model.named_modules()
        if name.startswith("blocks.") and getattr(module, "weight", torch.zeros(1)).ndim == 2
    }


@pytest.mark.parametrize("name", UNSHARDABLE_VARIANTS)
def test_what_would_change_the_result_is_left_whole(name):
    plan = infer_plan(build_model(name), 2, 0)
    assert plan is None or not [layer for layer in plan.layers.values() if layer.kind in ("row", "column")]


def test_one_bad_block_does_not_keep_the_others_from_being_cut():
    model = build_model("convolved")
    model.blocks[1] = build_model("chosen").blocks[0]
    plan = infer_plan(model, 2, 0)
    assert plan is not None and {name[:9] for name in plan.layers if "block" in name} == {"blocks.0."}


def test_fewer_groups_than_ranks_stay_whole_and_the_rest_is_cut():
    plan = infer_plan(build_model("parallel, 4 heads on 2"), 4, 1)
    assert plan is not None
    assert {name.split(".")[-1] for name in plan.layers if "blocks" in name} == {"fc_in", "fc_out"}


def _groups(x, leaf):
    units = ChannelDependence(x, [leaf]).channel_groups()
    return None if units is None else [(set(u.in_channels), set(u.out_channels[0])) for u in units]


def test_units_are_found_in_any_order_and_at_any_width():
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(12, generator=g)
    leaf = torch.randn(3, 5, 24, generator=g, requires_grad=True)
    shuffled = (leaf[..., order] * leaf[..., order + 12]).tanh()
    assert _groups(shuffled, leaf) == [({i}, {int(order[i]), int(order[i]) + 12}) for i in range(12)]
    wide = torch.randn(2, 4, 3 * 600, generator=g, requires_grad=True)
    q, k, v = wide.view(2, 4, 3, 5, 120).transpose(1, 3).unbind(2)
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 4, 600)
    found = _groups(heads, wide)
    assert [columns for columns, _ in found] == [set(range(120 * h, 120 * h + 120)) for h in range(5)]
    assert all(len(channels) == 360 for _, channels in found)
    thousand = torch.randn(2, 4, 1000, generator=g, requires_grad=True)
    assert len(_groups(torch.nn.functional.gelu(thousand), thousand)) >= 100
    assert len(_groups(nn.LayerNorm(1000)(thousand), thousand)) == 1
