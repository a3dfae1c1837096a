"""What stays resident with everything on NVMe: the same after each step, however many there are."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch

from tests import inspect
from tests.dist.test_offload_use import start
from tests.harness import run_ranks
from thalweg.comm.collectives.reducer import BufferPool
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.observe.flops import resident_mib
from thalweg.optim.offload.step_in_backward import MAX_PENDING_UPDATES

SHAPE = GPTConfig(vocab_size=2000, n_layer=6, n_head=4, n_embd=256, block_size=64)


def _resident(rank, world, keeps):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found, kept = [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        engine = start(GPT(SHAPE), folder, activation_checkpointing={"policy": "full"})
        for step in range(9):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(2000, (2, 65), generator=generator)
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
            engine.step()
            if keeps:  # the control: two units' worth of memory that nobody gives back; a hole may take one in
                kept.append(torch.ones(3 << 19))
            gc.collect()
            found.append(resident_mib())
        engine.close()
    return found


def _held(rank, world, keeps):
    """Blocks of reduced gradients that a backward pass has taken, of eight units."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder, pytest.MonkeyPatch.context() as patch:
        if keeps:
            held: list[Any] = []
            allocate = BufferPool.allocate

            def keeping(self, shape, dtype):
                held.append(allocate(self, shape, dtype))
                return held[-1]

            patch.setattr(BufferPool, "allocate", keeping)
        engine = start(GPT(SHAPE), folder)
        tokens = torch.randint(2000, (2, 65), generator=torch.Generator().manual_seed(0))
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        inspect.wait_for_updates(engine)
        blocks = len(inspect.gradient_memory(engine).outputs._blocks)
        engine.close()
    return blocks


def test_gradients_of_a_few_units_exist_at_once():
    """Those whose update waits for the disk, the one at work, and the one that is reduced."""
    assert run_ranks(_held, 1, False)[0] <= MAX_PENDING_UPDATES + 2


def test_negative_control_gradients_that_stay_are_noticed():
    assert run_ranks(_held, 1, True)[0] > MAX_PENDING_UPDATES + 2


def _blocks_in_forward(rank, world, keeps):
    """Blocks for inputs of reductions after a backward pass, and blocks of both kinds in the next forward pass."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder, pytest.MonkeyPatch.context() as patch:
        if keeps:
            patch.setattr(BufferPool, "release_memory", lambda self: None)
        engine = start(GPT(SHAPE), folder)
        memory, found = inspect.gradient_memory(engine), []
        tokens = torch.randint(2000, (2, 65), generator=torch.Generator().manual_seed(0))
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        found.append(len(memory.inputs._blocks))
        count = lambda *_: found.append(len(memory.inputs._blocks) + len(memory.outputs._blocks))
        engine.module.blocks[0].register_forward_pre_hook(count)
        engine(tokens[:, :-1], tokens[:, 1:])
        engine.close()
    return found


def test_gradients_that_left_leave_no_memory_idle():
    """The root's, the largest and the last to be reduced, would add to the next step's peak, twice where a lone rank's
    gradients were copied from one block to another."""
    assert run_ranks(_blocks_in_forward, 1, False)[0] == [0, 0]


def test_negative_control_idle_blocks_are_noticed():
    assert run_ranks(_blocks_in_forward, 1, True)[0][1] > 0


def _growth(found):
    """Of the least of three steps: what a step leaves for the next one to take comes and goes by a few MiB."""
    return min(found[6:]) - min(found[3:6])


def test_resident_memory_after_step_6_is_that_after_step_3():
    found = run_ranks(_resident, 1, False)[0]
    assert _growth(found) < 4.0, found


def test_negative_control_a_unit_that_stays_is_noticed():
    found = run_ranks(_resident, 1, True)[0]
    assert _growth(found) > 7.0, found
