"""The parameter tables against what is there: Thalweg's optimisers and schedules, and the installed torch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from thalweg.config import ConfigError, load_config
from thalweg.config.schema.base import Section, to_jsonable
from thalweg.config.schema.optimizer import OPTIMIZERS
from thalweg.config.schema.scheduler import REQUIRED_PARAMS, SCHEDULES
from thalweg.config.schema.unsupported import UNUSABLE_TYPES
from thalweg.optim.build import build_lr_scheduler, build_optimizer

BUILT = list(OPTIMIZERS)


def torch_classes(module: Any, base: type, others: tuple[str, ...]) -> set[str]:
    """The public subclasses of ``base`` in a module of torch."""
    found = {name for name, one in vars(module).items() if inspect.isclass(one) and issubclass(one, base)}
    return {name for name in found if not name.startswith("_") and name not in others}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4))]


def test_every_optimiser_of_torch_is_known() -> None:
    classes = torch_classes(torch.optim, torch.optim.Optimizer, ("Optimizer",))
    assert classes <= set(OPTIMIZERS) | set(UNUSABLE_TYPES["optimizer"])


def test_every_schedule_of_torch_is_known() -> None:
    classes = torch_classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler, ("LRScheduler",))
    assert classes <= set(SCHEDULES) | set(UNUSABLE_TYPES["scheduler"])


@pytest.mark.parametrize("name", BUILT)
def test_every_parameter_of_the_table_is_taken_by_the_optimiser(name: str) -> None:
    for key, field in OPTIMIZERS[name].model_fields.items():
        if field.default is not None:
            build_optimizer(name, parameters(), {key: to_jsonable(field.default)})


@pytest.mark.parametrize("name", BUILT)
def test_every_keyword_of_the_torch_class_is_in_the_table(name: str) -> None:
    cls = getattr(torch.optim, name, None)
    if cls is None:
        pytest.skip(f"{name} is not a class of torch")
    keywords = set(inspect.signature(cls.__init__).parameters) - {"self", "params"}
    assert keywords <= set(OPTIMIZERS[name].model_fields)


@pytest.mark.parametrize("name", BUILT)
def test_the_value_of_auto_is_the_optimisers_own_default(name: str) -> None:
    group = build_optimizer(name, parameters(), {}).param_groups[0]
    for key, field in OPTIMIZERS[name].model_fields.items():
        if key in group and field.default is not None and group[key] is not None:
            assert to_jsonable(group[key]) == to_jsonable(field.default), key


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_take_what_the_table_has(name: str) -> None:
    required = {
        key: {"milestones": [2, 3], "cycle_max_lr": 0.2}.get(key, 0.1 if "lr" in key else 4)
        for key in REQUIRED_PARAMS.get(name, ())
    }
    if name == "OneCycleLR":
        required["total_steps"] = 10
    config = load_config(
        {
            "optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
            "scheduler": {"type": name, "params": required},
        }
    )
    assert config.scheduler is not None
    for key, field in SCHEDULES[name].model_fields.items():
        given = dict(config.scheduler.params)
        if field.default is not None:
            given.setdefault(key, to_jsonable(field.default))
        build_lr_scheduler(name, given, build_optimizer("SGD", parameters(), {"lr": 0.1, "momentum": 0.9}))


@pytest.mark.parametrize(("block", "table"), [("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)])
def test_a_misspelt_parameter_is_refused_for_every_type(block: str, table: dict[str, type[Section]]) -> None:
    for name in table:
        with pytest.raises(ConfigError) as caught:
            load_config({block: {"type": name, "params": {"lrr": 1}}})
        assert f"{block}.params.lrr" in {problem.path for problem in caught.value.problems}


def test_the_config_hands_over_only_what_the_user_gave() -> None:
    config = load_config({"optimizer": {"type": "adam", "params": {"lr": 0.5}}})
    assert config.optimizer is not None
    built = build_optimizer(config.optimizer.type, parameters(), config.optimizer.params)
    assert dict(config.optimizer.params) == {"lr": 0.5}
    assert built.param_groups[0]["lr"] == 0.5
