"""GatheredParameters on models that torch's own fully_shard has sharded."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.zero.gathered_parameters import GatheredParameters, register_sharded_model

REUSE_RANKS = True


class Tied(nn.Module):
    """Uneven shapes, a dim0 smaller than the world, a tie, a frozen and a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 5)
        self.body = nn.Linear(5, 7)
        self.out = nn.Linear(7, 5)
        self.narrow = nn.Parameter(torch.randn(1, 5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.out(torch.relu(self.body(self.wte(tokens)))) * self.scale + self.narrow
        return self.head(x) + self.frozen.sum()


def _model(world: int, shard: bool = True, **options: object) -> tuple[Tied, Tied]:
    torch.manual_seed(7)
    plain = Tied()
    model = copy.deepcopy(plain)
    if shard:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.body, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, ignored_params={model.scale}, **options)
        register_sharded_model(model)
    return plain, model


TOKENS = torch.tensor([[1, 2, 3, 10]])


def _same(model: nn.Module, plain: nn.Module) -> None:
    assert torch.equal(model(TOKENS), plain(TOKENS))


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def _row10(rank: int, world: int) -> None:
    plain, model = _model(world)
    objects = dict(model.named_parameters())
    kinds = {name: type(p) for name, p in objects.items()}
    storages = {n: p.to_local().untyped_storage().data_ptr() for n, p in objects.items() if isinstance(p, DTensor)}
    with GatheredParameters(model.parameters(), modifier_rank=0):
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p is objects[name] and isinstance(p, nn.Parameter) and not isinstance(p, DTensor)
            assert (p.shape, p.numel(), p.dtype, p.requires_grad) == (
                q.shape,
                q.numel(),
                q.dtype,
                q.requires_grad,
            )
            assert torch.equal(p, q) and (p.detach().numpy() == q.detach().numpy()).all()
            assert type(p.data) is torch.Tensor and type(p * 1) is torch.Tensor
        assert model.head.weight is model.wte.weight
        for which in (model, plain) if rank == 0 else (plain,):
            torch.manual_seed(3)
            nn.init.xavier_normal_(which.body.weight)
            which.wte.weight.data.copy_(torch.arange(55.0).view(11, 5))
            with torch.no_grad():
                which.narrow.zero_()
                which.scale.fill_(0.5)
                which.frozen[1] = 9.0
            if which is plain and rank != 0:  # the other ranks' writes must not count
                model.body.weight.data.fill_(1e9)
    assert {name: type(p) for name, p in model.named_parameters()} == kinds
    for name, p in model.named_parameters():
        assert p is objects[name]
        if name in storages:
            assert p.to_local().untyped_storage().data_ptr() == storages[name]
    for (_, value), q in zip(_whole(model).items(), plain.parameters(), strict=True):
        assert torch.equal(value, q)
    _same(model, plain)


@pytest.mark.parametrize("world", [nightly(1), 2, nightly(3)])
def test_row10_shape_and_init_as_unsharded(world: int) -> None:
    run_ranks(_row10, world)


def _read_only(rank: int, world: int) -> None:
    plain, model = _model(world)
    with GatheredParameters(list(model.parameters())):
        model.body.weight.data.fill_(5.0)
        nn.init.zeros_(model.wte.weight)
    _same(model, plain)  # dropped: also the negative control of the tests that keep writes


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_writes_without_a_modifier_are_dropped(world: int) -> None:
    run_ranks(_read_only, world)


def _after_training(rank: int, world: int) -> None:
    plain, model = _model(world)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    handle = weakref.ref(model.wte.weight)
    for step in range(4):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            loss = m(TOKENS).square().mean()
            loss = loss + 0.1 * m.wte.weight.square().sum()  # a live graph over the sharded object
            if m is model and step == 1:
                with GatheredParameters(m.parameters()):  # between forward and backward
                    assert not isinstance(m.wte.weight, DTensor)
            loss.backward()
            grads = {n: p.grad for n, p in m.named_parameters()}
            if step >= 2:
                with GatheredParameters(m.parameters(), modifier_rank=world - 1):
                    assert m.body.weight.grad is None or m is plain
                    for p in (m.body.weight, m.narrow) if rank == world - 1 or m is plain else ():
                        p.data.mul_(0.5)
            for name, p in m.named_parameters():
                assert p.grad is grads[name]
            optimizer.step()
    assert handle() is model.wte.weight
    assert len(optimizers[1].state) == len(optimizers[0].state)
    for (name, value), q in zip(_whole(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, q, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_live_graphs_gradients_and_optimizer_survive(world: int) -> None:
    run_ranks(_after_training, world)


def _unsharded(rank: int, world: int) -> None:
    """The root unit stays unsharded after a forward; writes must reach the shard behind it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain, model = _model(world, mp_policy=policy)
    with torch.no_grad():
        model(TOKENS)
    shown = model.wte.weight
    assert not isinstance(shown, DTensor) and shown.dtype is torch.bfloat16
    with GatheredParameters([shown], modifier_rank=0):
        assert model.wte.weight.dtype is torch.float32 and torch.equal(model.wte.weight, plain.wte.weight)
        assert torch.equal(shown, plain.wte.weight)
        if rank == 0:
            shown.data.add_(1.0)
    plain.wte.weight.data.add_(1.0)
    assert isinstance(model.wte.weight, DTensor)
    assert torch.equal(model.wte.weight.full_tensor(), plain.wte.weight)
    with GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        plain.wte.weight.add_(1.0)
        model.wte.weight.add_(1.0)
        old = model(TOKENS)  # with the values from before, and it leaves the root unsharded again
    assert torch.equal(model.wte.weight, plain.wte.weight.bfloat16())  # the copy is up to date as well
    with torch.no_grad():
        new = model(TOKENS)
        torch.testing.assert_close(new.float(), plain(TOKENS), rtol=0.05, atol=0.05)
        assert not torch.equal(new, old)
    model.reshard()
    assert torch.equal(model.wte.weight.full_tensor(), plain.wte.weight)
    with torch.no_grad():
        model(TOKENS)
    assert model.wte.weight is shown
    with GatheredParameters(iter([shown, *model.parameters()]), modifier_rank=0):
        pass
    assert torch.equal(model.wte.weight.full_tensor(), plain.wte.weight)
    with pytest.raises(ValueError, match="take it from the module again"), GatheredParameters(shown):
        pass


def test_parameters_that_are_unsharded_at_the_moment() -> None:
    run_ranks(_unsharded, 2)


def _nested(rank: int, world: int) -> None:
    plain, model = _model(world)
    p, q = model.body.weight, model.wte.weight
    with GatheredParameters([p, p, q]):
        with GatheredParameters(p, modifier_rank=0):
            if rank == 0:
                p.data.fill_(2.0)
        assert not isinstance(p, DTensor) and (p == 2).all()
        q.data.fill_(3.0)  # dropped
    assert (p.full_tensor() == 2).all() and torch.equal(q.full_tensor(), plain.wte.weight)
    plain.body.weight.data.fill_(2.0)
    _same(model, plain)

    def fail() -> None:
        with GatheredParameters(model.parameters(), modifier_rank=0):
            p.data.fill_(9.0)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert isinstance(p, DTensor) and model.body.weight is p
    _same(model, plain)

    with pytest.raises(ValueError, match="resize the model"), GatheredParameters(p, modifier_rank=0):
        p.data = torch.zeros(2, 2)
    _same(model, plain)
    with pytest.raises(ValueError, match="modifier_rank=9"), GatheredParameters([q, p], modifier_rank=9):
        pass
    assert isinstance(q, DTensor)
    with pytest.raises(ValueError, match=r"pass model\.parameters"):
        GatheredParameters(model.named_parameters())  # type: ignore[arg-type]
    with GatheredParameters([model.head.bias, p]):  # of a layer without bias
        assert not isinstance(p, DTensor)
    with GatheredParameters([]), GatheredParameters(p, enabled=False):
        assert isinstance(p, DTensor)
    with GatheredParameters(p, modifier_rank=0):
        p.requires_grad_(False)
    assert not p.requires_grad and isinstance(p, DTensor)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        with GatheredParameters(param):
            assert torch.equal(param, expected)


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_nested_exceptions_and_wrong_use(world: int) -> None:
    run_ranks(_nested, world)


def _plain_model(rank: int, world: int) -> None:
    _, model = _model(world, shard=False)
    p = model.body.weight
    with GatheredParameters(model.parameters(), modifier_rank=1):
        assert model.body.weight is p
        p.data.fill_(float(rank + 5))
    assert (p == 6).all()
    with GatheredParameters(p):
        p.data.fill_(1.0)
    assert (p == 1).all()


def test_plain_model_is_broadcast() -> None:
    run_ranks(_plain_model, 2)


def _meshes(rank: int, world: int) -> None:
    """HSDP (two mesh axes), replicated DTensors, and shards that rest on the host."""
    torch.manual_seed(1)
    plain = nn.Linear(3, 5)
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    replicated = nn.Parameter(distribute_tensor(torch.ones(3), mesh["shard"], [Replicate()]))
    for source in range(world):
        with GatheredParameters(model.parameters(), modifier_rank=source, fwd_module=model):
            model.weight.data.fill_(float(rank))
            model.bias.data.fill_(float(rank))
        assert (model.weight.full_tensor() == source).all()
        assert torch.equal(model(torch.ones(1, 3)), plain.bias[None] * 0 + 4 * source)
    with GatheredParameters(replicated, modifier_rank=rank // 2 * 2):
        replicated.data.fill_(float(rank))
    assert (replicated.to_local() == rank // 2 * 2).all()
    with GatheredParameters(replicated):
        replicated.data.fill_(77.0)
    assert (replicated.to_local() == rank // 2 * 2).all()


def test_other_meshes() -> None:
    run_ranks(_meshes, 4)


def _inside(rank: int, world: int) -> None:
    _, model = _model(world)
    with GatheredParameters(model.parameters()):
        twin = copy.deepcopy(model.body.weight)
        state = model.state_dict()
    assert type(twin) is nn.Parameter and torch.equal(twin, state["body.weight"])
    assert state["body.weight"].shape == (7, 5) and type(state["body.weight"]) is torch.Tensor


def test_copies_made_inside_are_plain() -> None:
    run_ranks(_inside, 2)
