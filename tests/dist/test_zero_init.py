"""zero.Init on several ranks: memory, sharding by hand, GatheredParameters before sharding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.deferred_init.context import has_meta_tensors, materialize_module
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.zero import GatheredParameters, Init

REUSE_RANKS = True

SHAPE = GPTConfig(vocab_size=96, n_layer=2, n_head=2, n_embd=32, block_size=16)
TOKENS = torch.arange(16)[None]


def _peak_mib(reset: bool = False) -> float:
    """Return this process's peak resident memory in MiB since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _memory(rank: int, world: int) -> tuple[float, float, float]:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 2048) for _ in range(24)))  # 8 MiB each

    with Init():
        warm = nn.Linear(100, 100)
    materialize_module(warm, lambda *_: None)  # maps the code that fills: pages of files count, and are not its memory
    start = _peak_mib(reset=True)
    with Init():
        model = build()
    building = _peak_mib() - start
    start = _peak_mib(reset=True)
    materialize_module(model, lambda *_: None)
    filling = _peak_mib() - start
    start = _peak_mib(reset=True)
    kept = build()
    del kept
    return building, filling, _peak_mib() - start


def test_memory_is_that_of_one_tensor() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    ((building, filling, ordinary),) = run_ranks(_memory, 1, init=False)
    assert building < 16 and filling < 28, (building, filling)
    assert ordinary > 150  # negative control: the meter sees an ordinary build


def _sharded(rank: int, world: int) -> None:
    torch.manual_seed(5)
    plain = GPT(SHAPE)
    torch.manual_seed(5)
    with Init():
        model = GPT(SHAPE)
    mesh = init_device_mesh("cpu", (world,))
    shards: dict[str, Tensor] = {}

    def sink(name: str, meta: Tensor, value: Tensor) -> None:
        whole = distribute_tensor(value, mesh, placements[name], src_data_rank=None)
        shards[name] = whole.to_local().clone()

    twin = copy.deepcopy(plain)
    fully_shard(twin, mesh=mesh)
    placements = {name: p.placements for name, p in twin.named_parameters()}  # type: ignore[union-attr]
    materialize_module(model, sink)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(shards[name])  # type: ignore[operator]
    assert torch.equal(model(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("world", [nightly(1), 2, nightly(3)])
def test_sharded_values_are_those_of_an_unsharded_build(world: int) -> None:
    run_ranks(_sharded, world)


def _gathered_before_sharding(rank: int, world: int) -> None:
    torch.manual_seed(5)
    plain = GPT(SHAPE)
    torch.manual_seed(5)
    with Init():
        model = GPT(SHAPE)
    weight, other = model.wte.weight, model.blocks[0].mlp.up.weight
    with GatheredParameters([weight, weight]):
        assert model.head.weight is weight and torch.equal(weight, plain.wte.weight)
        weight.data.fill_(7.0)  # dropped
    with GatheredParameters(model.parameters(), modifier_rank=world - 1):
        assert not any(p.is_meta for p in model.parameters())
        assert torch.equal(model(TOKENS), plain(TOKENS))
        if rank == world - 1:
            other.data[3:5] = 9.0
    assert has_meta_tensors(model) and weight.is_meta and model.head.weight is weight
    nn.init.ones_(model.norm.bias)
    plain.blocks[0].mlp.up.weight.data[3:5] = 9.0
    nn.init.ones_(plain.norm.bias)
    expected = dict(plain.named_parameters())
    found: list[str] = []

    def sink(name: str, meta: Tensor, value: Tensor) -> None:
        assert torch.equal(value, expected[name]), name
        found.append(name)

    materialize_module(model, sink)
    assert sorted(found) == sorted(expected)
    with pytest.raises(ValueError, match="no value yet"), GatheredParameters(weight):
        pass


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_gathered_before_sharding(world: int) -> None:
    run_ranks(_gathered_before_sharding, world)


class _OfManyKinds(nn.Module):
    """Values of each rank's own: many small ones, a large one, tied, transposed, empty and of other dtypes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.small = nn.ParameterList(torch.randn(3, 5) for _ in range(40))
        self.large = nn.Parameter(torch.randn(300, 8192))  # more than one message
        self.tied = self.large
        self.transposed = nn.Parameter(torch.randn(7, 6).t())
        self.frozen = nn.Parameter(torch.randn(9).bfloat16(), requires_grad=False)
        self.register_buffer("mask", torch.rand(11) < 0.5)
        self.register_buffer("count", torch.tensor(rank + 7))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("table", torch.randn(5, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.large).sum() + sum(p.sum() for p in self.small) + self.transposed.sum()


def _initial_values(rank: int, world: int) -> tuple[int, list[str]]:
    import torch.distributed as dist

    import thalweg
    from thalweg.zero import initial_values

    messages, broadcast = list[int](), dist.broadcast

    def counted(tensor: Tensor, **options: object) -> object:
        if tensor.dtype == torch.uint8:  # others are of what ranks agree on
            messages.append(tensor.nbytes)
        return broadcast(tensor, **options)

    initial_values.dist.broadcast = counted  # type: ignore[assignment]
    try:
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = thalweg.initialize(model=_OfManyKinds(rank), config={**config, "zero_optimization": {"stage": 3}})[0]
    finally:
        initial_values.dist.broadcast = broadcast
    wanted, wrong = _OfManyKinds(0), []
    expected = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    with GatheredParameters(list(engine.module.parameters())):
        for name, value in (*engine.module.named_parameters(), *engine.module.named_buffers()):
            shown = value.detach()
            alone = shown.untyped_storage().nbytes() == shown.nbytes
            if not torch.equal(shown, expected[name].to(shown)) or (name in ("mask", "table") and not alone):
                wrong.append(name)
    assert engine.module.tied is engine.module.large
    engine.close()
    return len(messages), wrong


def test_values_of_rank_0_cross_in_few_messages() -> None:
    for num_messages, wrong in run_ranks(_initial_values, 2):
        assert wrong == []
        assert num_messages <= 4  # 43 parameters and 4 buffers


def _own_values(rank: int, world: int) -> list[str]:
    from thalweg.zero import initial_values

    initial_values._from_rank0 = lambda values, mesh: iter(values)  # type: ignore[assignment]
    return _initial_values(rank, world)[1]


def test_values_that_did_not_cross_are_noticed() -> None:
    for wrong in run_ranks(_own_values, 2):
        assert {"large", "transposed", "small.0"} <= {*wrong}
