"""Every optimiser on FSDP2 shards equals itself on whole parameters, at 1 to 4 ranks.

The model has rows that do not divide, vectors, fewer rows than ranks (so that some ranks hold nothing), and a
plain replicated parameter beside the shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.optim.build import COMPRESSED_OPTIMIZERS, OPTIMIZERS, build_optimizer
from thalweg.optim.local_optimizer import to_local_optimizer
from thalweg.optim.norms import clip_factor, global_grad_norm

HYPER: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1, "amsgrad": True},
    "Adam": {"adam_w_mode": False, "weight_decay": 0.1},
    "Lamb": {"weight_decay": 0.1},
    "Lion": {"weight_decay": 0.1, "betas": (0.9, 0.99)},
    "Muon": {"weight_decay": 0.1},
    "Adafactor": {"weight_decay": 0.1},
}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(7, 5),
            nn.Tanh(),
            nn.LayerNorm(5),
            nn.Linear(5, 2),
            nn.Linear(2, 3, bias=False),
            nn.Linear(3, 9),
        ).to(dtype)
        self.unused = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.gain


def sharded_net(world: int) -> Net:
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)), ignored_params={net.gain})
    return net


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(net: Net, optimizer: torch.optim.Optimizer, x: Tensor, steps: int, world: int) -> None:
    for _ in range(steps):
        net(x).square().mean().backward()
        if net.gain.grad is not None and world > 1 and not isinstance(net.gain.grad, DTensor):
            dist.all_reduce(net.gain.grad)
            net.gain.grad.div_(world)
        factor = clip_factor(float(global_grad_norm(net.parameters())), 0.5)
        for param in net.parameters():
            if param.grad is not None:
                param.grad *= factor
        optimizer.step()
        optimizer.zero_grad()


def worst(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((whole(p.detach()) - q.detach()).abs().max().item() for p, q in pairs)


def parity(rank: int, world: int) -> dict[str, tuple[float, float, list[str]]]:
    """For each optimiser: distance to the whole run, a wrong run's distance, and what is odd in the state."""
    found = {}
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    mine = x.view(world, 12 // world, 7)[rank]
    for name in OPTIMIZERS:
        hyper = {"lr": 0.01, **HYPER.get(name, {})}
        net, reference, wrong = sharded_net(world), Net(), Net()
        optimizer = build_optimizer(name, net.parameters(), hyper)
        whole_optimizer = build_optimizer(name, reference.parameters(), hyper)
        train(net, optimizer, mine, 3, world)
        train(reference, whole_optimizer, x, 3, 1)
        train(wrong, build_optimizer(name, wrong.parameters(), {**hyper, "lr": 0.0101}), x, 3, 1)
        pairs = list(zip(net.parameters(), reference.parameters(), strict=True))
        distance, control = worst(net, reference), worst(wrong, reference)
        found[name] = (distance, control, odd_state(optimizer, whole_optimizer, pairs))
    return found


def odd_state(
    optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer, pairs: list[tuple[Tensor, Tensor]]
) -> list[str]:
    odd = []
    for p, q in pairs:
        ours, theirs = optimizer.state.get(p, {}), reference.state.get(q, {})
        if ours.keys() != theirs.keys():
            odd.append(f"keys {sorted(ours)} instead of {sorted(theirs)}")
            continue
        for key, value in ours.items():
            if isinstance(p, DTensor) and value.dim() and not isinstance(value, DTensor):
                odd.append(f"{key} is not a DTensor")
            elif value.shape != theirs[key].shape:
                odd.append(f"{key} has shape {tuple(value.shape)}")
            elif not torch.allclose(whole(value), theirs[key], rtol=1e-3, atol=1e-5):
                odd.append(f"{key} differs by {(whole(value) - theirs[key]).abs().max().item()}")
    return odd


def same_gradients(rank: int, world: int) -> dict[str, float]:
    """Distance between sharded and whole steps that are fed the same bits of gradient."""
    found = {}
    for name in OPTIMIZERS:
        net, reference = sharded_net(world), Net()
        optimizer = build_optimizer(name, net.parameters(), {"lr": 0.01})
        whole_optimizer = build_optimizer(name, reference.parameters(), {"lr": 0.01})
        generator = torch.Generator().manual_seed(2)
        for step in range(4):
            for i, (p, q) in enumerate(zip(net.parameters(), reference.parameters(), strict=True)):
                q.grad = torch.randn(q.shape, generator=generator)
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else q.grad
                if i == 2 and step == 1:
                    p.grad = q.grad = None
            optimizer.step()
            whole_optimizer.step()
        found[name] = worst(net, reference)
    return found


def round_trip(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """(distance after a reload in mid-run, distance after a start without the state) from a straight run."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    found = {}
    for name in ("SGD", "AdamW", "NAdam", "Lamb", "Muon", "Adafactor"):
        hyper = {"lr": 0.01, **HYPER.get(name, {})}
        net = sharded_net(world)
        params = list(net.parameters())
        first = build_optimizer(name, params, hyper)
        train(net, first, x, 2, world)
        middle = [p.detach().clone() for p in params]
        saved = copy.deepcopy(first.state_dict())
        train(net, first, x, 2, world)
        straight = [whole(p.detach()).clone() for p in params]
        distances = []
        for state in (saved, None):
            with torch.no_grad():
                for p, m in zip(params, middle, strict=True):
                    p.copy_(m)
            again = build_optimizer(name, params, hyper)
            if state is not None:
                again.load_state_dict(state)
            train(net, again, x, 2, world)
            pairs = zip(params, straight, strict=True)
            distances.append(max((whole(p.detach()) - q).abs().max().item() for p, q in pairs))
        found[name] = (distances[0], distances[1])
    return found


def two_axes(rank: int, world: int) -> dict[str, float]:
    """A 2 x 2 mesh: replicas of shards (HSDP), two cut dims, and a column cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    layouts = [
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
    ]
    found = {}
    for name in OPTIMIZERS.keys() - COMPRESSED_OPTIMIZERS:  # those want workers that hold all parameters alike
        generator = torch.Generator().manual_seed(4)
        plain = [nn.Parameter(torch.randn(6, 8, generator=generator)) for _ in layouts]
        cut = [
            nn.Parameter(distribute_tensor(p.detach().clone(), mesh, layout))
            for p, layout in zip(plain, layouts, strict=True)
        ]
        ours, theirs = build_optimizer(name, cut, {"lr": 0.01}), build_optimizer(name, plain, {"lr": 0.01})
        for _ in range(3):
            for p, q, layout in zip(cut, plain, layouts, strict=True):
                q.grad = torch.randn(6, 8, generator=generator)
                p.grad = distribute_tensor(q.grad, mesh, layout)
            ours.step()
            theirs.step()
        found[name] = max((whole(p) - q).abs().max().item() for p, q in zip(cut, plain, strict=True))
    return found


def muon_traffic(rank: int, world: int, replicated: bool) -> tuple[float, int, bool]:
    """(distance to one process, orthogonalisations on this rank, all ranks hold the same bits)."""
    import thalweg.optim.algorithms.muon as muon_module

    counted = []
    original = muon_module.orthogonalize

    def counting(matrix: Tensor, **options: Any) -> Tensor:
        counted.append(matrix.shape)
        return original(matrix, **options)

    muon_module.orthogonalize = counting
    shapes = [(6, 4), (5, 7), (3, 3), (1, 8), (9, 2), (4, 4), (2, 2, 3)]
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    reference = [nn.Parameter(v.clone()) for v in values]
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(v.clone() if replicated else distribute_tensor(v, mesh, [Shard(0)])) for v in values]
    group = dist.group.WORLD if replicated else None
    ours = build_optimizer("Muon", params, {"lr": 0.1}, replicate_group=group)
    theirs = build_optimizer("Muon", reference, {"lr": 0.1})
    num_mine = 0
    for step in range(3):
        for i, (p, q) in enumerate(zip(params, reference, strict=True)):
            q.grad = torch.randn(q.shape, generator=generator)
            if i == 3 and step == 1:
                q.grad.zero_()
            grad = q.grad.clone() if replicated else distribute_tensor(q.grad, mesh, [Shard(0)])
            p.grad = None if i == 3 and step == 1 and rank == 0 and world > 1 else grad
        counted.clear()
        ours.step()
        num_mine += len(counted)
        theirs.step()
    muon_module.orthogonalize = original
    distance = max((whole(p) - q).abs().max().item() for p, q in zip(params, reference, strict=True))
    flat = torch.cat([whole(p.detach()).reshape(-1) for p in params])
    every = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(every, flat)
    return distance, num_mine, all(torch.equal(flat, other) for other in every)


def adopted(rank: int, world: int) -> dict[str, float]:
    """Objects of torch's own classes over shards, taken over, against torch's own over whole parameters."""
    found = {}
    for name in ("Rprop", "Adafactor", "Muon", "AdamW", "SGD"):
        cls = getattr(torch.optim, name)
        net, reference = sharded_net(world), Net()
        pairs = zip(net.parameters(), reference.parameters(), strict=True)
        chosen = [(p, q) for p, q in pairs if name != "Muon" or p.ndim == 2]
        ours, theirs = cls([p for p, _ in chosen], lr=0.01), cls([q for _, q in chosen], lr=0.01)
        to_local_optimizer(ours)
        generator = torch.Generator().manual_seed(2)
        for _ in range(3):
            for p, q in chosen:
                q.grad = torch.randn(q.shape, generator=generator)
                p.grad = q.grad
                if isinstance(p, DTensor):
                    p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
            ours.step()
            theirs.step()
        found[name] = worst(net, reference)
    return found


REUSE_RANKS = True

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "parity": (parity, (), (1, 2, 3, 4)),
    "same_gradients": (same_gradients, (), (3,)),
    "round_trip": (round_trip, (), (3,)),
    "two_axes": (two_axes, (), (4,)),
    "adopted": (adopted, (), (3,)),
    "muon_shards": (muon_traffic, (False,), (1, 2, 3, 4)),
    "muon_copies": (muon_traffic, (True,), (1, 2, 3, 4)),
}


def one_case(rank: int, world: int, name: str) -> Any:
    fn, args, worlds = CASES[name]
    assert world in worlds
    return fn(rank, world, *args)


@cache
def results(world: int, name: str) -> list[Any]:
    """What a case found on each rank."""
    return run_ranks(one_case, world, name)


@pytest.mark.parametrize("world", [nightly(1), nightly(2), nightly(3), nightly(4)])
def test_sharded_equals_whole(world: int) -> None:
    for result in results(world, "parity"):
        for name, (distance, control, odd) in result.items():
            limit = 1e-5 if name in ("Rprop", "Lion") else 1e-6  # these two step by the sign of a gradient
            assert distance < limit, f"{name} at {world} ranks is off by {distance}"
            assert control > 10 * limit or name in ("Rprop", "Adadelta"), f"{name}: a wrong rate passes ({control})"
            assert not odd, f"{name}: {odd}"


@pytest.mark.nightly
def test_same_gradients_same_bits() -> None:
    """Up to the last bits of the fused kernels' scalar tails, and of sums."""
    for result in results(3, "same_gradients"):
        for name, distance in result.items():
            summed = name in ("Adafactor", "Lamb", "Adam", "AdamW", "Adagrad")
            assert distance <= (1e-6 if summed else 0.0), f"{name}: {distance}"


def test_state_dict_continues_bit_for_bit() -> None:
    for result in results(3, "round_trip"):
        for name, (distance, control) in result.items():
            assert distance == 0.0, f"{name} differs by {distance} after a reload"
            assert control > 1e-6, f"{name}: losing the state is not noticed"


@pytest.mark.nightly
def test_other_layouts() -> None:
    for result in results(4, "two_axes"):
        for name, distance in result.items():
            assert distance < 1e-6, f"{name} is off by {distance}"


def test_adopted_torch_optimizers() -> None:
    for result in results(3, "adopted"):
        for name, distance in result.items():
            assert distance < 1e-6, f"{name} is off by {distance}"


@pytest.mark.parametrize("world", [nightly(1), 2, nightly(3), nightly(4)])
@pytest.mark.parametrize("case", ["muon_shards", "muon_copies"])
def test_muon_computes_each_matrix_once(world: int, case: str) -> None:
    """Also where rank 0 alone lacks a gradient: nobody waits for ever."""
    found = results(world, case)
    assert all(distance == 0.0 and same for distance, _, same in found), found
    assert sum(count for _, count, _ in found) == 3 * 8  # of seven parameters one is a stack of two
    if world > 1:
        assert max(count for _, count, _ in found) < 3 * 8
