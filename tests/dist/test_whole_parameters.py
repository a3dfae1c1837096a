"""What a program sees of the model between steps: whole plain parameters below stage 3, no silent part of one at 3."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import thalweg
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.comm.collectives.shared_memory import CommError
from thalweg.optim.step import EngineOptimizer

REUSE_RANKS = True

RATE = 0.1
WAYS = ("shared", "wire")


class Net(nn.Module):
    """Rows that two ranks do not share evenly, a tie, a buffer and a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.tied = self.up
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(7, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.down(self.norm(self.up(x).relu())) * self.scale)


def _net() -> Net:
    torch.manual_seed(3)
    return Net()


@contextmanager
def _engine(stage: int, way: str = "shared", **extra: Any) -> Iterator[thalweg.Engine]:
    os.environ["THALWEG_SHARED_MEMORY"] = str(int(way == "shared"))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.5}},
        "steps_per_print": 0,
        "cpu_kernels": "torch",
    }
    try:
        engine, *_ = thalweg.initialize(model=_net(), config=config | extra)
    finally:
        os.environ.pop("THALWEG_SHARED_MEMORY")
    yield engine
    engine.close()


def _batch(step: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def _step(model: Any, step: int, rows: slice = slice(None)) -> Tensor:
    loss = model(_batch(step)[rows].to(next(model.parameters()).device)).pow(2).mean()
    if isinstance(model, thalweg.Engine):
        model.backward(loss)
        model.step()
    else:
        loss.backward()
    return loss.detach()


class Plain:
    """The same on one process; batch norm sees all rows here, so its statistics are those of rank 0's."""

    def __init__(self) -> None:
        self.net, self.ranks = _net(), 2
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE, momentum=0.5)

    def step(self, step: int) -> None:
        for rank in range(self.ranks):
            (self.net(_batch(step)[rank::2]).pow(2).mean() / self.ranks).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _worst(module: nn.Module, plain: nn.Module) -> float:
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max(float((a.detach().float().cpu() - b.detach().cpu()).abs().max()) for a, b in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().cpu(), b.detach().cpu())


def _reads(rank: int, world: int, stage: int, way: str) -> None:
    plain = Plain()
    with _engine(stage, way) as engine:
        module: Any = engine.module
        before = dict(module.named_parameters())
        seen: list[torch.Size] = []
        handle = module.down.weight.register_hook(lambda grad: seen.append(grad.shape))
        for step in range(3):
            _step(engine, step, slice(rank, None, 2))
            plain.step(step)
            assert _worst(module, plain.net) < 1e-6
        assert seen == [torch.Size([5, 7])] * 3
        handle.remove()
        after = dict(module.named_parameters())
        assert all(after[name] is before[name] for name in before), "the same objects at all times"
        assert module.tied.weight is module.up.weight
        weight = module.down.weight
        assert isinstance(weight, nn.Parameter) and not isinstance(weight, DTensor)
        assert abs(weight.norm().item() - plain.net.down.weight.norm().item()) < 1e-6
        assert weight.detach().cpu().numpy().shape == (5, 7) and len(weight.tolist()) == 5
        assert torch.autograd.grad(module(_batch(9)).sum(), weight)[0].shape == (5, 7)

        copied = copy.deepcopy(module)
        assert type(copied) is Net and type(copied.up) is nn.Linear and copied.tied is copied.up
        assert all(type(param) is nn.Parameter for param in copied.parameters())
        assert not copied._forward_pre_hooks and not copied.up._forward_hooks
        assert _worst(copied, module) == 0.0
        average = torch.optim.swa_utils.AveragedModel(module)
        average.update_parameters(module)
        for state in (module.state_dict(), copied.state_dict()):
            assert all(type(value) is Tensor for value in state.values())
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            again = _net()
            again.load_state_dict(torch.load(file))
            assert _worst(again, module) == 0.0
        assert type(pickle.loads(pickle.dumps(module))) is Net

        loss = engine(_batch(5)[rank::2]).pow(2).mean()
        engine.backward(loss)
        for part in range(2):
            (plain.net(_batch(5)[part::2]).pow(2).mean() / 2).backward()
        norms = [p.grad.norm().item() for p in module.parameters()]
        assert norms == pytest.approx([p.grad.norm().item() for p in plain.net.parameters()], rel=1e-5)
        frozen_at = weight.detach().clone()
        _step(copied, 7)  # a copy trains by itself
        assert torch.equal(weight, frozen_at) and copied.down.weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_programs_see_whole_plain_parameters(stage: int, way: str) -> None:
    run_ranks(_reads, 2, stage, way)


@torch.no_grad()
def _write_index(net: Any) -> None:
    net.down.weight[1] = 0.25
    net.up.bias[2:4] += 1


def _write_data(net: Any) -> None:
    net.down.weight.data.mul_(0.5)
    net.up.weight.data[0, 0] = 2.0


def _set_data(net: Any) -> None:
    net.down.weight.data = net.down.weight.data * 0.5


def _load(net: Any) -> None:
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})


def _vector(net: Any) -> None:
    vector = torch.nn.utils.parameters_to_vector(net.down.parameters())
    torch.nn.utils.vector_to_parameters(vector.detach() * 0.5, net.down.parameters())


def _initialise(net: Any) -> None:
    torch.manual_seed(5)
    fill = nn.init.eye_ if net.up.weight.is_cuda else nn.init.normal_  # a GPU draws other numbers
    fill(net.up.weight)


WRITES: list[Callable[[Any], None]] = [_write_index, _write_data, _set_data, _load, _vector, _initialise]


def _writes(rank: int, world: int, stage: int, way: str, forget: bool = False) -> float:
    worst = 0.0
    for when in ("before", "between"):
        for write in WRITES:
            plain = Plain()
            with _engine(stage, way) as engine:
                for step in range(3):
                    if step == 1 and when == "before":
                        write(engine.module)
                        if not forget:
                            write(plain.net)
                        worst = max(worst, _worst(engine.module, plain.net))
                    if step == 1 and when == "between":  # the backward pass and the step
                        loss = engine(_batch(step)[rank::2]).pow(2).mean()
                        engine.backward(loss)
                        write(engine.module)
                        engine.step()
                        for part in range(2):
                            (plain.net(_batch(step)[part::2]).pow(2).mean() / 2).backward()
                        if not forget:
                            write(plain.net)
                        plain.optimizer.step()
                        plain.optimizer.zero_grad()
                    else:
                        _step(engine, step, slice(rank, None, 2))
                        plain.step(step)
                whole = engine.state_dict()
                shown = dict(engine.module.named_parameters())
                assert all(_same(whole[name], param) for name, param in shown.items())
                worst = max(worst, _worst(engine.module, plain.net))
    return worst


@pytest.mark.parametrize(("stage", "way"), [nightly(0, "shared"), (1, "wire"), nightly(2, "shared")])
def test_what_programs_write_is_trained_on(stage: int, way: str) -> None:
    assert max(run_ranks(_writes, 2, stage, way)) < 2e-6


def test_negative_control_a_write_that_is_lost_is_noticed() -> None:
    assert max(run_ranks(_writes, 2, 2, "shared", True)) > 1e-2


def _alone(rank: int, world: int) -> None:
    """What one rank does alone stays with it; where it would make models differ, the next pass says so."""
    with _engine(2) as engine:
        _step(engine, 0, slice(rank, None, 2))
        weight: Any = engine.module.get_parameter("down.weight")
        kept = weight.detach().clone()
        engine.eval()
        with torch.no_grad():
            if rank == 0:  # an evaluation on one rank alone asks nothing of the others
                assert torch.isfinite(engine(_batch(1))).all()
        engine.train()
        if rank == 1:
            weight.data.add_(1)
        torch.distributed.barrier()
        assert torch.equal(weight, kept + rank), "a rank's writes are its own"
        with pytest.raises(CommError, match="down.weight" if rank == 1 else "no parameter"):
            _step(engine, 1, slice(rank, None, 2))


def test_a_rank_that_writes_alone_is_told() -> None:
    run_ranks(_alone, 2, reuse=False)


def _half(rank: int, world: int, section: str) -> None:
    """In half precision programs see what is computed with; masters keep what no write has touched."""
    with _engine(2, **{section: {"enabled": True}}) as engine:
        module: Any = engine.module
        dtype = module.down.weight.dtype
        assert dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[section]
        masters = engine.state_dict()
        assert masters["down.weight"].dtype == torch.float32
        assert _same(module.down.weight, masters["down.weight"].to(dtype))
        module.down.bias.data.fill_(1 / 3)
        state = engine.state_dict()
        assert _same(state["down.weight"], masters["down.weight"])
        assert _same(state["down.bias"], torch.full((5,), 1 / 3).to(dtype).float())
        state["down.weight"] += 1e-5  # less than half a unit of the compute dtype
        engine.load_state_dict(state)
        assert _same(engine.state_dict()["down.weight"], state["down.weight"])


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_half_precision_shows_what_is_computed_with(section: str) -> None:
    run_ranks(_half, 2, section)


def _thaw(rank: int, world: int, stage: int) -> None:
    with _engine(stage) as engine:
        module: Any = engine.module
        module.down.requires_grad_(False)
        kept = [p.detach().clone() for p in module.down.parameters()]
        _step(engine, 0, slice(rank, None, 2))
        assert all(torch.equal(p, k) and p.grad is None for p, k in zip(module.down.parameters(), kept, strict=True))
        module.down.weight.requires_grad = True
        _step(engine, 1, slice(rank, None, 2))
        assert not torch.equal(module.down.weight, kept[0]) and torch.equal(module.down.bias, kept[1])
        momentum = engine.optimizer.state[module.down.weight]["momentum_buffer"]
        assert isinstance(engine.optimizer, EngineOptimizer) and momentum.shape == (5, 7)
        with pytest.raises(ValueError, match="keeps its shape and dtype"):
            module.half()


@pytest.mark.parametrize("stage", [0, 2])
def test_flags_and_state_are_found_by_the_parameter_that_programs_see(stage: int) -> None:
    run_ranks(_thaw, 2, stage)


def _cast(rank: int, world: int, stage: int) -> None:
    """Casts that would round the masters are refused, that to the dtype it computes in, for an evaluation, is none."""
    for extra, others in (({}, ("half", "bfloat16")), ({"bf16": {"enabled": True}}, ("half", "double"))):
        with _engine(stage, **extra) as engine:
            module: Any = engine.module
            _step(engine, 0, slice(rank, None, 2))
            masters = engine.state_dict()
            assert masters["down.weight"].dtype == torch.float32
            for name in others:
                with pytest.raises(ValueError, match="keeps its shape and dtype"):
                    getattr(module, name)()
            module.to(device=engine.device, dtype=torch.bfloat16 if extra else torch.float32)
            assert all(_same(value, masters[name]) for name, value in engine.state_dict().items())
            _step(engine, 1, slice(rank, None, 2))
            assert not _same(engine.state_dict()["down.weight"], masters["down.weight"])


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_are_not_rounded_by_a_cast_of_the_model(stage: int) -> None:
    run_ranks(_cast, 2, stage)


class Saved(Net):
    """Saves as Hugging Face's models do."""

    def save_pretrained(self, folder: str, state_dict: Any = None) -> None:
        Path(folder).mkdir()
        torch.save(state_dict or self.state_dict(), Path(folder) / "model.pt")


def _stage3(rank: int, world: int, folder: str) -> None:
    plain = Plain()
    with _engine(3) as engine:
        module: Any = engine.module
        seen: list[torch.Size] = []
        module.down.weight.register_hook(lambda grad: seen.append(grad.shape))
        for step in range(2):
            _step(engine, step, slice(rank, None, 2))
            plain.step(step)
        assert seen == [torch.Size([5, 7])] * 2
        engine.backward(engine(_batch(5)[rank::2]).pow(2).mean())
        for part in range(2):
            (plain.net(_batch(5)[part::2]).pow(2).mean() / 2).backward()
        for ours, theirs in zip(module.parameters(), plain.net.parameters(), strict=True):
            for a, b in ((ours, theirs), (ours.grad, theirs.grad)):
                found = [a.detach().norm().item(), float(a.detach().sum()), a.detach().max().item()]
                assert found == pytest.approx([b.norm().item(), float(b.sum()), b.max().item()], rel=1e-4, abs=1e-6)
        for work in (copy.deepcopy, torch.optim.swa_utils.AveragedModel, pickle.dumps):
            with pytest.raises(ValueError, match=r"engine\.state_dict\(\)"):
                work(module)
        with pytest.raises(ValueError, match=r"engine\.state_dict\(\)"):
            torch.save({"model": module.state_dict()}, io.BytesIO())
        assert copy.deepcopy(module.state_dict())["down.weight"].to_local().shape[1:] == (7,)
        with thalweg.zero.GatheredParameters(list(module.parameters())):
            copied = copy.deepcopy(module)
        assert type(copied) is Net and _worst(copied, plain.net) < 1e-5
        engine.zero_grad()
    torch.manual_seed(3)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    saved, *_ = thalweg.initialize(model=Saved(), config=config)
    target = Path(folder) / f"rank{rank}"
    with pytest.raises(ValueError, match="save_pretrained at ZeRO stage 3"):
        saved.module.save_pretrained(str(target))
    assert not target.exists(), "nothing is half written"
    saved.module.save_pretrained(str(target), state_dict=saved.state_dict())
    assert _same(torch.load(target / "model.pt")["down.weight"], _net().down.weight)
    saved.close()


def test_stage_3_gives_no_part_for_the_whole(tmp_path: Path) -> None:
    run_ranks(_stage3, 2, str(tmp_path))
