"""Activation offload under the engine, and inputs in parts over a group of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.models import tiny_gpt
from tests.dist.parity import ParityCase, bitwise_equal, run_engine
from tests.dist.tensor_models import build_model, compute_loss
from tests.dist.tensor_models import make_batch as llama_batch
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.activation_checkpointing import offloaded_forward
from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)
from thalweg.activation_checkpointing.offload import PartitionedActivationOffloader

REUSE_RANKS = True


def _stages(rank: int, world: int, folder: str, cases: list[ParityCase]) -> list[bool]:
    offloaded_forward.MIN_OFFLOAD_BYTES = 1
    found = []
    for case in cases:
        model = tiny_gpt(dropout=0.1)
        runs = []
        for section in ({"policy": "full"}, {"policy": "full", "offload": "nvme"}):
            torch.manual_seed(5)
            extra = {"activation_checkpointing": section, "memory": {"nvme_path": folder}, "seed": 3}
            runs.append(run_engine(model, case.with_(extra=extra), rank, world))
        found.append(bitwise_equal(runs[0].parameters, runs[1].parameters) and runs[0].losses == runs[1].losses)
    return found


@pytest.mark.nightly
def test_on_disk_at_every_stage() -> None:
    short = ParityCase(windows=(2,) * 3, accumulation=2)
    cases = [short.with_(stage=stage) for stage in range(4)] + [short.with_(stage=3, dtype="bf16")]
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(_stages, 2, folder, cases) == [[True] * len(cases)] * 2
        assert not list(Path(folder).iterdir())


def _parts(rank: int, world: int) -> tuple[bool, int, int]:
    offloaded_forward.MIN_OFFLOAD_BYTES = 1
    tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(0))
    grads: list[list[torch.Tensor]] = []
    held = []

    class Counting(PartitionedActivationOffloader):
        def save(self, tensor: torch.Tensor) -> Any:
            kept: Any = super().save(tensor)
            held.append((tensor.numel(), kept.shard.numel()))
            return kept

    for saver in (None, Counting(dist.group.WORLD)):  # type: ignore[arg-type]
        model = tiny_gpt(dropout=0.1)
        apply_activation_checkpointing(model, list(model.blocks), ActivationCheckpointPolicy("full"), saver)
        torch.manual_seed(1)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    return bitwise_equal(*grads), sum(whole for whole, _ in held), sum(part for _, part in held)


@pytest.mark.parametrize("world", [2, nightly(3)])
def test_in_parts_the_bits_are_the_same(world: int) -> None:
    for same, whole, part in run_ranks(_parts, world):
        assert same and whole > 0
        assert part <= whole / world + 3


def _over_tensor_ranks(rank: int, world: int, folder: str) -> list[Any]:
    """An engine on two tensor ranks whose units keep parts of their inputs, in memory or on disk."""
    import thalweg
    from thalweg.activation_checkpointing.offload import NvmeActivationOffloader

    offloaded_forward.MIN_OFFLOAD_BYTES = 1
    closed = []
    plain_save, plain_close = PartitionedActivationOffloader.save, NvmeActivationOffloader.close
    NvmeActivationOffloader.close = lambda self: (closed.append(1), plain_close(self))[1]  # type: ignore[method-assign]
    found: list[Any] = []
    for parts, offload in ((False, "none"), (True, "none"), (True, "nvme")):
        held = []

        def counting(self: Any, tensor: torch.Tensor, held: list[float] = held) -> Any:
            kept = plain_save(self, tensor)
            part = kept.shard if isinstance(kept.shard, torch.Tensor) else kept.shard.fetch()
            held.append(part.numel() / tensor.numel())
            return kept

        PartitionedActivationOffloader.save = counting  # type: ignore[method-assign]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "cpu_kernels": "torch",
            "log_level": "error",
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "tensor_parallel": {"autotp_size": 2},
            "memory": {"nvme_path": folder},
            "activation_checkpointing": {
                "policy": "full", "partition_activations": parts, "offload": offload
            },
        }  # fmt: skip
        engine = thalweg.initialize(model=build_model("llama"), config=config)[0]
        losses = []
        for step in range(2):
            loss = compute_loss(engine, llama_batch(step, 2))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        found.append((losses, len(held), max(held, default=0.0)))
    return [*found, len(closed)]


def test_over_tensor_ranks_each_keeps_its_part(tmp_path: Path) -> None:
    for whole, parts, on_disk, closed in run_ranks(_over_tensor_ranks, 2, str(tmp_path)):
        assert whole[0] == parts[0] == on_disk[0]
        assert whole[1] == 0
        assert parts[1] == on_disk[1] > 0
        assert parts[2] < 0.51 and on_disk[2] < 0.51
        assert closed == 1
