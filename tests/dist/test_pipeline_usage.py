"""Habits of people who train with pipelines: what works, what is refused, what is the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thalweg
from tests.dist.models import make_batch, tiny_gpt
from tests.dist.pipeline_parity import PipelineCase, merge_stages, run_engine, tied_layers, token_loss
from tests.harness import run_ranks
from thalweg.parallel.pipeline.module import LayerSpec, PipelineModule

ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


def _config(**extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "cpu_kernels": "torch",
        "log_level": "warning",
        "optimizer": ADAM,
        **extra,
    }


def _habits(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = tied_layers(num_stages=2)
    engine, *_ = thalweg.initialize(model=model, model_parameters=list(model.parameters()), config=_config())
    for call in (lambda: engine(make_batch(0, 4)[0]), lambda: engine.backward(torch.ones(())), engine.step):
        with pytest.raises(ValueError, match="train_batch"):
            call()
    found["short"] = float(engine.train_batch(iter([make_batch(step, 4) for step in range(3)])))
    assert engine.global_steps == 1 and engine.micro_steps == 3 and engine.was_step_applied()
    with pytest.raises(StopIteration):
        engine.train_batch(iter([]))
    with pytest.raises(ValueError, match=r"\(inputs, labels\)|another stage"):
        engine.eval_batch(iter([make_batch(0, 4)[0]] * 4))
    engine.close()

    engine, *_ = thalweg.initialize(model=tied_layers(num_stages=2), config=_config())
    found["seen"] = float(engine.eval_batch(iter([make_batch(step, 4) for step in range(4)])))
    found["state"] = {name: value.tolist() for name, value in engine.state_dict().items()}
    engine.save_16bit_model(folder)
    changed = {name: torch.tensor(value) + 1 for name, value in found["state"].items()}
    engine.load_state_dict(changed)
    again = engine.state_dict()
    found["loads"] = all(torch.equal(again[name], value) for name, value in changed.items())
    engine.close()
    return found


def _tied_on_device(rank: int, world: int) -> tuple[list[str], bool]:
    """Where copies of a tied weight meet, before training and in it; whether they are one afterwards."""
    from thalweg.parallel.pipeline.tied_weights import TiedWeights

    where: list[str] = []
    exchange = TiedWeights._exchange_copies

    def noted(self: Any, value: torch.Tensor, tie: Any) -> list[torch.Tensor]:
        where.append(value.device.type)
        return exchange(self, value, tie)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TiedWeights, "_exchange_copies", noted)
        model = tiny_gpt().to("sim")
        model.head.weight = model.wte.weight  # which moving takes apart on devices of other kinds than CUDA
        config = _config(gradient_accumulation_steps=3, pipeline={"stages": 3})
        engine, *_ = thalweg.initialize(model=model, config=config)
        engine.train_batch(iter([make_batch(step, 4) for step in range(3)]))
        state = engine.state_dict()
        engine.close()
    return where, torch.equal(state["wte.weight"], state["head.weight"])


def test_tied_weights_of_a_model_on_a_device_meet_on_the_host_before_training():
    """NCCL's first messages in a group want all its ranks, and those between two stages of three would wait for ever;
    in training the loss has gone over the group before."""
    first, middle, last = run_ranks(_tied_on_device, 3, device="simulated")
    assert first == last == (["cpu", "sim"], True) and middle == ([], True)


def test_habits_of_deepspeeds_users(tmp_path):
    results = run_ranks(_habits, 2, str(tmp_path))
    plain = merge_stages(tied_layers())
    losses = [token_loss(plain(tokens), labels).item() for tokens, labels in (make_batch(i, 4) for i in range(4))]
    named = dict(plain.named_parameters(remove_duplicate=False))
    for found in results:
        assert found["short"] == pytest.approx(sum(losses[:3]) / 3, rel=1e-6)
        assert found["seen"] == pytest.approx(sum(losses) / 4, rel=1e-6)
        assert found["loads"]
        assert found["state"].keys() == named.keys()
        assert all(torch.equal(torch.tensor(value), named[name].data) for name, value in found["state"].items())
    from safetensors.torch import load_file

    stored = load_file(Path(tmp_path) / "model.safetensors")
    assert stored.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(value, named[name].data.bfloat16()) for name, value in stored.items())


class Spike(nn.Module):
    """Makes gradients infinite, on its own stage alone, from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (self.scale * (torch.inf if self.calls == 3 else 1.0) if self.calls == 3 else self.scale)


def _numbers(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("1f1b", "zb_h1"):
        case = PipelineCase("layers", 2, stage=1, schedule=name, extra={"bf16": {"enabled": True}})
        run = run_engine(case, world, 8)
        found[name] = (run.losses, run.grad_norms)

    torch.manual_seed(5)
    layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 8, 8), LayerSpec(Spike)]
    # torch 2.11 has no gradient of mse_loss between dtypes.
    options: dict[str, Any] = {"loss_fn": lambda y, labels: nn.functional.mse_loss(y.float(), labels)}
    model = PipelineModule(layers, **options, partition_method="uniform", num_stages=2)
    config = _config(fp16={"enabled": True, "initial_scale_power": 4}, gradient_accumulation_steps=1)
    engine, *_ = thalweg.initialize(model=model, config=config)
    found["draw"] = torch.rand(3).tolist()
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found["skipped"] = []
    for _ in range(4):
        engine.train_batch(iter([(data, data)]))
        found["skipped"].append((engine.skipped_steps, engine.loss_scale))
    engine.close()

    torch.manual_seed(0)
    gpt = tiny_gpt()
    given = torch.optim.SGD(gpt.parameters(), lr=0.1)
    config = {
        key: value for key, value in _config(pipeline={"stages": 2, "schedule": "auto"}).items() if key != "optimizer"
    }
    engine, *_ = thalweg.initialize(model=gpt, optimizer=given, config=config)
    found["own"] = float(engine.train_batch(iter([make_batch(step, 4) for step in range(4)])))
    found["after"] = float(engine.eval_batch(iter([make_batch(step, 4) for step in range(4)])))
    engine.close()
    return found


def test_dtypes_scales_and_optimizers_are_one_over_all_stages():
    first, second = run_ranks(_numbers, 2)
    for name in ("1f1b", "zb_h1"):
        assert first[name] == second[name]
    # Gradients add up in fp32 in both, whichever way the backward pass runs.
    assert first["zb_h1"][1] == pytest.approx(first["1f1b"][1], rel=2e-2)
    assert first["skipped"] == second["skipped"]
    assert [count for count, _ in first["skipped"]] == [0, 0, 1, 1]
    assert first["draw"] != second["draw"]
    assert first["own"] == second["own"]
    torch.manual_seed(0)
    plain = tiny_gpt()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = [plain(*make_batch(step, 4)) for step in range(4)]
    (sum(losses) / 4).backward()
    optimizer.step()
    assert first["own"] == pytest.approx(sum(loss.item() for loss in losses) / 4, rel=1e-6)
    after = sum(plain(*make_batch(step, 4)).item() for step in range(4)) / 4
    assert first["after"] == pytest.approx(after, rel=1e-6)


def test_contradictions_are_refused():
    config = _config(pipeline={"stages": 3})
    with pytest.raises(ValueError, match="num_stages = 2"):
        thalweg.initialize(model=tied_layers(num_stages=2), config=config)
    bad = _config(pipeline={"stages": 2, "schedule": "dualpipev"}, gradient_accumulation_steps=3)
    from thalweg.config import load, resolve

    with pytest.raises(ValueError, match=r"pipeline\.schedule"):
        resolve(load(bad), world_size=2)
    with pytest.raises(ValueError, match="virtual_stages"):
        resolve(load(_config(pipeline={"stages": 2, "virtual_stages": 3})), world_size=2)


class _Counted(nn.Module):
    """Counts its forward passes, recomputed ones too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(width, width) if width else nn.Tanh(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)


class _OfAnotherClass(_Counted):
    pass


def _recomputed(rank: int, world: int) -> dict[tuple[bool, int], list[int]]:
    found: dict[tuple[bool, int], list[int]] = {}
    for listed in (None, ["_OfAnotherClass"]):
        layers = [_Counted(4), _Counted(0), _OfAnotherClass(4), _Counted(4)]
        model = PipelineModule([*layers, nn.Flatten(0)], 1, loss_fn=lambda y, _: y.sum(), checkpointable_layers=listed)
        engine, *_ = thalweg.initialize(model=model, config=_config(gradient_accumulation_steps=1))
        for interval in (0, 1, 2):
            engine.module.set_checkpoint_interval(interval)
            for layer in layers:
                layer.calls = 0
            engine.train_batch(iter([(torch.ones(4, 4), torch.zeros(4))]))
            found[bool(listed), interval] = [layer.calls for layer in layers]
        with pytest.raises(ValueError, match="interval is -1"):
            engine.module.set_checkpoint_interval(-1)
        engine.close()
    return found


def _recomputed_by_the_programs_own(rank: int, world: int) -> tuple[list[int], list[int]]:
    asked = []

    def recompute(function, *args):
        asked.append(args[0][0])
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    layers = [_Counted(4), _Counted(0), _Counted(4)]
    options = {"activation_checkpoint_interval": 1, "activation_checkpoint_func": recompute}
    model = PipelineModule([*layers, nn.Flatten(0)], 1, loss_fn=lambda y, _: y.sum(), **options)
    engine, *_ = thalweg.initialize(model=model, config=_config(gradient_accumulation_steps=1))
    engine.train_batch(iter([(torch.ones(4, 4), torch.zeros(4))]))
    engine.close()
    return asked, [layer.calls for layer in layers]


def test_layers_are_recomputed_by_the_programs_own_function():
    assert run_ranks(_recomputed_by_the_programs_own, 1) == [([0, 2], [2, 1, 2])]


def test_layers_are_recomputed_by_an_interval_that_may_change():
    (found,) = run_ranks(_recomputed, 1)
    assert found == {
        (False, 0): [1, 1, 1, 1], (False, 1): [2, 1, 2, 2], (False, 2): [2, 2, 2, 2],
        (True, 0): [1, 1, 1, 1], (True, 1): [1, 1, 2, 1], (True, 2): [1, 1, 1, 1],
    }  # fmt: skip
