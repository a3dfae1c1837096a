"""Every tier against none: the same bits (PAIN_POINTS rows 21, 23, 24; the parity matrix of the tiers)."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

from tests.dist.models import OddShapesModel, tiny_gpt
from tests.dist.parity import ParityCase, bitwise_equal, ragged_windows, run_engine
from tests.harness import run_ranks
from tests.marks import nightly


def tiers(case: ParityCase, folder: str, param: str = "none", optimizer: str = "none", **more) -> ParityCase:
    """The case with these tiers; ``more`` are options of ``offload_param``."""
    zero = {"stage": case.stage}
    if param != "none":
        zero["offload_param"] = {
            "device": param,
            "nvme_path": folder,
            "max_in_cpu": 0,
            "buffer_count": 2,
            **more,
        }
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer, "nvme_path": folder}
    return case.with_(extra={**case.extra, "zero_optimization": zero})


def combinations(stage: int, every: bool) -> list[tuple[str, str]]:
    """(parameters, optimiser state) of a stage: every pair of tiers, or those that differ most."""
    if not every:
        return [("nvme", "nvme"), ("none", "cpu")] if stage == 3 else [("none", "nvme")]
    params = ("none", "cpu", "nvme") if stage == 3 else ("none",)
    return [(p, o) for p in params for o in ("none", "cpu", "nvme") if (p, o) != ("none", "none")]


def _cells(world: int) -> list[tuple[str, ParityCase]]:
    """What is run for all pairs of tiers (the first), and for some."""
    if world == 4:
        return [
            ("gpt", ParityCase(windows=ragged_windows(2, 3), accumulation=2, clip=0.05)),
            ("odd", ParityCase(windows=(1,) * 3)),
            ("gpt", ParityCase(dtype="fp16", windows=(1,) * 2)),
            ("gpt", ParityCase(windows=(1,) * 2, optimizer="SGD", params={"lr": 0.1, "momentum": 0.9})),
            ("gpt", ParityCase(windows=(1,) * 2, optimizer="Lamb", params={"lr": 1e-2})),
        ]
    cells = [
        ("gpt", ParityCase(windows=(1,) * 4)),
        ("gpt", ParityCase(windows=ragged_windows(2, 3), accumulation=2, clip=0.05)),
        ("gpt", ParityCase(dtype="bf16", windows=(1,) * 3)),
        ("gpt", ParityCase(windows=(1,) * 3, extra={"tiling": {"loss": True}})),
        ("gpt", ParityCase(windows=(1,) * 3, optimizer="Lion", params={"lr": 1e-3})),
    ]
    if world == 1:
        cells += [
            ("gpt", ParityCase(dtype="fp16", windows=(1,) * 3)),
            ("gpt", ParityCase(windows=(1,) * 3, optimizer="SGD", params={"lr": 0.1, "momentum": 0.9})),
            ("gpt", ParityCase(windows=(1,) * 3, optimizer="Lamb", params={"lr": 1e-2})),
        ]
    if world == 2:
        cells += [
            ("odd", ParityCase(windows=(2,) * 3, accumulation=2)),
            ("odd", ParityCase(windows=(1,) * 3, clip=0.05)),
            ("gpt", ParityCase(dtype="fp16", windows=(1,) * 3, clip=0.05)),
            ("gpt", ParityCase(windows=(1,) * 3, optimizer="SGD", params={"lr": 0.1, "momentum": 0.9})),
            ("gpt", ParityCase(windows=(1,) * 3, optimizer="Lamb", params={"lr": 1e-2})),
        ]
    return cells


def _matrix(rank: int, world: int, every: bool) -> list[str]:
    torch.set_num_threads(1)
    models = {"gpt": tiny_gpt(), "odd": OddShapesModel()}
    failures = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        cells = list(enumerate(_cells(world)))
        for index, (name, plain) in cells if every else cells[::3]:
            for stage in (1, 2, 3)[not every :] if index < 2 else (3,):
                case = plain.with_(stage=stage)
                none = run_engine(models[name], case, rank, world)
                for param, optimizer in combinations(stage, every=index == 0 and world != 4):
                    tiered = run_engine(models[name], tiers(case, folder, param, optimizer), rank, world)
                    if tiered.losses != none.losses or not bitwise_equal(tiered.parameters, none.parameters):
                        worst = tiered.max_loss_difference(none)
                        failures.append(f"{name} {param}/{optimizer} {case} differs, losses by {worst:.1e}")
    return failures


@pytest.mark.parametrize(("world", "every"), [nightly(2, False), *(nightly(world, True) for world in (1, 2, 4))])
def test_every_tier_gives_the_bits_of_none(world, every):
    for failures in run_ranks(_matrix, world, every, timeout=400):
        assert failures == []


def _wrong(rank: int, world: int) -> bool:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        case = ParityCase(3, windows=(1,) * 3)
        none = run_engine(tiny_gpt(), case, rank, world)
        wrong = tiers(case.with_(params={"lr": 1.0001e-2}), folder, "nvme", "nvme")
        return bitwise_equal(run_engine(tiny_gpt(), wrong, rank, world).parameters, none.parameters)


def test_negative_control_a_wrong_rate_is_noticed():
    assert run_ranks(_wrong, 2) == [False, False]


def _hosts(rank: int, world: int) -> list[str]:
    """Ranks on several hosts, as far as they can tell: shards are read ahead of FSDP2's gather."""
    os.environ["THALWEG_HOST"] = f"host {rank // 2 if world == 4 else rank}"
    torch.set_num_threads(1)
    failures = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for case in (
            ParityCase(3, windows=(1,) * 3),
            ParityCase(3, "bf16", windows=(2,) * 2, accumulation=2, clip=0.05),
        ):
            none = run_engine(tiny_gpt(), case, rank, world)
            tiered = run_engine(tiny_gpt(), tiers(case, folder, "nvme", "nvme"), rank, world)
            if tiered.losses != none.losses or not bitwise_equal(tiered.parameters, none.parameters):
                failures.append(f"{case} differs, losses by {tiered.max_loss_difference(none):.1e}")
    return failures


@pytest.mark.parametrize("world", [2, nightly(4)])
def test_ranks_of_several_hosts_read_their_shards_from_disk(world):
    for failures in run_ranks(_hosts, world, timeout=200):
        assert failures == []
