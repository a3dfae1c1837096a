"""The plan of tiers, tiles and split axes: bytes that move elsewhere, and what is said of the rest."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import thalweg
from thalweg.config import load
from thalweg.ops.linear.autotune_cache import AutotuneCache
from thalweg.plan.search.search import auto_keys
from thalweg.plan.spec.cluster import Cluster
from thalweg.plan.spec.devices import get_device
from thalweg.plan.spec.run_spec import unmodelled_options
from thalweg.plan.trace.alloc_recorder import AllocationRecorder

SHAPE = {"vocab_size": 512, "n_layer": 8, "n_head": 4, "n_embd": 128, "block_size": 128}
GPUS = Cluster(devices_per_node=4, device_memory=80 << 30, host_memory=1 << 40, flops=get_device("h100").flops)
NVME = {"device": "nvme", "nvme_path": "/tmp"}
LONG = {"sequence_length": 128}


def config_of(stage=0, zero=(), **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **dict(zero)},
        **more,
    }


def planned(config, cluster=None, **more):
    where = cluster or Cluster(device="cpu", devices_per_node=1)
    return thalweg.plan(SHAPE, config, cluster=where, process_bytes=0, suggest=False, **more)


def test_gradients_wait_for_a_disk_that_is_slower_than_the_backward_pass():
    config = config_of(3, {"offload_param": {**NVME, "max_in_cpu": 0}, "offload_optimizer": NVME})
    config["gradient_clipping"] = 0.0
    rates = [1e6, 1e15]
    slow, fast = (
        planned(config, Cluster(device="cpu", disk_read_bandwidth=rate, disk_write_bandwidth=rate), **LONG)
        for rate in rates
    )
    unit = 12 * 128 * 128 * 4
    assert slow.per_rank.gradients - fast.per_rank.gradients >= 2 * unit
    early = {**config, "gradient_clipping": 1.0}
    early["zero_optimization"] = {"stage": 3}
    assert planned(early, Cluster(device="cpu", disk_read_bandwidth=1e6), **LONG).per_rank == (
        planned(early, Cluster(device="cpu"), **LONG).per_rank
    )


def test_the_operand_that_a_kernel_copies_is_counted(monkeypatch):
    blocks, results = {}, {}
    for kernel in ("onednn", "convolution", "torch", None):
        monkeypatch.setattr(AutotuneCache, "lookup", lambda *_, kernel=kernel: kernel)
        tape = AllocationRecorder()
        tape.linear_kernels = "auto"
        with FakeTensorMode():
            x, weight = torch.empty(512, 32), torch.empty(160, 32, requires_grad=True)
            with tape:
                torch.nn.functional.linear(x, weight).square().sum().backward()
        made = [size for number, size, _ in tape.pop_events() if number > 0]
        blocks[kernel], results[kernel] = made.count(512 * 160 * 4), made.count(160 * 32 * 4)
    assert blocks["onednn"] == blocks["torch"] + 1
    assert results["convolution"] == results["torch"] + 1
    assert blocks[None] == blocks["torch"] == blocks["convolution"]
    assert results[None] == results["torch"] == results["onednn"]


@pytest.mark.parametrize(("kernel", "capability", "widens"), [
    ("fp32", "AVX512", True), ("torch", "AVX2", False), (None, "AVX2", True), (None, "AVX512", False)
])  # fmt: skip
def test_half_precision_that_is_widened_is_counted(monkeypatch, kernel, capability, widens):
    """Operands and result of each product in fp32: of an embedding, the largest block of a small batch's step."""
    monkeypatch.setattr(AutotuneCache, "lookup", lambda *_: kernel)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    tape = AllocationRecorder()
    tape.linear_kernels = "auto"
    with FakeTensorMode():
        x = torch.empty(512, 32, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(160, 32, dtype=torch.bfloat16, requires_grad=True)
        with tape:
            torch.nn.functional.linear(x, weight).backward(torch.empty(512, 160, dtype=torch.bfloat16))
    made = [size for number, size, _ in tape.pop_events() if number > 0]
    assert made.count(4 * (512 * 32 + 160 * 32 + 512 * 160)) == (3 if widens else 0)


def test_what_is_not_counted_is_said():
    split = config_of(context_parallel_size=2)
    assert unmodelled_options(load(split)) == ["context_parallel_size"]
    small = Cluster(devices_per_node=4, device_memory=1 << 20)
    found = planned(split, small)
    assert found.fits is None  # too much as it is, but a split model is smaller than this
    assert "not modelled" in str(found)
    assert found.to_dict()["not_counted"] == ["context_parallel_size"]
    plain = planned(config_of(), small)
    assert plain.fits is False
    assert "not modelled" not in str(plain)
    parts = {"activation_checkpointing": {"policy": "full", "partition_activations": True}}
    in_parts = config_of(tensor_parallel={"autotp_size": 2}, **parts)
    assert unmodelled_options(load(in_parts)) == ["activation_checkpointing.partition_activations"]
    counted = config_of(
        3,
        {"offload_param": NVME, "offload_optimizer": NVME, "zero_quantized_gradients": True},
        tiling={"loss": True, "mlp": 4},
        activation_checkpointing={"policy": "full", "offload": "nvme"},
    )
    assert unmodelled_options(load(counted)) == []


def test_inputs_of_checkpointed_units_leave_for_the_disk_or_the_host():
    full, folder = {"policy": "full"}, {"nvme_path": "/tmp"}
    stay = planned(config_of(activation_checkpointing=full), sequence_length=128)
    away = config_of(activation_checkpointing={**full, "offload": "nvme"}, memory=folder)
    gone = planned(away, sequence_length=128)
    inputs = 8 * 2 * 128 * 128 * 4  # layers, batch, tokens, width, fp32
    assert stay.per_rank.activations - gone.per_rank.activations >= 0.3 * inputs  # some are on their way
    assert gone.tiers["disk_written"] == gone.tiers["disk_read"] == inputs
    assert gone.tiers["disk"] >= inputs
    assert stay.tiers["disk"] == 0
    host = config_of(activation_checkpointing={**full, "offload": "cpu"}, bf16={"enabled": True})
    assert planned(host, GPUS, sequence_length=128).tiers["host"] >= inputs // 2
    assert planned(host, sequence_length=128).tiers["host"] == 0  # a CPU rank's inputs are there already


def test_tensor_ranks_share_the_layers():
    def of(degree, **more):
        config = config_of(1, tensor_parallel={"autotp_size": degree}, **more)
        return planned(config, GPUS, sequence_length=128)

    whole, halves, quarters = of(1), of(2), of(4)
    assert whole.not_counted == halves.not_counted == []
    # Four data ranks, two pairs, one team of four: a rank's gradients before their reduction aside, the
    # states' shards are of one size, and what is gathered and saved shrinks.
    assert halves.per_rank.optimizer == pytest.approx(whole.per_rank.optimizer, rel=0.02)
    assert quarters.per_rank.gathered < 0.6 * halves.per_rank.gathered
    assert halves.per_rank.gathered < 0.6 * whole.per_rank.gathered
    saved = [found.per_rank.activations + found.per_rank.logits for found in (whole, halves, quarters)]
    assert saved[0] > saved[1] > saved[2]  # logits that are cut by vocabulary are not told from the rest
    hidden = 2 * 128 * 128 * 4
    # Each block sums twice in each direction, and so do the embedding's rows and the head's input.
    assert quarters.traffic["all_reduce"] >= 8 * 4 * hidden * 2 * 3 // 4
    assert "all_gather" not in quarters.traffic  # no data ranks
    assert halves.tokens_per_step == whole.tokens_per_step // 2


def test_a_deferred_model_is_not_whole_before_it_is_cut():
    """Tensor ranks of a processor hold the whole model first, unless it is built under ``zero.Init``."""

    def peak(**built):
        config = config_of(1, optimizer={"type": "SGD", "params": {"lr": 0.1}}, tensor_parallel={"autotp_size": 4})
        ranks = Cluster(devices_per_node=4, device="cpu")
        found = planned(config, ranks, sequence_length=1, **built)
        return found.per_rank.total, found.num_parameters * 4

    (whole, model_bytes), (parts, _) = peak(deferred_init=False), peak(deferred_init=True)
    assert whole - parts > 0.5 * model_bytes


def test_the_optimizers_state_moves_to_the_disk():
    here, there = (planned(config_of(2, zero)) for zero in ({}, {"offload_optimizer": NVME}))
    state = here.per_rank.optimizer
    assert state == pytest.approx(8 * here.num_parameters, rel=0.01)
    assert there.per_rank.optimizer == 0
    # Gradients rest there as well, as no update may begin before the norm is known (or they leave).
    assert there.tiers["disk"] == pytest.approx(12 * here.num_parameters, rel=0.1)
    assert there.tiers["disk_read"] >= state
    assert "disk" in there.time_breakdown
    assert here.tiers["disk"] == 0
    assert "disk" not in here.time_breakdown


@pytest.mark.parametrize("ranks", [1, 2])
def test_paged_units_are_in_memory_a_few_at_a_time(ranks):
    paged = {"offload_param": {**NVME, "max_in_cpu": 0, "buffer_count": 3}, "offload_optimizer": NVME}
    cluster = Cluster(device="cpu", devices_per_node=ranks)
    found = planned(config_of(3, paged), cluster)
    block = 12 * 128**2 * 4
    root = (2 * 512 + 128) * 128 * 4
    assert found.per_rank.parameters == 0
    assert found.per_rank.gathered <= 1.2 * (root + 3 * block)
    all_in = planned(config_of(3, {**paged, "offload_param": {**NVME}}), cluster)  # max_in_cpu: a billion
    assert all_in.per_rank.parameters + all_in.per_rank.gathered >= 8 * block
    # Each step reads the blocks for both passes, but what is still there.
    assert found.tiers["disk_read"] * ranks >= (8 + 4) * block


def test_updates_within_the_backward_pass_leave_one_units_gradients():
    early, late = (
        planned(config_of(2, {"offload_optimizer": {"device": "cpu"}}, gradient_clipping=clip)) for clip in (0.0, 1.0)
    )
    assert early.per_rank.gradients < 0.4 * late.per_rank.gradients
    assert late.per_rank.gradients == pytest.approx(4 * late.num_parameters, rel=0.01)


def test_a_gpus_states_on_the_host_are_no_part_of_its_memory():
    inside, outside = (planned(config_of(3, zero), GPUS) for zero in ({}, {"offload_optimizer": {"device": "cpu"}}))
    assert outside.per_rank.optimizer == outside.per_rank.parameters == 0
    assert outside.tiers["host"] == pytest.approx(16 * inside.num_parameters / 4, rel=0.01)
    assert outside.per_host == 4 * outside.tiers["host"]
    half = planned(config_of(3, {"offload_optimizer": {"device": "cpu"}}, bf16={"enabled": True}), GPUS)
    assert half.tiers["host"] == pytest.approx(18 * inside.num_parameters / 4, rel=0.01)  # and what crosses the link
    sums = planned(
        config_of(3, {"offload_optimizer": {"device": "cpu"}}, bf16={"enabled": True}, communication_data_type="bf16"),
        GPUS,
    )
    assert sums.tiers["host"] == pytest.approx(20 * inside.num_parameters / 4, rel=0.01)  # gradients as they came
    assert sums.time_breakdown["host link"] < half.time_breakdown["host link"]
    assert outside.time_breakdown["host link"] > 0
    full = Cluster(devices_per_node=4, device_memory=80 << 30, host_memory=1 << 20)
    assert planned(config_of(3, {"offload_optimizer": {"device": "cpu"}}), full).fits is False


def test_sequence_ranks_share_the_tokens():
    whole, halves = (planned(config_of(1, sequence_parallel_size=size), GPUS, sequence_length=128) for size in (1, 2))
    assert whole.not_counted == halves.not_counted == []
    assert halves.per_rank.optimizer == whole.per_rank.optimizer  # states are sharded over all of them
    most_of_whole, most_of_halves = (max(s.live_bytes.get("logits", 0) for s in p.timeline) for p in (whole, halves))
    assert most_of_halves == pytest.approx(most_of_whole / 2, rel=0.1) and most_of_whole > 0
    assert halves.per_rank.activations < 0.8 * whole.per_rank.activations
    assert halves.tokens_per_step == whole.tokens_per_step // 2
    # q, k, v and the output of each of 8 layers, forward and backward: half of a rank's part leaves.
    part = 2 * 64 * 128 * 4
    assert halves.traffic["all_to_all"] == pytest.approx(8 * 2 * 4 * part // 2, rel=0.01)
    assert "all_to_all" not in whole.traffic


def test_zeropp_narrows_the_network_only():
    cluster = Cluster(num_nodes=2, devices_per_node=4, device_memory=80 << 30)
    plain = config_of(3, bf16={"enabled": True})
    few = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 4}
    all_three = config_of(3, few, bf16={"enabled": True})
    wide, narrow = (planned(config, cluster) for config in (plain, all_three))
    assert wide.links["between nodes"] > 3 * narrow.links["between nodes"]
    assert wide.traffic["reduce_scatter"] == narrow.traffic["reduce_scatter"]  # the ledger's textbook form
    groups = planned(config_of(3, {"mics_shard_size": 4}, bf16={"enabled": True}), cluster)
    assert groups.per_rank.optimizer == pytest.approx(2 * wide.per_rank.optimizer, rel=0.01)
    assert groups.links["between nodes"] < wide.links["between nodes"]


def test_row45_frozen_parameters_have_neither_gradients_nor_state():
    from thalweg.nn.transformer import GPT, GPTConfig

    with torch.device("meta"):
        model = GPT(GPTConfig(**SHAPE))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" in name)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert 0 < trained < frozen
    found = thalweg.plan(model, config_of(3), cluster=GPUS, sequence_length=64)
    gradients = {s.phase: s.live_bytes.get("gradients", 0) for s in found.timeline}
    assert gradients["update"] == pytest.approx(4 * trained / 4, rel=0.01)
    assert gradients["forward"] == 0  # a device's go with the update
    assert found.per_rank.optimizer == pytest.approx(8 * trained / 4, rel=0.01)
    assert found.per_rank.parameters == pytest.approx((trained + frozen), rel=0.01)
    assert found.traffic["reduce_scatter"] == pytest.approx(4 * trained * 3 / 4, rel=0.01)


def test_equal_configs_leave_the_same_to_the_plan():
    """Only the values count, not how they came to be there: read from a file, left out, or read again."""
    base = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    left_out, written = load(base), load(base | {"train_micro_batch_size_per_gpu": "auto"})
    assert auto_keys(left_out) == [] and auto_keys(written) == ["train_micro_batch_size_per_gpu"]
    assert left_out != written
    for config in (left_out, written, load(base | {"zero_optimization": {"stage": "auto"}})):
        again = load(config.to_dict())
        assert again == config and auto_keys(again) == auto_keys(config)
    assert load(base | {"train_micro_batch_size_per_gpu": None}) == left_out


def test_auto_is_the_plans_only_where_it_was_written():
    assert auto_keys(load(config_of())) == []
    assert auto_keys(load(config_of("auto"))) == ["zero_optimization.stage"]
    follows = config_of(train_batch_size=8, gradient_accumulation_steps=2)
    follows["train_micro_batch_size_per_gpu"] = "auto"
    assert auto_keys(load(follows)) == []


def test_paged_parameters_stay_in_memory_as_far_as_there_is_room():
    """Without ``max_in_cpu`` an eighth of the memory is for them; a job for which that is too much is shown 0."""
    config = config_of(3, {"offload_param": NVME, "offload_optimizer": NVME})
    ample, small = (planned(config, Cluster(device="cpu", host_memory=size << 20)) for size in (4096, 2))
    numel = ample.num_parameters
    assert ample.per_rank.parameters >= 4 * numel
    assert small.per_rank.parameters == 0
    assert small.tiers["disk"] > ample.tiers["disk"]
    asked = config_of(3, {"offload_param": {**NVME, "max_in_cpu": numel}, "offload_optimizer": NVME})
    shown = thalweg.plan(SHAPE, asked, cluster=Cluster(device="cpu", host_memory=149 << 20), process_bytes=0)
    assert shown.fits is False
    assert shown.suggestion == {"zero_optimization.offload_param.max_in_cpu": 0}


def test_a_model_that_rests_on_a_disk_is_built_there():
    config = config_of(3, {"offload_param": {**NVME, "max_in_cpu": 0}, "offload_optimizer": NVME})
    deep = {**SHAPE, "n_layer": 24, "n_embd": 256, "block_size": 16}

    def predict(config, **how):
        cluster = Cluster(device="cpu")
        return thalweg.plan(deep, config, cluster=cluster, process_bytes=0, suggest=False, sequence_length=16, **how)

    deferred, whole = predict(config), predict(config, deferred_init=False)
    assert whole.per_rank.parameters >= 3.9 * whole.num_parameters
    assert deferred.per_rank.parameters == 0
    assert deferred.per_rank.total < whole.per_rank.total
    assert "thalweg.zero.Init()" in str(deferred) and not whole.assumptions


def test_a_config_without_an_optimizer_is_planned_with_adamw_and_says_so():
    bare = config_of()
    del bare["optimizer"]
    named, found = planned(config_of()), planned(bare)
    assert found.per_rank == named.per_rank
    assert found.assumptions == ["AdamW, as the config names no optimizer"] and not named.assumptions
    assert "planned with: AdamW" in str(found)
    assert found.to_dict()["assumptions"] == found.assumptions
