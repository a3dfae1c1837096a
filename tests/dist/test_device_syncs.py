"""What the host waits for on an accelerator, and how many kernels it launches: counted on a simulated one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dist.models import OddShapesModel, make_batch, tiny_gpt
from tests.dist.parity import MICRO_BATCH_SIZE, full_tensors
from tests.harness import run_ranks
from tests.marks import nightly
from tests.simdevice import accelerator
from thalweg.zero.fsdp2 import private_api
from thalweg.zero.whole_parameter import get_shard

REUSE_RANKS = True


def _count_syncs(work: Callable[[], object]) -> dict[str, int]:
    from tests import simdevice

    simdevice.reset_counts()
    work()
    return simdevice.num_syncs()[1]


def _count_launches(work: Callable[[], object]) -> int:
    from tests import simdevice

    simdevice.reset_counts()
    work()
    return simdevice.num_launches()


def _initialize(model: nn.Module, **config: Any) -> Any:
    import thalweg

    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    return thalweg.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE, "optimizer": adamw, **config}
    )[0]


def _batch(step: int, rank: int, world: int, device: torch.device) -> list[torch.Tensor]:
    return [t[rank::world].to(device) for t in make_batch(step, world * MICRO_BATCH_SIZE)]


# ---- a step -----------------------------------------------------------------------------------------


def _syncs_of_steps(rank: int, world: int, configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What three steps wait for, after two first ones."""
    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        engine = _initialize(tiny_gpt(), **copy.deepcopy(config))
        batches = [_batch(i, rank, world, engine.device) for i in range(10)]

        def step(engine: Any = engine, batches: Any = batches, name: str = name) -> None:
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(*batches.pop())
                engine.backward(loss, num_items=7 if name == "told" else None)
                engine.step()

        step()
        step()
        found[name] = _count_syncs(lambda step=step: [step() for _ in range(3)])
        engine.close()
    return found


def _stage(stage: int, dtype: str = "bf16", **config: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **({} if dtype == "fp32" else {dtype: {"enabled": True}}), **config}


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
WITHOUT_SYNC = {
    **{f"stage {stage}": _stage(stage) for stage in (0, 2, 3)},
    **{f"stage {stage}, clipped": _stage(stage, gradient_clipping=0.05) for stage in (0, 2, 3)},
    "fp32": _stage(2, "fp32", gradient_clipping=0.05),
    "fp16": _stage(2, "fp16", gradient_clipping=0.05),
    "schedule": _stage(2, gradient_clipping=0.05, scheduler=SCHEDULE),
    "tokens": _stage(2, token_weighted_loss=True, gradient_accumulation_steps=2),
    "told": _stage(2, token_weighted_loss=True, gradient_accumulation_steps=2),  # by num_items
    "prints": _stage(2, steps_per_print=9),
}


IN_THE_GATE = ("stage 0", "stage 2, clipped", "stage 3, clipped", "fp16", "schedule", "tokens", "told", "prints")


@pytest.mark.parametrize(
    ("world", "names"), [(2, IN_THE_GATE), nightly(1, tuple(WITHOUT_SYNC)), nightly(2, tuple(WITHOUT_SYNC))]
)
def test_a_step_of_adamw_waits_for_nothing(world, names):
    """S3: norm, clip factor and verdict stay on the device."""
    for syncs in run_ranks(_syncs_of_steps, world, {name: WITHOUT_SYNC[name] for name in names}, device="sim"):
        assert {name: found for name, found in syncs.items() if found} == {}


def _syncs_of_shared_heads(rank: int, world: int) -> dict[str, int]:
    """Of two steps of three tensor ranks, each of which needs one of two heads of keys whole."""
    from tests.dist.tensor_models import build_model, compute_loss
    from tests.dist.tensor_models import make_batch as make_tokens

    model = build_model("llama")
    engine = _initialize(model, tensor_parallel={"autotp_size": world}, bf16={"enabled": True})
    batches = [make_tokens(i, MICRO_BATCH_SIZE).to(engine.device) for i in range(4)]

    def step() -> None:
        engine.backward(compute_loss(engine, batches.pop()))
        engine.step()

    step()
    step()
    found = _count_syncs(lambda: [step() for _ in range(2)])
    engine.close()
    return found


def test_tensor_ranks_whose_heads_do_not_divide_wait_for_nothing():
    pytest.importorskip("transformers")
    assert run_ranks(_syncs_of_shared_heads, 3, device="sim") == [{}] * 3


def test_an_optimizer_that_must_be_told_waits_once():
    """The control: the counter sees what is there to be seen."""
    sgd = _stage(2, optimizer={"type": "SGD", "params": {"lr": 1e-2}}, gradient_clipping=0.05)
    assert run_ranks(_syncs_of_steps, 1, {"sgd": sgd}, device="sim") == [{"sgd": {"event": 3}}]


def _syncs_of_two_places(rank: int, world: int) -> dict[str, int]:
    """Of a step whose parameters are on the host but for a 0-dim one, which comes first."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = _initialize(OddShapesModel(), zero_optimization=zero)
    assert {get_shard(p).device.type for p in engine.module.parameters()} == {"cpu", accelerator().type}
    engine.backward(engine(*_batch(0, rank, world, engine.device)))
    found = _count_syncs(engine.step)
    engine.close()
    return found


def test_a_verdict_for_two_places_is_read_here():
    """A kernel of the host's would read it before it has come."""
    for found in run_ranks(_syncs_of_two_places, 2, device="sim"):
        assert found["event"] == 1, found


def _train_with_overflows(rank: int, world: int, dtype: str, late: bool) -> dict[str, Any]:
    """Six steps, of which the second and the third have a gradient that is not finite on one rank."""
    from contextlib import ExitStack

    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_type": "linear"}}
    engine = _initialize(tiny_gpt(), **_stage(2, dtype, gradient_clipping=0.05, scheduler=schedule))
    found: dict[str, Any] = {"rates": [], "scales": [], "applied": [], "norms": []}
    with ExitStack() as stack:
        if late:
            from tests.simdevice import late_work

            stack.enter_context(late_work())
        for step in range(6):
            found["scales"].append(engine.loss_scale)
            loss = engine(*_batch(step, rank, world, engine.device))
            if step in (1, 2) and rank == world - 1:
                loss = loss * math.inf
            engine.backward(loss)
            engine.step()
            if step % 2:  # asked at once, or after the next step
                found["applied"].append(engine.was_step_applied())
                found["norms"].append(engine.get_global_grad_norm())
                found["rates"].append(engine.get_lr()[0])
    found["counts"] = engine.skipped_steps, engine.optimizer.num_updates, engine.global_steps
    found["rates"].append(engine.get_lr()[0])
    found["parameters"] = [p.double().numpy() for p in full_tensors(engine.module.parameters())]
    engine.close()
    return found


@pytest.mark.parametrize(("dtype", "late"), [("fp16", True), nightly("bf16", True), nightly("bf16", False)])
def test_what_hangs_on_the_verdict_is_made_good(dtype, late):
    """Counters, loss scale and schedule are those of the CPU, which knows at once that a step is skipped."""
    host = run_ranks(_train_with_overflows, 2, dtype, False, device="cpu")[0]
    assert host["counts"][0] == 2
    for device in run_ranks(_train_with_overflows, 2, dtype, late, device="sim"):
        for key in ("counts", "applied", "scales", "rates"):
            assert device[key] == host[key], key
        assert device["norms"] == pytest.approx(host["norms"], rel=1e-3, nan_ok=True)
        for ours, theirs in zip(device["parameters"], host["parameters"], strict=True):
            assert abs(ours - theirs).max() < 2e-5


def _checkpoint_after_a_skip(rank: int, world: int, folder: str) -> list[Any]:
    engine = _initialize(tiny_gpt(), **_stage(2, scheduler=SCHEDULE))
    for step in range(3):
        loss = engine(*_batch(step, rank, world, engine.device))
        engine.backward(loss * math.inf if step == 2 else loss)
        engine.step()
    engine.save_checkpoint(folder)
    state = engine.lr_scheduler.state_dict()
    engine.close()
    again = _initialize(tiny_gpt(1), **_stage(2, scheduler=SCHEDULE))
    again.load_checkpoint(folder)
    return [state["last_batch_iteration"], again.lr_scheduler.state_dict()["last_batch_iteration"], again.skipped_steps]


def test_a_checkpoint_knows_what_became_of_the_last_step(tmp_path):
    assert run_ranks(_checkpoint_after_a_skip, 1, str(tmp_path), device="sim") == [[1, 1, 1]]


def _write_shard(rank: int, world: int, folder: str) -> Any:
    from pathlib import Path

    from safetensors.torch import load_file

    from thalweg.checkpoint.filesystem import FileSystem
    from thalweg.checkpoint.format import shards

    values = {
        "f": torch.arange(10_500.0).view(3, 3500).bfloat16(),  # five parts and a ragged one
        "t": torch.arange(12.0).view(3, 4).t(),
        "n": torch.tensor(7, dtype=torch.int64),
        "z": torch.zeros(0, 3),
    }
    on_device = {key: value.to(accelerator()) for key, value in values.items()}
    names = {"f": "bfloat16", "t": "float32", "n": "int64", "z": "float32"}
    entries = [shards.TensorEntry(key, names[key], tuple(value.shape)) for key, value in values.items()]
    path, on_its_way = Path(folder) / "x.safetensors", (on_device[entry.key] for entry in entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "STAGING_BYTES", 1 << 12)
        syncs = _count_syncs(lambda: shards.write_shard(FileSystem(), path, entries, on_its_way))
    again = load_file(path)
    return syncs, all(torch.equal(again[key], value) for key, value in values.items())


def test_a_checkpoint_is_copied_through_page_locked_memory(tmp_path):
    """S10: part by part, the next under way while one is hashed; only what lies in another order is copied at once."""
    syncs, equal = run_ranks(_write_shard, 1, str(tmp_path), device="sim")[0]
    assert equal
    assert syncs == {"event": 6 + 1, "copy to the host": 1}


def _huge_gradient(rank: int, world: int) -> list[float]:
    from thalweg.optim.norms import global_grad_norm

    norms = []
    for dtype, value in (
        (torch.float32, 1e30),
        (torch.bfloat16, 3.0),
        (torch.float32, 1e-30),
        (torch.float32, math.inf),
    ):
        parameter = nn.Parameter(torch.zeros(4, 100, dtype=dtype, device=accelerator()))
        parameter.grad = torch.full_like(parameter, value)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        norms.append(float(global_grad_norm([parameter])))
        assert torch.accelerator.max_memory_allocated() - before < 400, "a widened copy"
    return norms


def test_norms_neither_overflow_nor_widen():
    (norms,) = run_ranks(_huge_gradient, 1, device="sim")
    assert norms == pytest.approx([20e30, 60.0, 20e-30, math.inf])


# ---- launches ---------------------------------------------------------------------------------------


def _launches_of_low_bit_states(rank: int, world: int, state_dtype: str) -> list[tuple[int, dict[str, int]]]:
    found = []
    for rows in (256, 4096):
        adamw = {"type": "AdamW", "params": {"lr": 1e-2, "state_dtype": state_dtype}}
        engine = _initialize(nn.Linear(512, rows, bias=False), optimizer=adamw)
        x = torch.ones(1, 512, device=engine.device)
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            inner = engine.optimizer.inner
            launches = _count_launches(inner.step)
        found.append((launches, _count_syncs(inner.step)))
        engine.close()
    return found


@pytest.mark.parametrize("state_dtype", ["int8", "bf16"])
def test_launches_of_low_bit_states_are_bounded_by_tensors(state_dtype):
    """S1: not by chunks of a core's cache (here 1 and 8 of them)."""
    (small, large), *_ = run_ranks(_launches_of_low_bit_states, 1, state_dtype, device="sim")
    assert small == large and large[0] < 60 and large[1] == {}, (small, large)


def _backward_at_world_1(rank: int, world: int) -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))

    x = torch.ones(2, 32, device=accelerator())
    engine = _initialize(make(), zero_optimization={"stage": 2})
    bare, mesh = make().to(accelerator()), init_device_mesh(accelerator().type, (1,))
    for module in (*bare, bare):  # the same units
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    launches = []
    for model, backward in ((engine, engine.backward), (bare, lambda loss: loss.backward())):
        for _ in range(2):
            loss = model(x).square().mean()
            launches.append(_count_launches(lambda loss=loss, backward=backward: backward(loss)))
            model.zero_grad()
    engine.close()
    return launches[1::2]


def test_one_rank_passes_over_gradients_no_more_than_fsdp2():
    """S11: no product by 1, and no copy of what needs no reduction."""
    ((ours, bare),) = run_ranks(_backward_at_world_1, 1, device="sim")
    assert ours == bare - 4, (ours, bare)


# ---- the ledger -------------------------------------------------------------------------------------


def _ledger(rank: int, world: int, stage: int) -> dict[str, tuple[int, int]]:
    engine = _initialize(
        nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), **_stage(stage, "fp32")
    )
    for step in range(3):
        if step == 1:
            engine.ledger.reset()
        engine.backward(engine(torch.ones(1, 64, device=engine.device)).mean())
        engine.step()
    entries = {kind: engine.ledger.total(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    engine.close()
    return {kind: (entry.full_bytes, entry.sent_bytes) for kind, entry in entries.items()}


@pytest.mark.parametrize("stage", [nightly(0), nightly(2), 3])
def test_the_ledger_has_what_fsdp2_moves_on_a_device(stage):
    """W7."""
    nbytes = 2 * 2 * 64 * 64 * 4  # two steps, two layers
    for found in run_ranks(_ledger, 2, stage, device="sim"):
        if stage == 0:
            assert found == {"all_gather": (0, 0), "reduce_scatter": (0, 0), "all_reduce": (nbytes, nbytes)}
        else:
            gathers = found["all_gather"][0]
            assert gathers == (nbytes if stage == 2 else gathers) and gathers in (nbytes, 2 * nbytes)
            assert found["reduce_scatter"] == (nbytes, nbytes // 2) and found["all_reduce"] == (0, 0)


# ---- copies -----------------------------------------------------------------------------------------


def _copies(rank: int, world: int, folder: str) -> dict[str, dict[str, int]]:
    from thalweg.activation_checkpointing.offload import NvmeActivationOffloader
    from thalweg.data.batch_feed import to_device

    x = torch.randn(64, 1024, device=accelerator())
    device, saver = x.device, NvmeActivationOffloader(folder)
    kept: list[Any] = []
    found = {
        "batch": _count_syncs(lambda: to_device({"x": torch.ones(3), "y": [torch.ones(2)]}, device)),
        "first": _count_syncs(lambda: kept.append(saver.save(x + 1))),
        "next": _count_syncs(lambda: kept.append(saver.save(x + 2))),
        "fetched": _count_syncs(lambda: kept.append([one.fetch() for one in reversed(kept)])),
    }
    assert all(torch.equal(y.cpu(), (x + i).cpu()) for i, y in zip((2, 1), kept.pop(), strict=True))
    kept.clear()
    saver.close()
    return found


def test_copies_go_through_page_locked_memory(tmp_path):
    """S10: a batch waits for nothing; an activation that leaves for the disk is waited for when the next one leaves."""
    (found,) = run_ranks(_copies, 1, str(tmp_path), device="sim")
    assert found == {"batch": {}, "first": {}, "next": {"event": 1}, "fetched": {"event": 1}}


def _load_checkpoint(rank: int, world: int, folder: str) -> dict[str, int]:
    engine = _initialize(tiny_gpt(), **_stage(2))
    engine.backward(engine(*_batch(0, rank, world, engine.device)))
    engine.step()
    engine.save_checkpoint(folder)
    return _count_syncs(lambda: engine.load_checkpoint(folder))


def test_a_checkpoint_comes_back_through_page_locked_memory(tmp_path):
    """S10: the host does not wait for each tensor."""
    (syncs,) = run_ranks(_load_checkpoint, 1, str(tmp_path), device="simulated")
    assert syncs.get("copy to the device", 0) == 0, syncs


# ---- the link to the host ---------------------------------------------------------------------------


def _on_tiers(stage: int, optimizer: str, param: str, folder: str, pin_memory: bool = True) -> dict[str, Any]:
    where = {"nvme_path": folder, "pin_memory": pin_memory}
    tiers: dict[str, Any] = {"offload_optimizer": {"device": optimizer, **where}}
    if param != "none":
        tiers["offload_param"] = {"device": param, "max_in_cpu": 0, "buffer_count": 2, **where}
    return _stage(stage, zero_optimization={"stage": stage, **tiers})


@pytest.mark.parametrize("world", [1, nightly(2)])
def test_tiers_on_nvme_wait_for_gradients_alone(world, tmp_path):
    """S2: nothing crosses the link from pageable memory, nor to it; each gradient's arrival is waited for, as where the
    tiers are in host memory."""
    tiers = {
        "host": ("cpu", "cpu"),
        "optimizer": ("nvme", "none"),
        "parameters": ("cpu", "nvme"),
        "both": ("nvme",) * 2,
    }
    configs = {name: _on_tiers(3, *where, str(tmp_path)) for name, where in tiers.items()}
    configs["pageable"] = _on_tiers(3, "nvme", "nvme", str(tmp_path), pin_memory=False)  # the control
    for syncs in run_ranks(_syncs_of_steps, world, configs, device="simulated"):
        assert syncs.pop("pageable").keys() >= {"copy to the host"}
        assert {cause for found in syncs.values() for cause in found} == {"event"}, syncs
        # FSDP2 of torch 2.15 asks again for what has come.
        num_waits = {found["event"] for found in syncs.values()}
        assert world > 1 or max(num_waits) == min(num_waits) * (2 if private_api._GRADS_STAY_IN_PLACE else 1), syncs


crosses_unwidened = pytest.mark.skipif(
    private_api._GRADS_STAY_IN_PLACE,
    reason="FSDP2 of torch 2.15 casts each gradient to a dtype of its own before it crosses: twice the bytes",
)


def _bytes_over_the_link(rank: int, world: int, configs: dict[str, dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """To the device and to the host, in the passes of a window."""
    from tests import simdevice

    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        engine = _initialize(tiny_gpt(), **copy.deepcopy(config))
        batches = [_batch(i, rank, world, engine.device) for i in range(engine.gradient_accumulation_steps())]
        for _ in range(2):  # the second update's window
            simdevice.reset_counts()
            for batch in batches:
                engine.backward(engine(*batch))
                found[name] = simdevice.num_copied_bytes()
                engine.step()
        engine.close()
    return found


def _on_host(stage: int, dtype: str = "bf16", **config: Any) -> dict[str, Any]:
    tiers = {"offload_optimizer": {"device": "cpu"}, **({"offload_param": {"device": "cpu"}} if stage == 3 else {})}
    return _stage(stage, dtype, zero_optimization={"stage": stage, **tiers}, **config)


@crosses_unwidened
@pytest.mark.parametrize("stage", [nightly(2), 3])
def test_what_crosses_the_link_has_the_width_of_its_numbers(stage):
    """S2: parameters in the computing dtype; gradients in the reduction's, or on a rank alone in autograd's."""
    configs = {"fp32": _on_host(stage, "fp32"), "bf16": _on_host(stage)}
    configs["narrow sums"] = _on_host(stage, communication_data_type="bf16")
    (alone,) = run_ranks(_bytes_over_the_link, 1, configs, device="simulated")
    to_device, to_host = alone["fp32"]
    assert alone["bf16"] == alone["narrow sums"] == (to_device // 2, to_host // 2)
    for found in run_ranks(_bytes_over_the_link, 2, configs, device="simulated"):
        to_device, to_host = found["fp32"]
        assert found["bf16"] == (to_device // 2, to_host)  # a mean of two has more bits than bf16
        assert found["narrow sums"] == (to_device // 2, to_host // 2)


@crosses_unwidened
def test_sums_of_micro_batches_cross_the_link_as_they_are():
    """On a rank alone: reduced one by one they are autograd's, added up on the device they are not, nor in fp16, which
    are divided by a loss scale."""
    window = {"gradient_accumulation_steps": 2}
    one = {"fp32": _on_host(2, "fp32"), "fp16": _on_host(2, "fp16")}
    two = {f"stage {stage} {dtype}": _on_host(stage, dtype, **window) for stage in (1, 2) for dtype in ("fp32", "bf16")}
    (found,) = run_ranks(_bytes_over_the_link, 1, {**one, **two}, device="simulated")
    assert found["fp16"] == (found["fp32"][0] // 2, found["fp32"][1])
    assert found["stage 1 bf16"][1] == found["stage 1 fp32"][1]
    assert found["stage 2 bf16"][1] == found["stage 2 fp32"][1] // 2


def _sums_on_the_host(rank: int, world: int, configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the second window's passes wait for, and the parameters after it."""
    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        engine = _initialize(tiny_gpt(), **copy.deepcopy(config))
        batches = [_batch(i, rank, world, engine.device) for i in range(6)]

        def window(engine: Any = engine, batches: Any = batches) -> None:
            for _ in range(3):
                engine.backward(engine(*batches.pop()))
                engine.step()

        window()
        found[name] = (_count_syncs(window), full_tensors(engine.module.parameters()))
        engine.close()
    return found


@pytest.mark.parametrize("world", [1, nightly(2)])
def test_gradients_are_added_up_on_the_host_as_they_arrive(world):
    """From the second micro-batch on too nothing crosses to pageable memory; the control does, with the same sums."""
    configs = {}
    for stage, dtype in ((2, "fp32"), (2, "bf16"), (3, "bf16")):
        config = _on_host(stage, dtype, gradient_accumulation_steps=3)
        configs[f"stage {stage} {dtype}"], pageable = config, copy.deepcopy(config)
        for tier in pageable["zero_optimization"].values():
            if isinstance(tier, dict):
                tier["pin_memory"] = False
        configs[f"stage {stage} {dtype}, pageable"] = pageable
    for found in run_ranks(_sums_on_the_host, world, configs, device="simulated"):
        for name in [name for name in found if "pageable" not in name]:
            (syncs, params), (control_syncs, control) = found[name], found[f"{name}, pageable"]
            assert syncs.keys() == {"event"} and "copy to the host" in control_syncs, (name, syncs, control_syncs)
            assert all(map(torch.equal, params, control)), name


def _casts_beside_computing(rank: int, world: int, config: dict[str, Any], works_ahead: bool) -> dict[str, Any]:
    """Whether a unit's forward pass ends after the next one's cast, and the backward pass of the first begins after the
    last one's gradients are cast; the threads that cast."""
    from threading import Event, current_thread

    from thalweg.zero.fsdp2.private_api import ArrivingGrad, ArrivingGrads, get_fsdp_groups
    from thalweg.zero.storage import base

    seconds, was_cast, has_come = 30 if works_ahead else 0.3, dict[str, Event](), Event()
    found: dict[str, Any] = {"threads": set(), "forward": [], "backward": []}
    refresh, cast = base.refresh_unsharded, ArrivingGrad.cast

    def refresh_and_tell(storages: Any) -> None:
        refresh(storages)
        found["threads"].add(current_thread().name.rpartition("_")[0])
        for name in {storage.spec.name for storage in storages} & was_cast.keys():
            was_cast[name].set()

    def cast_and_tell(self: Any) -> None:
        cast(self)
        has_come.set()

    def wait_in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: found["backward"].append(has_come.wait(seconds)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "refresh_unsharded", refresh_and_tell)
        patch.setattr(ArrivingGrad, "cast", cast_and_tell)
        if not works_ahead:
            patch.setattr(base.FSDPStorage, "CASTS_AHEAD", 0)
            patch.setattr(ArrivingGrads, "cast_in_background", lambda self: None)
        torch.manual_seed(0)
        engine = _initialize(tiny_gpt(), **config)
        units = {group.name: engine.module.get_submodule(group.name) for group in get_fsdp_groups(engine.module)}
        del units[""]
        for unit, next_unit in pairwise(units):
            name = f"{next_unit}.{next(name for name, _ in units[next_unit].named_parameters())}"
            was_cast[name] = Event()
            units[unit].register_forward_hook(
                lambda *_, name=name: found["forward"].append(was_cast[name].wait(seconds))
            )
        next(iter(units.values())).register_forward_hook(wait_in_backward)
        engine.backward(engine(*_batch(0, rank, world, engine.device)))
        engine.step()
        engine.close()
    return found


@crosses_unwidened
@pytest.mark.parametrize("works_ahead", [True, False])
def test_the_host_casts_while_the_device_computes(works_ahead):
    """Masters ahead of the forward pass, gradients as they arrive; the control casts what is asked for."""
    (found,) = run_ranks(_casts_beside_computing, 1, _on_host(3), works_ahead, device="simulated")
    assert found["threads"] == {"thalweg-casts"}
    assert found["forward"] == [works_ahead] * len(found["forward"]) and len(found["forward"]) > 0
    assert found["backward"] == [works_ahead]


def _syncs_of_an_evaluation(rank: int, world: int, configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        engine = _initialize(tiny_gpt(), **copy.deepcopy(config))
        batch = _batch(0, rank, world, engine.device)
        with torch.no_grad():
            engine(*batch)
            found[name] = _count_syncs(lambda engine=engine, batch=batch: engine(*batch))
        engine.close()
    return found


@pytest.mark.parametrize("world", [1, nightly(2)])
def test_what_the_host_has_is_not_written_while_an_evaluation_reads_it(world):
    """The program may write to it next, an update too, and no gradient arrives that tells that the device has read it.
    A real device alone would show what is computed else; the control: nobody waits for what rests on the device."""
    configs = {"host": _on_host(3, "fp32"), "host, cast": _on_host(3), "device": _stage(3)}
    for found in run_ranks(_syncs_of_an_evaluation, world, configs, device="sim"):
        assert found["host"].get("device", 0) >= 1 <= found["host, cast"].get("device", 0)
        assert found["device"] == {}


def _launches_of_a_gather(rank: int, world: int, dtype: str) -> list[int]:
    """For a unit of 2 parameters and of 8."""
    from thalweg.zero.fsdp2.private_api import get_fsdp_groups

    launches = []
    for num_params in (2, 8):
        engine = _initialize(nn.ParameterList(torch.ones(8, 8) for _ in range(num_params)), **_on_host(3, dtype))
        (group,) = [group for group in get_fsdp_groups(engine.module) if group.params]
        group.gather()  # FSDP2 makes the unsharded parameters
        group.to_sharded()
        launches.append(_count_launches(group.gather))
        assert [param.unsharded_param.device.type for param in group.params if param.unsharded_param is not None] == [
            accelerator().type
        ] * num_params
        engine.close()
    return launches


def test_a_unit_crosses_the_link_as_one():
    """Its casts lie one behind the other.  Of lists the simulated device copies one after the other, as a GPU does not:
    a launch for each parameter beside the one over the link.  The control: masters that are no casts."""
    assert run_ranks(_launches_of_a_gather, 1, "bf16", device="simulated") == [[1 + 2, 1 + 8]]
    assert run_ranks(_launches_of_a_gather, 1, "fp32", device="simulated") == [[2 + 2, 8 + 8]]


# ---- reductions and codes ---------------------------------------------------------------------------


def _reduce_by_groups(rank: int, world: int) -> tuple[float, float]:
    """The mean that a group's reduction gives, and the memory that it takes beside its input and output."""
    from thalweg.comm.collectives.wire import AllToAllReduce, AllToAllReduceScatter

    reducer, numel = AllToAllReduceScatter(AllToAllReduce(dist.group.WORLD), "unit"), 1 << 16  # type: ignore[arg-type]
    rows, out = torch.full((world * numel,), rank + 1.0, device=accelerator()), torch.empty(numel, device=accelerator())
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    reducer(out, rows, dist.group.WORLD, dist.ReduceOp.AVG)  # type: ignore[arg-type]
    return float(out.mean()), (torch.accelerator.max_memory_allocated() - before) / rows.nbytes


def test_a_group_s_gradients_are_added_up_by_the_device_s_library():
    """S12: MiCS sent rows to their ranks and added them up there, in memory for all that a rank receives."""
    for mean, extra in run_ranks(_reduce_by_groups, 2, device="simulated"):
        assert mean == 1.5 and extra < 0.1


def _reduce_over_two_levels(rank: int, world: int) -> tuple[list[float], dict[str, int]]:
    """Two hosts of one rank."""
    from thalweg.comm.collectives.quantized import TwoLevelReduceScatter
    from thalweg.comm.collectives.wire import AllToAllReduce
    from thalweg.parallel_dims import new_subgroup

    whole = dist.group.WORLD
    assert whole is not None
    levels = AllToAllReduce(new_subgroup([rank], whole)), AllToAllReduce(whole)
    reducer, out = TwoLevelReduceScatter(*levels, [[1, 0]], "unit"), torch.empty(3, device=accelerator())
    rows = torch.tensor([[10.0] * 3, [20.0] * 3], device=accelerator()).add_(rank).flatten()
    found = _count_syncs(lambda: reducer(out, rows, whole, dist.ReduceOp.AVG))
    return out.tolist(), found


def test_a_reduction_over_two_levels_waits_for_nothing():
    """S12: the order of the hosts' ranks crossed the link with each unit's gradients."""
    # Of hosts in the other order each rank gets the other's row.
    assert run_ranks(_reduce_over_two_levels, 2, device="simulated") == [([20.5] * 3, {}), ([10.5] * 3, {})]


def _launches_of_a_codec(rank: int, world: int) -> list[tuple[int, list[float]]]:
    from thalweg.comm.collectives.quantized import make_payload_format
    from thalweg.comm.quantization import BlockQuantizer

    found, numel = [], 4096 + 96
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(accelerator())
    whole = [(4096, True), (96, False)]
    for segments in (whole, [(512, True)] * 8 + [(32, False)] * 3, [(500, True)] * 8 + [(192, False)]):
        packing = make_payload_format(segments, numel, torch.float32, BlockQuantizer(8))
        assert packing is not None
        payload, out = torch.empty(packing.num_bytes, dtype=torch.uint8, device=accelerator()), torch.empty_like(values)

        def pack_and_unpack(packing: Any = packing, payload: Any = payload, out: Any = out) -> None:
            packing.pack(values, payload)
            packing.unpack(payload, out)

        found.append((_count_launches(pack_and_unpack), out.tolist()))
    return found


def test_launches_of_a_codec_are_bounded_by_runs_of_parameters():
    """S12: twelve kernels each, and the same numbers; where a block would hold two parameters' they stay apart."""
    ((whole, numbers), (many, same), (apart, _)), *_ = run_ranks(_launches_of_a_codec, 1, device="simulated")
    assert many == whole and same == numbers
    assert apart > 4 * whole


# ---- other optimizers, experts, sequences -----------------------------------------------------------


def _syncs_of_adafactor(rank: int, world: int) -> dict[str, int]:
    adafactor = {"type": "Adafactor", "params": {"lr": 1e-2}}
    engine = _initialize(tiny_gpt(), optimizer=adafactor, zero_optimization={"stage": 2})
    engine.backward(engine(*_batch(0, rank, world, engine.device)))
    engine.optimizer.inner.step()
    found = _count_syncs(engine.optimizer.inner.step)
    engine.close()
    return found


def test_adafactor_waits_for_no_parameter():
    """S4."""
    assert run_ranks(_syncs_of_adafactor, 2, device="sim") == [{}] * 2


def _syncs_of_experts(rank: int, world: int, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    from thalweg.moe import MoE

    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(16, expert, num_experts=4, ep_size=world, k=2, capacity_factor=0.8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, balance, _ = self.moe(x)
            return y.float().square().mean() + 0.1 * balance

    engine = _initialize(Layer(), **_stage(0, "bf16" if dtype == torch.bfloat16 else "fp32"))
    x = torch.randn(24, 16, device=engine.device, dtype=dtype)
    engine.backward(engine(x))  # tries the grouped product out
    losses: list[torch.Tensor] = []
    syncs = _count_syncs(lambda: losses.append(engine(x)))
    syncs_backward = _count_syncs(lambda: engine.backward(losses[0]))
    engine.close()
    return sum(syncs.values()), syncs_backward


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_of_experts_waits_for_its_sizes_alone(world, dtype):
    """S5: once for what is dropped, once for who gets how much."""
    for forward, backward in run_ranks(_syncs_of_experts, world, dtype, device="sim"):
        assert forward <= world and backward == {}


def _syncs_of_sequences(rank: int, world: int) -> dict[str, dict[str, int]]:
    from thalweg.parallel.comm_group import ParallelGroup
    from thalweg.parallel.sequence.ring_attention import RingAttention, RingAttentionSpec
    from thalweg.parallel.sequence.ulysses import heads_to_tokens, tokens_to_heads

    group = ParallelGroup(dist.group.WORLD)  # type: ignore[arg-type]
    x = torch.randn(1, 4, 8, 16, device=accelerator())
    by_rank, counts = [[0, 2], [1, 3]], [8, 8]
    found = {}

    def exchange() -> None:
        (y,) = tokens_to_heads([x], [by_rank], counts, group)
        heads_to_tokens(y, [2, 2], counts, group)

    found["ulysses"] = _count_syncs(exchange)
    documents = torch.tensor([0] * 5 + [1] * 11, device=accelerator())

    def seen(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return ((documents[rows][:, None] == documents[columns]) & (columns <= rows[:, None]))[None, None]

    spans = (((0, 4), (12, 16)), ((4, 8), (8, 12)))
    q, k, v = (torch.randn(1, heads, 8, 16, device=accelerator(), requires_grad=True) for heads in (4, 2, 2))
    outputs: list[torch.Tensor] = []
    ring, spec = RingAttention(group), RingAttentionSpec(spans, True, seen, 0.25)
    found["ring"] = _count_syncs(lambda: outputs.append(ring.attend(q, k, v, spec)))
    found["ring backward"] = _count_syncs(lambda: outputs[0].sum().backward())
    return found


def test_exchanges_of_sequences_wait_for_nothing_and_a_masked_ring_once():
    """S6, S7."""
    for found in run_ranks(_syncs_of_sequences, 2, device="sim"):
        assert found["ulysses"] == {} and found["ring backward"] == {}
        assert sum(found["ring"].values()) == 1


def _memory_of_grouped_heads(rank: int, world: int) -> int:
    from thalweg.ops.attention.block import block_backward, block_forward

    q, keys = torch.randn(1, 8, 4, 64, device=accelerator()), torch.randn(1, 1, 4096, 64, device=accelerator())
    options: dict[str, Any] = {"causal": False, "mask": None, "scale": 0.1}
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    out, lse = block_forward(q, keys, keys, **options)
    forward = torch.accelerator.max_memory_allocated() - before
    grads = block_backward(q, q, keys, keys, out, lse, **options)
    assert [grad.shape for grad in grads] == [q.shape, keys.shape, keys.shape]
    return forward // keys.nbytes


def test_keys_of_grouped_heads_are_not_repeated():
    """S7: eight query heads share the keys, which take 1 MiB."""
    assert run_ranks(_memory_of_grouped_heads, 1, device="sim")[0] < 4
