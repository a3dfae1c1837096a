"""What users do to an engine: the rows of PAIN_POINTS that live in training loops."""

from __future__ import annotations

import copy
import gc
import os
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests import inspect
from tests.dist.models import OddShapesModel, make_batch, tiny_gpt
from tests.dist.moe_models import ModuleListMoEModel as MoEModel
from tests.dist.parity import (
    FP32_SLACK,
    ParityCase,
    bitwise_equal,
    full_tensor,
    full_tensors,
    largest_difference,
    run_engine,
    run_plain,
)
from tests.harness import is_device_real, run_ranks
from tests.marks import nightly
from thalweg.observe.flops_profiler import get_model_profile
from thalweg.zero.whole_parameter import get_shard

REUSE_RANKS = True

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "cpu_kernels": "torch"}


def config(stage: int, **more):
    """A ds_config of this stage."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        **ADAM,
        **more,
    }


def start(model, stage, **more):
    """An engine over ``model``."""
    import thalweg

    return thalweg.initialize(model=model, config=config(stage, **more))[0]


def mine(step, rank, world):
    """This rank's part of a global batch."""
    tokens, labels = make_batch(step, 2 * world)
    return tokens[rank::world], labels[rank::world]


def distance(engine, reference) -> float:
    """Largest difference between the engine's parameters and a plain model's."""
    return largest_difference(full_tensors(engine.module.parameters()), [p.detach() for p in reference.parameters()])


# Row 8: a random branch in every step


class Branching(nn.Module):
    """Three of eight blocks, chosen anew in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(8))
        self.out = nn.Linear(9, 1)

    def forward(self, x, which):
        for index in which:
            x = torch.tanh(self.layers[index](x))
        return self.out(x).square().mean()


def _branches(rank, world, stage):
    model = Branching()
    reference = copy.deepcopy(model)
    engine = start(model, stage)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    choose = random.Random(5)
    for step in range(50):
        which = choose.sample(range(8), 3)
        x = torch.randn(2 * world, 9, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x[rank::world], which))
        engine.step()
        reference(x, which).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(engine, reference)


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_row08_a_random_branch_every_step(together, stage):
    assert max(together(_branches, 2)) < 1e-4 * FP32_SLACK


# Row 14: several engines in one process


def _three_engines(rank, world):
    models = {stage: tiny_gpt(seed=stage) for stage in (0, 2, 3)}
    alone = {}
    for stage, model in models.items():
        alone[stage] = run_engine(model, ParityCase(stage, windows=(1,) * 4), rank, world)
    engines = {stage: start(copy.deepcopy(model), stage) for stage, model in models.items()}
    losses = {stage: [] for stage in models}
    for step in range(4):
        tokens, labels = mine(step, rank, world)
        outputs = {stage: engine(tokens, labels) for stage, engine in engines.items()}
        for stage in (3, 0, 2):
            engines[stage].backward(outputs[stage])
        for stage, engine in engines.items():
            engine.step()
            total = outputs[stage].detach().clone()
            dist.all_reduce(total)
            losses[stage].append(float(total) / world)
    return [losses[stage] == alone[stage].losses for stage in models]


def test_row14_three_engines_interleaved_equal_three_runs():
    for equal in run_ranks(_three_engines, 2):
        assert equal == [True, True, True]


# Row 15: two losses, a module used twice, a retained graph


class Siamese(nn.Module):
    """One tower used twice; returns two losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.tower = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 6)])

    def encode(self, x):
        return self.tower[1](torch.relu(self.tower[0](x)))

    def forward(self, a, b):
        ea, eb = self.encode(a), self.encode(b)
        return (ea - eb).square().mean(), ea.abs().mean()


def _two_losses(rank, world, stage, how):
    model = Siamese()
    reference = copy.deepcopy(model)
    # Plain descent: Adam would turn a rounding error in a gradient near zero into a whole step.
    engine = start(model, stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        a, b = torch.randn(2, 2 * world, 6, generator=generator).unbind(0)
        first, second = engine(a[rank::world], b[rank::world])
        if how == "sum":
            engine.backward(first + second)
        elif how == "two":
            engine.backward(first, retain_graph=True)
            engine.backward(second)
        else:
            engine.backward(first + second, retain_graph=True)
            engine.backward(first)
        engine.step()
        one, two = reference(a, b)
        (one + two if how != "again" else 2 * one + two).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(engine, reference)


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
@pytest.mark.parametrize("how", ["sum", "two", "again"])
def test_row15_two_losses_shared_modules_retained_graphs(together, stage, how):
    assert max(together(_two_losses, 2)) < 1e-6


# Row 16: the plain loop


def _plain_loop(rank, world, stage, dtype):
    import thalweg

    more = {dtype: {"enabled": True}} if dtype != "fp32" else {}
    driven = start(tiny_gpt(), stage, **more)
    model = tiny_gpt()
    settings = config(stage, **more)
    settings.pop("optimizer")
    given = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    engine, optimizer, _, _ = thalweg.initialize(model=model, optimizer=given, config=settings)
    worst = 0.0
    for step in range(5):
        tokens, labels = mine(step, rank, world)
        driven.backward(driven(tokens, labels))
        loss = engine(tokens, labels)
        loss.backward()
        for a, b in zip(driven.module.parameters(), engine.module.parameters(), strict=True):
            worst = max(worst, float((full_tensor(a.grad) - full_tensor(b.grad)).abs().max()))
        driven.step()
        optimizer.step()
        optimizer.zero_grad()
    return worst, largest_difference(*(full_tensors(one.module.parameters()) for one in (engine, driven)))


@pytest.mark.parametrize("dtype", ["fp32", nightly("bf16"), "fp16"])
@pytest.mark.parametrize("stage", [0, nightly(1), 3])
def test_row16_the_unmodified_loop_gives_the_same(together, stage, dtype):
    for worst_grad, worst_parameter in together(_plain_loop, 2):
        limit = 1e-7 if dtype != "fp16" else 2e-3
        assert worst_grad <= limit
        assert worst_parameter <= limit * 100


# A plain backward pass of what a model returns: its loss, and logits that the loss was made of

_HALF = {"fp16": {"enabled": True, "initial_scale_power": 6}}
_LOOPS = {
    "fp16": _HALF,
    "tokens": {"token_weighted_loss": True, "gradient_accumulation_steps": 2},
    "tensor": {**_HALF, "tensor_parallel": {"autotp_size": 2}},
    "tiles": {**_HALF, "tiling": {"loss": True, "loss_tokens": 4}},
    "deepspeed": {"gradient_accumulation_steps": 4},
    "own output": _HALF,
}


class _Attributes(dict):
    """A mapping that is its own attributes, as programs write it."""

    def __init__(self, **values) -> None:
        super().__init__(values)
        self.__dict__ = self


class _OwnOutput(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        output = self.inner(**batch)
        return _Attributes(loss=output.loss, logits=output.logits)


def _norms_of_loops(rank, world):
    """By loop: the gradient's norm with ``engine.backward``, and with plain backward passes."""
    import thalweg
    from tests.unit.infer_models import tiny_decoder
    from thalweg.compat.deepspeed.initialization import initialize

    norms = {}
    for name, more in _LOOPS.items():
        for plain in (False, True):
            make = initialize if name == "deepspeed" else thalweg.initialize
            model = tiny_decoder("llama")
            model = _OwnOutput(model) if name == "own output" else model
            engine = make(model=model, config=config(1, **more))[0]
            for micro in range(num_micro := engine.gradient_accumulation_steps()):
                seed = 2 * micro + inspect.data_mesh(engine).get_local_rank()
                tokens = torch.randint(100, (2, 8), generator=torch.Generator().manual_seed(seed))
                labels = torch.where(torch.arange(8) > 4 * seed % 7, tokens, -100)
                output = engine(input_ids=tokens, labels=labels)
                loss = output.loss + output.logits.div_(2.0).float().square().mean()
                if plain:
                    (loss if name == "deepspeed" else loss / num_micro).backward()
                else:
                    engine.backward(loss)
                if name == "deepspeed" or not plain:
                    engine.step()
            if engine.global_steps == 0:
                engine.optimizer.step()
            norms.setdefault(name, []).append(engine.get_global_grad_norm())
            engine.close()
    return norms


def test_row16_logits_beside_the_loss_and_changed_in_place_are_scaled_once():
    pytest.importorskip("transformers")
    norms = run_ranks(_norms_of_loops, 2)[0]
    assert {name: plain for name, (_, plain) in norms.items()} == {
        name: pytest.approx(driven, rel=2e-3) for name, (driven, _) in norms.items()
    }


# Row 17: which dtype holds what


def _dtypes(rank, world, stage, section, **expected):
    engine = start(tiny_gpt(), stage, **section)
    tokens, labels = mine(0, rank, world)
    seen = []
    engine.module.blocks[0].mlp.up.register_forward_hook(lambda m, a, out: seen.append((m.weight.dtype, out.dtype)))
    engine.backward(engine(tokens, labels))
    grads = {p.grad.dtype for p in engine.module.parameters()}
    engine.step()
    states = {
        value.dtype
        for entry in engine.optimizer.state.values()
        for key, value in entry.items()
        if key.startswith("exp_avg")
    }
    masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]}
    shown = {p.dtype for p in engine.module.parameters()}
    return seen[0], masters, grads, states, shown


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
@pytest.mark.parametrize(
    ("section", "compute", "master"),
    [
        ({}, torch.float32, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16, torch.float32),
        ({"fp16": {"enabled": True}}, torch.float16, torch.float32),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_row17_live_tensors_have_the_dtypes_of_the_config(together, stage, section, compute, master):
    for (weight, activation), masters, grads, states, shown in together(_dtypes, 2):
        assert shown == {compute if stage < 3 else master}
        assert (weight, activation) == (compute, compute)
        assert masters == {master}
        assert grads == {master}
        assert states == {torch.float32}


def _sums_of_micro_batches(rank, world):
    """Of a stage and its dtypes: how far a sum of 64 gradients is from fp32's, and what the config says of it."""
    found = []
    both = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}
    for stage, dtypes in ((1, both), (2, both), (1, {"data_types": both["data_types"]})):
        torch.manual_seed(0)
        net = nn.Linear(16, 16)
        reference = copy.deepcopy(net)
        engine = start(net, stage, gradient_accumulation_steps=64, **dtypes)
        for step in range(64):
            x = 0.3 + torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).square().mean())
            if step < 63:
                engine.step()
            (reference(x).square().mean() / 64).backward()
        inspect.finalize_grads(engine)
        error = full_tensor(engine.module.weight.grad) - reference.weight.grad
        said = "idle below stage 2, beside another communication_data_type" in engine.config.summarize()
        found.append((said, float(error.norm() / reference.weight.grad.norm()) > 2e-3))
        engine.close()
    return found


def test_a_dtype_of_sums_that_another_of_messages_leaves_idle_is_told():
    assert run_ranks(_sums_of_micro_batches, 1) == [[(True, True), (False, False), (False, False)]]


def _gradient_penalty(rank, world):
    """By stage: what a loss of gradients meets where ranks share no memory."""
    met = {}
    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    for stage in (2, 3):
        torch.manual_seed(0)
        engine = start(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), stage)
        x = torch.randn(2, 6, requires_grad=True)
        (inner,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        try:
            engine.backward((inner.norm(dim=1) - 1).square().mean())
            engine.step()
        except RuntimeError as error:
            met[stage] = "".join(error.__notes__)
    return met


def test_gradients_of_gradients_over_links_at_stage_3_name_the_cure():
    for met in run_ranks(_gradient_penalty, 2):
        assert met == {3: "gradients of gradients (create_graph=True) need parameters that stay: set stage 2"}


# Row 46: the schedule, once per update


def _rates(rank, world, accumulation):
    schedule = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_num_steps": 3,
            "total_num_steps": 10,
            "warmup_max_lr": 0.01,
            "warmup_type": "linear",
        },
    }
    engine = start(OddShapesModel(), 2, gradient_accumulation_steps=accumulation, scheduler=schedule)
    rates = []
    for step in range(6 * accumulation):
        engine.backward(engine(*mine(step, rank, world)))
        engine.step()
        if engine.micro_steps % accumulation == 0:
            rates.append(engine.get_lr()[0])
    return rates


def test_row46_one_curve_for_any_world_and_accumulation():
    curves = [run_ranks(_rates, world, n)[-1] for world, n in ((1, 1), (1, 3), (2, 1), (3, 2))]
    assert all(curve == curves[0] for curve in curves)
    assert len(set(curves[0])) == 6  # it moves at each update


# Row 32: memory of a deleted engine


def _cycles(rank, world, stage):
    from thalweg.observe.flops import resident_mib

    levels, on_device = [], []
    for _ in range(6):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        engine = start(model, stage)
        engine.backward(engine(torch.randn(4, 1024)).square().mean())
        engine.step()
        engine.close()
        del engine, model
        gc.collect()
        levels.append(resident_mib())
        on_device.append(torch.accelerator.memory_allocated() / 2**20 if torch.accelerator.is_available() else 0.0)
    return on_device if torch.accelerator.is_available() else levels  # whose memory the host's simulates


@pytest.mark.parametrize("stage", [nightly(0), 3])
def test_row32_memory_returns_after_an_engine(stage):
    """The states of one engine are 100 MiB a rank; five more cycles must not keep another one's."""
    for levels in run_ranks(_cycles, 2, stage, reuse=False):
        assert levels[-1] - levels[0] < 60, levels


# Skipped steps


def _overflow(rank, world, stage, dtype):
    more = {dtype: {"enabled": True}} if dtype != "fp32" else {}
    engine = start(tiny_gpt(), stage, **more)
    before = full_tensors(engine.module.parameters())
    loss = engine(*mine(0, rank, world))
    engine.backward(loss * float("inf") if rank == world - 1 else loss)
    engine.step()
    unchanged = bitwise_equal(full_tensors(engine.module.parameters()), before)
    for step in range(1, 3):
        engine.backward(engine(*mine(step, rank, world)))
        engine.step()
    after = full_tensors(engine.module.parameters())
    finite = all(bool(p.isfinite().all()) for p in after)
    return unchanged, not bitwise_equal(after, before), finite, engine.skipped_steps, engine.global_steps


@pytest.mark.parametrize("dtype", ["fp32", nightly("bf16"), "fp16"])
@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_one_rank_with_a_bad_gradient_skips_the_step_everywhere(together, stage, dtype):
    for outcome in together(_overflow, 2):
        assert outcome == (True, True, True, 1, 3)


# torch warns where a schedule steps before its optimizer; it does not here


def _halve(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def _schedule_warnings(rank, world, way, more, folder):
    """What torch says while a schedule steps at the right time, and the rate after three steps."""
    import thalweg

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    section = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, **more}
    if folder:
        section["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    given = {}
    if way in ("object", "kept by the user"):
        kind = torch.optim.SGD if way == "object" else torch.optim.AdamW
        given["optimizer"] = kind(net.parameters(), lr=1e-2)
    else:
        section |= ADAM
    if way == "config":
        section["scheduler"] = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = _halve(given["optimizer"]) if "optimizer" in given else None
        given |= {"object": {"lr_scheduler": schedule}, "function": {"lr_scheduler": _halve}}.get(way, {})
        engine, optimizer, _, own = thalweg.initialize(model=net, config=section, **given)
        schedule = _halve(optimizer) if way in ("plain loop", "wrong order") else schedule
        if way == "wrong order":
            schedule.step()
        for _ in range(3):
            loss = engine(torch.ones(2, 8).to(net[0].weight.dtype)).float().square().mean()
            if way == "plain loop":
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
            if own is None:
                schedule.step()
    said = [str(warning.message) for warning in caught if "step()" in str(warning.message)]
    return said, optimizer.param_groups[0]["lr"], engine.skipped_steps


SCALED = {"fp16": {"enabled": True, "initial_scale_power": 32}}


@pytest.mark.parametrize("way", ["config", "function", "object", "kept by the user", "plain loop"])
def test_a_schedule_in_the_right_order_is_not_warned_of(way, tmp_path):
    ((said, rate, _),) = run_ranks(_schedule_warnings, 1, way, {}, "")
    assert (said, rate) == ([], 5e-3)
    ((said, rate, skipped),) = run_ranks(_schedule_warnings, 1, way, SCALED, "")
    assert (said, skipped) == ([], 3) and rate == (5e-3 if way in ("kept by the user", "plain loop") else 1e-2)
    if way == "kept by the user":
        ((said, rate, _),) = run_ranks(_schedule_warnings, 1, way, {}, str(tmp_path))
        assert (said, rate) == ([], 5e-3)


def test_a_schedule_that_steps_first_is_warned_of():
    ((said, *_),) = run_ranks(_schedule_warnings, 1, "wrong order", {}, "")
    assert said and "before `optimizer.step()`" in said[0]


# Evaluation, no_sync, frozen parts


def _modes(rank, world, stage):
    model = OddShapesModel()
    reference = copy.deepcopy(model)
    engine = start(model, stage)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    for step in range(4):
        with engine.no_sync():
            engine.backward(engine(*mine(2 * step, rank, world)))
        engine.eval()
        with torch.no_grad():
            engine(*mine(90, rank, world))
        engine.train()
        engine.backward(engine(*mine(2 * step + 1, rank, world)))
        engine.step()
        for part in (0, 1):
            reference(*make_batch(2 * step + part, 2 * world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss, expected = engine(*mine(99, rank, world)), reference(*mine(99, rank, world))
    if engine.device.type != "cpu":  # over links the root's stay gathered from one evaluation to the next
        inspect.finalize_grads(engine)
    trained = [get_shard(p) for p in engine.module.parameters() if p.ndim]
    sharded = all(isinstance(p, DTensor) for p in trained) and (stage == 3) == all(
        isinstance(p, DTensor) for p in engine.module.parameters() if p.ndim
    )
    frozen = torch.equal(full_tensor(engine.module.frozen.weight), reference.frozen.weight)
    return distance(engine, reference), float((loss - expected).abs()), sharded, frozen


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_no_sync_evaluation_and_frozen_parts(together, stage):
    for worst, gap, sharded, frozen in together(_modes, 2):
        assert worst < 1e-4
        assert gap < 1e-5
        assert sharded
        assert frozen


def _submodule(rank, world, stage):
    """Calls that do not go through the root."""
    engine = start(tiny_gpt(), stage, bf16={"enabled": True})
    reference = tiny_gpt()
    for step in range(2):
        engine.backward(engine(*mine(step, rank, world)))
        engine.step()
    x = torch.randn(1, 4, 24)
    with torch.no_grad():
        out = engine.module.blocks[1](x.to(engine.device)).cpu()
        for name, parameter in engine.module.blocks[1].named_parameters():
            reference.blocks[1].get_parameter(name).copy_(full_tensor(parameter))
        expected = reference.blocks[1].bfloat16()(x.bfloat16())
        # A layer that belongs to no unit but the root's, as the embedding of an encoder that `generate` calls.
        embedded = engine.module.wte(torch.arange(4, device=engine.device)).cpu()
        table = full_tensor(engine.module.wte.weight).bfloat16()
    return max(float((out.float() - expected.float()).abs().max()), float((embedded - table[:4]).abs().max()))


@pytest.mark.parametrize("stage", [0, nightly(1), 3])
def test_a_unit_called_by_itself_sees_the_latest_update(together, stage):
    assert max(together(_submodule, 2)) == 0.0


# Several hosts: the wire forms of the collectives


def _wire(rank, world, stage):
    import os

    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    case = ParityCase(stage, windows=(2,) * 6, accumulation=2, clip=0.05)
    plain = run_plain(tiny_gpt(), case, world, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0))
    wire = run_engine(tiny_gpt(), case, rank, world)
    os.environ["THALWEG_SHARED_MEMORY"] = "1"
    shared = run_engine(tiny_gpt(), case, rank, world)
    return wire.max_loss_difference(plain), wire.losses == shared.losses


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
@pytest.mark.parametrize("world", [2, nightly(3)])
def test_wire_and_shared_memory_give_the_same_bits(together, stage, world):
    for worst, equal in together(_wire, world):
        assert worst < 2e-6
        assert equal


def _hosts(rank, world, stage):
    import os

    os.environ["THALWEG_HOST"] = f"host {rank // 2}"
    case = ParityCase(stage, windows=(2,) * 5, accumulation=2, clip=0.05)
    plain = run_plain(OddShapesModel(), case, world, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0))
    outcome = run_engine(OddShapesModel(), case, rank, world)
    engine = start(OddShapesModel(), stage)
    carriers = {entry.transport for entry in (engine(*mine(0, rank, world)).backward(), engine.ledger.entries())[1]}
    return outcome.max_loss_difference(plain), carriers, engine.device.type


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_two_hosts_of_two_ranks_use_both_levels(together, stage):
    for worst, carriers, device in together(_hosts, 4):
        assert worst < 2e-6
        assert carriers == {"both" if device == "cpu" else "wire"}  # a device's library knows its own levels


# Disagreement


def _disagree(rank, world):
    engine = start(Branching(), 3)
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(rank))
    try:
        engine.backward(engine(x, [0, 1, 2] if rank == 0 else [2, 1, 0]))
    except RuntimeError as error:
        return engine.device.type, f"{type(error).__name__}: {error}"
    return engine.device.type, "no error"


@pytest.mark.parametrize("device", [None, "sim"])
def test_ranks_that_run_other_modules_get_an_error_with_names(device):
    """On a device, whose library would wait for ever, the rank that comes second says so, which ends what the other
    waits for: its peer's process lives on."""
    found = run_ranks(_disagree, 2, timeout=60, device=device, reuse=False if device else None)
    told = ["CommError: rank" in message and "layers." in message for _, message in found]
    # A GPU's host may be done with its pass before it waits for the device.
    assert all(told) if found[0][0] != "cpu" and not is_device_real() else any(told), found


class TwoHeads(nn.Module):
    """Heads of one unit, of which a forward pass uses one, and the other times 0 if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, head, uses_both=False):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        used, other = (self.left, self.right)[:: 1 - 2 * head]
        loss = used(x).square().mean()
        return loss + 0 * other(x).sum() if uses_both else loss


def _use_one_head_each(rank, world, stage):
    """How far ranks with other heads are from one process, and what those hear that leave one out; the device."""
    x = torch.randn(world, 2, 8, generator=torch.Generator().manual_seed(5))
    reference = TwoHeads()
    sum(reference(x[which], which) for which in range(2)).div(2).backward()
    engine, worst = start(TwoHeads(), stage), []
    engine.backward(engine(x[rank], rank, uses_both=True))
    inspect.finalize_grads(engine)
    for one, two in zip(engine.module.parameters(), reference.parameters(), strict=True):
        worst.append(float((full_tensor(one.grad).cpu() - two.grad).abs().max()))
    engine.zero_grad()
    try:
        engine.backward(engine(x[rank], rank))
        message = "no error"
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    return max(worst), message, engine.device.type


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("device", [None, "sim"])
def test_ranks_that_use_other_parameters_of_a_unit_get_an_error_with_their_names(device, stage):
    """Their buffers would hold gradients of different parameters, and of the same sizes here."""
    found = run_ranks(_use_one_head_each, 2, stage, timeout=60, device=device, reuse=False)  # a device's abort stays
    worst, told, (device, _) = zip(*found, strict=True)
    assert max(worst) < 1e-6
    named = [message.startswith("CommError: rank") for message in told]
    # A device's all-reduce that is given up says so itself; the collectives of other stages ask what it was.
    assert (any(named) and "no error" not in told) if device != "cpu" and not stage else all(named), told
    unused = ("without left.weight, left.bias", "without right.weight, right.bias")
    assert any(name in message and "times 0" in message for message in told for name in unused), told


def _cross_entropy_outside(rank, world):
    """Logits out of the engine, loss outside, as most scripts do."""
    engine = start(tiny_gpt(), 3)
    reference = tiny_gpt()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(3):
        tokens, labels = mine(step, rank, world)
        engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), labels.flatten().to(engine.device)))
        engine.step()
        tokens, labels = make_batch(step, 2 * world)
        F.cross_entropy(reference(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(engine, reference)


def test_loss_outside_of_the_model():
    assert max(run_ranks(_cross_entropy_outside, 2)) < 1e-4


def _init_and_gather(rank, world, stage):
    """A model built on meta inside the context trains like one built plainly; full parameters can be set."""
    import thalweg

    torch.manual_seed(0)
    with thalweg.zero.Init():
        model = tiny_gpt()
        engine = start(model, stage)
    plain = start(tiny_gpt(), stage)
    losses = [[], []]
    for step in range(3):
        for found, one in zip(losses, (engine, plain), strict=True):
            loss = one(*mine(step, rank, world))
            one.backward(loss)
            one.step()
            found.append(loss.item())
    weight = engine.module.norm.weight
    with thalweg.zero.GatheredParameters(weight, modifier_rank=0):
        shape = tuple(weight.shape)
        if rank == 0:
            nn.init.constant_(weight, 2.0)
    changed = engine(*mine(9, rank, world)).item() != plain(*mine(9, rank, world)).item()
    with thalweg.zero.GatheredParameters(weight):
        return losses[0] == losses[1], shape, changed, float(weight.detach().min())


@pytest.mark.parametrize("stage", [0, nightly(1), 3])
def test_init_inside_the_context_and_gathered_writes(together, stage):
    assert together(_init_and_gather, 2) == [(True, (24,), True, 2.0)] * 2


# Samples are counted as they were seen, short windows included


def _count_samples(rank, world):
    engine = start(tiny_gpt(), 2, gradient_accumulation_steps=3)
    data = iter([mine(step, rank, world) for step in range(4)])
    counts = []
    for _ in range(2):
        engine.train_batch(data)
        counts.append(engine.global_samples)
    return counts


def test_a_short_window_counts_the_samples_that_it_saw():
    for counts in run_ranks(_count_samples, 2):
        assert counts == [3 * 2 * 2, 4 * 2 * 2]


def _initialize_again(rank: int, world: int) -> list[tuple[int, int, list, list]]:
    """A model trained by one engine, then by a second one of another stage: its weights, and those of the same steps
    of a plain model."""
    import thalweg

    found = []
    for before, after in ((0, 2), (1, 3), (3, 1), (3, 3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        model[0].register_forward_hook(lambda *_: None)
        model[2].bias.requires_grad_(False)
        plain, hooks = copy.deepcopy(model), dict(model[0]._forward_hooks)
        optimizer = torch.optim.Adam((p for p in plain.parameters() if p.requires_grad), lr=0.1)
        engines: list = []
        for step, stage in enumerate((before, after)):
            optimizer.state.clear()
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}},
                "zero_optimization": {"stage": stage},
            }
            trained = [p for p in model.parameters() if p.requires_grad]  # the second time those of the first engine
            engine = thalweg.initialize(model=model, config=config, model_parameters=trained)[0]
            assert engine.module is model and hooks.items() <= model[0]._forward_hooks.items()
            batch = torch.arange(4 * world * 2).view(world, 2, 4) / 10 + step
            engine.backward(engine(batch[rank]).square().mean())
            engine.step()
            plain(batch.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engines.append(engine)
        with pytest.raises(RuntimeError, match="a later initialize"):
            engines[0](batch[rank])
        values = engine.state_dict()
        assert not model[2].bias.requires_grad and list(values) == list(plain.state_dict())
        found.append((before, after, list(values.values()), list(plain.state_dict().values())))
        engine.close()
    return found


def test_a_model_of_another_engine_is_taken_over():
    for cases in run_ranks(_initialize_again, 2):
        for before, after, values, expected in cases:
            for value, want in zip(values, expected, strict=True):
                assert torch.allclose(value, want, atol=1e-6), (before, after)
                assert not torch.allclose(value, torch.zeros_like(want), atol=1e-2)


def _initialize_tensor_parallel_again(rank: int, world: int) -> str:
    import thalweg

    model, config = tiny_gpt(), {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    thalweg.initialize(model=model, config=config)
    with pytest.raises(ValueError) as error:
        thalweg.initialize(model=model, config=config)
    return str(error.value)


def test_a_model_that_another_engine_has_cut_is_refused():
    assert all("cut already" in said for said in run_ranks(_initialize_tensor_parallel_again, 2))


class ShiftedBlock(nn.Module):
    """A layer whose input meets a buffer first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x):
        return x + self.linear(x + self.offset)


class ShiftedLayers(nn.Module):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ShiftedBlock(), ShiftedBlock()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _fp32_buffer(rank, world):
    notes = []
    for more in ({}, {"data_types": {"buffer_dtype": "bf16"}}):
        engine = start(ShiftedLayers(), 3, bf16={"enabled": True}, **more)
        try:
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            notes.append("trained")
        except RuntimeError as error:
            notes.append("".join(error.__notes__))
        engine.close()
    return notes


def test_an_fp32_buffer_that_an_operator_refuses_is_named_with_the_cure():
    """Torch says which dtypes met, not why: a product of bf16 parameters takes no fp32 input."""
    refused, trained = run_ranks(_fp32_buffer, 1)[0]
    assert "these buffers are in fp32: layers.0.offset, layers.1.offset." in refused
    assert '"buffer_dtype": "bf16"' in refused and trained == "trained"


def _profiled(rank, world, stage, folder, profile_step):
    options = {"enabled": True, "profile_step": profile_step, "module_depth": 1, "output_file": f"{folder}/{rank}.txt"}
    engine = start(ShiftedLayers(), stage, flops_profiler=options)
    x, seen = torch.ones(2, 8), []
    for _ in range(3):
        with torch.no_grad():
            engine(x)  # an evaluation is not a step
        seen.append(Path(options["output_file"]).exists())
        engine.backward(engine(x).sum())
        engine.step()
    engine.close()
    return seen, Path(options["output_file"]).read_text() if rank == 0 else None


@pytest.mark.parametrize(("stage", "profile_step"), [(3, 1), (0, 0)])
def test_the_flops_profiler_shows_one_pass_of_the_step_it_is_told(tmp_path, stage, profile_step):
    (seen, text), (seen_by_other, _) = run_ranks(_profiled, 2, stage, str(tmp_path), profile_step)
    assert seen == [step > profile_step for step in range(3)] and not any(seen_by_other), "rank 0 writes, once"
    flops, _, params = get_model_profile(ShiftedLayers(), (2, 8), print_profile=False, as_string=False)
    first, *modules = text.splitlines()
    assert first.startswith(f"profile of step {profile_step}: {params} parameters") and f"{flops:g} FLOPs" in first
    assert flops == 2 * 2 * 8 * 8 * 2 and [line.split()[0] for line in modules] == ["ShiftedLayers"]
    assert f"{flops:g} FLOPs" in modules[0]


@pytest.mark.parametrize("file", ["", "new/profile.txt", "taken/profile.txt"])
def test_a_profile_goes_to_the_screen_or_a_new_folder_and_stops_no_training(tmp_path, file):
    (tmp_path / "taken").write_text("a file")
    (text,) = run_ranks(_profiled_to, 1, file and str(tmp_path / file))
    assert bool(text) == (file == "new/profile.txt")
    if text:  # two layers, each with half of the products
        rows = {line.split()[0]: line.split()[2] for line in text.splitlines()[1:]}
        assert rows["ShiftedLayers"] == "512" and rows["layers.0"] == rows["layers.1"] == "256", rows


def _profiled_to(rank, world, file):
    engine = start(ShiftedLayers(), 1, flops_profiler={"enabled": True, "profile_step": 1, "output_file": file})
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    assert engine.global_steps == 3
    engine.close()
    text = Path(file).read_text() if file and Path(file).is_file() else ""
    assert not text or text.startswith("profile of step 1")
    return text


# Each kind of group: axes, parts of an axis, experts' groups, levels of hosts, those of a thread.
GROUPS = {
    "tensor": {"tensor_parallel": {"autotp_size": 2}, "checkpoint": {"asynchronous": True}},
    "sequence": {"sequence_parallel_size": 2},
    "ring": {"context_parallel_size": 2, "sequence_parallel_size": 2},
    "MiCS": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    "MiCS, stage 1": {"zero_optimization": {"stage": 1, "mics_shard_size": 2}},
    "experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "wire": {"zero_optimization": {"stage": 3}},
    "two hosts": {"zero_optimization": {"stage": 3}},
    "pipeline": {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}},
}
TWINS = {"sequence": "ring", "MiCS, stage 1": "MiCS"}  # make no group that the other does not


def _train_one_after_another(rank, world, kind, folder, engines):
    """By engine: threads and process groups of this rank once it is closed, or gone without that."""
    import torch.distributed.distributed_c10d as c10d

    gc.freeze()  # or each collection looks through all that torch has made

    patch = pytest.MonkeyPatch()
    patch.setenv("THALWEG_SHARED_MEMORY", "0" if kind == "wire" else "1")
    patch.setenv("THALWEG_HOST", str(rank // 2) if kind == "two hosts" else "one")
    counts = []
    for turn in range(engines):
        model = MoEModel() if kind == "experts" else tiny_gpt()
        engine = start(model, 2, log_level="error", **GROUPS[kind])
        tokens, labels = make_batch(0, 4)
        if kind == "pipeline":
            engine.train_batch(iter([(tokens, labels)]))
        else:
            engine.backward(engine(tokens).logsumexp(-1).mean() if kind == "experts" else engine(tokens, labels))
            engine.step()
        if kind == "tensor":
            engine.save_checkpoint(folder)
        if turn % 2 == 0 or kind == "tensor":
            engine.close()
        del engine, model
        gc.collect()
        dist.barrier()
        counts.append((len(list(Path("/proc/self/task").iterdir())), len(c10d._world.pg_map)))
    patch.undo()
    return counts


@pytest.mark.parametrize(
    ("engines", "kind"), [(3, kind) for kind in GROUPS if kind not in TWINS] + [nightly(5, kind) for kind in GROUPS]
)
def test_engines_one_after_another_leave_no_process_groups(engines, kind, tmp_path):
    """Each group keeps threads, connections and, of NCCL, memory of the device until its end."""
    for counts in run_ranks(_train_one_after_another, 4, kind, str(tmp_path), engines):
        threads, groups = zip(*counts[1:], strict=True)
        assert len(set(groups)) == 1, counts
        assert max(threads) <= threads[0] + 2, counts  # of others: a torch pool may begin late
