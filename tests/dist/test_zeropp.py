"""ZeRO++ and MiCS: every mix on every layout of hosts trains as one process does."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.dist.models import OddShapesModel, tiny_gpt
from tests.dist.parity import ParityCase, bitwise_equal, run_engine, run_plain
from tests.dist.zeropp_support import (
    ALL,
    FEATURE_SETS,
    HPZ,
    LAYOUTS,
    LOCO,
    MICS,
    QG,
    QN,
    init_engine,
    set_fake_host,
    train_steps,
    wide_gpt,
)
from tests.harness import run_ranks
from tests.marks import nightly

# Largest difference of a loss in 6 updates from one plain process in fp32.
TOLERANCE = {"exact": 2e-6, "weights": 2e-2, "gradients": 6e-2}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def _case(mix, stage=3, **changes):
    zero = {"zero_optimization": {"stage": stage, **mix}, "log_level": "error"}
    return ParityCase(stage, windows=(1,) * 6, extra=zero).with_(**changes)


def _fits(mix, layout):
    """Whether groups of two are possible: hpZ's within a host, MiCS's in the world."""
    size = len(layout)
    if "mics_shard_size" in mix and size % 2:
        return False
    pairs = [layout[i : i + 2] for i in range(0, size, 2)]
    return "zero_hpz_partition_size" not in mix or all(len(p) == 2 and len(set(p)) == 1 for p in pairs)


def _tolerance(mix, layout):
    group = layout if "mics_shard_size" not in mix else layout[:2]
    if "zero_quantized_gradients" in mix and len(set(layout)) > 1:
        return TOLERANCE["gradients"]
    if mix.get("mics_shard_size") and mix.get("zero_quantized_gradients"):
        return TOLERANCE["gradients"]  # copies exchange theirs, wherever they are
    if ("zero_quantized_weights" in mix or mix == QN) and len(set(group)) > 1:
        return TOLERANCE["weights"]
    return TOLERANCE["exact"]


# Each feature alone or with all others; nightly takes each mix.
FEW_MIXES = ("hpZ", "LoCo all", "all MiCS", "frozen", "qwZ qgZ")


def _mixes(rank, world, name, every):
    layout = LAYOUTS[name]
    set_fake_host(layout, rank)
    failures = []
    plains, stage3 = {}, {}
    for model_name, model in (("gpt", tiny_gpt()), ("odd", OddShapesModel())):
        for mix_name, mix in FEATURE_SETS.items():
            if not every and (mix_name not in FEW_MIXES or model_name == "odd"):
                continue
            if not _fits(mix, layout) or (model_name == "odd" and mix_name not in ("all", "frozen", "MiCS")):
                continue
            longer = {"windows": (2,) * 4, "accumulation": 2, "clip": 0.05}
            both = mix_name in (("hpZ", "MiCS", "all", "all MiCS") if every else ("all MiCS",))
            for changes in ({}, longer) if both else ({},):
                case = _case(mix, **changes)
                key = (model_name, str(changes))
                if key not in plains:
                    plains[key] = run_plain(model, case, world, adamw)
                    stage3[key] = run_engine(model, _case({}, **changes), rank, world)
                outcome = run_engine(model, case, rank, world)
                worst = outcome.max_loss_difference(plains[key])
                if not worst <= _tolerance(mix, layout):
                    failures.append(f"{model_name} {mix_name} {changes} on {name}: off by {worst:.1e}")
                if mix_name == "hpZ" and not bitwise_equal(outcome.parameters, stage3[key].parameters):
                    failures.append(f"{model_name} hpZ and stage 3 differ in bits on {name}")
    return failures


@pytest.mark.parametrize(
    ("name", "every"), [nightly("2 + 1", False), nightly("2 + 2", False), *(nightly(name, True) for name in LAYOUTS)]
)
def test_every_mix_on_every_layout_trains_as_one_process_does(name, every):
    for failures in run_ranks(_mixes, len(LAYOUTS[name]), name, every, timeout=300):
        assert failures == []


def _controls(rank, world):
    """What each tolerance must notice."""
    set_fake_host(LAYOUTS["2 + 2"], rank)
    plain = run_plain(tiny_gpt(), _case({}), world, adamw)
    rate = run_engine(tiny_gpt(), _case({}, params={"lr": 1.01e-2}), rank, world).max_loss_difference(plain)
    rate2 = run_engine(tiny_gpt(), _case({}, params={"lr": 2e-2}), rank, world).max_loss_difference(plain)
    quantised = run_engine(tiny_gpt(), _case(ALL), rank, world).max_loss_difference(plain)
    return rate, rate2, quantised


@pytest.mark.nightly
def test_negative_controls_fail():
    rate, rate2, quantised = run_ranks(_controls, 4)[0]
    assert rate > 10 * TOLERANCE["exact"]
    assert rate2 > TOLERANCE["gradients"]
    assert quantised > TOLERANCE["exact"]  # it does round


def _half(rank, world, dtype, stage):
    set_fake_host(LAYOUTS["2 + 2"], rank)
    failures = []
    for name in ("hpZ", "MiCS", "all", "LoCo all", "all MiCS"):
        changes = {"dtype": dtype, "windows": (2, 2, 1, 2), "accumulation": 2, "clip": 0.05}
        plain = run_plain(tiny_gpt(), _case({}, **changes), world, adamw)
        worst = run_engine(tiny_gpt(), _case(FEATURE_SETS[name], stage, **changes), rank, world).max_loss_difference(
            plain
        )
        if not worst <= TOLERANCE["gradients"]:
            failures.append(f"{name} {dtype} stage {stage}: off by {worst:.1e}")
    return failures


@pytest.mark.parametrize(
    ("dtype", "stage"), [nightly("bf16", 3), nightly("bf16", 1), nightly("fp16", 1), nightly("fp16", 3)]
)
def test_mixes_in_half_precision_with_ragged_windows_and_clipping(together, dtype, stage):
    for failures in together(_half, 4):
        assert failures == []


def _links(rank, world, stage):
    """Without shared memory: two levels of links, as on GPUs, quantised at both."""
    set_fake_host(LAYOUTS["2 + 2"], rank)
    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    plain = run_plain(tiny_gpt(), _case({}), world, adamw)
    mixes = {"hpZ": HPZ, "MiCS": MICS, "wide MiCS": {"mics_shard_size": 4, **QG}, "all": {**ALL, **LOCO}}
    worst = {
        name: run_engine(tiny_gpt(), _case(mix, stage), rank, world).max_loss_difference(plain)
        for name, mix in mixes.items()
    }
    engine = init_engine(wide_gpt(), ALL, stage)
    train_steps(engine, rank, world, 2)
    kinds = [(entry.kind, entry.intra_bytes, entry.inter_bytes) for entry in engine.ledger.entries()]
    return worst, kinds


@pytest.mark.parametrize("stage", [nightly(1), nightly(3)])
def test_links_at_both_levels(together, stage):
    for worst, kinds in together(_links, 4):
        assert worst["hpZ"] <= TOLERANCE["exact"]
        assert worst["MiCS"] <= TOLERANCE["exact"]
        assert worst["wide MiCS"] <= TOLERANCE["gradients"]
        assert worst["all"] <= TOLERANCE["gradients"]
        reduced = [(intra, inter) for kind, intra, inter in kinds if kind == "reduce_scatter"]
        assert all(intra > 0 and inter > 0 for intra, inter in reduced)


def _hierarchical(rank, world):
    """A MiCS group over two hosts whose gathers cross each link once."""
    set_fake_host((0, 0, 1, 1, 2, 2, 3, 3)[:world], rank)
    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    from thalweg.comm import CommsLog
    from thalweg.comm.collectives.hierarchical import HostGroups, TwoLevelAllGather
    from thalweg.comm.topology import HostTopology

    group = dist.group.WORLD
    route = HostTopology.discover(group)
    hosts = HostGroups.discover(group, route)
    gather = TwoLevelAllGather(hosts, "m", CommsLog(), lambda numel, dtype: None)
    out = gather.allocate((5 * world,), dtype=torch.bfloat16, device=torch.device("cpu"))
    own = out.narrow(0, 5 * rank, 5)
    own.fill_(float(rank))
    gather(out, own, group)
    return torch.equal(out.float(), torch.arange(world).repeat_interleave(5).float())


def test_two_level_gathers_put_every_shard_in_its_place():
    assert all(run_ranks(_hierarchical, 4))
