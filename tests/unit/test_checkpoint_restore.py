"""One process: a module and its optimiser go on as if never stopped; what does not fit is an error."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from tests.unit.checkpoint_support import (
    SmallModel,
    save_model,
    small_model,
    train_steps,
)
from thalweg.checkpoint import (
    Checkpoint,
    CheckpointMismatchError,
    Snapshot,
    build_snapshot,
    model_tensors,
    open_verified,
    restore_module,
    save_snapshot,
)
from thalweg.optim.algorithms.lion import Lion
from thalweg.optim.algorithms.low_bit import LowBitAdam

torch.set_num_threads(1)


def states_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    for group_a, group_b in zip(a.param_groups, b.param_groups, strict=True):
        for p, q in zip(group_a["params"], group_b["params"], strict=True):
            x, y = a.state.get(p, {}), b.state.get(q, {})
            if x.keys() != y.keys():
                return False
            for key in x:
                tensors = isinstance(x[key], torch.Tensor)
                if tensors and (x[key].dtype != y[key].dtype or not torch.equal(x[key], y[key])):
                    return False
                if not tensors and x[key] != y[key]:
                    return False
    return True


def models_equal(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_and_optimizer_go_on_as_if_never_stopped(tmp_path, name):
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train_steps(model, optimizer, 3)
    save_model(tmp_path, model, optimizer, 3)
    expected = train_steps(model, optimizer, 3, seed=1)

    other = small_model(seed=9)
    fresh = OPTIMIZERS[name](other.parameters())
    for group in fresh.param_groups:
        group["lr"] = torch.tensor(7.0) if isinstance(group["lr"], torch.Tensor) else 7.0
    restore_module(Checkpoint.open(tmp_path), other, fresh)
    assert train_steps(other, fresh, 3, seed=1) == expected
    assert models_equal(model, other)
    assert states_equal(optimizer, fresh)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("momentum", "adamw", "was SGD, .* not those of AdamW: load with load_optimizer_states=False"),
        ("adamw", "lion", "was AdamW, .* not those of Lion"),
        ("adamw", "nadam", "was AdamW, .* not those of NAdam"),
        ("lion", "adamw", "was Lion, .* not those of AdamW"),
        ("amsgrad", "adamw", ""),
        ("adamw", "low bit", ""),
    ],
)
def test_another_optimizer_is_refused_and_another_form_of_one_is_not(tmp_path, before, after, named):
    makers = {**OPTIMIZERS, "lion": Lion, "low bit": lambda p: LowBitAdam(p, state_dtype="bf16")}
    model, other = small_model(), small_model(seed=9)
    optimizer, fresh = makers[before](model.parameters()), makers[after](other.parameters())
    train_steps(model, optimizer, 1)
    save_model(tmp_path, model, optimizer)
    if named:
        kept = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(CheckpointMismatchError, match=named):
            restore_module(Checkpoint.open(tmp_path), other, fresh)
        assert all(torch.equal(kept[name], value) for name, value in other.state_dict().items())
    restore_module(Checkpoint.open(tmp_path), other, fresh, strict=not named)
    assert models_equal(model, other)


def test_the_comparison_notices_a_wrong_learning_rate(tmp_path):
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optimizer, 3)
    save_model(tmp_path, model, optimizer, 3)
    expected = train_steps(model, optimizer, 3, seed=1)
    other = small_model(seed=9)
    fresh = OPTIMIZERS["adamw"](other.parameters())
    restore_module(Checkpoint.open(tmp_path), other, fresh)
    fresh.param_groups[0]["lr"] = 0.0101
    assert train_steps(other, fresh, 3, seed=1) != expected
    assert not models_equal(model, other)


def test_an_optimizer_in_use_is_reset_to_the_checkpoint(tmp_path):
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optimizer, 1)
    save_model(tmp_path, model, optimizer, 1)
    expected = train_steps(model, optimizer, 2, seed=3)
    train_steps(model, optimizer, 5, seed=4)
    model.scale.requires_grad_(True)
    restore_module(Checkpoint.open(tmp_path), model, optimizer)
    assert train_steps(model, optimizer, 2, seed=3) == expected


def test_groups_are_matched_by_name_not_by_order(tmp_path):
    def groups(model: nn.Module, turn: bool) -> torch.optim.Optimizer:
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        decay = [p for p in parameters.values() if p.dim() > 1]
        rest = [p for p in parameters.values() if p.dim() <= 1]
        made = [
            {"params": decay, "weight_decay": 0.1, "lr": 0.01},
            {"params": rest, "weight_decay": 0.0, "lr": 0.02},
        ]
        return torch.optim.AdamW([{**g, "params": g["params"][::-1]} for g in made[::-1]] if turn else made)

    model = small_model()
    optimizer = groups(model, turn=False)
    train_steps(model, optimizer, 2)
    save_model(tmp_path, model, optimizer, 2)
    expected = train_steps(model, optimizer, 3, seed=1)
    other = small_model(seed=1)
    fresh = groups(other, turn=True)
    for group in fresh.param_groups:
        group.update(lr=5.0, weight_decay=3.0)
    restore_module(Checkpoint.open(tmp_path), other, fresh)
    assert [g["lr"] for g in fresh.param_groups] == [0.02, 0.01]
    assert train_steps(other, fresh, 3, seed=1) == expected

    one_group = small_model()  # that its group has frozen parameters as well does not matter
    with pytest.raises(CheckpointMismatchError, match="hyperparameters differ"):
        restore_module(Checkpoint.open(tmp_path), one_group, torch.optim.AdamW(one_group.parameters()))


def test_lbfgs_state_of_lists_of_tensors(tmp_path):
    def build(seed: int):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=2)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        x = torch.linspace(-1, 1, 12).view(4, 3)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    model, optimizer = build(0)
    run(model, optimizer)
    save_model(tmp_path, model, optimizer)
    expected = run(model, optimizer)
    other, fresh = build(1)
    restore_module(Checkpoint.open(tmp_path), other, fresh)
    assert run(other, fresh) == expected


def test_state_random_generators_and_extra_state(tmp_path):
    class Extra(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen, "tensor": torch.ones(2)}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = nn.Sequential(Extra(2, 2))
    model[0].seen = 5
    state = {"client": {"tuple": (1, {"x": torch.arange(3)})}, "schedule": {"last": 3}}
    random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
    save_snapshot(tmp_path, "t", build_snapshot(model, state=state, per_rank={"position": (7, [1])}), step=1)
    drawn = (random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(2).tolist())
    other = nn.Sequential(Extra(2, 2))
    back = restore_module(Checkpoint.open(tmp_path), other)
    assert (random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(2).tolist()) == drawn
    assert other[0].seen == 5
    assert back["client"]["tuple"][0] == 1 and torch.equal(back["client"]["tuple"][1]["x"], torch.arange(3))
    assert back.keys() == state.keys()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.per_rank(0)["position"] == (7, [1])
    assert checkpoint.per_rank(1) is None


class CountingLinear(nn.Linear):
    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Described(nn.Module):
    """A model with a config as Hugging Face's, a buffer and a tie."""

    config = SimpleNamespace(to_json_string=lambda: "{}")

    def __init__(self, compiles_parts: bool) -> None:
        super().__init__()
        layer = CountingLinear(3, 3)
        layer.register_buffer("mean", torch.randn(3))
        self.layer = torch.compile(layer, backend="eager") if compiles_parts else layer
        self.head = nn.Linear(3, 3)
        self.head.weight = layer.weight


@pytest.mark.parametrize("is_whole", [True, False])
def test_compiled_modules_are_stored_under_the_names_of_plain_ones(tmp_path, is_whole):
    """A model that ``torch.compile`` has wrapped, or one with such a module, changes checkpoints with a plain one."""

    def build(seed, compiles):
        torch.manual_seed(seed)
        plain = Described(compiles and not is_whole)
        model = torch.compile(plain, backend="eager") if compiles and is_whole else plain
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        return model, optimizer

    names = {}
    for compiles in (False, True):
        model, optimizer = build(0, compiles)
        model.layer.count = 7
        save_model(tmp_path / str(compiles), model, optimizer)
        other, fresh = build(9, not compiles)
        with Checkpoint.open(tmp_path / str(compiles)) as saved:
            names[compiles] = {*saved.manifest.tensors}, saved.manifest.aliases
            assert saved.state["thalweg"]["hf_config"]["architectures"] == ["Described"]
            restore_module(saved, other, fresh)
        pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs if isinstance(x, torch.Tensor))
        assert states_equal(optimizer, fresh) and other.layer.count == 7
    assert names[False] == names[True]


def test_row34_tied_weights_are_stored_once_and_come_back_tied_or_not(tmp_path):
    """PAIN_POINTS 34: aliases are kept; a tied checkpoint fills a tied and an untied model."""
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optimizer, 1)
    save_model(tmp_path, model, optimizer)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.manifest.aliases == {"model/head.weight": "model/embed.weight"}
    assert torch.equal(checkpoint.read("model/head.weight"), model.embed.weight)
    tied = small_model(1)
    restore_module(checkpoint, tied)
    assert tied.head.weight is tied.embed.weight
    assert models_equal(tied, model)
    untied = small_model(2)
    untied.head.weight = nn.Parameter(torch.zeros(7, 5))
    fresh = OPTIMIZERS["adamw"](untied.parameters())
    restore_module(checkpoint, untied, fresh)
    assert torch.equal(untied.head.weight, untied.embed.weight)
    assert torch.equal(fresh.state[untied.head.weight]["exp_avg"], fresh.state[untied.embed.weight]["exp_avg"])


def test_row34_an_untied_checkpoint_fills_a_tied_model_only_if_equal(tmp_path):
    apart = small_model()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    save_snapshot(tmp_path, "equal", build_snapshot(apart), step=0)
    tied = small_model(1)
    restore_module(Checkpoint.open(tmp_path), tied)
    assert torch.equal(tied.head.weight, apart.embed.weight)
    with torch.no_grad():
        apart.head.weight += 1
    save_snapshot(tmp_path, "different", build_snapshot(apart), step=0)
    with pytest.raises(CheckpointMismatchError, match=r"ties head\.weight to embed\.weight"):
        restore_module(Checkpoint.open(tmp_path), tied)


def test_row34_the_other_name_of_a_tie_may_come_first(tmp_path):
    model = small_model()
    save_snapshot(tmp_path, "t", build_snapshot(model), step=0)

    class Reversed(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            embed = self._modules.pop("embed")
            self._modules["embed"] = embed

    other = Reversed()
    assert next(iter(model_tensors(other)[1].items())) == ("embed.weight", "head.weight")
    optimizer = OPTIMIZERS["adamw"](other.parameters())
    train_steps(other, optimizer, 1)
    save_model(tmp_path, other, optimizer)
    back = small_model(4)
    fresh = OPTIMIZERS["adamw"](back.parameters())
    restore_module(Checkpoint.open(tmp_path), back, fresh)
    assert torch.equal(back.embed.weight, other.embed.weight)
    assert torch.equal(fresh.state[back.embed.weight]["exp_avg"], optimizer.state[other.head.weight]["exp_avg"])


def test_row02_unmatched_names_are_errors_with_the_nearest_names(tmp_path):
    """PAIN_POINTS 2: a strict load; nothing is skipped in silence, and nothing is changed."""
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optimizer, 1)
    save_model(tmp_path, model, optimizer)
    checkpoint = Checkpoint.open(tmp_path)

    renamed = small_model(1)
    renamed.hiden = renamed._modules.pop("hidden")
    before = {k: v.clone() for k, v in renamed.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=r"model/hiden\.weight \(nearest: model/hidden\.weight"):
        restore_module(checkpoint, renamed)
    assert all(torch.equal(before[k], v) for k, v in renamed.state_dict().items())

    smaller = small_model(1)
    del smaller.frozen
    with pytest.raises(CheckpointMismatchError, match=r"unexpected checkpoint keys: .*model/frozen\.weight"):
        restore_module(checkpoint, smaller)
    restore_module(checkpoint, smaller, strict=False)
    assert torch.equal(smaller.hidden.weight, model.hidden.weight)

    resized = small_model(1)
    resized.hidden = nn.Linear(5, 4)
    with pytest.raises(
        CheckpointMismatchError, match=r"model/hidden\.weight has shape \[4, 5\] here and \[3, 5\] there"
    ):
        restore_module(checkpoint, resized)

    fewer = small_model(1)
    partial = OPTIMIZERS["adamw"]([p for n, p in fewer.named_parameters() if n != "scale"])
    with pytest.raises(CheckpointMismatchError, match=r"unexpected checkpoint keys: .*optim/.*/scale"):
        restore_module(checkpoint, fewer, partial)

    save_snapshot(tmp_path, "weights", build_snapshot(model), step=1)
    with pytest.raises(CheckpointMismatchError, match="saved without an optimiser"):
        restore_module(Checkpoint.open(tmp_path, "weights"), model, optimizer)


def test_row02_the_loss_curve_continues(tmp_path):
    """PAIN_POINTS 2: a job that stops and resumes has the losses of one that did not."""
    straight = small_model()
    optimizer = OPTIMIZERS["adamw"](straight.parameters())
    train_steps(straight, optimizer, 4, seed=1)
    whole = train_steps(straight, optimizer, 4, seed=2)
    first = small_model()
    optimizer = OPTIMIZERS["adamw"](first.parameters())
    train_steps(first, optimizer, 4, seed=1)
    save_model(tmp_path, first, optimizer, 4)
    second = small_model(5)
    optimizer = OPTIMIZERS["adamw"](second.parameters())
    restore_module(open_verified(tmp_path, resume="must"), second, optimizer)
    assert train_steps(second, optimizer, 4, seed=2) == whole


def test_a_parameter_frozen_at_save_may_be_unfrozen_and_the_reverse_is_an_error(tmp_path):
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optimizer, 1)
    save_model(tmp_path, model, optimizer)
    other = small_model(1)
    other.frozen.requires_grad_(True)
    fresh = OPTIMIZERS["adamw"](other.parameters())
    restore_module(Checkpoint.open(tmp_path), other, fresh)
    assert other.frozen.weight not in fresh.state
    train_steps(other, fresh, 1)
    save_snapshot(tmp_path, "some", build_snapshot(other, OPTIMIZERS["adamw"]([other.scale])), step=2)
    with pytest.raises(CheckpointMismatchError, match=r"group 0 has parameters that .* did not have: embed\.weight"):
        restore_module(Checkpoint.open(tmp_path, "some"), other, fresh)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    with pytest.raises(CheckpointMismatchError, match="not among the module's"):
        build_snapshot(model, stranger)


def test_dtypes_are_cast_with_a_warning_and_only_among_floats(tmp_path, caplog):
    save_snapshot(tmp_path, "t", Snapshot({"model/a": torch.arange(3.0), "model/i": torch.arange(3)}), step=0)
    target = {"model/a": torch.zeros(3, dtype=torch.bfloat16), "model/i": torch.zeros(3, dtype=torch.int64)}
    with caplog.at_level(logging.WARNING):
        Checkpoint.open(tmp_path).read_into(target)
    assert "model/a" in caplog.text and torch.equal(target["model/a"], torch.arange(3).bfloat16())
    target["model/i"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatchError, match="model/i is float32 here and int64 there"):
        Checkpoint.open(tmp_path).read_into(target)
    with pytest.raises(CheckpointMismatchError, match="meta device"):
        Checkpoint.open(tmp_path).read_into({"model/a": torch.zeros(3, device="meta")}, strict=False)


def test_frozen_parameters_may_be_left_out(tmp_path):
    model = small_model()
    save_snapshot(tmp_path, "t", build_snapshot(model, include_frozen=False), step=0)
    assert not [name for name in Checkpoint.open(tmp_path).tensor_names() if "frozen" in name]
    other = small_model(1)
    before = other.frozen.weight.clone()
    restore_module(Checkpoint.open(tmp_path), other)
    assert torch.equal(other.frozen.weight, before)
    assert torch.equal(other.hidden.weight, model.hidden.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_on_a_gpu_state_and_generator_go_back_to_where_they_were(tmp_path, options):
    model = small_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    save_model(tmp_path, model, optimizer)
    drawn = torch.rand(3, device="cuda")
    other = small_model(1).cuda()
    fresh = torch.optim.AdamW(other.parameters(), **options)
    restore_module(Checkpoint.open(tmp_path), other, fresh)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert models_equal(model, other) and states_equal(optimizer, fresh)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert {k: v.device for k, v in optimizer.state.get(p, {}).items()} == {
            k: v.device for k, v in fresh.state.get(q, {}).items()
        }
