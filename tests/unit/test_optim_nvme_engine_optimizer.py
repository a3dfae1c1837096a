"""The streamed update behind the optimizer that users hold: clipping, skipped steps, checkpoints."""

from __future__ import annotations

import copy
import math
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from thalweg.checkpoint import build_snapshot, open_verified, restore_module, save_snapshot
from thalweg.optim.accumulation import AccumulationWindow
from thalweg.optim.algorithms.elementwise import AdamW
from thalweg.optim.loss_scaler import LossScaler
from thalweg.optim.offload.nvme_step import NvmeStep
from thalweg.optim.step import EngineOptimizer
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapFile

torch.set_num_threads(1)
MIB = 1 << 20


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 90), nn.LayerNorm(90))


class _NothingToReduce:
    """What an update asks of a sharded model, of a plain one."""

    sites = None

    def finalize_grads(self) -> None:
        pass

    def set_loss_scale(self, scale: float) -> None:
        pass


def _managed(model: nn.Module, swap: SwapFile | None, max_norm: float = 0.0) -> EngineOptimizer:
    inner = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    update = NvmeStep(inner, swap, BufferRing(2, MIB // 4)) if swap is not None else None
    return EngineOptimizer(
        inner, _NothingToReduce(), AccumulationWindow(1), LossScaler(), max_norm=max_norm, strategy=update
    )


def _train(model: nn.Module, optimizer: EngineOptimizer, steps: range, poison: int = -1) -> None:
    for step in steps:
        x = torch.randn(16, 70, generator=torch.Generator().manual_seed(step))
        (model(x).pow(3).sum() * 10).backward()
        if step == poison:
            next(model.parameters()).grad[0, 0] = math.inf
        optimizer.step()
        optimizer.zero_grad()


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _swapped(swap: SwapFile, optimizer: EngineOptimizer) -> bool:
    moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim]
    return bool(moments) and all(swap.locate(v) is not None for v in moments)


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_clipping_and_skipped_steps(tmp_path: Path, max_norm: float) -> None:
    plain, streamed = _model(), _model()
    with closing(SwapFile(tmp_path, 4 * MIB)) as swap:
        first, second = _managed(plain, None, max_norm), _managed(streamed, swap, max_norm)
        for model, optimizer in ((plain, first), (streamed, second)):
            _train(model, optimizer, range(6), poison=3)
        assert _equal(plain, streamed) and _swapped(swap, second)
        assert second.skipped_steps == first.skipped_steps == 1
        assert second.num_updates == 5 and second.grad_norm == first.grad_norm
        _train(plain, first, range(6, 7))
        assert not _equal(plain, streamed)


def test_state_dicts_go_both_ways(tmp_path: Path) -> None:
    plain, streamed = _model(), _model()
    with closing(SwapFile(tmp_path, 8 * MIB)) as swap:
        first, second = _managed(plain, None), _managed(streamed, swap)
        _train(plain, first, range(3))
        streamed.load_state_dict(plain.state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert _swapped(swap, second)
        _train(plain, first, range(3, 5))
        _train(streamed, second, range(3, 5))
        assert _equal(plain, streamed)
        plain.load_state_dict(streamed.state_dict())
        first.load_state_dict(copy.deepcopy(second.state_dict()))
        _train(plain, first, range(5, 7))
        _train(streamed, second, range(5, 7))
        assert _equal(plain, streamed)


@pytest.mark.parametrize(("saved", "loaded"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_of_one_kind_loads_into_the_other(tmp_path: Path, saved: bool, loaded: bool) -> None:
    """State that is loaded is made in the swap file at once, without a copy in memory."""
    folder = tmp_path / "checkpoint"
    with closing(SwapFile(tmp_path, 4 * MIB)) as one, closing(SwapFile(tmp_path, 4 * MIB)) as two:
        model = _model()
        optimizer = _managed(model, one if saved else None)
        _train(model, optimizer, range(3))
        save_snapshot(folder, "t", build_snapshot(model, optimizer), step=3)
        again = _model(1)
        fresh = _managed(again, two if loaded else None)
        checkpoint = open_verified(folder, resume="must")
        assert checkpoint is not None
        with checkpoint:
            restore_module(checkpoint, again, fresh)
        assert not loaded or _swapped(two, fresh)
        _train(model, optimizer, range(3, 6))
        _train(again, fresh, range(3, 6))
        assert _equal(model, again)


def _mapped_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.parametrize("released", [True, False])
def test_saving_and_loading_keep_no_state_in_memory(
    tmp_path: Path, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 MiB of moments pass through the mapping; without the release (negative control) they stay."""
    if not released:
        monkeypatch.setattr(NvmeStep, "release", lambda self, tensor: None)
    model = nn.Linear(3000, 1000)
    with closing(SwapFile(tmp_path, 80 * MIB)) as swap:
        optimizer = _managed(model, swap)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        swap.trim()
        before = _mapped_kib()
        save_snapshot(tmp_path / "checkpoint", "t", build_snapshot(model, optimizer), step=1)
        saved = _mapped_kib()
        checkpoint = open_verified(tmp_path / "checkpoint", resume="must")
        assert checkpoint is not None
        with checkpoint:
            restore_module(checkpoint, model, optimizer)
        grown = max(saved, _mapped_kib()) - before
        assert (grown < 6 << 10) if released else (grown > 20 << 10), grown
        assert _swapped(swap, optimizer)
