"""Helpers of the checkpoint tests: a tiny job, hashes of what a checkpoint holds, failing disks."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.checkpoint import (
    Checkpoint,
    FileSystem,
    Snapshot,
    build_snapshot,
    open_verified,
    save_snapshot,
)


def tiny_snapshot(seed: int = 0) -> Snapshot:
    """A few tensors of several dtypes with values that depend on ``seed``; three shard files."""
    generator = torch.Generator().manual_seed(seed)
    return Snapshot(
        tensors={
            "model/weight": torch.randn(5, 3, generator=generator),
            "model/half": torch.randn(7, generator=generator).bfloat16(),
            "optim/step/weight": torch.tensor(float(seed)),
        },
        aliases={"model/tied": "model/weight"},
        state={"client": {"seed": seed, "tensor": torch.arange(4) + seed}},
    )


def digest(checkpoint: Checkpoint) -> str:
    """One hash over every tensor, the state and its values, all read through the checks."""
    total = hashlib.sha256(repr(checkpoint.head.step).encode())
    for name in checkpoint.tensor_names():
        tensor = checkpoint.read(name)
        total.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    total.update(repr(checkpoint.state).encode())
    return total.hexdigest()


def saved_digest(snapshot: Snapshot, step: int, folder: Path) -> str:
    """The digest that a checkpoint of ``snapshot`` has."""
    save_snapshot(folder, "reference", snapshot, step=step)
    return digest(Checkpoint.open(folder))


def newest_digest(folder: Path) -> str:
    """The digest of what a resuming job would take."""
    checkpoint = open_verified(folder, resume="must")
    assert checkpoint is not None
    with checkpoint:
        return digest(checkpoint)


def list_names(folder: Path) -> set[str]:
    """All names in the directory, hidden ones included."""
    return {path.name for path in folder.iterdir()}


OPERATIONS = tuple(name for name, value in vars(FileSystem).items() if callable(value) and not name.startswith("_"))


class FaultInjectingFileSystem(FileSystem):
    """A file system that calls ``before_operation(index, operation, target)`` ahead of each operation.

    ``before_operation`` may raise (a failing disk), sleep (a slow one) or kill the process; ``index``
    counts from 0, ``target`` is the path or handle.  ``calls`` keeps what was called.
    """

    def __init__(self, before_operation: Callable[[int, str, Any], None] | None = None) -> None:
        self.before_operation = before_operation
        self.calls: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in OPERATIONS:
            return attribute

        def watched(target: Any, *args: Any, **options: Any) -> Any:
            index = len(self.calls)
            self.calls.append((name, target))
            if self.before_operation is not None:
                self.before_operation(index, name, target)
            return attribute(target, *args, **options)

        return watched


class NoFsyncFileSystem(FaultInjectingFileSystem):
    """A probe that does not wait for the disk: where no power is lost, fsync changes nothing."""

    def fsync(self, handle: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


def fail_at(index: int, code: int = errno.EIO, *, forever: bool = False) -> FaultInjectingFileSystem:
    """A disk whose operation ``index`` fails (and, with ``forever``, all after it)."""

    def before(k: int, operation: str, target: Any) -> None:
        if k == index or (forever and k > index):
            raise OSError(code, os.strerror(code), str(target))

    return NoFsyncFileSystem(before)


def kill_at(index: int) -> FaultInjectingFileSystem:
    """A disk at whose operation ``index`` the process is killed as by ``kill -9``."""

    def before(k: int, operation: str, target: Any) -> None:
        if k == index:
            os.kill(os.getpid(), 9)

    return NoFsyncFileSystem(before)


def run_in_fork(action: Callable[[], Any]) -> int:
    """Run ``action`` in a forked child; returns the wait status (0: it finished)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)  # no pytest below this point
    return os.waitpid(pid, 0)[1]


def record_operations(action: Callable[[FileSystem], Any]) -> FaultInjectingFileSystem:
    """Run ``action`` on a probe that does nothing; its ``log`` has the operations."""
    probe = NoFsyncFileSystem()
    action(probe)
    return probe


def small_model(seed: int = 0) -> nn.Module:
    """Uneven dims, a frozen weight, a tie, bf16, buffers of both kinds, a 0-dim parameter."""
    torch.manual_seed(seed)
    return SmallModel()


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.hidden = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 5)
        self.low = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        x = self.frozen(torch.tanh(self.hidden(x)))
        x = self.low(x.bfloat16()).float() * self.scale
        return self.head(x)


def train_steps(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> list[float]:
    """Steps on random tokens; the losses."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 7, (6,), generator=generator)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits, tokens.to(logits.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_model(folder: Path, model: nn.Module, optimizer: Any, step: int = 0, **options: Any) -> Path:
    """Collect and save under ``step<N>``."""
    return save_snapshot(folder, f"step{step}", build_snapshot(model, optimizer), step=step, **options)
