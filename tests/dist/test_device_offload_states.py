"""`engine.offload_states()`: training leaves a device's memory to somebody else, and goes on as if it had not."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

import thalweg
from tests.dist.models import VOCAB_SIZE, make_batch, tiny_gpt
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.compat.deepspeed.config import OffloadStateTypeEnum
from thalweg.zero import offload_states

REUSE_RANKS = True
AFTER, STEPS = 2, 4
Outcome = dict[str, Any]


def _config(stage: int, dtype: str) -> dict[str, Any]:
    half = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0.1, "log_level": "error", **half,
    }  # fmt: skip


def _evaluate(engine: Any) -> None:
    with torch.no_grad():
        engine(*(t.to(engine.device) for t in make_batch(99, 2)))


def _train(rank: int, world: int, stage: int, dtype: str, ways: list[str], folder: str) -> dict[str, Outcome]:
    found = {}
    for way in ways:
        torch.manual_seed(0)
        engine = thalweg.initialize(model=tiny_gpt(), config=_config(stage, dtype))[0]
        losses, outcome = [], Outcome()
        for step in range(STEPS):
            if step == AFTER and way != "never":
                torch.accelerator.synchronize()
                outcome["before"] = torch.accelerator.memory_allocated()
                states = [OffloadStateTypeEnum.optim_states] if way.startswith("optimizer") else None
                engine.offload_states(include=states, non_blocking=way == "asked")
                if way == "tampered":
                    _, host = engine.sharded_model._on_host._held["optim_states"][0]
                    host.fill_(1)
                outcome["after"] = torch.accelerator.memory_allocated()
                if way == "asked":
                    engine.reload_states(non_blocking=True)
                elif way == "optimizer, evaluated":
                    _evaluate(engine)
                    outcome["after"] = torch.accelerator.memory_allocated()
                elif way == "saved":
                    engine.save_checkpoint(f"{folder}/{stage}{dtype}")
                    engine.offload_states()
                    engine.load_checkpoint(f"{folder}/{stage}{dtype}")
                elif way == "loaded by name":
                    state = engine.state_dict()
                    engine.offload_states()
                    engine.load_state_dict(state)
                elif way == "the optimizer's step":
                    engine.reload_states()
            tokens, labels = (t.to(engine.device) for t in make_batch(step, world * 2))
            loss = engine(tokens[rank::world], labels[rank::world])
            losses.append(loss.item())
            engine.backward(loss)
            if way == "the optimizer's step":
                engine.offload_states(["optim_states"])
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                engine.step()
        outcome["losses"] = losses
        outcome["parameters"] = {name: value.cpu() for name, value in engine.state_dict().items()}
        engine.close()
        del engine, loss, tokens, labels
        gc.collect()
        found[way] = outcome
    return found


def _differs(one: Outcome, other: Outcome) -> bool:
    return one["losses"] != other["losses"] or any(
        not torch.equal(value, other["parameters"][name]) for name, value in one["parameters"].items()
    )


WAYS = ["never", "asked", "unasked", "optimizer, evaluated", "saved", "loaded by name", "the optimizer's step"]


GATE = [(2, "fp32"), (3, "bf16")]
OTHERS = [cell for cell in itertools.product(range(4), ("fp32", "bf16", "fp16")) if cell not in GATE]


@pytest.mark.parametrize(("stage", "dtype"), [*GATE, *(nightly(*cell) for cell in OTHERS)])
def test_training_goes_on_to_the_bit(tmp_path, stage, dtype):
    for found in run_ranks(_train, 2, stage, dtype, WAYS, str(tmp_path), device="sim"):
        reference = found.pop("never")
        for way, outcome in found.items():
            assert not _differs(outcome, reference), way
        # What is left are buffers, and what the allocator rounds up.
        assert found["unasked"]["after"] < 0.1 * found["unasked"]["before"], found["unasked"]
        moved = found["optimizer, evaluated"]["before"] - found["optimizer, evaluated"]["after"]
        num_owned = sum(p.numel() for p in tiny_gpt().parameters()) / (1 if stage == 0 else 2)
        assert moved == pytest.approx(2 * 4 * num_owned, rel=0.2)


def test_what_comes_back_otherwise_shows(tmp_path):
    """The control of the test above."""
    for found in run_ranks(_train, 2, 3, "fp32", ["never", "tampered"], str(tmp_path), device="sim"):
        assert _differs(found["tampered"], found["never"])


def _ask(rank: int, world: int) -> list[str]:
    engine = thalweg.initialize(model=tiny_gpt(), config=_config(1, "fp32"))[0]
    said = []
    for args in ({"include": ["optimizer"]}, {"device": "nvme"}):
        with pytest.raises(ValueError) as error:
            engine.offload_states(**args)
        said.append(str(error.value))
    engine.offload_states()  # nothing of a CPU's moves
    assert not any(engine.sharded_model._on_host._held.values())
    engine(torch.zeros(1, 4, dtype=torch.long) % VOCAB_SIZE, torch.zeros(1, 4, dtype=torch.long))
    engine.close()
    return said


def test_what_does_not_exist_is_refused():
    unknown, elsewhere = run_ranks(_ask, 1, device="cpu")[0]
    assert "optim_states" in unknown and "not optimizer" in unknown
    assert "not to nvme" in elsewhere
    assert set(offload_states.STATES) == {state.value for state in OffloadStateTypeEnum}
