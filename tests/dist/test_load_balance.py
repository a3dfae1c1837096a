"""Experts balanced by a bias (``expert_parallel.load_balance_coeff``): its steps, what they do, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.moe_models import build_model, compute_loss, make_batch
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.nn.moe.layer import GatePolicy, route
from thalweg.parallel_dims import control_group

REUSE_RANKS = True
COEFF, WIDTH, EXPERTS, STEPS = 0.01, 12, 6, 25


class _Routed(nn.Module):
    """One layer of our own experts, whose gate likes two of them."""

    def __init__(self) -> None:
        from thalweg.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.moe = MoE(WIDTH, expert, EXPERTS, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
        with torch.no_grad():
            self.moe.gate.weight.copy_(0.3 * torch.randn(EXPERTS, WIDTH))[:, 0] = 0.0
            self.moe.gate.weight[:2, 0] = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0].square().mean()


def _engine(model: nn.Module, coeff: float | None, ep: int, lr: float, **extra: Any) -> Any:
    import thalweg

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_optimization": {"stage": 2 if ep == 1 else 1},
        "expert_parallel": {"autoep_size": ep, "load_balance_coeff": coeff},
        **extra,
    }
    return thalweg.initialize(model=model, config=config)[0]


def _x(step: int, rank: int) -> Tensor:
    x = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    x[..., 0] = 1.0
    return x


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _own(rank: int, world: int, ep: int, coeff: float | None, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = _engine(_Routed(), coeff, ep, 1e-6, gradient_accumulation_steps=2, train_batch_size=8)
    layer, counted, loads, expected, biases = engine.module.moe, [], [], torch.zeros(EXPERTS), []
    layer.register_forward_hook(lambda module, args, output: counted.append(output[2]))
    for step in range(2 * STEPS):
        engine.backward(engine(_x(step, rank)))
        engine.step()
        if step % 2:
            total = sum(counted).float().cpu()
            dist.all_reduce(total)
            loads.append(float(total.max() / total.mean()))
            expected += (coeff or 0.0) * (total.mean() - total).sign()
            counted.clear()
            biases.append(torch.zeros(EXPERTS) if coeff is None else layer.e_score_correction_bias.cpu().clone())
    found = {"loads": loads, "bias": biases[-1], "expected": expected.clone()}
    engine.eval()
    engine(_x(0, rank))  # counts for nothing
    engine.train()
    if coeff is not None:
        engine.save_checkpoint(folder)
        other = _engine(_Routed(), coeff, ep, 1e-6, gradient_accumulation_steps=2, train_batch_size=8)
        found["before load"] = other.module.moe.e_score_correction_bias.clone()
        other.load_checkpoint(folder)
        found["loaded"] = other.module.moe.e_score_correction_bias.clone()
        other.close()
    engine.close()
    return found


@pytest.mark.parametrize("ep", [nightly(1), 2])
def test_our_own_layer_comes_into_balance(ep: int, tmp_path: Path) -> None:
    """By the paper's rule over all ranks and micro-batches; without it the load stays (the control)."""
    for found in run_ranks(_own, 2, ep, COEFF, str(tmp_path)):
        assert torch.equal(found["bias"], found["expected"]) and found["bias"].any()
        assert _mean(found["loads"][:3]) > 2.2 and _mean(found["loads"][-5:]) < 1.5
        assert not found["before load"].any() and torch.equal(found["loaded"], found["bias"])
    for found in run_ranks(_own, 2, ep, None, str(tmp_path)):
        assert _mean(found["loads"][-5:]) > 2.2


def _hugging_face(rank: int, world: int, ep: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = build_model("deepseek_v3")
    gates = {n: m for n, m in model.named_modules() if "e_score_correction_bias" in m._buffers}
    expected = {name: gate.e_score_correction_bias.clone() for name, gate in gates.items()}
    counts = {name: torch.zeros(6) for name in gates}
    for name, gate in gates.items():

        def count(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            counts[name].add_(output[2].flatten().cpu().bincount(minlength=6))

        gate.register_forward_hook(count)
    engine = _engine(model, COEFF, ep, 0.05)
    for step in range(3):
        engine.backward(compute_loss(engine, make_batch(step, 2 * world)[rank::world]))
        engine.step()
        for name, own in counts.items():
            dist.all_reduce(own, group=control_group(None))
            expected[name] += COEFF * (own.mean() - own).sign()
            own.zero_()
    named = dict(engine.module.named_modules())
    found = {name: named[name].e_score_correction_bias.cpu() for name in gates}
    engine.close()
    with pytest.raises(ValueError, match="no router of MixtralForCausalLM has a bias"):
        _engine(build_model("mixtral"), COEFF, ep, 0.05)
    return {"found": found, "expected": expected}


@pytest.mark.parametrize("ep", [1, 2])
def test_a_router_of_hugging_face_gets_the_same_steps(ep: int) -> None:
    for rank in run_ranks(_hugging_face, 2, ep):
        assert rank["found"] and rank["found"].keys() == rank["expected"].keys()
        for name, bias in rank["found"].items():
            assert bias.any()
            torch.testing.assert_close(bias, rank["expected"][name])


def test_a_bias_chooses_and_weighs_nothing() -> None:
    logits = torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(0))
    policy = GatePolicy(2, drop_tokens=False, sample_second_expert=False)
    plain, zero = route(logits, policy), route(logits, policy, bias=torch.zeros(EXPERTS))
    assert torch.equal(plain.experts, zero.experts) and torch.equal(plain.weights, zero.weights)
    drawn = route(logits, policy, bias=torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0, 0.0]))
    assert (drawn.experts[:, 0] == 2).all() and not (plain.experts[:, 0] == 2).all()
    chosen = logits.softmax(-1).gather(1, drawn.experts)
    torch.testing.assert_close(drawn.weights, chosen / chosen.sum(1, keepdim=True))
