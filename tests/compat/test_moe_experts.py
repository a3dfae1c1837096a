"""``deepspeed.moe.layer.MoE``: its experts one by one under DeepSpeed's names, before and in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks

REUSE_RANKS = True
NUM_EXPERTS, WIDTH = 2, 4
ROUTING: dict[str, Any] = {"num_experts": NUM_EXPERTS, "k": 1, "drop_tokens": False, "use_rts": False}
STACK = "experts.stack."


class _Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def _plain() -> Any:
    """Thalweg's own layer, whose experts differ."""
    from thalweg.nn.moe.layer import MoE

    torch.manual_seed(0)
    layer = MoE(WIDTH, _Expert(), **ROUTING)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer


def _named_as_deepspeed(layer: Any, owned: range) -> dict[str, torch.Tensor]:
    """The state of a rank that has these experts, as DeepSpeed names and numbers them."""
    state = {"deepspeed_moe.gate.wg.weight": layer.gate.weight.detach().clone()}
    for index, expert in enumerate(owned):
        for name, stack in layer.experts.stack.named_parameters():
            state[f"deepspeed_moe.experts.deepspeed_experts.{index}.{name}"] = stack[expert].detach().clone()
        state[f"deepspeed_moe.experts.deepspeed_experts.{index}.scale"] = torch.ones(1)
    return state


def _layer(**options: Any) -> Any:
    from thalweg.compat.deepspeed.moe import DeepSpeedMoE

    return DeepSpeedMoE(WIDTH, _Expert(), **ROUTING | options)


def _inputs(rank: int) -> torch.Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(rank + 1))


def _train(rank: int, world: int, stage: int, ep_size: int) -> None:
    from thalweg.compat.deepspeed import tensor_access as access
    from thalweg.compat.deepspeed.initialization import initialize

    reference, layer = _plain(), _layer(ep_size=ep_size)
    owned = range(rank % ep_size, rank % ep_size + 1) if ep_size > 1 else range(NUM_EXPERTS)
    layer.load_state_dict(_named_as_deepspeed(reference, owned))
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine = initialize(model=layer, config=config)[0]
    loaded = engine.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in reference.state_dict().items())

    torch.stack([reference(_inputs(r))[0].square().mean() for r in range(world)]).mean().backward()
    engine.backward(engine(_inputs(rank))[0].square().mean())
    experts = engine.deepspeed_moe.experts.deepspeed_experts
    assert len(experts) == engine.num_local_experts == len(owned)
    for name, stack in reference.experts.stack.named_parameters():
        for index, expert in enumerate(owned):
            row, expected, other = experts[index].get_parameter(name), stack.grad[expert], stack.grad[1 - expert]
            for grad in (access.safe_get_full_grad(row), row.grad):
                assert torch.allclose(grad, expected, atol=1e-6) and not torch.allclose(grad, other, atol=1e-3)
            access.safe_set_full_grad(row, torch.full_like(row, expert + 1.0))
            assert access.safe_get_full_grad(row).unique().tolist() == [expert + 1.0]
    engine.step()

    # A look shows what training has by now, and what is written through it stays.
    experts, state = engine.deepspeed_moe.experts.deepspeed_experts, engine.state_dict()
    for name in dict(reference.experts.stack.named_parameters()):
        for index, expert in enumerate(owned):
            row, value = experts[index].get_parameter(name), state[STACK + name][expert]
            assert torch.equal(row, value) and not torch.equal(value, loaded[STACK + name][expert])
            assert access.safe_get_full_optimizer_state(row, "exp_avg").mean() == pytest.approx(0.1 * (expert + 1))
    if world == ep_size or ep_size == 1:
        with torch.no_grad():
            experts[0][0].weight.mul_(2)
            experts[0][2].bias.data = torch.full((WIDTH,), 5.0)
        now, first = engine.state_dict(), owned[0]
        assert torch.equal(now[f"{STACK}0.weight"][first], state[f"{STACK}0.weight"][first] * 2)
        assert now[f"{STACK}2.bias"][first].unique().tolist() == [5.0]
    access.safe_set_full_fp32_param(experts[-1][0].bias, torch.full((6,), owned[-1] + 7.0))
    access.safe_set_full_optimizer_state(experts[-1][0].bias, torch.full((6,), 2.0), "exp_avg")
    written = engine.state_dict()[f"{STACK}0.bias"]
    assert written[1].unique().tolist() == [8.0]
    assert torch.equal(written[0], state[f"{STACK}0.bias"][0]) if ep_size == 1 else (written[0] == 7.0).all()
    engine.backward(engine(_inputs(rank))[0].square().mean())
    engine.step()
    assert not torch.equal(engine.state_dict()[f"{STACK}0.bias"], written)
    with pytest.raises(ValueError, match="no gradient"):
        access.safe_set_full_grad(experts[0][0].bias, torch.ones(6))
    engine.close()


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_are_read_and_written_one_by_one(stage: int, ep_size: int) -> None:
    run_ranks(_train, 2, stage, ep_size)


def test_experts_whose_copies_divide_their_values() -> None:
    run_ranks(_train, 4, 2, 2)


def test_names_of_a_state_dict() -> None:
    plain, layer = _plain(), _layer(use_residual=True)
    expected = _named_as_deepspeed(plain, range(NUM_EXPERTS))
    rest = {name: value for name, value in layer.state_dict().items() if name.startswith(("mlp.", "coefficient."))}
    assert len(rest) == 7 and set(layer.state_dict()) == set(expected) | set(rest)
    # Under the names of either, in a model, and what is missing is said.
    model = nn.ModuleDict({"moe": layer})
    model.load_state_dict({f"moe.{name}": value for name, value in (expected | rest).items()}, strict=True)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in expected.items())
    again = _layer()
    again.load_state_dict(plain.state_dict())
    assert all(torch.equal(again.state_dict()[name], value) for name, value in expected.items())
    del expected["deepspeed_moe.experts.deepspeed_experts.1.0.weight"]
    with pytest.raises(RuntimeError, match=r"experts\.stack\.0\.weight"):
        layer.load_state_dict(expected | rest)


def test_an_expert_before_training() -> None:
    from thalweg.moe import is_moe_param

    layer = _layer()
    first, second = layer.deepspeed_moe.experts.deepspeed_experts
    nn.init.constant_(second[0].weight, 3.0)
    second[2].weight.data = torch.full((WIDTH, 6), 4.0)
    weight = layer.experts.stack[0].weight
    assert (weight[1] == 3).all() and not (weight[0] == 3).any() and (layer.experts.stack[2].weight[1] == 4).all()
    assert layer.deepspeed_moe.gate.wg.weight is layer.gate.weight and is_moe_param(first[0].weight)
    assert first[0].weight.grad is None and first.scale is layer.experts.stack.scale
    x = torch.randn(3, WIDTH)
    single = _Expert()
    single.load_state_dict(second.state_dict())
    assert torch.equal(second(x), single(x)) and not torch.allclose(first(x), single(x))
    copied = copy.deepcopy(second)
    nn.init.zeros_(copied[0].weight)
    assert (weight[1] == 3).all() and type(copied[0].weight) is nn.Parameter
    for freeze in (first.requires_grad_, lambda value: setattr(first[0].weight, "requires_grad", value)):
        with pytest.raises(ValueError, match="together"):
            freeze(False)
    layer.experts.requires_grad_(False)
    assert (
        not first[0].weight.requires_grad
        and not layer.deepspeed_moe.experts.deepspeed_experts[0][0].weight.requires_grad
    )
    divided = _layer(ep_size=2)
    assert divided.num_local_experts == 1 and len(divided.experts.stack[0].weight) == 1
    with pytest.raises(ValueError, match=r"after initialize\(\)"):
        divided(x)


def _exchange(rank: int, world: int) -> list[Any]:
    from thalweg.compat.deepspeed.gating import _AllToAll

    x = (torch.arange(4.0).view(2, 2) + 10 * rank).requires_grad_()
    y = _AllToAll.apply(torch.distributed.group.WORLD, x)
    (y * torch.tensor([[1.0], [2.0]]) * (rank + 1)).sum().backward()
    assert x.grad is not None
    return [y.tolist(), x.grad[:, 0].tolist()]


def test_equal_parts_go_to_all_ranks_and_their_gradients_back() -> None:
    assert run_ranks(_exchange, 2) == [
        [[[0.0, 1.0], [10.0, 11.0]], [1.0, 2.0]],
        [[[2.0, 3.0], [12.0, 13.0]], [2.0, 4.0]],
    ]
