"""Tensor parallelism with precision, dropout, recomputation, offload and Muon; what each axis sends."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from tests.dist.parity import full_named
from tests.dist.tensor_models import build_model, compute_loss, make_batch
from tests.dist.tensor_parity import make_config, run_engine, train_engine
from tests.harness import run_ranks

ROWS, STEPS = 4, 6


def _losses(rank: int, world: int, tensor: int, stage: int = 1, dropout: float = 0.0, **extra: Any) -> list[float]:
    model = build_model("reference")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
        if hasattr(module, "n_head"):
            module.dropout = dropout
    ranks = world // tensor
    own = slice(rank // tensor, None, ranks)
    config = make_config(stage, tensor, ROWS, ranks, seed=3, **extra)
    return train_engine(
        model, config, lambda engine, step: compute_loss(engine, make_batch(step, ROWS)[own]), STEPS
    ).losses


def _worst(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def _mixes(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
    for name, extra in (
        ("bf16", {"bf16": {"enabled": True}}),
        ("fp16", {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        ("muon", muon),
        ("state in bf16", {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "state_dtype": "bf16"}},
        }),
    ):  # fmt: skip
        one, two = (_losses(rank, world, tensor, **extra) for tensor in (1, 2))
        found[name] = _worst(two, one)
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    plain = _losses(rank, world, 2, 3, **adam)
    other = _losses(rank, world, 2, 3, optimizer={"type": "AdamW", "params": {"lr": 1.1e-3}})
    found["rate"] = _worst(other, plain)
    with tempfile.TemporaryDirectory() as folder:
        disk = {"device": "nvme", "nvme_path": folder}
        for name, zero in (
            ("state on the host", {"offload_optimizer": {"device": "cpu"}}),
            ("state on disk", {"offload_optimizer": disk}),
            ("all on disk", {"offload_optimizer": disk, "offload_param": disk}),
        ):
            extra = {**adam, "zero_optimization": {"stage": 3, **zero}}
            found[name] = _losses(rank, world, 2, 3, **extra) == plain
    recomputed = {"activation_checkpointing": {"policy": "full"}}
    dropped = _losses(rank, world, 2, dropout=0.2)
    found["recomputed"] = _losses(rank, world, 2, dropout=0.2, **recomputed) == dropped
    found["dropped"] = _worst(dropped, _losses(rank, world, 2))
    return found


@pytest.mark.nightly
def test_precision_muon_offload_and_recomputed_dropout():
    for found in run_ranks(_mixes, 2, timeout=200):
        assert found["bf16"] < 2e-2 and found["fp16"] < 5e-3 and found["state in bf16"] < 2e-2, found
        assert found["muon"] < 1e-4, found
        assert found["rate"] > 1e-6  # another rate would be noticed
        assert found["state on the host"] and found["state on disk"] and found["all on disk"], found
        assert found["recomputed"] and 1e-3 < found["dropped"] < 0.5, found


def _team_after_data_parallelism(rank: int, world: int, folder: str) -> tuple[list[int], list[int], list[float]]:
    """The random numbers' state where data ranks saved and where a team has loaded that; a bias after steps there."""
    import thalweg

    torch.set_num_threads(1)
    states = []
    for tensor in (1, world):
        model = build_model("reference")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        engine, *_ = thalweg.initialize(model=model, config=make_config(1, tensor, ROWS, world // tensor, seed=3))
        if tensor > 1:
            engine.load_checkpoint(folder)
        states.append(torch.get_rng_state().tolist())
        for step in range(3):
            engine.backward(compute_loss(engine, make_batch(step, ROWS)[rank // tensor :: world // tensor]))
            engine.step()
        if tensor == 1:
            engine.save_checkpoint(folder)
        bias = full_named(engine.module.named_parameters())["norm.bias"]
        engine.close()
    return *states, bias.tolist()


def test_a_team_draws_one_dropout_after_a_checkpoint_of_data_ranks(tmp_path):
    one, other = run_ranks(_team_after_data_parallelism, 2, str(tmp_path))
    assert one[0] != other[0]  # the control: so they were saved
    assert one[1:] == other[1:]


def _sent(rank: int, world: int) -> dict[str, Any]:
    """Bytes that a rank sends in a step of each stage, and the bytes of parameters by unit."""
    import thalweg

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        model = build_model("reference")
        blocks = sum(p.numel() for p in model.blocks.parameters()) * 4
        found["all"], found["blocks"] = sum(p.numel() for p in model.parameters()) * 4, blocks
        engine, *_ = thalweg.initialize(model=model, config=make_config(stage, 1, ROWS, world))
        for step in range(2):
            engine.ledger.reset()
            engine.backward(compute_loss(engine, make_batch(step, ROWS)[rank::world]))
            engine.step()
        kinds = ("all_reduce", "reduce_scatter", "all_gather")
        found[f"stage {stage}"] = {kind: engine.ledger.total(kind).sent_bytes for kind in kinds}
        engine.close()
    return found


def test_stages_1_and_2_send_what_data_parallelism_does_and_stage_3_half_as_much_again(monkeypatch):
    monkeypatch.setenv("THALWEG_SHARED_MEMORY", "0")
    for found in run_ranks(_wire_only, 4):
        share = 3 / 4
        pad = 0.06 * found["all"]  # rows that 4 ranks do not divide, and a few numbers of the norm
        plain = found["stage 0"]
        assert abs(plain["all_reduce"] - 2 * share * found["all"]) < pad, found
        for stage in (1, 2):
            sent = found[f"stage {stage}"]
            assert abs(sum(sent.values()) - sum(plain.values())) < pad, found
        three = found["stage 3"]
        assert abs(three["reduce_scatter"] - share * found["all"]) < pad, found
        # the root unit is gathered once, every block twice: 1.5x of data parallelism in all
        assert abs(three["all_gather"] - share * (found["all"] + found["blocks"])) < pad, found


def _wire_only(rank: int, world: int) -> dict[str, Any]:
    import os

    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    return _sent(rank, world)


def _uneven(rank: int, world: int) -> list[str]:
    """Heads and widths that divide by no number of ranks, at three of them."""
    from tests.dist.tensor_parity import run_plain

    torch.set_num_threads(1)
    failures = []
    for name in ("reference, 5 heads", "llama, 4 heads on 1", "llama, 6 heads on 3, tied"):
        plain = run_plain(build_model(name), rows=2, steps=3)
        found = run_engine(build_model(name), rank, world, stage=0, tensor=3, rows=2, steps=3).max_differences(plain)
        if any(not value <= 1e-5 for value in found.values()):
            failures.append(f"{name}: {found}")
    return failures


def test_three_ranks_share_heads_that_do_not_divide():
    for failures in run_ranks(_uneven, 3, timeout=120):
        assert failures == []
