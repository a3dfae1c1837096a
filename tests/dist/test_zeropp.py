"""ZeRO++ and MiCS: every mix on every layout of hosts, bytes between hosts, checkpoints, refusals.

Hosts are faked by ``THALWEG_HOST``, which keeps ranks from sharing memory.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.dist.models import Odd, batch, tiny_gpt
from tests.dist.parity import Case, equal_bits, full, run_engine, run_plain
from tests.harness import run_ranks

QW = {"zero_quantized_weights": True}
QG = {"zero_quantized_gradients": True}
QN = {"zero_quantized_nontrainable_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
LOCO = {**QG, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
MICS = {"mics_shard_size": 2}
ALL = {**QW, **QG, **HPZ}

# By rank: the host it is on.
LAYOUTS = {
    "2 on one host": (0, 0),
    "1 + 1": (0, 1),
    "2 + 1": (0, 0, 1),
    "1 + 1 + 1": (0, 1, 2),
    "2 + 2": (0, 0, 1, 1),
    "3 + 1": (0, 0, 0, 1),
    "4 on one host": (0, 0, 0, 0),
}
MIXES = {"qwZ": QW, "qgZ": QG, "LoCo": LOCO, "hpZ": HPZ, "MiCS": MICS, "qwZ hpZ": {**QW, **HPZ}}
MIXES |= {"qwZ qgZ": {**QW, **QG}, "qgZ hpZ": {**QG, **HPZ}, "all": ALL, "frozen": QN}
MIXES |= {"all MiCS": {**QW, **QG, **MICS}, "LoCo all": {**ALL, **LOCO}}
# Largest difference of a loss in 6 updates from one plain process in fp32.
TOLERANCE = {"exact": 2e-6, "weights": 2e-2, "gradients": 6e-2}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def _place(layout, rank):
    os.environ["THALWEG_HOST"] = f"host {layout[rank]}"


def _case(mix, stage=3, **changes):
    zero = {"zero_optimization": {"stage": stage, **mix}, "log_level": "error"}
    return Case(stage, windows=(1,) * 6, extra=zero).with_(**changes)


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


def _mixes(rank, world, name):
    layout = LAYOUTS[name]
    _place(layout, rank)
    failures = []
    plains, stage3 = {}, {}
    for model_name, model in (("gpt", tiny_gpt()), ("odd", Odd())):
        for mix_name, mix in MIXES.items():
            if not _fits(mix, layout) or (model_name == "odd" and mix_name not in ("all", "frozen", "MiCS")):
                continue
            for changes in ({}, {"windows": (2,) * 4, "accumulation": 2, "clip": 0.05}):
                case = _case(mix, **changes)
                key = (model_name, str(changes))
                if key not in plains:
                    plains[key] = run_plain(model, case, world, adamw)
                    stage3[key] = run_engine(model, _case({}, **changes), rank, world)
                outcome = run_engine(model, case, rank, world)
                worst = outcome.worst(plains[key])
                if not worst <= _tolerance(mix, layout):
                    failures.append(f"{model_name} {mix_name} {changes} on {name}: off by {worst:.1e}")
                if mix_name == "hpZ" and not equal_bits(outcome.parameters, stage3[key].parameters):
                    failures.append(f"{model_name} hpZ and stage 3 differ in bits on {name}")
    return failures


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_mix_on_every_layout_trains_as_one_process_does(name):
    for failures in run_ranks(_mixes, len(LAYOUTS[name]), name, timeout=300):
        assert failures == []


def _controls(rank, world):
    """What each tolerance must notice."""
    _place(LAYOUTS["2 + 2"], rank)
    plain = run_plain(tiny_gpt(), _case({}), world, adamw)
    rate = run_engine(tiny_gpt(), _case({}, params={"lr": 1.01e-2}), rank, world).worst(plain)
    rate2 = run_engine(tiny_gpt(), _case({}, params={"lr": 2e-2}), rank, world).worst(plain)
    quantised = run_engine(tiny_gpt(), _case(ALL), rank, world).worst(plain)
    return rate, rate2, quantised


def test_negative_controls_fail():
    rate, rate2, quantised = run_ranks(_controls, 4)[0]
    assert rate > 10 * TOLERANCE["exact"]
    assert rate2 > TOLERANCE["gradients"]
    assert quantised > TOLERANCE["exact"]  # it does round


def _half(rank, world, dtype, stage):
    _place(LAYOUTS["2 + 2"], rank)
    failures = []
    for name in ("hpZ", "MiCS", "all", "LoCo all", "all MiCS"):
        changes = {"dtype": dtype, "windows": (2, 2, 1, 2), "accumulation": 2, "clip": 0.05}
        plain = run_plain(tiny_gpt(), _case({}, **changes), world, adamw)
        worst = run_engine(tiny_gpt(), _case(MIXES[name], stage, **changes), rank, world).worst(plain)
        if not worst <= TOLERANCE["gradients"]:
            failures.append(f"{name} {dtype} stage {stage}: off by {worst:.1e}")
    return failures


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_mixes_in_half_precision_with_ragged_windows_and_clipping(dtype, stage):
    for failures in run_ranks(_half, 4, dtype, stage):
        assert failures == []


def _settings(mix, stage=3, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **mix},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "cpu_kernels": "torch",
        "log_level": "error",
        **more,
    }


def _start(model, mix, stage=3, **more):
    import thalweg

    return thalweg.initialize(model=model, config=_settings(mix, stage, **more))[0]


def _steps(engine, rank, world, count, first=0):
    losses = []
    for step in range(first, first + count):
        tokens, labels = batch(step, 2 * world)
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _bytes(rank, world):
    _place(LAYOUTS["2 + 2"], rank)
    shape = {"bf16": {"enabled": True}, "communication_data_type": "bf16"}
    sent = {}
    for name, mix in {"stage 3": {}, **MIXES}.items():
        engine = _start(_wider(), mix, **shape)
        _steps(engine, rank, world, 1)
        engine.ledger.reset()
        _steps(engine, rank, world, 2, first=1)
        sent[name] = engine.ledger.total().inter_bytes / 2
        sent[f"{name}, gathers"] = engine.ledger.total("all_gather").inter_bytes / 2
        engine.close()
    return sent


def _wider():
    from thalweg.nn.transformer import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=512, n_layer=3, n_head=4, n_embd=128, block_size=12, tied=True))


def test_all_three_send_less_than_a_quarter_between_hosts():
    """Counted by the ledger, against stage 3 that sends parameters and gradients in bf16, once a host."""
    ranks = run_ranks(_bytes, 4)
    sent = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    blocks, root = _sizes(_wider())
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
    """Homes on both hosts are the same and near the master, after steps, after a jump and after a load."""
    _place(LAYOUTS["2 + 2"], rank)
    slow = {"type": "AdamW", "params": {"lr": 1e-4}}
    engine = _start(_wider(), {**QW, **HPZ}, optimizer=slow)
    sharded = engine._parts.sharded
    found = []

    def look(when):
        _steps(engine, rank, world, 1)
        engine.eval()
        with torch.no_grad():
            tokens, labels = batch(0, 2)
            engine(tokens, labels)
        engine.train()
        for name, store in sharded._stores.items():
            home = store.home.float().clone()
            everyone = home.clone()
            dist.broadcast(everyone, src=0)
            same = torch.equal(everyone, home)
            rows = store._last - store._first
            master = store.shard[:rows].float()
            error = (store.rows_of(rank)[:rows].float() - master).abs().max() if rows else torch.zeros(())
            largest = master.abs().max() if rows else torch.ones(())
            found.append((when, name, same, float(error / largest.clamp(min=1e-12))))
        dist.barrier()  # rows of a host are read by all its ranks

    look("first")
    _steps(engine, rank, world, 3)
    look("later")
    with torch.no_grad():
        for store in sharded._stores.values():
            store.shard.mul_(-3.0)
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
    _place(LAYOUTS["2 + 2"], rank)
    model = _wider()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.2."))
    engine = _start(model, HPZ)
    sent = []
    for _ in range(3):
        engine.ledger.reset()
        _steps(engine, rank, world, 1)
        sent.append(engine.ledger.total("all_gather").inter_bytes)
    engine.eval()
    tokens, labels = batch(0, 2)
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
    _place(LAYOUTS["2 + 2"], rank)
    engine = _start(tiny_gpt(), mix)
    _steps(engine, rank, world, 3)
    engine.save_checkpoint(folder, "here")
    before = [full(p) for p in engine.module.parameters()]
    other = _start(tiny_gpt(seed=5), mix)
    other.load_checkpoint(folder, "here")
    after = [full(p) for p in other.module.parameters()]
    a, b = _steps(engine, rank, world, 3, first=3), _steps(other, rank, world, 3, first=3)
    return equal_bits(before, after), max(abs(x - y) for x, y in zip(a, b, strict=True)), _bits(before)


def _load_alone(rank, world, folder):
    engine = _start(tiny_gpt(seed=7), {}, stage=0)
    engine.load_checkpoint(folder, "here")
    return _bits([full(p) for p in engine.module.parameters()])


def _bits(tensors):
    """Tensors as bytes, which outlive the rank that made them."""
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("name", ["hpZ", "all", "MiCS", "all MiCS"])
def test_checkpoints_hold_logical_tensors(name, tmp_path):
    for same, difference, _ in (ranks := run_ranks(_checkpoint, 4, str(tmp_path), MIXES[name])):
        assert same
        assert difference <= (2e-2 if "all" in name else 0.0)
    alone = run_ranks(_load_alone, 1, str(tmp_path))[0]
    assert alone == ranks[0][2]


def _mics_layout(rank, world):
    from torch.distributed.tensor import DTensor

    _place(LAYOUTS["2 + 2"], rank)
    engine = _start(tiny_gpt(), MICS)
    _steps(engine, rank, world, 2)
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


def _links(rank, world, stage):
    """Without shared memory: two levels of links, as on GPUs, quantised at both."""
    _place(LAYOUTS["2 + 2"], rank)
    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    plain = run_plain(tiny_gpt(), _case({}), world, adamw)
    mixes = {"hpZ": HPZ, "MiCS": MICS, "wide MiCS": {"mics_shard_size": 4, **QG}, "all": {**ALL, **LOCO}}
    worst = {name: run_engine(tiny_gpt(), _case(mix, stage), rank, world).worst(plain) for name, mix in mixes.items()}
    engine = _start(_wider(), ALL, stage)
    _steps(engine, rank, world, 2)
    kinds = [(entry.kind, entry.intra_bytes, entry.inter_bytes) for entry in engine.ledger.entries()]
    return worst, kinds


@pytest.mark.parametrize("stage", [1, 3])
def test_links_at_both_levels(stage):
    for worst, kinds in run_ranks(_links, 4, stage):
        assert worst["hpZ"] <= TOLERANCE["exact"]
        assert worst["MiCS"] <= TOLERANCE["exact"]
        assert worst["wide MiCS"] <= TOLERANCE["gradients"]
        assert worst["all"] <= TOLERANCE["gradients"]
        reduced = [(intra, inter) for kind, intra, inter in kinds if kind == "reduce_scatter"]
        assert all(intra > 0 and inter > 0 for intra, inter in reduced)


def _hierarchical(rank, world):
    """A MiCS group over two hosts whose gathers cross each link once."""
    _place((0, 0, 1, 1, 2, 2, 3, 3)[:world], rank)
    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    from thalweg.comm import Hosts, Route, TwoLevelAllGather

    group = dist.group.WORLD
    route = Route.find(group)
    hosts = Hosts.find(group, route)
    gather = TwoLevelAllGather(
        hosts.local, hosts.peers, (hosts.local_route, hosts.peers_route), hosts.places, "m"
    )
    out = gather.allocate((5 * world,), dtype=torch.bfloat16, device=torch.device("cpu"))
    own = out.narrow(0, 5 * rank, 5)
    own.fill_(float(rank))
    gather(out, own, group)
    return torch.equal(out.float(), torch.arange(world).repeat_interleave(5).float())


def test_two_level_gathers_put_every_shard_in_its_place():
    assert all(run_ranks(_hierarchical, 4))


def _refused(rank, world, layout, mix):
    _place(layout, rank)
    with pytest.raises(ValueError) as caught:
        _start(tiny_gpt(), mix)
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
    _place(LAYOUTS["2 + 2"], rank)
    engine = _start(tiny_gpt(), {**ALL, **LOCO})
    _steps(engine, rank, world, 1)
    before = [full(p) for p in engine.module.parameters()]
    tokens, labels = batch(9, 2)
    loss = engine(tokens, labels)
    engine.backward(loss * (float("inf") if rank == 3 else 1.0))
    engine.step()
    after = [full(p) for p in engine.module.parameters()]
    losses = _steps(engine, rank, world, 2)
    return engine.skipped_steps, equal_bits(before, after), all(x == x for x in losses)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(_overflow, 4) == [(1, True, True)] * 4


def _pending(rank, world):
    """zero.Init and an ordinary build give the same run."""
    import thalweg

    _place(LAYOUTS["2 + 2"], rank)
    plain = _steps(_start(_wider(), ALL), rank, world, 2)
    with thalweg.zero.Init():
        torch.manual_seed(0)
        model = _wider()
    return plain == _steps(_start(model, ALL), rank, world, 2)


def test_models_built_on_meta_cross_too():
    assert all(run_ranks(_pending, 4))


def _edited(rank, world, mix):
    """What GatheredParameters leaves is seen on both hosts, and counted."""
    import thalweg

    _place(LAYOUTS["2 + 2"], rank)
    engine = _start(_wider(), mix)
    _steps(engine, rank, world, 1)
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
        tokens, labels = batch(0, 2)
        loss = engine(tokens, labels).item()
    return moved, loss, weight.numel() * weight.element_size()


@pytest.mark.parametrize("name", ["hpZ", "all", "MiCS"])
def test_edited_parameters_cross_and_are_counted(name):
    ranks = run_ranks(_edited, 4, MIXES[name])
    plain = run_ranks(_edited, 4, {})
    assert [loss for _, loss, _ in ranks] == pytest.approx([plain[0][1]] * 4, abs=5e-3)
    assert sum(moved["broadcast"] for moved, _, _ in plain) == 2 * plain[0][2]
    assert sum(moved["all_gather"] for moved, _, _ in plain) == 2 * plain[0][2] * 3 // 4
