"""Expert parallelism against one process: unhit experts, disjoint routing (row 7), checkpoints (row 47)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import inspect
from tests.dist.parity import full_tensors
from tests.dist.tensor_parity import TrainResult, make_config, train_engine, train_plain
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.moe import MoE

WIDTH, EXPERTS, VOCABULARY = 8, 4, 11
TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}


class Tiny(nn.Module):
    """An embedding, two blocks with experts, a head."""

    def __init__(self, ep: int, k: int, disjoint: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.blocks = nn.ModuleList(
            MoE(WIDTH, expert, EXPERTS, ep, k=k, drop_tokens=False, top2_2nd_expert_sampling=False) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for block in self.blocks:
                for parameter in block.experts.stack.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            if disjoint:  # token t goes to expert t % 2 (+ 1): experts 0 or 3 are never hit at k = 1
                self.embed.weight.zero_()
                for token in range(VOCABULARY):
                    self.embed.weight[token, token % 2] = 8.0
                for block in self.blocks:
                    block.gate.weight.zero_()
                    block.gate.weight[1, 0] = block.gate.weight[2, 1] = 1.0
                    block.gate.weight.requires_grad_(False)
                self.embed.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _batch(step: int, rows: int, disjoint: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(70 + step)
    tokens = torch.randint(0, VOCABULARY, (rows, 5), generator=generator)
    if disjoint:  # even tokens in even rows, odd tokens in odd ones: ranks choose different experts
        tokens = (tokens // 2) * 2 % (VOCABULARY - 1) + torch.arange(rows)[:, None] % 2
    return tokens, torch.randint(0, VOCABULARY, (rows, 5), generator=generator)


def _plain(model: nn.Module, rows: int, steps: int, disjoint: bool) -> TrainResult:
    return train_plain(model, lambda own, step: own(*_batch(step, rows, disjoint)), steps)


def _engine(
    model: nn.Module, rank: int, world: int, stage: int, steps: int, disjoint: bool, **extra: Any
) -> TrainResult:
    rows = 2 * world

    def loss_at(engine: Any, step: int) -> Tensor:
        tokens, labels = _batch(step, rows, disjoint)
        return engine(tokens[rank::world], labels[rank::world])

    return train_engine(model, make_config(stage, 1, rows, world, **extra), loss_at, steps)


def _parity(rank: int, world: int, cases: list[tuple[int, int, int, bool]], steps: int) -> list[str]:
    torch.set_num_threads(1)
    failures = []
    for ep, k, stage, disjoint in cases:
        model = Tiny(ep, k, disjoint)
        plain = _plain(model, 2 * world, steps, disjoint)
        differences = _engine(model, rank, world, stage, steps, disjoint).max_differences(plain)
        if any(not value <= TOLERANCE[key] for key, value in differences.items()):
            failures.append(f"ep {ep}, top {k}, stage {stage}, disjoint {disjoint}: {differences}")
    return failures


@pytest.mark.parametrize("steps", [4, nightly(20)])
def test_experts_over_ranks_equal_one_process(steps):
    cases = [(2, 2, 2, False), (4, 3, 3, False), (4, 1, 0, False), (2, 1, 0, False), (2, 1, 3, True)]
    for failures in run_ranks(_parity, 4, cases, steps, timeout=300):
        assert failures == []


def _lengths(rank: int, world: int) -> list[str]:
    """Three copies of experts whose biases have 8 numbers, and stay out of step with gradients."""
    return _parity(rank, world, [(2, 2, 1, False)], 3)


@pytest.mark.nightly
def test_parts_of_unequal_length():
    for failures in run_ranks(_lengths, 6):
        assert failures == []


def _held(rank: int, world: int, stage: int) -> dict[str, int]:
    """Elements of experts and of their states on this rank, and bytes sent for them."""
    import thalweg

    torch.set_num_threads(1)
    config = make_config(stage, 1, 2 * world, world)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = thalweg.initialize(model=Tiny(2, 2, False), config=config)
    for step in range(2):
        tokens, labels = _batch(step, 2 * world, False)
        engine.backward(engine(tokens[rank::world], labels[rank::world]))
        engine.step()
    stacks = [p for name, p in engine.module.named_parameters() if "stack" in name]
    moments = [engine.optimizer.state[p][key] for p in stacks for key in ("exp_avg", "exp_avg_sq")]
    found = {
        "parameters": sum(p.to_local().numel() for p in stacks),
        "moments": sum(m.to_local().numel() for m in moments),
    }
    for entry in inspect.comm_entries(engine):
        if entry.module == "experts" and entry.transport == "wire":
            found[entry.kind] = entry.sent_bytes
    block = engine.module.blocks[0]
    last = [p for name, p in block.named_parameters() if "stack.2" in name]
    with thalweg.zero.GatheredParameters(last, modifier_rank=0):
        for parameter in last if rank == 0 else ():
            parameter.data.zero_()
    found["answers"] = int(block(torch.randn(3, WIDTH))[0].count_nonzero())
    engine.close()
    return found


def test_copies_divide_the_states_of_experts_and_send_what_the_formula_says():
    whole = 2 * EXPERTS * (8 * 12 + 12 + 12 * 8 + 8)
    plain, divided = (run_ranks(_held, 4, stage)[0] for stage in (0, 1))
    assert plain["parameters"] == whole // 2 and plain["moments"] == 2 * whole // 2
    assert divided["parameters"] == whole // 4 and divided["moments"] == 2 * whole // 4
    sent = 4 * whole // 2 // 2  # bytes of own rows, half of which go to the other copy
    assert plain["answers"] == divided["answers"] == 0, "what was written is what answers"
    assert plain["all_reduce"] == 2 * 2 * sent  # two steps, there and back
    assert divided["reduce_scatter"] == divided["all_gather"] == 2 * sent


def test_row07_disjoint_routing_and_unhit_experts_complete_at_stage_3():
    cases = [(ep, 1, stage, True) for ep in (1, 2) for stage in (3, 0)]
    for failures in run_ranks(_parity, 2, cases, 6, timeout=120):
        assert failures == []


def _control(rank: int, world: int) -> float:
    from thalweg.zero.expert_params import ZeroExpertParams

    torch.set_num_threads(1)
    model = Tiny(2, 2, False)
    plain = _plain(model, 2 * world, 2, False)
    reduce = ZeroExpertParams.reduce_grads
    ZeroExpertParams.reduce_grads = lambda self, divisor: reduce(self, 1.01 * divisor)  # type: ignore[method-assign]
    return _engine(model, rank, world, 1, 2, False).max_differences(plain)["gradient"]


def test_a_wrong_average_is_noticed():
    assert all(value > 1e-3 for value in run_ranks(_control, 2))


def _saved(rank: int, world: int, ep: int, stage: int, load: str | None, save: str) -> list[np.ndarray]:
    import thalweg

    config = make_config(stage, 1, 2 * world, world)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = thalweg.initialize(model=Tiny(ep, 2, False), config=config)
    if load is None:
        for step in range(2):
            tokens, labels = _batch(step, 2 * world, False)
            engine.backward(engine(tokens[rank::world], labels[rank::world]))
            engine.step()
    else:
        engine.load_checkpoint(load)
    engine.save_checkpoint(save)
    own = list(engine.module.parameters())
    moments = [engine.optimizer.state[p][key] for p in own for key in ("exp_avg", "exp_avg_sq")]
    values = [t.numpy() for t in full_tensors((*own, *moments))]
    engine.close()
    return values


def test_row47_experts_are_stored_under_global_ids(tmp_path):
    at = {name: str(tmp_path / name) for name in ("four", "one", "two", "copies", "back")}
    first = run_ranks(_saved, 4, 4, 3, None, at["four"])[0]
    others = [
        run_ranks(_saved, 1, 1, 0, at["four"], at["one"])[0],
        run_ranks(_saved, 2, 2, 1, at["one"], at["two"])[0],
        run_ranks(_saved, 4, 2, 2, at["two"], at["copies"])[0],
        run_ranks(_saved, 4, 4, 3, at["copies"], at["back"])[0],
    ]
    for values in others:
        assert all(np.array_equal(a, b) for a, b in zip(values, first, strict=True))
    stacks = [value for value in first if value.ndim == 3 and value.shape[0] == EXPERTS]
    assert stacks and all(
        not np.array_equal(stack[i], stack[j]) for stack in stacks for i in range(4) for j in range(i)
    )
