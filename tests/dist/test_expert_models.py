"""Hugging Face models with experts over ranks, against one process; their checkpoints at other degrees."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import inspect
from tests.dist.moe_models import SEQ_LEN, build_model, compute_loss, make_batch
from tests.dist.parity import full_named, full_tensor
from tests.dist.tensor_parity import TrainResult, make_config
from tests.harness import run_ranks
from tests.marks import nightly

TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}


def _plain(model: nn.Module, rows: int, parts: int, steps: int, length: int = SEQ_LEN) -> TrainResult:
    """One process; each batch in ``parts``, as an auxiliary loss is that of the tokens seen together."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        tokens = make_batch(step, rows)[:, :length]
        total = sum(compute_loss(model, tokens[part::parts]) / parts for part in range(parts))
        assert isinstance(total, torch.Tensor)
        total.backward()
        if step == 0:
            gradients = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
            }
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return TrainResult(losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


def _engine(
    model: nn.Module, rank: int, world: int, ep: int, stage: int, steps: int, tensor: int = 1,
    sequence: int = 1, length: int = SEQ_LEN, **extra: Any,
) -> TrainResult:  # fmt: skip
    import thalweg

    team = tensor * sequence
    ranks = world // team
    rows = 2 * ranks
    extra |= {"expert_parallel": {"enabled": True, "autoep_size": ep}, "sequence_parallel_size": sequence}
    config = make_config(stage, tensor, rows, ranks, **extra)
    engine, *_ = thalweg.initialize(model=copy.deepcopy(model), config=config)
    losses, gradients = [], {}
    for step in range(steps):
        loss = compute_loss(engine, make_batch(step, rows)[rank // team :: ranks, :length])
        engine.backward(loss)
        if step == 0:
            inspect.finalize_grads(engine)
            gradients = {
                n: torch.zeros(p.shape) if p.grad is None else full_tensor(p.grad)
                for n, p in engine.module.named_parameters()
            }
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    parameters = full_named(engine.module.named_parameters())
    engine.close()
    return TrainResult(losses, gradients, parameters)


Case = tuple[str, int, int, int, int, int]  # model, ep, stage, steps, tensor, sequence


def _parity(rank: int, world: int, cases: list[Case]) -> list[str]:
    torch.set_num_threads(1)
    failures = []
    for name, ep, stage, steps, tensor, sequence in cases:
        model = build_model(name)
        ranks = world // (tensor * sequence)
        plain = _plain(model, 2 * ranks, ranks, steps)
        differences = _engine(model, rank, world, ep, stage, steps, tensor, sequence).max_differences(plain)
        if any(not value <= TOLERANCE[key] for key, value in differences.items()):
            failures.append(f"{name}, ep {ep}, stage {stage}, tensor {tensor}, sequence {sequence}: {differences}")
    return failures


@pytest.mark.parametrize(("steps", "every"), [nightly(3, False), nightly(20, True)])
def test_models_over_four_ranks_equal_one_process(steps, every):
    cases: list[Case] = [
        ("mixtral", 4, 3, steps, 1, 1),
        ("deepseek_v3", 4, 2, 3, 1, 1),
        ("gpt_oss", 4, 1, 3, 1, 1),
        ("list", 4, 3, 6, 1, 1),
        ("mixtral", 2, 3, 6, 2, 1),
    ]
    more: list[Case] = [
        ("mixtral, auxiliary loss", 2, 1, 3, 1, 1),
        ("qwen2_moe", 2, 2, 3, 1, 1),
        ("qwen3_moe", 4, 0, 3, 1, 1),
        ("deepseek_v2", 2, 3, 3, 1, 1),
        ("olmoe", 2, 0, 3, 1, 1),
        ("switch", 2, 2, 3, 1, 1),
        ("qwen3_moe", 4, 1, 3, 1, 2),
    ]
    for failures in run_ranks(_parity, 4, cases + more * every, timeout=300):
        assert failures == []


def _few_tokens(rank: int, world: int, cases: list[tuple[str, int, int]]) -> list[str]:
    """Each rank has one or two tokens, so most experts of a rank are hit by none."""
    torch.set_num_threads(1)
    failures = []
    for name, ep, stage in cases:
        model = build_model(name)
        plain = _plain(model, 2 * world, world, 4, length=2)
        differences = _engine(model, rank, world, ep, stage, 4, length=2).max_differences(plain)
        if any(not value <= TOLERANCE[key] for key, value in differences.items()):
            failures.append(f"{name}, ep {ep}, stage {stage}: {differences}")
    return failures


def test_row07_experts_that_nobody_hits_in_models_with_lists_and_stacks():
    cases = [("list", 1, 3), ("list", 1, 0), ("list", 2, 3), ("mixtral", 1, 3), ("mixtral", 2, 2)]
    for failures in run_ranks(_few_tokens, 2, cases, timeout=120):
        assert failures == []


def _traffic(rank: int, world: int) -> tuple[int, int, int]:
    import thalweg

    torch.set_num_threads(1)
    model = build_model("mixtral")
    config = make_config(1, 1, 2 * world, world, expert_parallel={"autoep_size": world})
    engine, *_ = thalweg.initialize(model=model, config=config)
    loss = compute_loss(engine, make_batch(0, 2 * world)[rank::world])
    engine.backward(loss)
    entries = {e.module: e for e in inspect.comm_entries(engine) if e.kind == "all_to_all"}
    engine.close()
    rows = entries["experts"]
    return rows.full_bytes, rows.sent_bytes, entries["expert counts"].full_bytes


def test_traffic_is_four_times_the_chosen_rows():
    world, layers, tokens, k, width = 4, 2, 8 * SEQ_LEN, 2, 16
    found = run_ranks(_traffic, world)
    full = sum(each[0] for each in found)
    assert full == 4 * layers * tokens * k * width * 4  # there and back, forward and backward
    assert abs(sum(each[1] for each in found) - full * (world - 1) / world) <= 8 * layers * world
    assert all(each[2] == layers * 8 * 5 for each in found)  # a count an expert


def _control(rank: int, world: int) -> dict[str, float]:
    from thalweg.parallel.expert.expert_parallel import AllToAllDispatcher

    torch.set_num_threads(1)
    model = build_model("mixtral")
    plain = _plain(model, 2 * world, world, 2)
    to_experts = AllToAllDispatcher.dispatch

    def wrong(self: Any, rows: Any, groups: Any) -> Any:
        received, own, back = to_experts(self, rows, groups)
        return received, own, lambda results: back(results.flip(0))  # results of other rows

    AllToAllDispatcher.dispatch = wrong  # type: ignore[method-assign]
    return _engine(model, rank, world, 2, 1, 2).max_differences(plain)


def test_rows_that_come_back_in_another_order_are_noticed():
    for differences in run_ranks(_control, 2):
        assert differences["loss"] > 1e-4 and differences["gradient"] > 1e-3


def _saved(rank: int, world: int, ep: int, stage: int, load: str | None, save: str) -> dict[str, np.ndarray]:
    import thalweg

    torch.set_num_threads(1)
    found = {}
    for name in ("mixtral", "list"):
        config = make_config(stage, 1, 2 * world, world, expert_parallel={"autoep_size": ep})
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
        engine, *_ = thalweg.initialize(model=build_model(name, seed=0 if load is None else 9), config=config)
        if load is None:
            for step in range(2):
                engine.backward(compute_loss(engine, make_batch(step, 2 * world)[rank::world]))
                engine.step()
        else:
            engine.load_checkpoint(f"{load}/{name}")
        engine.save_checkpoint(f"{save}/{name}")
        if ep > 1 and hasattr(engine.module, "config"):
            engine.save_16bit_model(f"{save}/export")
        for key, parameter in engine.module.named_parameters():
            found[f"{name}/{key}"] = full_tensor(parameter).numpy()
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/{key}/{moment}"] = full_tensor(engine.optimizer.state[parameter][moment]).numpy()
        engine.close()
    return found


@pytest.mark.parametrize("every", [nightly(True)])
def test_row47_experts_of_models_go_between_degrees_and_to_transformers(tmp_path, every):
    import transformers

    at = {name: str(tmp_path / name) for name in ("four", "one", "two", "three", "back")}
    first = run_ranks(_saved, 4, 4, 3, None, at["four"])[0]
    others = [
        run_ranks(_saved, 1, 1, 0, at["four"], at["one"])[0],
        run_ranks(_saved, 2, 2, 1, at["one"], at["two"])[0],
    ]
    if every:
        others.append(run_ranks(_saved, 3, 3, 2, at["two"], at["three"])[0])
        others.append(run_ranks(_saved, 4, 4, 3, at["three"], at["back"])[0])
    for values in others:
        assert values.keys() == first.keys()
        assert all(np.array_equal(values[key], value) for key, value in first.items())
    stacks = [value for key, value in first.items() if key.endswith("gate_up_proj")]
    assert stacks and all(
        not np.array_equal(stack[i], stack[j]) for stack in stacks for i in range(len(stack)) for j in range(i)
    )
    ours = build_model("mixtral")
    state = {key.removeprefix("mixtral/"): torch.from_numpy(value) for key, value in first.items()}
    ours.load_state_dict({key: state[key] for key in ours.state_dict()})
    export = f"{at['back' if every else 'two']}/export"
    read = transformers.MixtralForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokens = make_batch(0, 2)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.bfloat16())
        assert torch.equal(read.eval()(tokens).logits, ours.eval()(tokens).logits)
