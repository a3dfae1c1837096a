"""What users do to an engine with tiers: branches, several engines, plain loops, failures, checkpoints."""

from __future__ import annotations

import copy
import random
import tempfile
import time

import pytest
import torch

import thalweg
from tests import inspect
from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import bitwise_equal, full_tensors
from tests.dist.test_engine import Branching
from tests.dist.test_exception_recovery import Fused
from tests.harness import run_ranks
from tests.marks import nightly

REUSE_RANKS = True


def settings(folder, param="nvme", optimizer="nvme", stage=3, accumulation=1, **more):
    """A ds_config with these tiers."""
    zero = {"stage": stage}
    if param != "none":
        zero["offload_param"] = {"device": param, "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2}
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer, "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "cpu_kernels": "torch",
        "log_level": "error",
        **more,
    }


def start(model, folder, *tiers, **more):
    """An engine over a copy of ``model``."""
    return thalweg.initialize(model=copy.deepcopy(model), config=settings(folder, *tiers, **more))[0]


def mine(step, rank, world):
    """This rank's part of a global batch."""
    tokens, labels = make_batch(step, 2 * world)
    return tokens[rank::world], labels[rank::world]


def values(engine):
    """The full parameters, the engine closed."""
    found = full_tensors(engine.module.parameters())
    engine.close()
    return found


def _branches(rank, world, folder):
    results = []
    for tiers in (("none", "none"), ("nvme", "nvme")):
        engine = start(Branching(), folder, *tiers)
        choose = random.Random(5)
        for step in range(20):
            which = choose.sample(range(8), 3)
            x = torch.randn(2 * world, 9, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x[rank::world], which))
            engine.step()
        results.append(values(engine))
    return bitwise_equal(*results)


def _a_mixture(rank, world, folder):
    """Evaluation between steps, a window under no_sync, a plain loop's step, named_parameters in between."""
    results, notes = [], []
    for tiers in (("none", "none"), ("nvme", "nvme"), ("none", "cpu")):
        engine = start(tiny_gpt(), folder, *tiers, accumulation=2)
        for step in range(3):
            tokens, labels = mine(2 * step, rank, world)
            with engine.no_sync():
                engine.backward(engine(tokens, labels))
                engine.step()
            with torch.no_grad():
                notes.append(float(engine(tokens, labels)))
            engine.backward(engine(*mine(2 * step + 1, rank, world)))
            engine.step()
            named = dict(engine.module.named_parameters())
            notes.append(float(sum(p.double().sum() for p in full_tensors(named.values()))))
            assert list(named) == list(dict(tiny_gpt().named_parameters()))
        loss = engine(*mine(9, rank, world))  # nobody's engine.backward: gradients stay to be looked at
        loss.backward()
        notes.append(float(sum(g.double().sum() for g in full_tensors(p.grad for p in engine.module.parameters()))))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        results.append(values(engine))
    third = len(notes) // 3
    same = notes[:third] == notes[third : 2 * third] == notes[2 * third :]
    return same, bitwise_equal(results[0], results[1]), bitwise_equal(results[0], results[2])


def _three_engines(rank, world, folder):
    kinds = {0: ("none", "none"), 1: ("nvme", "nvme"), 2: ("nvme", "cpu")}
    alone = {}
    for seed, tiers in kinds.items():
        engine = start(tiny_gpt(seed), folder, *tiers)
        for step in range(3):
            engine.backward(engine(*mine(step, rank, world)))
            engine.step()
        alone[seed] = values(engine)
    engines = {seed: start(tiny_gpt(seed), folder, *tiers) for seed, tiers in kinds.items()}
    for step in range(3):
        losses = {seed: engine(*mine(step, rank, world)) for seed, engine in engines.items()}
        for seed in (2, 0, 1):
            engines[seed].backward(losses[seed])
        for engine in engines.values():
            engine.step()
    return [bitwise_equal(values(engine), alone[seed]) for seed, engine in engines.items()]


def _failure(rank, world, folder, burns):
    results = []
    for fails in (True, False):
        model = copy.deepcopy(tiny_gpt())
        model.blocks[1] = Fused(model.blocks[1])
        # With clipping updates wait for step(), so that a failed backward pass has changed nothing.
        engine = start(model, folder, gradient_clipping=0.05)
        fuse, step, failed = engine.module.blocks[1], 0, False
        while step < 4:
            fuse.burns = burns if fails and step == 2 and not failed else ""
            try:
                engine.backward(engine(*mine(step, rank, world)))
            except FloatingPointError:
                failed = True
                continue
            engine.step()
            step += 1
        assert failed == fails
        results.append(values(engine))
    return bitwise_equal(*results)


def _checkpoints(rank, world, folder):
    """Saved with tiers, loaded without, and back."""
    equal = []
    for first, second in ((("nvme", "nvme"), ("none", "none")), (("none", "none"), ("nvme", "nvme"))):
        results = []
        for again in (False, True):
            engine = start(tiny_gpt(), folder, *first)
            for step in range(4):
                if again and step == 2:
                    engine.save_checkpoint(f"{folder}/{first[0]}")
                    engine.close()
                    engine = start(tiny_gpt(1), folder, *second)
                    engine.load_checkpoint(f"{folder}/{first[0]}")
                engine.backward(engine(*mine(step, rank, world)))
                engine.step()
            results.append(values(engine))
        equal.append(bitwise_equal(*results))
    return equal


def _masters(rank, world, folder):
    """16-bit parameters in memory over masters on the disk: loaded and edited like any others."""
    results, held, expected = [], [], []
    half = {"bf16": {"enabled": True}, "gradient_clipping": 0.5}
    for tiers in (("none", "none"), ("none", "nvme")):
        engine = start(tiny_gpt(), folder, *tiers, **half)
        swap = inspect.swap_file(engine)
        pieces = [p.to_local() for p in engine.module.parameters() if p.to_local().numel()]
        held.append(swap is not None and all(swap.locate(piece) is not None for piece in pieces))
        # A device gathers from masters in host memory; on a CPU parameters in 16 bits are in memory without them.
        expected.append(tiers == ("none", "nvme") and engine.device.type == "cpu")
        for step in range(4):
            if step == 1 and world == 1:  # each rank has a folder of its own here
                engine.save_checkpoint(f"{folder}/masters")
            if step == 2:  # an edit by hand
                with torch.no_grad():
                    for p in engine.module.parameters():
                        p.mul_(1.01)
            if step == 3 and world == 1:
                engine.load_checkpoint(f"{folder}/masters")
            engine.backward(engine(*mine(step, rank, world)))
            engine.step()
        results.append(values(engine))
    return held == expected, bitwise_equal(*results)


def _partly(rank, world, folder):
    """A part of the state stays in memory; everything else is as with all of it on the disk."""
    results, parts = [], []
    for tiers, ratio, more in (
        (("none", "none"), 1.0, {}),
        (("nvme", "nvme"), 0.4, {}),
        (("none", "nvme"), 0.4, {"gradient_clipping": 1e9}),
        (("nvme", "nvme"), 0.0, {}),
        (("nvme", "nvme"), 0.4, {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
        (("none", "none"), 1.0, {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
    ):
        config = {**settings(folder, *tiers), **more}
        config["zero_optimization"].setdefault("offload_optimizer", {})["ratio"] = ratio
        engine = thalweg.initialize(model=copy.deepcopy(tiny_gpt()), config=config)[0]
        for step in range(3):
            if step == 2:
                engine.save_checkpoint(f"{folder}/{len(results)}")
                engine.load_checkpoint(f"{folder}/{len(results)}")
            engine.backward(engine(*mine(step, rank, world)))
            engine.step()
        swap, sizes = inspect.optimizer_swap_file(engine), [0, 0]
        for param in engine.module.parameters():
            piece = engine.optimizer.state[param]["exp_avg"].to_local()
            sizes[swap is not None and swap.locate(piece) is not None] += piece.numel()
        parts.append(sizes[1] / sum(sizes))
        results.append(values(engine))
    return parts, [bitwise_equal(results[0], one) for one in results[1:4]], bitwise_equal(*results[4:])


def _delays(rank, world, folder):
    """Transfers that take their time, each another one, in every order that this allows."""
    from thalweg.storage_io.disk import Disk

    results = []
    with pytest.MonkeyPatch.context() as patch:
        for tiers in (("none", "none"), ("nvme", "nvme"), ("none", "nvme")):
            engine = start(tiny_gpt(), folder, *tiers, bf16={"enabled": True})
            for step in range(3):
                engine.backward(engine(*mine(step, rank, world)))
                engine.step()
            results.append(values(engine))
            chance = random.Random(rank)
            for name in ("preadv", "pwritev"):
                plain = getattr(Disk, name)

                def slow(self, *args, plain=plain, chance=chance):
                    time.sleep(chance.random() * 4e-3)
                    return plain(self, *args)

                patch.setattr(Disk, name, slow)
    return bitwise_equal(*results[:2]) and bitwise_equal(results[0], results[2])


def _two_backwards(rank, world, folder):
    engine = start(tiny_gpt(), folder)
    engine.backward(engine(*mine(0, rank, world)))
    if engine.device.type == "cpu":  # where the first has used its gradients up; a device's come to the host later
        with pytest.raises(ValueError, match="Add the losses"):
            engine.backward(engine(*mine(1, rank, world)))
    engine.close()
    retained = []
    for tiers in (("none", "none"), ("nvme", "nvme")):
        engine = start(tiny_gpt(), folder, *tiers)
        for step in range(2):
            loss = engine(*mine(step, rank, world))
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
        retained.append(values(engine))
    return bitwise_equal(*retained)


def _not_finite(rank, world, folder):
    engine = start(tiny_gpt(), folder)
    before = full_tensors(engine.module.parameters())
    loss = engine(*mine(0, rank, world))
    engine.backward(loss * float("nan"))
    engine.step()
    skipped = (engine.skipped_steps, engine.optimizer.overflow)
    return skipped, bitwise_equal(values(engine), before)


def _in_folder(rank, world, name, *args):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return globals()[name](rank, world, folder, *args)


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_row08_a_random_branch_with_parameters_on_a_disk(world):
    assert all(run_ranks(_in_folder, world, "_branches"))


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_evaluation_no_sync_and_plain_loops_between_steps(world):
    for same in run_ranks(_in_folder, world, "_a_mixture"):
        assert same == (True, True, True)


def test_row14_three_engines_with_different_tiers():
    for equal in run_ranks(_in_folder, 2, "_three_engines"):
        assert equal == [True, True, True]


@pytest.mark.parametrize("burns", ["forward", "backward"])
def test_an_exception_leaves_the_tiers_at_rest(burns):
    assert all(run_ranks(_in_folder, 2, "_failure", burns))


def test_checkpoints_pass_between_tiers():
    for equal in run_ranks(_in_folder, 1, "_checkpoints"):
        assert equal == [True, True]


def test_a_part_of_the_state_stays_in_memory():
    for parts, equal, lamb in run_ranks(_in_folder, 1, "_partly"):
        assert equal == [True] * 3 and lamb
        assert parts[0] == parts[3] == parts[5] == 0.0
        for share in (parts[1], parts[2], parts[4]):
            assert 0.4 <= share < 0.6


def test_row05_random_delays_of_transfers_change_no_bit():
    assert all(run_ranks(_in_folder, 2, "_delays"))


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_masters_go_to_the_disk_and_sixteen_bits_stay(world):
    assert run_ranks(_in_folder, world, "_masters") == [(True, True)] * world


def test_row15_two_backward_passes_are_an_error_or_retain_the_graph():
    assert all(run_ranks(_in_folder, 2, "_two_backwards"))


def test_a_gradient_that_is_not_finite_changes_nothing():
    for (skipped, overflow), equal in run_ranks(_in_folder, 2, "_not_finite"):
        assert skipped == 1 and overflow and equal


def _paged_units(rank, world, limits):
    found = []
    for limit in limits:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            config = settings(folder, memory={"host_limit": limit, "preflight": "off"})
            del config["zero_optimization"]["offload_param"]["max_in_cpu"]
            engine = thalweg.initialize(model=tiny_gpt(), config=config)[0]
            engine.backward(engine(*mine(0, rank, world)))
            engine.step()
            found.append(0 if inspect.sharded_model(engine).paging is None else len(inspect.pager(engine).units))
            engine.close()
    return found


@pytest.mark.parametrize("world", [1, nightly(2)])
def test_parameters_leave_memory_where_there_is_little_of_it(world):
    """Without ``max_in_cpu`` the memory there is decides, alike on all ranks."""
    for ample, small in run_ranks(_paged_units, world, [1 << 30, 1 << 16]):
        assert ample == 0 and small > 2
