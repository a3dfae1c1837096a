"""ZeRO++ and MiCS: bytes between hosts, homes, checkpoints, edits, refusals, overflows."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

from tests import inspect
from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import bitwise_equal, full_tensors
from tests.dist.zeropp_support import (
    FEATURE_SETS,
    HPZ,
    LAYOUTS,
    LOCO,
    MICS,
    QW,
    init_engine,
    set_fake_host,
    train_steps,
    wide_gpt,
)
from tests.harness import run_ranks
from tests.marks import nightly

ALL = FEATURE_SETS["all"]


def _bytes(rank, world):
    set_fake_host(LAYOUTS["2 + 2"], rank)
    shape = {"bf16": {"enabled": True}, "communication_data_type": "bf16"}
    sent = {}
    for name in ("stage 3", "qwZ", "hpZ", "qwZ qgZ", "all"):
        mix = FEATURE_SETS.get(name, {})
        engine = init_engine(wide_gpt(), mix, **shape)
        train_steps(engine, rank, world, 1)
        engine.ledger.reset()
        train_steps(engine, rank, world, 2, first=1)
        sent[name] = engine.ledger.total().inter_bytes / 2
        sent[f"{name}, gathers"] = engine.ledger.total("all_gather").inter_bytes / 2
        engine.close()
    return sent


def test_all_three_send_less_than_a_quarter_between_hosts():
    """Counted by the ledger, against stage 3 that sends parameters and gradients in bf16, once a host."""
    ranks = run_ranks(_bytes, 4)
    sent = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    blocks, root = _sizes(wide_gpt())
    both = blocks + root
    # Forward and backward gather the blocks, the root is kept; gradients once: 2 bytes, half to each side.
    assert sent["stage 3"] == pytest.approx(2 * (3 * blocks + 2 * root), rel=0.02)
    assert sent["hpZ, gathers"] == pytest.approx(2 * both, rel=0.02)
    assert sent["qwZ, gathers"] < 0.53 * sent["stage 3, gathers"]
    assert sent["stage 3"] > 4 * sent["all"]
    assert sent["stage 3"] < 4 * sent["qwZ qgZ"]  # two of them do not suffice


def _sizes(model):
    blocks = sum(p.numel() for n, p in model.named_parameters() if n.startswith("blocks."))
    return blocks, sum(p.numel() for p in model.parameters()) - blocks


def _replicas(rank, world):
    """Copies on both hosts are the same and near the master, after steps, after a jump and after a load."""
    set_fake_host(LAYOUTS["2 + 2"], rank)
    slow = {"type": "AdamW", "params": {"lr": 1e-4}}
    engine = init_engine(wide_gpt(), {**QW, **HPZ}, optimizer=slow)
    sharded = inspect.sharded_model(engine)
    found = []

    def look(when):
        train_steps(engine, rank, world, 1)
        engine.eval()
        with torch.no_grad():
            tokens, labels = make_batch(0, 2)
            engine(tokens, labels)
        engine.train()
        for name, storage in sharded._shard_storages.items():
            copy = storage.unsharded.float().clone()
            rank0_copy = copy.clone()
            dist.broadcast(rank0_copy, src=0)
            same = torch.equal(rank0_copy, copy)
            rows = storage.num_rows
            master = storage.shard[:rows].float()
            error = (storage.get_rank_rows(rank)[:rows].float() - master).abs().max() if rows else torch.zeros(())
            largest = master.abs().max() if rows else torch.ones(())
            found.append((when, name, same, float(error / largest.clamp(min=1e-12))))
        dist.barrier()  # rows of a host are read by all its ranks

    look("first")
    train_steps(engine, rank, world, 3)
    look("later")
    with torch.no_grad():
        for storage in sharded._shard_storages.values():
            storage.shard.mul_(-3.0)
    look("jump")
    engine.close()
    return found


def test_homes_on_two_hosts_agree_and_stay_near_the_master():
    worst = {"first": 0.0, "later": 0.0, "jump": 0.0}
    for found in run_ranks(_replicas, 4):
        for when, name, same, error in found:
            assert same, (when, name)
            worst[when] = max(worst[when], error)
    assert worst["jump"] <= 0.51 / 127  # whole weights in 8 bits
    assert worst["later"] <= 0.51 / 127 / 4  # steps in 4 bits are finer than that
    assert worst["later"] > 0


def _unchanged(rank, world):
    """Frozen parameters cross once; evaluation again and again crosses nothing."""
    set_fake_host(LAYOUTS["2 + 2"], rank)
    model = wide_gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.2."))
    engine = init_engine(model, HPZ)
    sent = []
    for _ in range(3):
        engine.ledger.reset()
        train_steps(engine, rank, world, 1)
        sent.append(engine.ledger.total("all_gather").inter_bytes)
    engine.eval()
    tokens, labels = make_batch(0, 2)
    with torch.no_grad():
        engine(tokens, labels)
        engine.ledger.reset()
        engine(tokens, labels)
    sent.append(engine.ledger.total("all_gather").inter_bytes)
    return sent


def test_what_has_not_changed_is_not_sent_again():
    first, second, third, again = run_ranks(_unchanged, 4)[0]
    assert second == third
    assert second < 0.4 * first
    assert again == 0


def _checkpoint(rank, world, folder, mix):
    set_fake_host(LAYOUTS["2 + 2"], rank)
    engine = init_engine(tiny_gpt(), mix)
    train_steps(engine, rank, world, 3)
    engine.save_checkpoint(folder, "here")
    before = full_tensors(engine.module.parameters())
    other = init_engine(tiny_gpt(seed=5), mix)
    other.load_checkpoint(folder, "here")
    after = full_tensors(other.module.parameters())
    a, b = train_steps(engine, rank, world, 3, first=3), train_steps(other, rank, world, 3, first=3)
    ends = [full_tensors(one.module.parameters()) for one in (engine, other)]
    return bitwise_equal(before, after), a == b and bitwise_equal(*ends), _bits(before)


def _load_alone(rank, world, folder):
    engine = init_engine(tiny_gpt(seed=7), {}, stage=0)
    engine.load_checkpoint(folder, "here")
    return _bits(full_tensors(engine.module.parameters()))


def _bits(tensors):
    """Tensors as bytes, which outlive the rank that made them."""
    return [tensor.cpu().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("name", [nightly("hpZ"), nightly("qwZ hpZ"), nightly("all MiCS"), nightly("LoCo all")])
def test_checkpoints_hold_logical_tensors_and_a_resumed_run_has_the_same_bits(name, tmp_path):
    for same, goes_on, _ in (ranks := run_ranks(_checkpoint, 4, str(tmp_path), FEATURE_SETS[name])):
        assert same
        assert goes_on
    alone = run_ranks(_load_alone, 1, str(tmp_path))[0]
    assert alone == ranks[0][2]


def _forgets_nothing(rank, world, folder):
    """As above, but the run that goes on keeps what it has sent and what it owes."""
    from thalweg.zero.shard import ShardedModel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedModel, "reset_compression", lambda self: None)
        return _checkpoint(rank, world, folder, FEATURE_SETS["LoCo all"])[1]


@pytest.mark.nightly
def test_negative_control_errors_that_are_kept_would_be_noticed(tmp_path):
    assert run_ranks(_forgets_nothing, 4, str(tmp_path)) == [False] * 4


def _with_offload(rank, world, layout):
    """Mixes and tiers do not touch: whatever is on the host or on NVMe, the bits are those of none."""
    set_fake_host(LAYOUTS[layout], rank)
    failures = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for name in ("hpZ", "MiCS", "all", "LoCo all", "all MiCS", "qwZ qgZ"):
            if layout == "1 + 1" and name != "qwZ qgZ":
                continue
            known = None
            for params, state in (("none", "none"), ("none", "cpu"), ("none", "nvme"), ("nvme", "nvme")):
                mix = {**FEATURE_SETS[name], "offload_optimizer": {"device": state, "nvme_path": folder}}
                if params == "nvme":
                    if "zero_hpz_partition_size" in mix:
                        continue  # keeps a copy of the parameters in each host's memory
                    mix["offload_param"] = {"device": params, "nvme_path": folder, "max_in_cpu": 0}
                engine = init_engine(tiny_gpt(), mix)
                found = (
                    train_steps(engine, rank, world, 3),
                    full_tensors(engine.module.parameters()),
                )
                engine.close()
                known = known or found
                if found[0] != known[0] or not bitwise_equal(found[1], known[1]):
                    failures.append(f"{name} with parameters on {params}, state on {state}")
    return failures


@pytest.mark.parametrize("layout", ["1 + 1", nightly("2 + 2")])
def test_every_mix_together_with_offload(layout):
    for failures in run_ranks(_with_offload, len(LAYOUTS[layout]), layout, timeout=200):
        assert failures == []


def _mics_layout(rank, world):
    from torch.distributed.tensor import DTensor

    set_fake_host(LAYOUTS["2 + 2"], rank)
    engine = init_engine(tiny_gpt(), MICS)
    train_steps(engine, rank, world, 2)
    shapes = []
    for parameter in engine.module.parameters():
        assert isinstance(parameter, DTensor)
        shapes.append((parameter.device_mesh.shape, parameter.to_local().numel(), parameter.numel()))
    gathered = engine.ledger.total("all_gather").inter_bytes
    local = _bits([p.to_local().detach().clone() for p in engine.module.parameters()])
    return shapes, gathered, local


def test_mics_shards_within_groups_and_copies_stay_equal():
    ranks = run_ranks(_mics_layout, 4)
    for mesh_shape, local, whole in ranks[0][0]:
        assert mesh_shape == (2, 2)
        assert local >= whole // 2
    assert all(gathered == 0 for _, gathered, _ in ranks)
    assert ranks[0][2] == ranks[2][2]
    assert ranks[1][2] == ranks[3][2]
    assert ranks[0][2] != ranks[1][2]


def _refused(rank, world, layout, mix):
    set_fake_host(layout, rank)
    with pytest.raises(ValueError) as caught:
        init_engine(tiny_gpt(), mix)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "mix", "words"),
    [
        ((0, 0, 1), HPZ, ("zero_hpz_partition_size = 2", "[2, 1]", "use 1")),
        ((0, 1), HPZ, ("zero_hpz_partition_size = 2", "[1, 1]")),
        ((0, 0, 1, 1), {"zero_hpz_partition_size": 4}, ("[2, 2]", "use one of [2]")),
        ((0, 0, 0), MICS, ("mics_shard_size = 2", "3 data-parallel ranks", "[1, 3]")),
    ],
)
def test_groups_that_do_not_fit_are_refused_with_the_cure(layout, mix, words):
    for message in run_ranks(_refused, len(layout), layout, mix):
        assert all(word in message for word in words), message


def _overflow(rank, world):
    """An inf on one rank must not hide in codes: the step is skipped everywhere."""
    set_fake_host(LAYOUTS["2 + 2"], rank)
    engine = init_engine(tiny_gpt(), {**ALL, **LOCO})
    train_steps(engine, rank, world, 1)
    before = full_tensors(engine.module.parameters())
    tokens, labels = make_batch(9, 2)
    loss = engine(tokens, labels)
    engine.backward(loss * (float("inf") if rank == 3 else 1.0))
    engine.step()
    after = full_tensors(engine.module.parameters())
    losses = train_steps(engine, rank, world, 2)
    return engine.skipped_steps, bitwise_equal(before, after), all(x == x for x in losses)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(_overflow, 4) == [(1, True, True)] * 4


def _pending(rank, world):
    """zero.Init and an ordinary build give the same run."""
    import thalweg

    set_fake_host(LAYOUTS["2 + 2"], rank)
    plain = train_steps(init_engine(wide_gpt(), ALL), rank, world, 2)
    with thalweg.zero.Init():
        torch.manual_seed(0)
        model = wide_gpt()
    return plain == train_steps(init_engine(model, ALL), rank, world, 2)


def test_models_built_on_meta_cross_too():
    assert all(run_ranks(_pending, 4))


def _edited(rank, world, mix):
    """What GatheredParameters leaves is seen on both hosts, and counted."""
    import thalweg

    set_fake_host(LAYOUTS["2 + 2"], rank)
    engine = init_engine(wide_gpt(), mix)
    train_steps(engine, rank, world, 1)
    engine.ledger.reset()
    weight = next(p for p in engine.module.parameters() if p.ndim == 2)
    with thalweg.zero.GatheredParameters([weight], modifier_rank=3):
        if rank == 3:
            with torch.no_grad():
                weight.fill_(0.25)
    counted = [e for e in engine.ledger.entries() if e.module == "GatheredParameters"]
    moved = {e.kind: e.inter_bytes for e in counted}
    engine.eval()
    with torch.no_grad():
        tokens, labels = make_batch(0, 2)
        loss = engine(tokens, labels).item()
    return moved, loss, weight.numel() * weight.element_size()


def _all_edited(rank, world):
    return [_edited(rank, world, mix) for mix in ({}, HPZ, ALL, MICS)]


def test_edited_parameters_cross_and_are_counted():
    ranks = run_ranks(_all_edited, 4)
    losses = [loss for rank in ranks for _, loss, _ in rank]
    assert losses == pytest.approx([losses[0]] * 16, abs=5e-3)
    plain = [rank[0] for rank in ranks]
    size = plain[0][2]
    assert sum(moved["broadcast"] for moved, _, _ in plain) == 2 * size
    assert sum(moved["all_gather"] for moved, _, _ in plain) == 2 * size * 3 // 4
