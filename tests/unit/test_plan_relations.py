"""What must hold between plans, whatever the model: sums, stages, tiers, ranks, batches, and what is said."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thalweg
from tests.marks import nightly
from thalweg.activation_checkpointing.apply import default_nvme_path
from thalweg.config import load
from thalweg.plan import Cluster, Plan, extrapolate, planner
from thalweg.plan.html import plan_to_html
from thalweg.plan.inputs.input_spec import input_spec_from_call
from thalweg.plan.spec.run_spec import apply_changes

pytest.importorskip("transformers")
GIB = 2**30


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Small ones: odd vocabularies, wide and short, narrow and deep, decoders, encoders, both, experts."""
    heads = draw(st.sampled_from([2, 4]))
    width, layers = heads * draw(st.sampled_from([16, 32, 64])), draw(st.integers(3, 4))
    vocabulary = draw(st.sampled_from([97, 512, 4097, 20000]))
    hf = {"num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": width}
    hf |= {"intermediate_size": 3 * width, "vocab_size": vocabulary, "max_position_embeddings": 256}
    grouped = {**hf, "num_key_value_heads": heads // 2}
    return draw(
        st.sampled_from(
            [
                {"vocab_size": vocabulary, "n_layer": layers, "n_head": heads, "n_embd": width},
                {"model_type": "llama", **grouped},
                {"model_type": "gpt2", **hf},
                {"model_type": "bert", "architectures": ["BertForMaskedLM"], **hf},
                {"model_type": "t5", "d_model": width, "d_ff": width, "d_kv": 16, "num_layers": layers}
                | {"num_heads": heads, "vocab_size": vocabulary, "decoder_start_token_id": 0},
                # As many experts as the most ranks: shards are rows, and with fewer experts twice the ranks gather
                # twice the padding (docs/decisions/2026-11-24-experts-fewer-than-ranks.md).
                {"model_type": "qwen2_moe", "num_experts": 16, "num_experts_per_tok": 2, **grouped},
            ]
        )
    )


configs = st.fixed_dictionaries(
    {
        "train_micro_batch_size_per_gpu": st.sampled_from([1, 2]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, 4]),
        "optimizer": st.fixed_dictionaries({"type": st.sampled_from(["AdamW", "SGD", "Lion"])}),
        "bf16": st.fixed_dictionaries({"enabled": st.booleans()}),
        "activation_checkpointing": st.fixed_dictionaries({"policy": st.sampled_from(["none", "full", "selective"])}),
    }
)


def ask(model: Any, config: dict[str, Any], nodes: int, local: int, length: int, **more: Any) -> Plan:
    where = Cluster(num_nodes=nodes, devices_per_node=local, **more)
    return thalweg.plan(model, config, cluster=where, sequence_length=length, suggest=False, process_bytes=0)


@pytest.mark.nightly
@given(models(), configs, st.sampled_from([(1, 2), (1, 4), (2, 4), (4, 1)]), st.sampled_from([16, 40]))
@settings(max_examples=2, deadline=None)
def test_relations_between_plans(
    model: dict[str, Any], config: dict[str, Any], ranks: tuple[int, int], length: int
) -> None:
    beside: list[int] = []

    def total(zero: dict[str, Any], nodes: int = ranks[0], tokens: int = length, **more: Any) -> int:
        found = ask(model, config | {"zero_optimization": zero} | more, nodes, ranks[1], tokens).to_dict()
        parts = {key: value for key, value in found["per_rank"].items() if key != "total"}
        assert found["per_rank"]["total"] == sum(parts.values()) and min(parts.values()) >= 0
        assert json.loads(json.dumps(found)) == found
        beside.append(parts["parameters"] + parts["buffers"])
        # Holes are a measured share of the blocks that are small enough for the heap: of two plans the larger may
        # have fewer, since more of its blocks are mappings.
        return found["per_rank"]["total"] - found["per_rank"]["fragmentation"]

    stages = [total({"stage": stage}) for stage in range(4)]
    # Stages 1 to 3 keep a shard beside the gathered parameters, and a block's gradients twice while they are reduced.
    # SGD keeps nothing that could be cut, and two ranks may save less than that.
    granted = beside[1] if config["optimizer"]["type"] == "SGD" else 0
    assert stages[3] <= stages[2] <= stages[1] <= stages[0] + granted
    assert total({"stage": 3}, nodes=2 * ranks[0]) <= stages[3]
    micro = config["train_micro_batch_size_per_gpu"]
    assert total({"stage": 2}, train_micro_batch_size_per_gpu=2 * micro) >= stages[2]
    assert total({"stage": 1}, tokens=length + 7) >= stages[1]
    states = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    away = total(states)
    assert away <= stages[3]
    assert total({**states, "offload_param": {"device": "cpu"}}) <= away


def test_the_gradient_of_an_encoders_output_gathers_nothing_a_second_time() -> None:
    """FSDP2 looks ahead once a forward pass: at its peak, the embedding's gradient, stage 3 has what stage 2 has."""
    model = {"model_type": "t5", "d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 3, "num_heads": 2}
    model |= {"vocab_size": 20000, "decoder_start_token_id": 0}
    config = {"optimizer": {"type": "SGD"}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    config |= {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"policy": "full"}}
    second, third = (ask(model, config | {"zero_optimization": {"stage": stage}}, 1, 4, 16) for stage in (2, 3))
    assert third.per_rank.gathered == second.per_rank.gathered > 20000 * 32 * 2


def test_a_plan_names_parameters_with_fewer_rows_than_ranks() -> None:
    """Four experts on 16 ranks: a rank holds an expert or nothing; on 4, or with 16, all hold the same."""
    shape = {"model_type": "qwen2_moe", "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    shape |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "num_experts_per_tok": 2}
    config = CONFIG | {"zero_optimization": {"stage": 3}}
    (line,) = (few := ask(shape | {"num_experts": 4}, config, 4, 4, 16)).warnings
    assert "mlp.experts." in line and "[4, " in line and "into 16 ranks" in line and "4 times their bytes" in line
    assert f"warning: {line}" in str(few) and few.to_dict()["warnings"] == [line]
    assert not ask(shape | {"num_experts": 4}, config, 1, 4, 16).warnings
    grouped = CONFIG | {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}
    cured = ask(shape | {"num_experts": 4}, grouped, 4, 4, 16)
    assert not cured.warnings and cured.per_rank.gathered < few.per_rank.gathered
    assert not ask(shape | {"num_experts": 16}, config, 4, 4, 16).warnings
    assert not ask(shape | {"num_experts": 4}, CONFIG | {"zero_optimization": {"stage": 0}}, 4, 4, 16).warnings


DEEP = {"vocab_size": 512, "n_layer": 40, "n_head": 2, "n_embd": 64, "block_size": 64}
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}


@pytest.mark.parametrize("policy", ["none"])
def test_the_timeline_of_a_deep_model_reaches_its_peak(policy: str) -> None:
    """A model beyond 24 blocks is traced with 4 and 5 of them, and its page shows all."""
    config = CONFIG | {"activation_checkpointing": {"policy": policy}}
    found = ask(DEEP, config, 1, 2, 64)
    shallow = ask(DEEP | {"n_layer": 6}, config, 1, 2, 64)
    highest = max(sample.resident_bytes for sample in found.timeline)
    assert highest == pytest.approx(found.per_rank.total - found.per_rank.fragmentation, rel=0.02)
    assert highest > 3 * max(sample.resident_bytes for sample in shallow.timeline)
    state = {sample.live_bytes.get("optimizer", 0) for sample in found.timeline}
    assert max(state) == pytest.approx(found.per_rank.optimizer, rel=0.02)
    assert "polygon" in plan_to_html(found)


def test_a_disk_that_is_too_small_is_said_and_so_is_what_fits() -> None:
    nvme = {"device": "nvme", "nvme_path": "/tmp"}
    config = CONFIG | {"zero_optimization": {"stage": 2, "offload_optimizer": nvme}}
    found = thalweg.plan(
        DEEP | {"n_layer": 2},
        config,
        cluster=Cluster(device="cpu", host_memory=64 * GIB, disk_bytes=1 << 20),
        suggest=False,
    )
    assert found.fits is False and found.exceeded_resource == "disk"
    assert found.excess_bytes == found.tiers["disk"] - (1 << 20) > 0
    assert "for the disk, which has 1 MiB free" in str(found)
    roomy = Cluster(device="cpu", host_memory=64 * GIB, disk_bytes=GIB)
    enough = thalweg.plan(DEEP | {"n_layer": 2}, config, cluster=roomy)
    assert enough.fits is True and enough.exceeded_resource == "memory" and enough.excess_bytes < 0


def test_the_plan_looks_at_the_disk_that_the_job_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One order of the folders that a config names, for the plan and for activations that leave."""
    asked: list[str | None] = []
    monkeypatch.setattr(planner, "get_disk_limit", lambda cluster, folder: asked.append(folder))
    idle, states = {"nvme_path": "/idle"}, {"device": "nvme", "nvme_path": "/states"}
    for zero, memory, folder in (
        ({"offload_param": idle, "offload_optimizer": states}, {}, "/states"),
        ({"offload_param": idle, "offload_optimizer": {"nvme_path": "/other"}}, {}, "/idle"),
        ({"offload_param": idle, "offload_optimizer": states}, {"nvme_path": "/given"}, "/given"),
        ({}, {}, None),
    ):
        config = CONFIG | {"zero_optimization": {"stage": 3, **zero}, "memory": memory}
        ask(DEEP | {"n_layer": 2}, config, 1, 1, 8)
        assert asked.pop() == folder == default_nvme_path(load(config))


def test_attention_on_a_gpu_keeps_no_weights_of_pairs_for_its_dropout() -> None:
    shape = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128}
    shape |= {"n_positions": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    drop, none = (ask({**shape, "attn_pdrop": p}, CONFIG, 1, 1, 512).per_rank for p in (0.1, 0.0))
    assert drop.activations == none.activations
    pairs = 4 * 4 * 512 * 512 * 4  # rows, heads, tokens, tokens, fp32
    on_cpu = ask({**shape, "attn_pdrop": 0.1}, CONFIG, 1, 1, 512, device="cpu").per_rank
    assert on_cpu.activations > drop.activations + 2 * pairs


@pytest.mark.parametrize("vocabulary", [nightly(512), nightly(20000)])
def test_what_is_suggested_in_the_last_resort_fits_as_well(vocabulary: int) -> None:
    """Wide logits, or little memory: a loss without logits, fewer rows at once, states elsewhere.

    The limit is a quarter of what a job takes beside its context, which nothing that is suggested makes smaller.
    """
    shape = {"vocab_size": vocabulary, "n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 512}
    config = CONFIG | {"train_micro_batch_size_per_gpu": 6}
    roomy = ask(shape, config, 1, 1, 512).per_rank.total
    small = Cluster(device_memory=roomy // 4, host_memory=64 * GIB)
    first = thalweg.plan(shape, config, cluster=small, sequence_length=512, process_bytes=0)
    assert first.fits is False and first.suggestion, first.reasons
    mended = apply_changes(config, first.suggestion)
    again = thalweg.plan(shape, mended, cluster=small, sequence_length=512, process_bytes=0)
    assert again.fits is True and again.tokens_per_step == first.tokens_per_step


@pytest.mark.nightly
def test_a_given_batch_has_fewer_rows_where_fewer_are_suggested() -> None:
    """The preflight knows the first batch of a job and nothing else."""
    shape = {"vocab_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 128}
    tokens = torch.zeros(16, 128, dtype=torch.int64, device="meta")
    batch = {"tokens_BT": tokens, "labels_BT": tokens}
    config = CONFIG | {"train_micro_batch_size_per_gpu": 16}
    whole = thalweg.plan(shape, config, batch=batch, device="h100", process_bytes=0)
    half = {**config, "train_micro_batch_size_per_gpu": 8, "activation_checkpointing": {"policy": "full"}}
    fewer = ask(shape, half, 1, 1, 128)
    room = (fewer.per_rank.total + 1000) // 2 * 2
    assert room < whole.per_rank.total
    found = thalweg.plan(shape, config, batch=batch, cluster=Cluster(device_memory=room), process_bytes=0)
    assert found.suggestion and found.suggestion["train_micro_batch_size_per_gpu"] <= 8
    assert found.suggestion["gradient_accumulation_steps"] >= 2
    shared = input_spec_from_call((tokens, torch.zeros(1, 128), torch.zeros(()), True), {})
    assert [f.shape for f in shared.with_batch_size(4, 16).tensor_specs] == [(4, 128), (1, 128), ()]
    with pytest.raises(ValueError, match="cannot be cut"):
        input_spec_from_call((tokens, torch.zeros(3)), {}).with_batch_size(4, 16)


@pytest.mark.nightly
def test_auto_tries_small_micro_batches_before_it_leaves_the_device() -> None:
    shape = {"vocab_size": 512, "n_layer": 3, "n_head": 2, "n_embd": 64, "block_size": 128}
    auto = {"device": "auto"}
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW"},
    }
    config |= {"zero_optimization": {"stage": "auto", "offload_optimizer": auto, "offload_param": auto}}
    config |= {"activation_checkpointing": {"policy": "auto"}, "gradient_accumulation_steps": "auto"}
    fixed: dict[str, Any] = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    fixed |= {"activation_checkpointing": {"policy": "full"}}
    fixed |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16}
    small = Cluster(devices_per_node=2, device_memory=ask(shape, fixed, 1, 2, 128).per_rank.total)
    found = thalweg.plan(shape, config, cluster=small, sequence_length=128, process_bytes=0)
    assert found.fits is True and found.config is not None
    assert found.config.train_batch_size == 32 and found.tokens_per_step == 32 * 128
    zero = found.config.zero_optimization
    assert zero.offload_optimizer.device == zero.offload_param.device == "none"
    none = Cluster(devices_per_node=2, device_memory=1000, host_memory=64 * GIB)
    found = thalweg.plan(shape, config, cluster=none, sequence_length=128, suggest=False)
    assert found.fits is False and found.config is not None
    assert found.config.zero_optimization.offload_optimizer.device == "cpu"  # the nearest, all the same
    assert found.config.train_micro_batch_size_per_gpu == 1


@pytest.mark.parametrize("kind", ["Adafactor", "Lamb", "Muon", "RMSprop"])
def test_optimizers_that_read_values_are_planned(kind: str) -> None:
    shape = {"vocab_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64}
    found = ask(shape, CONFIG | {"optimizer": {"type": kind}}, 1, 1, 64)
    bare = ask(shape, CONFIG | {"optimizer": {"type": "SGD"}}, 1, 1, 64)
    each = (found.per_rank.optimizer - bare.per_rank.optimizer) / found.num_parameters
    assert each == pytest.approx({"Adafactor": 0, "Lamb": 8, "Muon": 5}.get(kind, 4), abs=0.2)


T5 = {"model_type": "t5", "d_model": 32, "d_ff": 32, "d_kv": 16, "num_heads": 2, "vocab_size": 97}
T5 |= {"num_layers": 9, "num_decoder_layers": 8, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("shape", "stage", "policy"),
    [(DEEP | {"vocab_size": 30000, "n_layer": 26}, 3, "none"), nightly(T5, 3, "none")],
)
def test_a_deep_model_needs_what_the_whole_of_it_does(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], stage: int, policy: str
) -> None:
    """Also where another moment is the highest in a shallow one: a large embedding is gathered there.

    Of the holes of a device's allocator the plan takes those of the shallow one: they are whole segments of 2 MiB,
    more than all of this T5, and follow no line (docs/decisions/2026-11-23-the-plan-on-devices.md).
    """
    config = CONFIG | {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config |= {"activation_checkpointing": {"policy": policy}}
    monkeypatch.setattr(extrapolate, "MAX_FULL_DEPTH", 6)
    found = ask(shape, config, 1, 8, 32)
    monkeypatch.setattr(extrapolate, "MAX_FULL_DEPTH", 1000)
    monkeypatch.setattr(extrapolate, "MAX_TOTAL_FULL_DEPTH", 1000)
    whole = ask(shape, config, 1, 8, 32)
    alive, all_alive = (plan.per_rank.total - plan.per_rank.fragmentation for plan in (found, whole))
    assert alive == pytest.approx(all_alive, rel=0.02)
    assert abs(found.per_rank.fragmentation - whole.per_rank.fragmentation) <= 2 * 2**20
    for name, value in asdict(whole.per_rank).items():
        here = getattr(found.per_rank, name)
        assert here >= 0 and (name == "fragmentation" or here == pytest.approx(value, abs=0.03 * all_alive)), name
    assert found.traffic == whole.traffic
    assert found.time_breakdown["compute"] == pytest.approx(whole.time_breakdown["compute"], rel=1e-6)
