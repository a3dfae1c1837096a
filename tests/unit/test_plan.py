"""The plan: published cases, the tape against real tensors, the heap, depth, the answer's form."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch
import transformers

import thalweg
from thalweg.config import load, resolve
from thalweg.config.schema.training import Tiling
from thalweg.nn.sparse_attention import FixedSparsityConfig, SparseSelfAttention
from thalweg.nn.sparse_attention.sparse_self_attention import get_attention
from thalweg.nn.tiled_mlp import apply_tiling
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.optim.algorithms import moment_codec
from thalweg.optim.build import build_optimizer
from thalweg.plan.estimates import transformer_activation_bytes, zero_state_bytes
from thalweg.plan.extrapolate import measure_extrapolated
from thalweg.plan.inputs.input_spec import infer_input_spec, input_spec_from_call
from thalweg.plan.inputs.model_loader import load_meta_model
from thalweg.plan.memory.rank_memory import CachingAllocator, RankMemory
from thalweg.plan.planner import build_planner
from thalweg.plan.preflight import Preflight
from thalweg.plan.spec.cluster import Cluster, accelerator_cluster, build_cluster
from thalweg.plan.spec.devices import DEVICES, find_device, get_device
from thalweg.plan.spec.run_spec import RankTopology, RunSpec
from thalweg.plan.trace.alloc_recorder import AllocationRecorder
from thalweg.plan.trace.step import trace_step
from thalweg.utils.formatting import format_bytes, format_seconds, parse_bytes
from thalweg.utils.trees import copy_to_meta
from thalweg.zero.policy import ZeroPolicy

SHAPE = GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=64, block_size=64)
NEARLY = "785MiB"  # 60 beside what the libraries take
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


def on_meta(shape: GPTConfig = SHAPE) -> GPT:
    with torch.device("meta"):
        return GPT(shape)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zeros_published_case(stage, gigabytes):
    """7.5 billion parameters, K = 12, 64 ranks (the paper's figure 1)."""
    found = zero_state_bytes(7.5e9, 64, stage) / 1e9
    assert round(found, 1) == gigabytes
    assert round(zero_state_bytes(7.5e9, 32, stage) / 1e9, 1) != gigabytes or stage == 0


def test_the_lectures_case():
    """GPT-2 of 1.5 billion parameters, sequence 1,024, batch 32: about 60 GB of activations."""
    assert transformer_activation_bytes(1600, 48, 1024, 32) == pytest.approx(60e9, rel=0.1)


def test_the_plan_gives_the_published_numbers_of_a_real_model():
    # 7.5 billion parameters: 36 layers of 4,096 and a vocabulary of 51,200, tied.
    shape = {"vocab_size": 51200, "n_layer": 36, "n_head": 32, "n_embd": 4096, "block_size": 1024}
    cluster = Cluster(num_nodes=8, devices_per_node=8, device_memory=80 << 30, flops=get_device("h100").flops)
    config = {**CONFIG, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    found = thalweg.plan(shape, config, cluster=cluster, sequence_length=128, suggest=False)
    assert found.num_parameters == pytest.approx(7.5e9, rel=0.01)
    assert found.published["zero_states"] == pytest.approx(16.6e9, rel=0.01)
    gpt2 = {"vocab_size": 50257, "n_layer": 48, "n_head": 25, "n_embd": 1600, "block_size": 1024}
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 32, "bf16": {"enabled": True}}
    found = thalweg.plan(gpt2, config, cluster=cluster, sequence_length=1024, suggest=False)
    assert found.published["activations"] == pytest.approx(60e9, rel=0.1)


def live_peak(events) -> int:
    sizes, live, peak = {}, 0, 0
    for number, num_bytes, _ in events:
        if number > 0:
            sizes[number], live = num_bytes, live + num_bytes
            peak = max(peak, live)
        elif number < 0:
            live -= sizes.pop(-number)
    return peak


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_tape_of_fakes_equals_the_tape_of_real_tensors(dropout):
    shape = GPTConfig(**{**SHAPE.to_dict(), "dropout": dropout})
    real = GPT(shape)
    tokens = torch.randint(0, 256, (2, 64))
    tape = AllocationRecorder()
    tape.ignore([*real.parameters(), tokens])
    with tape:
        loss = real(tokens, tokens)
        loss.backward()
        del loss
        for parameter in real.parameters():
            parameter.grad = None
    one_rank = RunSpec(ZeroPolicy(0), topology=RankTopology(), optimizer=None)
    fake = trace_step(on_meta(shape), input_spec_from_call((tokens, tokens), {}), one_rank)
    activations = [event for event in fake.window_events if event[2] != "buffers"]
    numbers = {number for number, _, label in fake.window_events if label == "buffers"}
    activations = [event for event in activations if -event[0] not in numbers]
    # The real run keeps all gradients to the end; those of the fake one leave unit by unit.
    assert live_peak(activations) == pytest.approx(live_peak(tape.events), rel=0.02)
    assert fake.flops == tape.flops
    short = trace_step(on_meta(shape), infer_input_spec(real, 2, 32), one_rank)
    assert live_peak(short.window_events) < 0.7 * live_peak(fake.window_events)  # negative control


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_experts_of_hugging_face_are_planned_in_fp32(family):
    """torch's grouped product has no form without values but in bf16."""
    more = {"num_local_experts": 4} if family == "Mixtral" else {"num_experts": 4}
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2,
        vocab_size=512, use_cache=False, **more,
    )  # fmt: skip
    real = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, 512, (2, 64))
    tape = AllocationRecorder()
    tape.ignore([*real.parameters(), tokens])
    with tape:
        real(input_ids=tokens, labels=tokens).loss.backward()
        for parameter in real.parameters():
            parameter.grad = None
    one_rank = RunSpec(ZeroPolicy(0), topology=RankTopology(), optimizer=None)
    with torch.device("meta"):
        planned = transformers.AutoModelForCausalLM.from_config(config)
    fake = trace_step(planned, input_spec_from_call((), {"input_ids": tokens, "labels": tokens}), one_rank)
    buffers = {number for number, _, label in fake.window_events if label == "buffers"}
    own = [event for event in fake.window_events if abs(event[0]) not in buffers]
    assert live_peak(own) == pytest.approx(live_peak(tape.events), rel=0.1)


WIDE = GPTConfig(vocab_size=2048, n_layer=2, n_head=2, n_embd=32, block_size=64)


@pytest.mark.parametrize(
    "tiling",
    [Tiling(loss=True, loss_tokens=32), Tiling(loss=True, loss_tokens=64, mlp=4), Tiling(mlp=8)],
)
def test_tiles_of_fakes_equal_tiles_of_real_tensors(tiling):
    tokens = torch.randint(0, 2048, (4, 64))
    real, tape = GPT(WIDE), AllocationRecorder()
    tape.ignore([*real.parameters(), tokens])
    apply_tiling(real, tiling)
    with tape:
        loss = real(tokens, tokens)
        loss.backward()
        del loss
    batch, one_rank = (
        input_spec_from_call((tokens, tokens), {}),
        RunSpec(ZeroPolicy(0), topology=RankTopology(), optimizer=None, tiling=tiling),
    )
    fake = trace_step(on_meta(WIDE), batch, one_rank)
    own = {number for number, _, label in fake.window_events if label == "buffers"}
    events = [event for event in fake.window_events if abs(event[0]) not in own]
    assert live_peak(events) == pytest.approx(live_peak(tape.events), rel=0.03)
    plain = trace_step(on_meta(WIDE), batch, RunSpec(ZeroPolicy(0), topology=RankTopology(), optimizer=None))
    if tiling.loss:  # full logits would be most of it
        assert live_peak(fake.window_events) < 0.7 * live_peak(plain.window_events)
    else:
        assert live_peak(fake.window_events) != live_peak(plain.window_events)


def test_views_and_in_place_results_cost_nothing():
    tape = AllocationRecorder()
    x = torch.ones(64, 64)
    tape.ignore([x])
    with tape:
        y = x.t().reshape(-1)[:100].view(10, 10)
        x.add_(1)
        del y
    made = [event for event in tape.events if event[0] > 0]
    assert [num_bytes for _, num_bytes, _ in made] == [x.nbytes]  # reshape of a transposed one copies, once
    assert sum(event[0] for event in tape.events) == 0


def test_a_heap_keeps_its_highest():
    heap = RankMemory(100, 1.5)
    heap.allocate(1, 1000, "activations")
    heap.allocate(2, 400, "optimizer")
    heap.free(1)
    heap.adjust_mmapped("gathered", 300)
    assert heap.resident_bytes == 100 + 2100 + 300
    at_peak = heap.breakdown_at_peak()
    assert (at_peak.activations, at_peak.optimizer, at_peak.gathered) == (1000, 400, 300)
    assert at_peak.fragmentation == 700 and at_peak.process == 100 and at_peak.total == 2500
    heap.allocate(3, 900, "activations")  # fits into what is free
    assert heap.resident_bytes == 2500
    mapped = RankMemory(0, 1.5, mmap_threshold=500)
    mapped.allocate(1, 1000, "activations")
    assert mapped.resident_bytes == 1000
    mapped.free(1)
    assert mapped.resident_bytes == 0 and mapped.breakdown_at_peak().total == 1000


def test_a_device_gives_out_blocks_as_torch_does():
    """By the rules of torch's caching allocator, worked out by hand."""
    mib, blocks = 2**20, CachingAllocator()

    def held_after(*, free: tuple[int, ...] = (), **sizes: int) -> float:
        for number in free:
            blocks.free(number)
        for name, size in sizes.items():
            blocks.allocate(int(name[1:]), size)
        return blocks.held_bytes / mib

    assert held_after(b1=1000, b2=mib) == 2  # 1,024 bytes and 1 MiB of one segment of 2 MiB
    assert held_after(b3=mib) == 4  # what is left of it is too small by 1,024 bytes
    assert held_after(b4=3 * mib, b5=15 * mib) == 24  # below 10 MiB: of a segment of 20, whose rest others may take
    assert held_after(b6=11 * mib + 1) == 36  # a segment of its own of whole 2 MiB; its last MiB is not split off
    assert held_after(free=(6,)) == 24  # wholly free: it could go back
    assert held_after(free=(4,), b7=2 * mib) == 24  # the smallest free block that holds it
    assert held_after(b8=3 * mib) == 24
    assert held_after(free=(5, 7), b9=17 * mib) == 24  # neighbours join
    assert held_after(free=(1, 2, 3, 8, 9)) == 0

    device = RankMemory(0, None)
    device.allocate(1, 12 * mib, "activations")
    device.allocate(2, 4 * mib, "optimizer")
    device.free(1)
    device.adjust_mmapped("gathered", 300)
    assert device.resident_bytes == 4 * mib + 300
    peak = device.breakdown_at_peak()
    assert (peak.activations, peak.optimizer) == (12 * mib, 4 * mib)
    assert peak.total == 32 * mib and peak.fragmentation == 16 * mib


def test_a_device_is_known_by_its_exact_name_or_measured(monkeypatch):
    """W8: "rtx4090" is in no driver's name, and a device that nobody knows is no H100."""
    assert len(DEVICES) >= 30
    for name, device in DEVICES.items():
        assert find_device(name.upper()) is device and get_device(name) is device
        assert device.flops.get("tf32", 1e20) >= device.flops["fp32"]  # products are never slower in less precision
        assert 8 << 30 < device.memory_bytes < 300 << 30 and device.source
    assert get_device("rtx4090").name == "NVIDIA GeForce RTX 4090"
    assert find_device("NVIDIA H100") is None and find_device("NVIDIA Nobody 1") is None
    assert get_device("NVIDIA H100 PCIe").flops["bf16"] < 0.8 * get_device("h100").flops["bf16"]
    with pytest.raises(ValueError, match=r"'rtx409' is not known; near it: .*rtx4090"):
        build_cluster(device="rtx409")

    plain, tf32 = (accelerator_cluster(get_device("h100"), tf32) for tf32 in (False, True))
    assert plain.peak_flops(torch.float32) == 67e12 and tf32.peak_flops(torch.float32) == 494.5e12
    assert plain.peak_flops(torch.bfloat16) == tf32.peak_flops(torch.bfloat16) == 989e12

    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="this machine has none"):
            build_cluster(device="gpu")
        guessed = thalweg.plan(GPT(SHAPE), CONFIG, device_memory="80GiB", sequence_length=32)
        assert any("no device is named" in line for line in guessed.assumptions)


@pytest.mark.parametrize("excess", ["holes", "device", "host"])
def test_a_job_that_fits_but_for_holes_is_warned_of_and_no_other(excess, monkeypatch):
    tiny = {"vocab_size": 512, "n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 128}
    plan = thalweg.plan(tiny, CONFIG, device="h100")
    alive, holes = plan.per_rank.total - plan.per_rank.fragmentation, 100 << 20
    plan = dataclasses.replace(plan, per_rank=dataclasses.replace(plan.per_rank, fragmentation=holes))
    plan = dataclasses.replace(plan, limit=alive + {"holes": holes - 1, "device": -1, "host": 2 * holes}[excess])
    if excess == "host":  # by less than the holes of the device
        plan = dataclasses.replace(plan, per_host=1 << 30, host_limit=(1 << 30) - 1)
    assert plan.fits is False

    preflight, rejected = Preflight.__new__(Preflight), []
    preflight._meta_model, preflight._limit_bytes = SimpleNamespace(model=torch.nn.Linear(2, 2)), 1
    preflight._device = torch.device("meta")
    monkeypatch.setattr(preflight, "_try_predict", lambda input_spec: plan, raising=False)
    monkeypatch.setattr(preflight, "_reject", lambda *args: rejected.append(args), raising=False)
    said: list[str] = []
    monkeypatch.setattr("thalweg.plan.preflight._log.warning", lambda text, *values: said.append(text % values))
    preflight._check_batch(None)
    assert bool(rejected) == (excess != "holes")
    assert any("expandable_segments" in line for line in said) == (excess == "holes")


def test_recomputation_stages_and_precision_move_the_right_bytes():
    source = {"vocab_size": 512, "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128}
    gpu = Cluster(num_nodes=1, devices_per_node=8, device_memory=80 << 30, flops=get_device("h100").flops)
    answers = {}
    for stage in range(4):
        answers[stage] = thalweg.plan(source, {**CONFIG, "zero_optimization": {"stage": stage}}, cluster=gpu)
    states = [answers[stage].per_rank for stage in range(4)]
    assert states[0].parameters == 8 * states[1].parameters
    assert states[0].optimizer == pytest.approx(8 * states[1].optimizer, rel=0.01)
    assert states[3].gathered < states[2].gathered
    recompute = {**CONFIG, "activation_checkpointing": {"policy": "full"}}
    full = thalweg.plan(source, recompute, cluster=gpu)
    assert full.per_rank.activations < 0.6 * states[0].activations
    assert full.time_breakdown["compute"] > 1.2 * answers[0].time_breakdown["compute"]


def test_a_deep_model_is_continued_from_shallow_ones():
    shape = GPTConfig(vocab_size=512, n_layer=26, n_head=2, n_embd=64, block_size=64)
    setting = RunSpec(ZeroPolicy(3), topology=RankTopology(1, 2), micro_batch_size=2)

    def measure(model):
        found = trace_step(model, infer_input_spec(model, 2, 64), setting)
        return {"peak": live_peak(found.window_events), "flops": found.flops}

    continued = measure_extrapolated(lambda: on_meta(shape), measure)
    whole = measure(on_meta(shape))
    assert continued["peak"] == pytest.approx(whole["peak"], rel=0.01)
    assert continued["flops"] == whole["flops"]


@pytest.fixture
def traced_ops(monkeypatch):
    """Operators of every trace that a plan makes: what its processor time goes into."""
    counts = []

    def count(*args):
        trace = trace_step(*args)
        counts.append(trace.num_ops)
        return trace

    monkeypatch.setattr("thalweg.plan.planner.trace_step", count)
    return counts


def test_a_plan_traces_as_much_of_a_deep_stack_as_of_a_shallow_one(traced_ops):
    def plan_depth(model):
        traced_ops.clear()
        return thalweg.plan(model, CONFIG, devices_per_node=2, device="h100", suggest=False), list(traced_ops)

    (shallow, ops), (deep, ops_of_deep) = (
        plan_depth(on_meta(dataclasses.replace(SHAPE, n_layer=depth))) for depth in (26, 52)
    )
    assert ops_of_deep == ops and len(ops) == 2
    assert deep.per_rank.activations > 1.8 * shallow.per_rank.activations
    # Layers that differ are all traced: each is wider than the one before.
    differing = on_meta(dataclasses.replace(SHAPE, n_layer=26))
    for index, block in enumerate(differing.blocks):
        width = 64 * (index + 1)
        block.mlp = torch.nn.Sequential(*(torch.nn.Linear(*size, device="meta") for size in ((64, width), (width, 64))))
    _, ops_of_differing = plan_depth(differing)
    assert len(ops_of_differing) == 1 and ops_of_differing[0] > 3 * ops[0]


def test_a_search_traces_once_what_its_configurations_share(traced_ops):
    tiny = {"vocab_size": 512, "n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 128}
    machines = {"devices_per_node": 2, "device": "h100"}

    def ask(planner, stage, accumulation):
        traced_ops.clear()
        config = {**CONFIG, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation}
        return planner.predict(resolve(load(config), world_size=2)).to_dict(), len(traced_ops)

    planner = build_planner(tiny, **machines)
    first, shared, third = (ask(planner, stage, 1) for stage in (1, 2, 3))
    assert [first[1], shared[1], third[1]] == [1, 0, 1]
    assert shared[0] == ask(build_planner(tiny, **machines), 2, 1)[0] != first[0]
    # Of two micro-batches stage 1 reduces one's gradients and stage 2 both's.
    once, twice = (ask(planner, stage, 2) for stage in (1, 2))
    assert [once[1], twice[1]] == [1, 1]
    assert once[0]["per_rank"] != twice[0]["per_rank"]


def test_the_answer_has_its_keys_and_fits_or_not():
    tiny = {"vocab_size": 512, "n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 128}
    found = thalweg.plan(tiny, CONFIG, device="h100", device_memory="80GiB").to_dict()
    wanted = {"parameters", "gradients", "optimizer", "gathered", "buffers", "activations", "total"}
    assert wanted <= found["per_rank"].keys()
    assert found["per_rank"]["total"] == sum(v for k, v in found["per_rank"].items() if k != "total")
    assert {"traffic", "step_seconds", "bottleneck", "fits", "suggestion"} <= found.keys()
    assert found["fits"] is True
    assert json.loads(json.dumps(found)) == found
    small = thalweg.plan(tiny, {**CONFIG, "train_micro_batch_size_per_gpu": 64}, device="h100", device_memory=NEARLY)
    assert small.fits is False
    assert small.suggestion
    changed = thalweg.plan.plan  # the package is callable, and a package
    assert callable(changed)


def test_a_suggestion_fits_when_it_is_followed():
    from thalweg.plan.spec.run_spec import apply_changes

    tiny = {"vocab_size": 512, "n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 128}
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 64}
    first = thalweg.plan(tiny, config, device="h100", device_memory=NEARLY)
    second = thalweg.plan(tiny, apply_changes(config, first.suggestion), device="h100", device_memory=NEARLY)
    assert second.fits is True
    assert first.fits is False
    assert second.tokens_per_step == first.tokens_per_step


def test_the_page_needs_no_network():
    from thalweg.plan.html import plan_to_html

    tiny = {"vocab_size": 512, "n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 128}
    page = plan_to_html(thalweg.plan(tiny, CONFIG, device="h100"))
    assert "<svg" in page
    assert "polygon" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_live_model_is_not_touched():
    model = GPT(SHAPE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    thalweg.plan(model, {**CONFIG, "activation_checkpointing": {"policy": "full"}}, sequence_length=32)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [type(module) for module in model.modules()] == classes
    assert not any(p.is_meta for p in model.parameters())
    assert all(p.is_meta for p in copy_to_meta(model).parameters())


@pytest.mark.parametrize("wrong", [3, "no/such/folder", {"n_layer": 2, "depth": 3}, {"model_type": "nothing"}])
def test_what_is_no_model_is_a_clear_error(wrong):
    with pytest.raises((ValueError, FileNotFoundError)):
        load_meta_model(wrong)


def test_a_model_with_other_inputs_asks_for_a_batch():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="batch="):
        thalweg.plan(model, CONFIG)
    found = thalweg.plan(model, CONFIG, batch=torch.ones(2, 4))
    assert found.per_rank.total > 0


def test_more_tokens_than_positions_are_an_error_before_the_run():
    learnt = GPT(GPTConfig(64, 1, 2, 32, 16))
    turned = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="16 positions"):
        thalweg.plan(learnt, CONFIG, sequence_length=17)
    assert thalweg.plan(learnt, CONFIG, sequence_length=16).per_rank.total > 0
    assert thalweg.plan(turned, CONFIG, sequence_length=17).per_rank.total > 0


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_texts_beside_images_are_planned(family):
    """Positions of images are no bound for texts, and those of texts are for them."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(
        family,
        text_config={**text, "vocab_size": 99, "max_position_embeddings": 20},
        vision_config={**text, "image_size": 24, "patch_size": 8},  # 9 patches
    )
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    found = thalweg.plan(model, CONFIG)
    trained = sum(p.numel() for p in model.parameters())
    assert found.per_rank.activations > 0 and found.per_rank.optimizer >= 8 * trained
    fields = infer_input_spec(model, 2).kwargs
    assert fields["input_ids"].shape == (2, 20) and fields["pixel_values"].shape == (2, 3, 24, 24)
    with pytest.raises(ValueError, match="20 positions"):
        thalweg.plan(model, CONFIG, sequence_length=21)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GiB", 80 << 30), ("16 GB", 16 * 10**9), ("512m", 512 << 20), (7, 7)]
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


def test_sizes_that_are_none():
    with pytest.raises(ValueError, match="80GiB"):
        parse_bytes("many")
    assert format_bytes(3 << 30) == "3 GiB"
    seconds = (2e-5, 0.25, 90.0, 5400.0, 72000.0, 2.6e6)
    assert [format_seconds(one) for one in seconds] == ["20 us", "250 ms", "90 s", "90 min", "20 h", "30.1 days"]
    with pytest.raises(ValueError, match="h100"):
        build_cluster(device="abacus")


def test_a_big_llama_on_1024_gpus_in_seconds():
    pytest.importorskip("transformers")
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    config = {
        **CONFIG,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 1,
    }
    config["activation_checkpointing"] = {"policy": "full"}
    load_meta_model({**llama, "num_hidden_layers": 1})  # the library's import is not the plan's
    start = time.process_time()
    found = thalweg.plan(llama, config, num_nodes=128, devices_per_node=8, device="h100", sequence_length=4096)
    assert time.process_time() - start < 5
    assert found.num_parameters == 70_553_706_496
    assert found.per_rank.optimizer == pytest.approx(8 * 70.55e9 / 1024, rel=0.01)
    assert found.fits is True


class _Sparse(torch.nn.Module):
    """As programs of DeepSpeed's build it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attention = torch.nn.Linear(64, 192), SparseSelfAttention(FixedSparsityConfig(num_heads=4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.attention(q, k, v).square().mean()


def test_a_plan_leaves_nothing_behind_that_a_run_would_meet() -> None:
    """What is made once and kept must not be a plan's fake tensors."""
    moment_codec._codebook.cache_clear()
    moment_codec._dynamic_tree_codes.cache_clear()
    get_attention.cache_clear()
    config = CONFIG | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "state_dtype": "int8"}}}
    planned = thalweg.plan(on_meta(), config, cluster=Cluster(devices_per_node=1, device="cpu"))
    assert planned.per_rank.total > 0
    param = torch.nn.Parameter(torch.ones(64, 256))
    optimizer = build_optimizer("AdamW", [param], {"lr": 1e-2, "state_dtype": "int8"})
    param.grad = torch.ones(64, 256)
    optimizer.step()
    assert torch.allclose(param, torch.full((64, 256), 0.99), atol=1e-3)
    model, x = _Sparse(), torch.randn(2, 256, 64)
    thalweg.plan(model, CONFIG, cluster=Cluster(devices_per_node=1, device="cpu"), batch=[x], suggest=False)
    assert model(x).isfinite()
