"""The global gradient norm over mixed layouts: right, the same bits everywhere, one all-reduce a group."""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.optim.norms import clip_factor, global_grad_norm

SHAPES = [(6, 4), (5,), (2, 3), (1,), (7, 2), (3, 3)]


def grads(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


def one_axis(values: list[Tensor], world: int) -> list[nn.Parameter]:
    """Sharded by rows, replicated, by columns, plain; the plain ones are on every rank alike."""
    mesh = init_device_mesh("cpu", (world,))
    layouts = [Shard(0), Shard(0), Replicate(), None, Shard(1), None]
    params = []
    for value, layout in zip(values, layouts, strict=True):
        whole = value if layout is None else distribute_tensor(value, mesh, [layout])
        param = nn.Parameter(torch.zeros_like(whole))
        param.grad = whole.clone()
        params.append(param)
    return params


def reference(values: list[Tensor]) -> float:
    return torch.linalg.vector_norm(torch.cat([v.double().reshape(-1) for v in values])).item()


def norm_and_calls(params: list[nn.Parameter]) -> tuple[Tensor, list[str]]:
    """The norm, and the name of the group of each all-reduce that it took."""
    calls: list[str] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, group: Any, **kwargs: Any) -> Any:
        calls.append(group.group_name)
        return all_reduce(tensor, *args, group=group, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        return global_grad_norm(params), calls


def norms(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scale in (1.0, 1e30, 1e-25):
        got, calls = norm_and_calls(one_axis(grads(scale), world))
        assert got.shape == () and got.dtype == torch.float64
        found[f"scale {scale}"] = (got.item(), reference(grads(scale)), len(calls))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        params = one_axis(grads(1.0, dtype), world)
        found[f"dtype {dtype}"] = (global_grad_norm(params).item(), reference(grads(1.0, dtype)), 1)
    params = one_axis(grads(), world)
    for param in params[::2]:
        param.grad = None
    found["some without gradient"] = (global_grad_norm(params).item(), reference(grads()[1::2]), 1)
    for param in params:
        param.grad = None
    found["none with gradient"] = (global_grad_norm(params).item(), 0.0, 1)
    return found


def lone_nonfinite(rank: int, world: int) -> dict[str, float]:
    """One bad element on one rank: in its shard, or in its copy of a plain gradient."""
    found = {}
    for bad in (math.nan, math.inf, -math.inf):
        for culprit in range(world):
            params = one_axis(grads(), world)
            piece = params[0].grad.to_local()  # pyright: ignore
            if rank == culprit and piece.numel():
                piece.view(-1)[-1] = bad
            if culprit * math.ceil(6 / world) < 6:  # the culprit has some of the six rows
                found[f"shard {bad} {culprit}"] = global_grad_norm(params).item()
            params = one_axis(grads(), world)
            if rank == culprit:
                params[3].grad[0] = bad  # pyright: ignore
            value = global_grad_norm(params, replicate_group=dist.group.WORLD)
            found[f"copy {bad} {culprit}"] = value.item()
    return found


def copies_that_differ(rank: int, world: int) -> float:
    params = one_axis(grads(), world)
    params[3].grad += rank  # pyright: ignore
    return global_grad_norm(params, replicate_group=dist.group.WORLD).item()


def clipping(rank: int, world: int) -> dict[str, float]:
    found = {}
    for limit in (0.5, 100.0):
        params, plain = one_axis(grads(), world), [nn.Parameter(torch.zeros_like(g)) for g in grads()]
        for param, grad in zip(plain, grads(), strict=True):
            param.grad = grad
        factor = clip_factor(float(global_grad_norm(params)), limit)
        for param in params:
            if param.grad is not None:
                param.grad *= factor
        torch.nn.utils.clip_grad_norm_(plain, limit)
        wholes = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in params]
        pairs = zip(wholes, plain, strict=True)
        found[f"distance {limit}"] = max((w - p.grad).abs().max().item() for w, p in pairs)  # pyright: ignore
        found[f"factor {limit}"] = factor
    return found


def two_axes(rank: int, world: int) -> tuple[float, float, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    layouts: list[Any] = [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        None,
        [Shard(0), Shard(0)],
        [Partial(), Replicate()],
    ]
    values, params = grads(), []
    for value, layout in zip(values, layouts, strict=True):
        if layout is None:
            whole = value
        elif any(placement.is_partial() for placement in layout):
            whole = DTensor.from_local(value * (0.25 if mesh.get_local_rank("a") == 0 else 0.75), mesh, layout)
            layout = [Replicate(), Replicate()]
        else:
            whole = distribute_tensor(value, mesh, layout)
        empty = torch.zeros_like(value)
        param = nn.Parameter(empty if layout is None else distribute_tensor(empty, mesh, layout))
        param.grad = whole
        params.append(param)
    got, calls = norm_and_calls(params)
    return got.item(), reference(values), calls


def all_cases(rank: int, world: int) -> dict[str, Any]:
    cases = (
        norms,
        lone_nonfinite,
        copies_that_differ,
        clipping,
        *((two_axes,) if world == 4 else ()),
    )
    return {case.__name__: case(rank, world) for case in cases}


@cache
def results(world: int) -> list[dict[str, Any]]:
    return run_ranks(all_cases, world)


worlds = pytest.mark.parametrize("world", [nightly(1), 2, 3, nightly(4)])


@worlds
def test_norm_of_a_mix(world: int) -> None:
    for key, (got, want, calls) in results(world)[0]["norms"].items():
        assert got == pytest.approx(want, rel=1e-6, abs=1e-300), key
        assert calls == (1 if world > 1 or key[:6] != "scale " else 0), key
        assert math.isfinite(got), f"{key}: finite gradients must never be taken for an overflow"


@worlds
def test_same_bits_on_all_ranks(world: int) -> None:
    first, *others = [result["norms"] for result in results(world)]
    assert all(other == first for other in others)
    differing = [result["copies_that_differ"] for result in results(world)]
    assert len(set(differing)) == 1, "rank 0's copy decides"


@worlds
def test_one_bad_element_is_noticed_everywhere(world: int) -> None:
    for result in results(world):
        assert result["lone_nonfinite"]
        for key, value in result["lone_nonfinite"].items():
            assert not math.isfinite(value), key


@worlds
def test_clipping_is_torchs(world: int) -> None:
    for result in results(world):
        assert result["clipping"]["distance 0.5"] < 1e-7
        assert result["clipping"]["distance 100.0"] == 0.0
        assert result["clipping"]["factor 0.5"] < 0.2 and result["clipping"]["factor 100.0"] == 1.0


def test_two_axes_and_partial_sums() -> None:
    rows = [result["two_axes"] for result in results(4)]
    assert len({got for got, _, _ in rows}) == 1
    for got, want, calls in rows:
        assert got == pytest.approx(want, rel=1e-6)
        assert len(calls) == len(set(calls)) == 2, "one all-reduce for each axis"
