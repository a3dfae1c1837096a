"""R6: what one layout saved, any other loads, bit for bit: worlds, stages, meshes and placements."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.checkpoint_support import SmallModel, small_model, train_steps
from thalweg.checkpoint import (
    Checkpoint,
    Snapshot,
    UnserializableStateError,
    build_snapshot,
    open_verified,
    restore_module,
    save_snapshot,
)

REUSE_RANKS = True


def build(seed: int, stage: int) -> SmallModel:
    """The small model: 7 x 5, 3 x 5 (fewer rows than ranks), bf16, tied, frozen, 0-dim, buffers."""
    model = small_model(seed)
    if stage:
        fully_shard(model.low)
        fully_shard(model.hidden, reshard_after_forward=stage == 3)
        fully_shard(model, ignored_params={model.scale}, reshard_after_forward=stage == 3)
    return model


def optimizer_of(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": lr * 2}], lr=lr)


def full(tensor: torch.Tensor) -> numpy.ndarray:
    value = tensor.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Hashes of every unsharded tensor and hyperparameter, by torch's own gathering alone."""
    found: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = hashlib.sha256(full(tensor)).hexdigest()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            found[f"{name} hyper"] = repr({k: v for k, v in group.items() if k != "params"})
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                found[f"{name} {key}"] = hashlib.sha256(full(value)).hexdigest()
    return found


def save_trained(rank: int, world: int, folder: str, stage: int) -> dict[str, str]:
    model = build(0, stage)
    optimizer = optimizer_of(model)
    train_steps(model, optimizer, 3)
    save_snapshot(
        folder,
        "a",
        build_snapshot(model, optimizer, state={"client": (1, {2})}, per_rank={"rank": rank}),
        step=3,
    )
    return fingerprint(model, optimizer)


def load_and_save(rank: int, world: int, folder: str, out: str, stage: int) -> dict[str, str]:
    model = build(5, stage)
    optimizer = optimizer_of(model, lr=3.0)
    checkpoint = open_verified(folder, resume="must")
    assert checkpoint is not None
    assert restore_module(checkpoint, model, optimizer)["client"] == (1, {2})
    for parameter, state in optimizer.state.items():
        assert isinstance(state["exp_avg"], DTensor) == isinstance(parameter, DTensor)
        if isinstance(parameter, DTensor):
            assert state["exp_avg"].placements == parameter.placements
        assert state["step"].device.type == "cpu" and state["step"].dim() == 0
    save_snapshot(out, "a", build_snapshot(model, optimizer, state={"client": (1, {2})}), step=3)
    result = fingerprint(model, optimizer)
    train_steps(model, optimizer, 1)
    assert fingerprint(model, optimizer) != result
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of 4 ranks at stage 3, and what it must load as."""
    folder = tmp_path_factory.mktemp("saved")
    prints = run_ranks(save_trained, 4, str(folder), 3)
    assert all(p == prints[0] for p in prints)
    assert len(prints[0]) > 30
    return folder, prints[0]


@pytest.mark.parametrize(
    ("world", "stage"),
    [(1, 0), nightly(1, 3), (2, 2), nightly(2, 3), nightly(2, 0), (3, 1), nightly(4, 3), nightly(8, 3)],
)
def test_row01_saved_at_four_ranks_loads_at_any_world_and_stage(saved, tmp_path, world, stage):
    """PAIN_POINTS 1: parameters and moments bit-equal; and back to 4 ranks, bit-equal again."""
    folder, expected = saved
    out = tmp_path / "out"
    for found in run_ranks(load_and_save, world, str(folder), str(out), stage):
        assert found == expected
    if (world, stage) in ((3, 1), (2, 0)):
        for found in run_ranks(load_and_save, 4, str(out), str(tmp_path / "back"), 3):
            assert found == expected
        a, b = Checkpoint.open(folder), Checkpoint.open(tmp_path / "back")
        names = a.tensor_names("model/") + a.tensor_names("optim/")
        assert names == b.tensor_names("model/") + b.tensor_names("optim/")
        assert all(torch.equal(a.read(name), b.read(name)) for name in names)


def test_row01_the_comparison_can_fail(saved, tmp_path):
    folder, expected = saved
    found = run_ranks(load_with_a_changed_bit, 2, str(folder))[0]
    assert {name for name in expected if found[name] != expected[name]} == {"hidden.weight exp_avg"}


def load_with_a_changed_bit(rank: int, world: int, folder: str) -> dict[str, str]:
    model = build(5, 3)
    optimizer = optimizer_of(model)
    restore_module(Checkpoint.open(folder), model, optimizer)
    if rank == 1:
        optimizer.state[model.hidden.weight]["exp_avg"].to_local().view(torch.int32)[0, 0] ^= 1
    return fingerprint(model, optimizer)


def test_row34_ties_survive_sharding(saved):
    folder, _ = saved
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.manifest.aliases == {"model/head.weight": "model/embed.weight"}
    assert "optim/exp_avg/embed.weight" in checkpoint.tensor_names()
    assert not [name for name in checkpoint.tensor_names() if "head" in name or "scratch" in name]


def test_every_rank_writes_only_its_own_and_nothing_twice(saved):
    folder, _ = saved
    checkpoint = Checkpoint.open(folder)
    stored = {file.name for file in (Path(folder) / "a").iterdir()} - {"manifest.json"}
    assert stored == set(checkpoint.manifest.files)
    weight = checkpoint.manifest.tensors["model/embed.weight"]
    assert [(p.file[6:11], p.offset, p.size) for p in weight.pieces] == [
        ("00000", (0, 0), (2, 5)),
        ("00001", (2, 0), (2, 5)),
        ("00002", (4, 0), (2, 5)),
        ("00003", (6, 0), (1, 5)),
    ]
    hidden = checkpoint.manifest.tensors["model/hidden.weight"]
    assert [p.size for p in hidden.pieces] == [(1, 5)] * 3
    assert checkpoint.per_rank(2)["rank"] == 2
    written = sum(record.size - record.header_bytes for record in checkpoint.manifest.files.values())
    assert written == sum(record.nbytes for record in checkpoint.manifest.tensors.values())


SHAPES = [(7, 5), (12, 6), (1, 3), (2, 7), (6,), (0, 4), ()]
PLACEMENTS = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Shard(1)),
    (Replicate(), Shard(0)),
    (Shard(-1), Replicate()),
    (Replicate(), Replicate()),
]


def laid_out(mesh, turn: int) -> dict[str, DTensor]:
    """Tensors of many shapes in every placement; ``turn`` rotates which placement a name gets."""
    found = {}
    for index, shape in enumerate(SHAPES):
        values = torch.arange(int(numpy.prod(shape)), dtype=torch.float32).reshape(shape) + 100 * index
        fitting = [p for p in PLACEMENTS if all(getattr(q, "dim", 0) < len(shape) for q in p)]
        fitting = fitting if shape else [(Replicate(), Replicate())]
        for number in range(len(fitting)):
            placements = fitting[(number + turn) % len(fitting)]
            found[f"model/{shape} {number}"] = distribute_tensor(values.clone(), mesh, placements)
    return found


def save_placements(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    tensors: dict[str, torch.Tensor] = dict(laid_out(mesh, 0))
    values = torch.arange(72.0).reshape(12, 6)
    strided = distribute_tensor(values, mesh, (_StridedShard(0, split_factor=3), Shard(0)))
    tensors["model/strided"] = strided
    tensors["model/interleaved"] = distribute_tensor(values, mesh, (Replicate(), _StridedShard(0, split_factor=2)))
    tensors["model/plain"] = torch.arange(5.0)
    save_snapshot(folder, "t", Snapshot(tensors, state={"ema": strided, "here": rank}), step=0)


def load_placements(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (3, 2))
    expected = laid_out(mesh, 3)
    live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    missing = open_verified(folder, resume="must").read_into(live, strict=False)
    assert not missing
    for name, tensor in expected.items():
        assert torch.equal(live[name].to_local(), tensor.to_local()), (name, tensor.placements)
    strided = torch.zeros(12, 6)
    open_verified(folder, resume="must").read_into({"model/strided": strided}, strict=False)
    assert torch.equal(strided, torch.arange(72.0).reshape(12, 6))


def test_every_placement_on_a_two_dimensional_mesh(tmp_path):
    run_ranks(save_placements, 6, str(tmp_path))
    checkpoint = open_verified(tmp_path, resume="must")
    for index, shape in enumerate(SHAPES):
        values = torch.arange(int(numpy.prod(shape)), dtype=torch.float32).reshape(shape) + 100 * index
        names = [name for name in checkpoint.tensor_names() if name.startswith(f"model/{shape} ")]
        assert names
        for name in names:
            assert torch.equal(checkpoint.read(name), values), name
    values = torch.arange(72.0).reshape(12, 6)
    for name in ("model/strided", "model/interleaved"):
        assert torch.equal(checkpoint.read(name), values), name
    assert torch.equal(checkpoint.state["ema"], values) and checkpoint.state["here"] == 0
    run_ranks(load_placements, 6, str(tmp_path))


def save_partial(rank: int, world: int, folder: str) -> str:
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (world,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(UnserializableStateError, match=r"model/x: placement .* unreduced") as caught:
        save_snapshot(folder, "t", Snapshot({"model/x": partial}), step=0)
    return str(caught.value)


def test_unreduced_values_are_refused_on_every_rank(tmp_path):
    texts = run_ranks(save_partial, 2, str(tmp_path))
    assert texts[0] == texts[1]


def save_replicated(rank: int, world: int, folder: str) -> None:
    tensors = {f"model/{i}": torch.full((1000,), float(i)) for i in range(8)}
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(rank)
    snapshot = build_snapshot(model)
    save_snapshot(
        folder,
        "t",
        Snapshot({**tensors, **snapshot.tensors}, rank_local=snapshot.rank_local, per_rank={"r": (rank,)}),
        step=0,
    )


def test_replicas_are_written_once_by_ranks_in_turn_and_buffers_by_the_first(tmp_path):
    run_ranks(save_replicated, 4, str(tmp_path))
    checkpoint = Checkpoint.open(tmp_path)
    sizes = [record.size for name, record in checkpoint.manifest.files.items() if ".model." in name]
    assert len(sizes) == 4 and max(sizes) < 1.2 * min(sizes)
    assert torch.equal(checkpoint.read("model/running_mean"), torch.zeros(3))
    assert [checkpoint.per_rank(r)["r"] for r in range(4)] == [(0,), (1,), (2,), (3,)]


def two_groups(rank: int, world: int, folder: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    for step in range(3):
        snapshot = Snapshot({"model/x": torch.full((3,), float(mine + step))}, per_rank={"rank": rank})
        save_snapshot(folder, f"job{mine}", snapshot, step=step, group=groups[mine])
    with pytest.raises(ValueError, match="not in the process group"):
        save_snapshot(folder, "x", Snapshot(), step=0, group=groups[1 - mine])


def test_two_groups_save_to_one_directory_at_once(tmp_path):
    run_ranks(two_groups, 4, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"job0", "job1", "latest"}
    for mine in range(2):
        checkpoint = open_verified(tmp_path, f"job{mine}")
        assert checkpoint is not None and checkpoint.world_size == 2 and checkpoint.step == 2
        assert torch.equal(checkpoint.read("model/x"), torch.full((3,), mine + 2.0))
        assert checkpoint.per_rank(1)["rank"] == 2 * mine + 1


class LocalMomentum(torch.optim.Optimizer):
    """An optimiser that keeps its state as the plain local shard, as fused CPU steps like to."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            local, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad))
            state = self.state[parameter]
            state.setdefault("momentum", torch.zeros_like(local)).mul_(0.9).add_(grad)
            state["count"] = state.get("count", 0) + 1
            local.sub_(state["momentum"], alpha=0.1)


def local_state(rank: int, world: int, folder: str, out: str, load_first: bool) -> tuple[list, bool]:
    model = build(5, 3)
    optimizer = LocalMomentum(model.parameters())
    if load_first:
        restore_module(open_verified(folder, resume="must"), model, optimizer)
        assert all(not isinstance(s["momentum"], DTensor) for s in optimizer.state.values())
        assert all(s["momentum"].shape == p.to_local().shape for p, s in optimizer.state.items() if p.dim())
    losses = train_steps(model, optimizer, 2, seed=1 if load_first else 0)
    if not load_first:
        save_snapshot(folder, "a", build_snapshot(model, optimizer), step=2)
        losses = train_steps(model, optimizer, 2, seed=1)
    return losses


def test_state_kept_as_local_shards_reshards_too(tmp_path):
    expected = run_ranks(local_state, 4, str(tmp_path), "", False)[0]
    assert Checkpoint.open(tmp_path).manifest.tensors["optim/momentum/embed.weight"].shape == (7, 5)
    for world in (1, 3, 4):
        for losses in run_ranks(local_state, world, str(tmp_path), "", True):
            assert losses == expected
