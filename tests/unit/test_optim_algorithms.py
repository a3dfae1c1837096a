"""Lamb, Lion, Muon and Adafactor on plain tensors against their papers' rules, written out in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thalweg.optim.algorithms.distributed_matrices import MatrixSharding, plan_rounds
from thalweg.optim.algorithms.muon import Muon
from thalweg.optim.algorithms.muon_params import is_hidden_matrix, muon_groups
from thalweg.optim.algorithms.newton_schulz import COEFFICIENTS, orthogonalize, orthogonalize_cost
from thalweg.optim.build import build_optimizer

torch.set_num_threads(1)


def gradients(shape: tuple[int, ...], steps: int = 5, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) * scale for _ in range(steps)]


def trained(name: str, start: Tensor, grads: list[Tensor], hyper: dict[str, Any]) -> Tensor:
    param = nn.Parameter(start.clone())
    optimizer = build_optimizer(name, [param], hyper)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> bool:
    return (got.double() - want).abs().max().item() < tolerance


def lamb(start: Tensor, grads: list[Tensor], lr: float, wd: float, low: float, high: float, correct: bool) -> Tensor:
    p = start.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        g = g.double()
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        m_hat = m / (1 - 0.9**t) if correct else m
        v_hat = v / (1 - 0.999**t) if correct else v
        r = m_hat / (v_hat.sqrt() + 1e-6) + wd * p
        ratio = (p.norm() / r.norm()).item() if p.norm() > 0 and r.norm() > 0 else 1.0
        p = p - lr * min(max(ratio, low), high) * r
    return p


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.5, 0.5), (3.0, 4.0)])
def test_lamb(correct: bool, low: float, high: float) -> None:
    start, grads = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), gradients((6, 4))
    hyper = {
        "weight_decay": 0.1,
        "eps": 1e-6,
        "min_coeff": low,
        "max_coeff": high,
        "bias_correction": correct,
    }
    want = lamb(start, grads, 0.05, 0.1, low, high, correct)
    assert close(trained("lamb", start, grads, {"lr": 0.05, **hyper}), want, 1e-5)
    assert not close(trained("lamb", start, grads, {"lr": 0.051, **hyper}), want, 1e-5)


def test_lamb_from_zero_and_with_eps_inside() -> None:
    start, grads = torch.zeros(4), gradients((4,))
    assert close(trained("Lamb", start, grads, {"lr": 0.05, "eps": 1e-6}), lamb(start, grads, 0.05, 0, 0.01, 10, True))
    tiny = gradients((4,), scale=1e-8)
    outside = trained("Lamb", torch.ones(4), tiny, {"lr": 0.05, "eps": 1e-6})
    inside = trained("Lamb", torch.ones(4), tiny, {"lr": 0.05, "eps": 1e-6, "eps_inside_sqrt": True})
    assert not close(outside, inside.double())


def test_lion() -> None:
    start, grads = torch.ones(5, 2), gradients((5, 2))
    p, m = start.double(), torch.zeros(5, 2, dtype=torch.float64)
    for g in grads:
        g = g.double()
        update = torch.sign(0.9 * m + 0.1 * g)
        p = p - 0.01 * (update + 0.3 * p)
        m = 0.99 * m + 0.01 * g
    hyper = {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.3}
    assert close(trained("Lion", start, grads, hyper), p)
    assert not close(trained("Lion", start, grads, {**hyper, "betas": [0.99, 0.5]}), p)


def newton_schulz(g: Tensor, steps: int) -> Tensor:
    """The iteration on singular values alone."""
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", [(4, 4), (3, 9), (9, 3), (1, 5), (16, 2)])
@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("steps", [1, 2, 5, 7])
def test_orthogonalize(shape: tuple[int, int], method: str, steps: int) -> None:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    got = orthogonalize(g, steps=steps, method=method)
    assert got.shape == g.shape
    assert close(got, newton_schulz(g, steps), 2e-5)
    assert not close(got, newton_schulz(g, steps + 1), 2e-3)
    assert (orthogonalize(torch.zeros(shape), method=method) == 0).all()


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_in_bf16(adjust: str | None, nesterov: bool) -> None:
    """The same bits as ``torch.optim.Muon`` for the same method and dtype."""
    for shape in [(6, 4), (4, 9)]:
        start, grads = torch.randn(shape, generator=torch.Generator().manual_seed(0)), gradients(shape)
        twin = nn.Parameter(start.clone())
        theirs = torch.optim.Muon([twin], 0.1, 0.2, nesterov=nesterov, adjust_lr_fn=adjust)
        for grad in grads:
            twin.grad = grad.clone()
            theirs.step()
        hyper = {"lr": 0.1, "weight_decay": 0.2, "nesterov": nesterov, "adjust_lr_fn": adjust}
        exact = trained("Muon", start, grads, {**hyper, "ns_method": "standard", "ns_dtype": "bf16"})
        assert torch.equal(exact, twin.detach())
        other = trained("Muon", start, grads, {**hyper, "momentum": 0.9})
        assert not torch.allclose(other, twin.detach(), atol=1e-3)


def test_muon_counts_kernels_as_matrices_and_skips_missing_gradients() -> None:
    start, grads = torch.randn(4, 3, 2, 2), gradients((4, 3, 2, 2))
    flat = trained("Muon", start.view(4, 12), [g.view(4, 12) for g in grads], {"lr": 0.1})
    assert torch.equal(trained("Muon", start, grads, {"lr": 0.1}), flat.view(4, 3, 2, 2))
    a, b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    optimizer = build_optimizer("Muon", [a, b], {"lr": 0.1, "weight_decay": 0.5})
    a.grad = torch.randn(2, 3)
    optimizer.step()
    assert (b == 1).all() and (a != 1).any() and b not in optimizer.state


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_steps_each_matrix_of_a_stack_as_if_it_were_alone(adjust: str) -> None:
    """Experts in one parameter, as Hugging Face has them."""
    start, grads = torch.randn(3, 6, 4), gradients((3, 6, 4))
    together = trained("Muon", start, grads, {"lr": 0.1, "adjust_lr_fn": adjust})
    alone = [trained("Muon", start[i], [g[i] for g in grads], {"lr": 0.1, "adjust_lr_fn": adjust}) for i in range(3)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-6)


def test_muon_groups_tell_kernels_from_stacks_and_leave_stacked_biases_out() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 6, 3), "linear": nn.Linear(4, 4)})
    model["experts"] = experts = nn.Module()
    experts.up = nn.Parameter(torch.randn(3, 6, 4))
    experts.up_bias = nn.Parameter(torch.randn(3, 6))
    groups = muon_groups(model, [{"params": list(model.parameters())}])
    by_kind = {(g["use_muon"], g.get("is_convolution", False)): {tuple(p.shape) for p in g["params"]} for g in groups}
    assert by_kind == {
        (True, False): {(4, 4), (3, 6, 4)},
        (True, True): {(6, 4, 3)},
        (False, False): {(6,), (4,), (3, 6)},
    }
    optimizer = build_optimizer("Muon", groups, {"lr": 0.1})
    kernel, start = model["conv"].weight, model["conv"].weight.detach().clone()
    kernel.grad = gradients((6, 4, 3), 1)[0]
    optimizer.step()
    flat = trained("Muon", start.view(6, 12), [kernel.grad.view(6, 12)], {"lr": 0.1})
    assert torch.allclose(kernel.detach(), flat.view(6, 4, 3), atol=1e-6)


def test_muon_rates_and_the_other_half() -> None:
    matrix, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    twin = nn.Parameter(bias.detach().clone())
    hyper = {"lr": 0.3, "adam_lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-8}
    optimizer = build_optimizer("muon", [bias, matrix], hyper)
    assert [(g["use_muon"], g["lr"]) for g in optimizer.param_groups] == [(True, 0.3), (False, 0.01)]
    adamw = torch.optim.AdamW([twin], 0.01, (0.8, 0.9), weight_decay=0.1, fused=True)
    for grad in gradients((4,)):
        bias.grad, twin.grad, matrix.grad = grad.clone(), grad.clone(), torch.randn(4, 4)
        optimizer.step()
        adamw.step()
    assert torch.equal(bias.detach(), twin.detach())
    plain = build_optimizer("Muon", [matrix, bias], {}).param_groups
    assert [g["lr"] for g in plain] == [0.02, 3e-4]
    groups = [{"params": [matrix, bias], "lr": 0.5}, {"params": [twin]}]
    rates = [(g["use_muon"], g["lr"]) for g in build_optimizer("Muon", groups, {"muon_lr": 0.1}).param_groups]
    assert rates == [(True, 0.5), (False, 0.5), (False, 3e-4)]


def test_muon_state_round_trip() -> None:
    params = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4))]
    optimizer = build_optimizer("Muon", params, {"lr": 0.1})

    def some_steps(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for g, h in zip(gradients((4, 6)), gradients((4,)), strict=True):
            params[0].grad, params[1].grad = g, h
            optimizer.step()
        return [p.detach().clone() for p in params]

    middle, saved = some_steps(optimizer), optimizer.state_dict()
    saved = {
        "state": {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()},
        "param_groups": saved["param_groups"],
    }
    end = some_steps(optimizer)
    with torch.no_grad():
        for p, m in zip(params, middle, strict=True):
            p.copy_(m)
    again = build_optimizer("Muon", params, {"lr": 0.7})
    again.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(some_steps(again), end, strict=True))


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "use_muon": True}])


class TinyGPT(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(40, 8), nn.Embedding(16, 8)
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.to_vocabulary = nn.Linear(8, 40, bias=False)
        if tied:
            self.to_vocabulary.weight = self.wte.weight


@pytest.mark.parametrize("tied", [True, False])
def test_muon_groups_of_a_model(tied: bool) -> None:
    model = TinyGPT(tied)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = build_optimizer("Muon", muon_groups(model, [{"params": trained}]), {"lr": 0.1})
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names[0] == ["up.weight", "down.weight"]
    learnt = [p for p in model.parameters() if p.requires_grad]
    split = build_optimizer("Muon", learnt, {"lr": 0.1}, model=model).param_groups
    assert [len(group["params"]) for group in split] == [len(n) for n in names]
    own = [
        {"params": [model.wpe.weight, model.up.bias], "lr": 1.0},
        {"params": [model.wte.weight], "use_muon": True},
    ]
    kinds = [(g["use_muon"], g["lr"]) for g in build_optimizer("Muon", own, {}, model=model).param_groups]
    assert kinds == [(False, 1.0), (True, 0.02)]
    others = {"wte.weight", "wpe.weight", "up.bias", "down.bias", "norm.weight", "norm.bias"}
    model_head = set() if tied else {"to_vocabulary.weight"}
    assert set(names[1]) == others | model_head


def test_hidden_matrices_by_name_and_shape() -> None:
    wide, tall, square = torch.zeros(8, 32), torch.zeros(80, 8), torch.zeros(8, 8)
    assert is_hidden_matrix(wide) and is_hidden_matrix(square) and is_hidden_matrix(torch.zeros(32, 8))
    assert not is_hidden_matrix(tall) and not is_hidden_matrix(torch.zeros(8))
    assert not is_hidden_matrix(square, "transformer.wpe.weight")
    assert not is_hidden_matrix(square, "embeddings.position.weight")
    assert not is_hidden_matrix(square, "lm_head.weight")
    assert is_hidden_matrix(square, "encoder.attention.output.dense.weight")
    assert is_hidden_matrix(square, "multi_head.proj.weight")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30), st.integers(1, 5))
def test_plans_are_complete_bounded_and_balanced(shapes: list[tuple[int, int]], world: int) -> None:
    sizes = [torch.Size(s) for s in shapes]
    rounds = plan_rounds(sizes, world, capacity=1600)
    assert sorted(i for r in rounds for i in r) == list(range(len(shapes)))
    for plan in rounds:
        elements = sum(sizes[i].numel() for i in plan)
        assert elements <= 1600 or len(plan) == 1
        assert all(0 <= owner < world for owner in plan.values())
        load = [0] * world
        for i, owner in plan.items():
            n, m = sorted(shapes[i])
            load[owner] += n * n * (n + m)
        largest = max(n * n * (n + m) for n, m in (sorted(shapes[i]) for i in plan))
        assert max(load) <= sum(load) / world + largest


def test_large_matrices_are_orthogonalised_by_all_ranks_at_once() -> None:
    """Llama 3 8B's: each was a round of its own, in which seven of eight ranks waited for its owner."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    sizes, world, longest = [torch.Size(s) for s in shapes] * 32, 8, 0
    rounds = plan_rounds(sizes, world)
    cost = [orthogonalize_cost(*size) for size in sizes]
    for plan in rounds:
        longest += max(sum(cost[i] for i, owner in plan.items() if owner == rank) for rank in range(world))
        # Beside a matrix of its own a rank holds its pieces of the round's.
        assert sum(sizes[i].numel() for i in plan) <= world * 14336 * 4096
    assert sum(cost) / longest > 0.9 * world


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0, 1, None]))
def test_cuts_split_and_join(rows: int, cols: int, world: int, dim: int | None) -> None:
    whole = torch.arange(rows * cols, dtype=torch.float32).view(rows, cols)
    cut = MatrixSharding(whole.shape, dim, world)
    pieces = cut.shard(whole)
    assert [p.numel() for p in pieces] == [cut.shard_numel(rank) for rank in range(world)]
    if dim is None:
        assert all(torch.equal(p.view(rows, cols), whole) for p in pieces)
        return
    assert torch.equal(cut.unshard(pieces), whole)
    chunks = [*whole.chunk(world, dim), *[None] * world][:world]
    for rank, (piece, chunk) in enumerate(zip(pieces, chunks, strict=True)):
        shape = cut.shard_shape(rank)
        assert torch.equal(piece.view(shape), chunk) if chunk is not None else math.prod(shape) == 0


@pytest.mark.parametrize("shape", [(6, 4), (5,), (2, 3, 4), (1, 1)])
def test_adafactor_is_torchs(shape: tuple[int, ...]) -> None:
    start, grads = torch.randn(shape, generator=torch.Generator().manual_seed(0)), gradients(shape)
    for hyper in ({}, {"weight_decay": 0.1, "lr": 0.5, "d": 2.0}, {"eps": (1e-4, 0.1), "maximize": True}):
        twin = nn.Parameter(start.clone())
        theirs = torch.optim.Adafactor([twin], **hyper)  # pyright: ignore
        for grad in grads:
            twin.grad = grad.clone()
            theirs.step()
        got = trained("Adafactor", start, grads, hyper)
        torch.testing.assert_close(got, twin.detach(), rtol=1e-5, atol=1e-7)
        assert not torch.allclose(trained("Adafactor", start, grads, {**hyper, "beta2_decay": -0.5}), got, 1e-5, 1e-7)
