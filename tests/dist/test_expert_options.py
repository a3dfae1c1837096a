"""What a gate does is a rank's own affair: spreading its experts changes nothing, whatever the options."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import thalweg
from tests.dist.moe_models import build_model
from tests.dist.parity import full_tensor
from tests.dist.tensor_parity import make_config
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.moe import MoE

WIDTH, EXPERTS, VOCABULARY = 8, 4, 11
OPTIONS: dict[str, dict[str, Any]] = {
    "random selection": {"capacity_factor": 0.5, "min_capacity": 1},
    "drops in order": {"capacity_factor": 0.6, "min_capacity": 0, "use_rts": False},
    "noise on choices": {"noisy_gate_policy": "RSample"},
    "noise on inputs": {"k": 2, "noisy_gate_policy": "Jitter", "capacity_factor": 0.8, "min_capacity": 2},
    "second expert drawn": {"k": 2, "drop_tokens": False},
    "three, z-loss": {"k": 3, "capacity_factor": 0.7, "min_capacity": 0, "z_loss_coef": 0.1},
    "all": {"k": 4, "drop_tokens": False},
    "residual": {"use_residual": True},
    "shared": {"k": 2, "shared_expert": True, "top2_2nd_expert_sampling": False},
}
RANDOM = ("random selection", "noise on choices", "noise on inputs", "second expert drawn", "residual")


class Model(nn.Module):
    """An embedding, a layer of experts, a head; some tokens are left to the shared parts alone."""

    def __init__(self, ep: int, options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        shared = nn.Linear(WIDTH, WIDTH) if options.get("shared_expert") else None
        self.layer = MoE(WIDTH, expert, EXPERTS, ep, **{**options, "shared_expert": shared})
        with torch.no_grad():
            for parameter in self.layer.experts.stack.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            self.layer.gate.weight.mul_(3.0)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        y, balance, _ = self.layer(self.embed(tokens), used_token=tokens != 0)
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten()) + 0.1 * balance


def _run(rank: int, world: int, ep: int, options: dict[str, Any], seed: int) -> tuple[list[float], Tensor]:
    import thalweg

    engine, *_ = thalweg.initialize(model=Model(ep, options), config=make_config(ep % 4, 1, 2 * world, world))
    torch.manual_seed(seed + rank)
    losses = []
    for step in range(4):
        draw = torch.Generator().manual_seed(9 * step + rank)
        tokens, labels = torch.randint(0, VOCABULARY, (2, 2, 6), generator=draw)
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    engine.eval()
    with torch.no_grad():
        losses.append(float(engine(tokens, labels)))
    stack = full_tensor(engine.module.layer.experts.stack[0].weight)
    engine.close()
    return losses, stack


def _compare(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """The largest difference that degrees make, and the one that other random numbers make."""
    torch.set_num_threads(1)
    found = {}
    for name, options in OPTIONS.items():
        runs = [_run(rank, world, ep, options, 30) for ep in (1, 2, 4) if ep <= world]
        other = _run(rank, world, 1, options, 60)

        def distance(a: tuple[list[float], Tensor], b: tuple[list[float], Tensor]) -> float:
            losses = max(abs(x - y) for x, y in zip(a[0], b[0], strict=True))
            return max(losses, float((a[1] - b[1]).abs().max()))

        found[name] = max(distance(runs[0], run) for run in runs[1:]), distance(runs[0], other)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, nightly(4)])
def test_degrees_change_nothing(world: int) -> None:
    for found in run_ranks(_compare, world, timeout=240):
        for name, (degrees, numbers) in found.items():
            assert degrees < 1e-5, (name, degrees)
            assert (numbers > 1e-3) == (name in RANDOM), (name, numbers)


def _generate(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Prompts and lengths of its own on each rank: one stops long before the other."""
    import thalweg
    from tests.dist.moe_models import build_model

    torch.set_num_threads(1)
    model = build_model("mixtral")
    prompt = torch.tensor([[3 + rank, 7, 9][: 2 + rank]])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "use_cache": rank == 0}
    options |= {"max_new_tokens": 3 if rank else 9}
    wanted = model.eval().generate(prompt, **options)
    config = make_config(2, 1, 2 * world, world, expert_parallel={"autoep_size": world})
    engine, *_ = thalweg.initialize(model=model, config=config)
    engine.eval()
    found = engine.module.generate(prompt.to(engine.device), **options)
    engine.close()
    return found.tolist(), wanted.tolist()


def test_ranks_generate_texts_of_unlike_length() -> None:
    pytest.importorskip("transformers")
    for found, wanted in run_ranks(_generate, 2, timeout=60):
        assert found == wanted


def _uneven_shards(rank: int, world_size: int, stage: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thalweg").addHandler(handler)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    thalweg.initialize(model=build_model("qwen2_moe"), config=config | {"zero_optimization": {"stage": stage}})
    return [line for line in lines if "cuts parameters by rows" in line]


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_that_ranks_do_not_divide_are_named(stage: int) -> None:
    """Five experts on four ranks; rank 0 says it once."""
    first, *others = run_ranks(_uneven_shards, 4, stage, reuse=False)
    assert others == [[], [], []] and len(first) == (stage == 3)
    assert not stage or ("mlp.experts." in first[0] and "[5, " in first[0] and "into 4 ranks" in first[0])
