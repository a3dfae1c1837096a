"""A gradient that is not finite, wherever it turns up: the step is left out whole, with tiers as without."""

from __future__ import annotations

import logging
import tempfile

import pytest
import torch

from tests import inspect
from tests.dist.models import tiny_gpt
from tests.dist.parity import bitwise_equal, full_tensor, full_tensors
from tests.dist.test_offload_use import mine, start
from tests.harness import run_ranks
from tests.marks import nightly

REUSE_RANKS = True

STEPS = 5
EXACT = [("nvme", "nvme"), ("none", "nvme"), ("nvme", "none"), ("none", "none")]
DTYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}


def _break(module, where, rank, broken_rank):
    """Make a gradient infinite on one rank: of what enters a block, of one weight, or by the loss."""

    def spoil(grad):
        return grad * float("inf") if rank == broken_rank else grad

    if where == "block":
        return module.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(spoil) and None)
    return None


def _train(rank, world, folder, tiers, where, broken, **more):
    """Losses, skips and parameters of a run in which steps ``broken`` go wrong on the last rank."""
    engine = start(tiny_gpt(), folder, *tiers, **more)
    found = []
    for step in range(STEPS):
        handle = _break(engine.module, where, rank, world - 1) if step in broken else None
        loss = engine(*mine(step, rank, world))
        if step in broken and where == "loss":
            loss = loss * (float("nan") if rank == world - 1 else 1.0)
        engine.backward(loss)
        engine.step()
        if handle is not None:
            handle.remove()
        found.append((engine.skipped_steps, engine.optimizer.overflow, engine.loss_scale))
        found.append(loss.item() if step not in broken else 0.0)
    states = [engine.optimizer.state[p] for p in engine.optimizer.param_groups[0]["params"]]
    moments = [float(full_tensor(state["exp_avg"]).double().sum()) for state in states]
    parameters = full_tensors(engine.module.parameters())
    engine.close()
    return found, moments, parameters


def _same(a, b):
    return a[0] == b[0] and a[1] == b[1] and bitwise_equal(a[2], b[2])


def _skips(rank, world, dtype):
    torch.set_num_threads(1)
    failures = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for where, broken in (("block", (0, 3)), ("loss", (2,))):
            known = None
            for tiers in reversed(EXACT if where == "block" else [*EXACT, ("none", "cpu"), ("nvme", "cpu")]):
                found = _train(rank, world, folder, tiers, where, broken, **DTYPES[dtype])
                known = known or found
                if not _same(found, known) or found[0][-2][0] != len(broken):
                    failures.append(f"{where} {broken} {tiers} {dtype}: {found[0]} instead of {known[0]}")
    return failures


@pytest.mark.parametrize(("world", "dtype"), [nightly(1, "fp32"), (1, "bf16"), nightly(2, "fp32"), nightly(2, "fp16")])
def test_a_lost_step_changes_nothing_in_any_tier(world, dtype):
    for failures in run_ranks(_skips, world, dtype, timeout=240):
        assert failures == []


def _control(rank, world):
    """What is not lost differs: the comparison above is not one of constants."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        lost = _train(rank, world, folder, ("nvme", "nvme"), "block", (2,))
        kept = _train(rank, world, folder, ("nvme", "nvme"), "block", ())
    return _same(lost, kept)


def test_negative_control_a_step_that_is_taken_differs():
    assert run_ranks(_control, 1) == [False]


def _without_room(rank, world):
    """Where the disk has no room for second places gradients rest until the step; nothing else changes."""
    from thalweg.optim.offload import policy

    results = []
    with tempfile.TemporaryDirectory(dir=".") as folder, pytest.MonkeyPatch.context() as patch:
        for room in (True, False):
            if not room:
                patch.setattr(policy.SwapFile, "extend_if_free", lambda self, needed, free: False)
            engine = start(tiny_gpt(), folder)
            tentative = inspect.step_strategy(engine)._double_buffered
            assert (tentative is not None) == room
            engine.close()
            results.append(_train(rank, world, folder, ("nvme", "nvme"), "block", (1,)))
    return _same(*results)


def test_a_disk_without_room_for_second_places_gives_the_same():
    assert run_ranks(_without_room, 1) == [True]


def _dropped(rank, world):
    """zero_grad() after a backward pass, and an exception in one, leave nothing behind."""
    results = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for tiers in (("none", "none"), ("nvme", "nvme")):
            engine = start(tiny_gpt(), folder, *tiers)
            for step in range(4):
                if step == 2:
                    engine.backward(engine(*mine(9, rank, world)))
                    engine.zero_grad()
                engine.backward(engine(*mine(step, rank, world)))
                engine.step()
            results.append(full_tensors(engine.module.parameters()))
            engine.close()
    return bitwise_equal(*results)


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_gradients_that_the_user_drops_have_changed_nothing(world):
    assert all(run_ranks(_dropped, world))


def _on_the_host(rank, world):
    """In place, a gradient that overflows under a finite loss leaves out what comes after it, and says so.  A device's
    gradients arrive when the pass is over: all are left out."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    with tempfile.TemporaryDirectory(dir=".") as folder:
        engine = start(tiny_gpt(), folder, "none", "cpu", log_level="warning")
        logger = logging.getLogger("thalweg")
        logger.addHandler(handler := Keep(level=logging.WARNING))
        before = full_tensors(engine.module.parameters())
        handle = _break(engine.module, "block", rank, world - 1)
        engine.backward(engine(*mine(0, rank, world)))
        engine.step()
        handle.remove()
        logger.removeHandler(handler)
        names = [name for name, _ in engine.module.named_parameters()]
        after = full_tensors(engine.module.parameters())
        changed = {name for name, a, b in zip(names, before, after, strict=True) if not torch.equal(a, b)}
        skipped, on_cpu = engine.skipped_steps, engine.device.type == "cpu"
        engine.close()
        waits = start(tiny_gpt(), folder, "none", "cpu", gradient_clipping=1e9)
        assert waits.config.gradient_clipping == 1e9
        handle = _break(waits.module, "block", rank, world - 1)
        waits.backward(waits(*mine(0, rank, world)))
        waits.step()
        same = bitwise_equal(full_tensors(waits.module.parameters()), before)
        waits.close()
    return skipped, changed, lines, same, on_cpu


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_on_the_host_what_came_before_is_updated_and_named(world):
    ranks = run_ranks(_on_the_host, world)
    on_cpu = ranks[0][4]
    assert any("blocks.1" in line and "kept their values" in line for line in ranks[0][2]) == on_cpu
    for skipped, changed, _, same, _ in ranks:
        assert skipped == 1
        assert bool(changed) == on_cpu and all(name.startswith("blocks.2.") for name in changed)
        assert same  # with clipping the whole step is left out
