"""Delayed updates: exact where nothing waits, as documented where something does, the same on shards."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thalweg.config.schema.zero import ZenFlow
from thalweg.optim.algorithms import zenflow
from thalweg.optim.algorithms.zenflow import ZenFlowAdam
from thalweg.optim.build import build_optimizer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=g)) for shape in ((6, 40), (20,), (3, 5, 8), (30, 7))]


def gradients(step: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(50 + step)
    scale = torch.linspace(0.1, 3, 40)
    grads = [torch.randn(p.shape, generator=g) for p in model()]
    return [grads[0] * scale, *grads[1:]]


def run(make: Any, steps: int = 12) -> tuple[list[nn.Parameter], Any]:
    params = model()
    optimizer = make(params)
    for step in range(steps):
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g
        optimizer.step()
    return params, optimizer


def plain(name: str = "AdamW", **hyper: Any) -> Any:
    return lambda params: build_optimizer(name, params, {"lr": 1e-2, "weight_decay": 0.1, **hyper})


def waits(name: str = "AdamW", hyper: dict[str, Any] | None = None, **policy: Any) -> Any:
    given = {"lr": 1e-2, "weight_decay": 0.1, **(hyper or {})}
    return lambda params: build_optimizer(
        name, params, given, zenflow_policy=ZenFlow(**{"update_interval": 4, **policy})
    )


def same(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("hyper", [{}, {"adam_w_mode": False}, {"bias_correction": False}], ids=str)
@pytest.mark.parametrize(
    "policy", [{"topk_ratio": 1.0}, {"full_warm_up_rounds": 12}, {"topk_ratio": 1.0, "overlap_step": True}]
)
def test_where_nothing_waits_the_bits_are_adams(hyper: dict[str, Any], policy: dict[str, Any]) -> None:
    assert same(run(waits("Adam", hyper, **policy))[0], run(plain("Adam", **hyper))[0])
    assert not same(run(waits("Adam", hyper, topk_ratio=0.5))[0], run(plain("Adam", **hyper))[0])


def reference(steps: int, k: int, select: int, update: int, overlap: bool) -> Tensor:
    """The rule for one matrix of 40 columns, spelled out column by column in fp64."""
    p = model()[0].detach().double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    count, acc, waiting = torch.zeros(40), torch.zeros_like(p), 0
    chosen, pending = torch.zeros(40, dtype=torch.bool), torch.zeros_like(p)

    def adam(columns: Tensor, g: Tensor) -> Tensor:
        change = torch.zeros_like(p)
        for c in columns.nonzero().flatten().tolist():
            count[c] += 1
            m[:, c] = 0.9 * m[:, c] + 0.1 * g[:, c]
            v[:, c] = 0.999 * v[:, c] + 0.001 * g[:, c] ** 2
            mean, square = m[:, c] / (1 - 0.9 ** float(count[c])), v[:, c] / (1 - 0.999 ** float(count[c]))
            change[:, c] = -1e-2 * mean / (square.sqrt() + 1e-8)
        return change

    for step in range(steps):
        g = gradients(step)[0].double()
        p += pending
        pending = torch.zeros_like(p)
        if step % select == 0:
            if waiting:
                p += adam(~chosen, acc / waiting)
                acc, waiting = torch.zeros_like(p), 0
            order = g.square().sum(0).argsort(descending=True)
            chosen = torch.zeros(40, dtype=torch.bool)
            chosen[order[:k]] = True
        p *= 1 - 1e-2 * 0.1
        p += adam(chosen, g)
        acc[:, ~chosen] += g[:, ~chosen]
        waiting += 1
        if waiting >= update:
            change = adam(~chosen, acc / waiting)
            acc, waiting = torch.zeros_like(p), 0
            if overlap:
                pending = change
            else:
                p += change
    return p


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("select", "update"), [(16, 4), (5, 3), (4, 7), (1, 1)])
def test_the_rule(select: int, update: int, overlap: bool) -> None:
    params, _ = run(
        waits(topk_ratio=0.25, select_interval=select, update_interval=update, overlap_step=overlap), steps=14
    )
    want = reference(14, 10, select, update, overlap)
    assert (params[0].double() - want).abs().max() < 2e-5
    if update > 1:
        wrong = reference(14, 11, select, update, overlap)
        assert (params[0].double() - wrong).abs().max() > 1e-3


def test_the_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = waits(topk_ratio=0.25, select_interval=6, update_interval=3, overlap_step=True)
    quick, _ = run(rule)
    slow = zenflow._run_all

    def late(jobs: Any) -> None:
        time.sleep(0.05)
        slow(jobs)

    monkeypatch.setattr(zenflow, "_run_all", late)
    assert same(run(rule)[0], quick)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stop", [5, 6, 7, 8])
def test_a_saved_state_goes_on_to_the_bit(overlap: bool, stop: int) -> None:
    rule = waits(topk_ratio=0.25, select_interval=7, update_interval=3, overlap_step=overlap)
    whole, _ = run(rule, steps=12)
    first, optimizer = run(rule, steps=stop)
    saved = copy.deepcopy(optimizer.state_dict())
    params = [nn.Parameter(p.detach().clone()) for p in first]
    other = rule(params)
    other.load_state_dict(saved)
    for step in range(stop, 12):
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g
        other.step()
    assert same(params, whole)


def test_by_themselves_they_are_updated_when_they_matter() -> None:
    params, optimizer = run(waits(topk_ratio=0.25, update_interval="auto", auto_ratio=0.5), steps=14)
    counts = optimizer.state[params[0]]["column_steps"]
    assert counts.max() == 14 and 1 <= counts.min() < 14
    _, patient = run(waits(topk_ratio=0.25, update_interval="auto", auto_ratio=1.0), steps=14)
    assert patient.state[patient.param_groups[0]["params"][0]]["column_steps"].sum() < counts.sum()


def test_16_bit_weights() -> None:
    params = [nn.Parameter(p.detach().bfloat16()) for p in model()]
    optimizer = waits(topk_ratio=0.25)(params)
    for step in range(9):
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g.bfloat16()
        optimizer.step()
    assert all(p.isfinite().all() for p in params)
    assert isinstance(optimizer, ZenFlowAdam) and optimizer.state[params[0]]["delayed"].dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: waits(select_strategy="epoch", steps_per_epoch=0)(model()), "at least 1"),
        (lambda: waits(select_strategy="epoch")(model()), "steps_per_epoch"),
        (lambda: build_optimizer("Lion", model(), {}, zenflow_policy=ZenFlow()), "Adam and AdamW"),
        (
            lambda: build_optimizer("AdamW", model(), {"state_dtype": "int8"}, zenflow_policy=ZenFlow()),
            "fp32 state",
        ),
        (
            lambda: build_optimizer("AdamW", model(), {"amsgrad": True}, zenflow_policy=ZenFlow()),
            "no such variant",
        ),
    ],
)
def test_what_there_is_not(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
