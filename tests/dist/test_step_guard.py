"""Gradients that are not finite and spikes: what reaches the weights, and what the config makes of it (R16)."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import thalweg
from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import bitwise_equal, full_tensors
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.config import ConfigError, load_config
from thalweg.optim.accumulation import StepResult
from thalweg.optim.step import StepGuard, TrainingDivergedError
from thalweg.zero.whole_parameter import named_shards

REUSE_RANKS = True

DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1}},
}
SPIKE = 1e4  # on one rank's loss
LONG = 24  # steps, enough for a median


def start(stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "log_level": "warning",
        **more,
    }
    return thalweg.initialize(model=tiny_gpt(), config=config)[0]


def take(engine: Any, rank: int, world: int, batch: int, factor: float = 1.0) -> bool:
    """One step on batch ``batch``, whose loss the last rank has multiplied; whether it updated."""
    rows = [part[rank::world].to(engine.device) for part in make_batch(batch, 2 * world)]
    loss = engine(*rows)
    engine.backward(loss * factor if rank == world - 1 else loss)
    engine.step()
    return not engine.optimizer.overflow


def read(engine: Any) -> list[torch.Tensor]:
    """Parameters and optimizer states, whole."""
    shards = [shard for _, shard in named_shards(engine.module)]
    states = [engine.optimizer.state[shard] for shard in shards]
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]
    return full_tensors((*shards, *moments))


@contextmanager
def listening() -> Iterator[list[str]]:
    """What the package logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thalweg").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("thalweg").removeHandler(handler)


@contextmanager
def shared_folder() -> Iterator[str]:
    """Rank 0's, until all ranks are done with it."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        torch.distributed.broadcast_object_list(names)
        yield names[0]
        torch.distributed.barrier()


def _inject(rank: int, world: int, dtype: str, stage: int, count: int, seed: int, blind: bool) -> list[str]:
    """Spoil every second step, each in a way of its own; what went wrong.  ``blind``: no step sees it."""
    torch.set_num_threads(1)
    if blind:
        StepResult.overflowed = property(lambda result: False)  # type: ignore[assignment]
    draws, failures, skipped = random.Random(seed), [], 0
    engine = start(stage, **DTYPES[dtype])
    params = list(engine.module.parameters())
    take(engine, rank, world, 0)
    for index in range(count):
        where, value = draws.choice(("loss", "gradient", "block")), draws.choice((float("nan"), float("inf")))
        broken, param, block = draws.randrange(world), draws.randrange(len(params)), draws.randrange(3)

        def spoil(grad: torch.Tensor, value: float = value, here: bool = rank == broken) -> torch.Tensor:
            if not here:
                return grad
            grad = grad.clone()
            grad.view(-1)[0] = value
            return grad

        module = engine.module.blocks[block]
        handle = None
        if where == "block":
            handle = module.register_forward_hook(lambda m, a, out, spoil=spoil: out.register_hook(spoil) and None)
        elif where == "gradient":  # of one weight
            inner = [
                m for m in engine.module.modules() if getattr(m, "weight", None) is not None and not list(m.children())
            ]
            handle = inner[param % len(inner)].register_full_backward_pre_hook(
                lambda m, grads, spoil=spoil: tuple(spoil(grad) for grad in grads)
            )
        before = read(engine)
        loss = engine(*(part[rank::world].to(engine.device) for part in make_batch(index, 2 * world)))
        engine.backward(loss * value if where == "loss" and rank == broken else loss)
        engine.step()
        if handle is not None:
            handle.remove()
        skipped += 1
        if engine.skipped_steps != skipped or not engine.optimizer.overflow:
            failures.append(f"{index} {where} {value}: {engine.skipped_steps} skips instead of {skipped}")
        if not bitwise_equal(before, read(engine)):
            failures.append(f"{index} {where} {value} on rank {broken}: something was updated")
        # Two that are good: the first after an overflow does not yet let a loss scale grow.
        if failures or not all(take(engine, rank, world, 1000 + 2 * index + good) for good in range(2)):
            break
    return failures + [f"after {index}: a good step was skipped"] * (skipped < count and not failures)


@pytest.mark.parametrize(
    ("dtype", "stage", "count"),
    [("fp32", 3, 8), ("fp16", 1, 8)]
    + [nightly(dtype, stage, 84) for dtype in DTYPES for stage in range(4)],  # a thousand and eight
)
def test_r16_nothing_that_is_not_finite_reaches_the_weights(dtype: str, stage: int, count: int) -> None:
    for failures in run_ranks(_inject, 2, dtype, stage, count, stage, False, timeout=300):
        assert not failures


def test_negative_control_a_verdict_that_sees_nothing() -> None:
    assert all(run_ranks(_inject, 2, "fp32", 1, 2, 0, True, reuse=False))


def _stop(rank: int, world: int, stage: int) -> tuple[bool, str, int, bool, list[str]]:
    engine = start(stage, health={"non_finite": "stop"})
    take(engine, rank, world, 0)
    before, said = read(engine), ""
    with listening() as lines:
        try:
            take(engine, rank, world, 1, float("nan"))
            engine.step()  # an accelerator says so with the next step
        except TrainingDivergedError as error:
            said = str(error)
    kept = bitwise_equal(before, read(engine))
    return kept, said, engine.global_steps, take(engine, rank, world, 2), lines


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("stage", [1, nightly(0), nightly(3)])
def test_a_run_that_is_to_stop_says_where_and_keeps_its_weights(stage: int, device: str) -> None:
    for kept, said, steps, goes_on, lines in run_ranks(_stop, 2, stage, device=device):
        assert kept and goes_on
        assert said.startswith("step 2: health.non_finite: the gradients are not finite. Nothing was updated")
        assert steps >= 2
        if device == "cpu":  # the last rank's, and in the sum everybody's
            assert any("not finite on this rank: the gradients of" in line and "more" in line for line in lines)


def _spike(rank: int, world: int, policy: str, at: int) -> tuple[bool, bool, list[str]]:
    """Whether the step of a spike after ``at`` others updated, whether it changed something, and the log."""
    engine = start(2, health={"spike": policy})
    for batch in range(at):
        assert take(engine, rank, world, batch)
    before = read(engine)
    with listening() as lines:
        updated = take(engine, rank, world, at, SPIKE)
    changed = not bitwise_equal(before, read(engine))
    return updated, changed, [line for line in lines if "spike" in line]


@pytest.mark.parametrize(
    ("policy", "at", "updates", "says"),
    [("ignore", LONG, True, 0), ("warn", LONG, True, 1), ("skip", LONG, False, 1), ("skip", 12, True, 0)],
)
def test_a_spike_is_what_the_config_says(policy: str, at: int, updates: bool, says: int) -> None:
    for updated, changed, lines in run_ranks(_spike, 2, policy, at):
        assert (updated, changed, len(lines)) == (updates, updates, says)
        assert all(line.startswith(f"step {at + 1}: health.spike: the gradient's norm, ") for line in lines)


def _rewind(rank: int, world: int, stage: int) -> list[str]:
    failures: list[str] = []
    saved: list[tuple[list[torch.Tensor], int]] = []
    # A run that takes up no earlier run goes back within itself all the same.
    engine = start(stage, health={"spike": "rewind", "non_finite": "rewind"}, checkpoint={"resume": "never"})
    with shared_folder() as folder:
        try:  # nothing to go back to
            take(engine, rank, world, 0, float("nan"))
            take(engine, rank, world, 0)
            failures.append("went back to nothing")
        except TrainingDivergedError as error:
            failures += [] if "no checkpoint was saved" in str(error) else [str(error)]
        for batch in range(LONG):
            take(engine, rank, world, batch)
            if batch in (LONG - 3, LONG - 1):
                engine.save_checkpoint(folder)
                saved.append((read(engine), engine.global_steps))
        for attempt in range(6):
            engine.backward(engine(*(part[rank::world].to(engine.device) for part in make_batch(99 + attempt, 4))))
            engine.step()  # one that went well in between
            take(engine, rank, world, 200 + attempt, SPIKE if attempt % 2 else float("inf"))
            expected, at = saved[1 if attempt < 3 else 0]
            if engine.global_steps != at:
                failures.append(f"{attempt}: at step {engine.global_steps} instead of {at}")
            if not bitwise_equal(read(engine), expected):
                failures.append(f"{attempt}: not the state of step {at}")
        try:
            take(engine, rank, world, 300, float("nan"))
            take(engine, rank, world, 301)
            failures.append("went back a seventh time")
        except TrainingDivergedError as error:
            failures += [] if "6 times back at a checkpoint did not help" in str(error) else [str(error)]
    return failures


@pytest.mark.parametrize("stage", [2, nightly(0), nightly(3)])
def test_a_run_goes_back_to_its_last_checkpoint_then_to_the_one_before_then_stops(stage: int) -> None:
    for failures in run_ranks(_rewind, 2, stage):
        assert not failures


def _resumed(rank: int, world: int, forget: bool) -> bool:
    """Whether a spike updates right after a resume."""
    engine = start(1, health={"spike": "skip"})
    for batch in range(LONG):
        take(engine, rank, world, batch)
    with shared_folder() as folder:
        engine.save_checkpoint(folder)
        engine = start(1, health={"spike": "skip"})
        if forget:
            StepGuard.load_state_dict = lambda guard, norms: None  # type: ignore[method-assign]
        engine.load_checkpoint(folder)
    return take(engine, rank, world, LONG, SPIKE)


@pytest.mark.parametrize("forget", [False, True], ids=["as it is", "negative control"])
def test_what_is_a_spike_is_the_same_after_a_resume(forget: bool) -> None:
    assert run_ranks(_resumed, 2, forget) == [forget, forget]


def _on_device(rank: int, world: int) -> list[Any]:
    """On an accelerator: a spike that is skipped at once; a rewind, which comes with the step after."""
    engine = start(1, health={"spike": "skip"})
    for batch in range(LONG):
        take(engine, rank, world, batch)
    before = read(engine)
    found = [take(engine, rank, world, LONG, SPIKE), bitwise_equal(before, read(engine))]
    engine = start(1, health={"non_finite": "rewind"})
    with shared_folder() as folder:
        for batch in range(2):
            take(engine, rank, world, batch)
        engine.save_checkpoint(folder)
        saved = read(engine)
        take(engine, rank, world, 2)
        take(engine, rank, world, 3, float("nan"))
        take(engine, rank, world, 4)
        found += [engine.global_steps, bitwise_equal(saved, read(engine))]
    return found


def test_an_accelerator_skips_a_spike_and_goes_back() -> None:
    for found in run_ranks(_on_device, 2, device="sim"):
        assert found == [False, True, 2, True]


@pytest.mark.parametrize(("health", "names"), [({"spike": "skip"}, "spike"), ({"non_finite": "stop"}, "non_finite")])
def test_sites_with_gradients_of_their_own_cannot_come_to_one_verdict(health: dict[str, str], names: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "outer_optimizer": {"sync_every": 4}}
    with pytest.raises(ConfigError, match=rf"health\.{names}.*a site knows its own gradients alone"):
        load_config(config | {"health": health}, world_size=2)
    load_config(config | {"health": {"spike": "warn"}}, world_size=2)
