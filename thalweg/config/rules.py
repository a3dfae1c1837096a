"""The rules between options, and who asks the tables about a given config.

``rules.toml`` lists the combinations that contradict themselves, ``_FORMULAS`` those that take arithmetic; the tables
of ``support.py`` say what is not built yet and what has no effect.
"""

import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.config.errors import ConfigProblem, OptionNotOffered, UnsupportedOption
from thalweg.config.schema.base import AUTO, Section, get_by_path
from thalweg.config.schema.optimizer import COMPRESSED_OPTIMIZERS
from thalweg.config.schema.scheduler import REQUIRED_PARAMS
from thalweg.config.support import is_under, unsupported_options


@dataclass(frozen=True)
class Rule:
    """``violated`` takes the values at ``paths``; the problem is reported at the first of them."""

    paths: tuple[str, ...]
    violated: Callable[..., bool]
    expected: str


# What the table has no words for: values that are reckoned with.
_FORMULAS = (
    Rule(
        ("fp16.min_loss_scale", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power"),
        lambda min_scale, on, scale, power: on and scale == 0 and min_scale > 2.0**power,
        "at most the initial scale, 2 to the power of fp16.initial_scale_power",
    ),
    Rule(
        ("pipeline.schedule", "gradient_accumulation_steps", "pipeline.stages"),
        lambda name, steps, stages: stages > 1 and name == "dualpipev" and steps < 2 * stages,
        "another schedule, or gradient_accumulation_steps to be at least twice pipeline.stages",
    ),
)
_OPERATORS = {"!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CONDITION = re.compile(r"(!=|<=?|>=?|in|not in) (@?)(.+)")


def _holds(value: Any, condition: Any, given: Mapping[str, Any]) -> bool:
    """Whether a value is what a condition of the table says, where these are the values of the rule's options."""
    if condition == "set":
        return bool(value)
    parsed = _CONDITION.fullmatch(condition) if isinstance(condition, str) else None
    if parsed is None:
        return value == condition
    word, is_option, operand = parsed.groups()
    if is_option:  # a list of rates, one for each group, is not compared
        return type(value) is type(given[operand]) is not tuple and _OPERATORS[word](value, given[operand])
    if word in _OPERATORS:
        return _OPERATORS[word](value, type(value)(operand))
    names = operand.replace("compressed_optimizers", ", ".join(COMPRESSED_OPTIMIZERS)).split(", ")
    return (value in names) == (word == "in")


def _read_rules() -> Iterator[Rule]:
    table = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = table["groups"]
    for block in table["rules"]:
        for each in groups[block["each"]] if "each" in block else [""]:
            given = block.get("when", {}).items()
            when = [(groups.get(name, [name.replace("{each}", each)]), condition) for name, condition in given]
            for option, fault, expected in block["options"]:
                conditions = [([option.replace("{each}", each)], fault), *when]
                text = block.get("expected", "{}").replace("{}", expected).replace("{each}", each)
                yield _make_rule(conditions, text)


def _make_rule(conditions: Sequence[tuple[list[str], Any]], expected: str) -> Rule:
    """The rule that not all conditions may hold, each of any of its options."""
    paths = tuple(path for options, _ in conditions for path in options)
    paths += tuple(text.partition("@")[2] for _, text in conditions if isinstance(text, str) and "@" in text)

    def violated(*values: Any) -> bool:
        given = dict(zip(paths, values, strict=True))
        return all(any(_holds(given[path], text, given) for path in options) for options, text in conditions)

    return Rule(paths, violated, expected)


RULES = (*_read_rules(), *_FORMULAS)


def find_rule_violations(config: Section, skipped: tuple[str, ...] = ()) -> Iterator[ConfigProblem]:
    """Every broken rule whose options are known and not below a path of ``skipped``."""
    for rule in RULES:
        values = [get_by_path(config, path) for path in rule.paths]
        if any(value is None or value == AUTO for value in values) or _overlaps(rule.paths, skipped):
            continue
        if rule.violated(*values):
            yield ConfigProblem(rule.paths[0], values[0], rule.expected)
    type_name, params = get_by_path(config, "scheduler.type"), get_by_path(config, "scheduler.params")
    for name in REQUIRED_PARAMS.get(type_name, ()) if isinstance(type_name, str) else ():
        path = f"scheduler.params.{name}"
        if params.get(name) is None and not _overlaps((path,), skipped):
            yield ConfigProblem(path, None, f"a value, which {type_name} cannot do without")
    yield from _find_curriculum_problems(config, skipped)
    for block in ("offload_param", "offload_optimizer"):
        path = f"zero_optimization.{block}"
        on_disk = get_by_path(config, f"{path}.device") == "nvme"
        if on_disk and not get_by_path(config, f"{path}.nvme_path") and not _overlaps((path,), skipped):
            yield ConfigProblem(f"{path}.nvme_path", None, f'a folder on the disk to use, as {path}.device is "nvme"')


_SCHEDULE_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def _find_curriculum_problems(config: Section, skipped: tuple[str, ...]) -> Iterator[ConfigProblem]:
    """What a curriculum, batches by tokens or random-LTD that is switched on cannot do without."""
    block = "data_efficiency"
    if any(is_under(path, block) or is_under(path, "curriculum_learning") for path in skipped):
        return

    def need(path: str, section: Any, expected: str, *keys: str) -> Iterator[ConfigProblem]:
        for key in keys:
            if (value := get_by_path(section, key)) in (None, ()):
                yield ConfigProblem(f"{path}.{key}", value, expected)

    legacy, efficiency = get_by_path(config, "curriculum_learning"), get_by_path(config, block)
    schedules = {"curriculum_learning": legacy} if legacy.enabled is True else {}
    for name, metric in efficiency.curriculum_metrics.items():
        path = f"{block}.data_sampling.curriculum_learning.curriculum_metrics.{name}"
        schedules[path] = metric
        if metric.clustering_type == "schedule_based":
            files = ("index_to_sample_path", "index_to_metric_path")[: 1 + (metric.difficulty_type == "value")]
            yield from need(path, metric, "a file that DataAnalyzer wrote", *files)
        elif not name.startswith("seqlen"):
            expected = '"schedule_based"; only a metric called seqlen cuts sequences and needs no index'
            yield ConfigProblem(f"{path}.clustering_type", metric.clustering_type, expected)
        elif any(get_by_path(config, one) > 1 for one in ("sequence_parallel_size", "context_parallel_size")):
            yield ConfigProblem(path, name, "no metric that cuts sequences, as several ranks share one")
    for path, one in schedules.items():
        paces = (f"schedule_config.{key}" for key in _SCHEDULE_NEEDS[one.schedule_type])
        expected = f"a value, which {one.schedule_type} cannot do without"
        yield from need(path, one, expected, "min_difficulty", "max_difficulty", *paces)
        pace = one.schedule_config
        if one.schedule_type == "fixed_discrete" and len(pace.difficulty) != len(pace.max_step) + 1:
            expected = f"{len(pace.difficulty) - 1} steps, one for each difficulty but the last"
            yield ConfigProblem(f"{path}.schedule_config.max_step", list(pace.max_step), expected)
    if efficiency.dynamic_batching is not None:
        path = f"{block}.data_sampling.dynamic_batching"
        yield from need(path, efficiency.dynamic_batching, "the tokens of a micro-batch", "max_tokens")
    if (ltd := efficiency.random_ltd) is not None:
        path = f"{block}.data_routing.random_ltd"
        keys = ("min_value", "max_value", "schedule_config.require_steps", "schedule_config.seq_per_step")
        yield from need(f"{path}.random_ltd_schedule", ltd.random_ltd_schedule, "a value", *keys)
        yield from need(path, ltd, "the numbers of the layers, counted from 0", "random_ltd_layer_id")
        if ltd.random_ltd_layer_num not in (None, len(ltd.random_ltd_layer_id)):
            expected = f"{len(ltd.random_ltd_layer_id)}, as many as random_ltd_layer_id names"
            yield ConfigProblem(f"{path}.random_ltd_layer_num", ltd.random_ltd_layer_num, expected)


def find_unsupported(config: Section, skipped: tuple[str, ...] = ()) -> Iterator[ConfigProblem]:
    """One problem for each switch that is on of what is not built."""
    for path, (hint, is_on, status) in unsupported_options(type(config)).items():
        value = get_by_path(config, path)
        if value is None or (isinstance(value, str) and value == AUTO) or _overlaps((path,), skipped):
            continue
        if is_on(value):
            yield (UnsupportedOption if status == "later" else OptionNotOffered)(path, value, hint)


def _overlaps(paths: tuple[str, ...], skipped: tuple[str, ...]) -> bool:
    return any(is_under(path, other) or is_under(other, path) for path in paths for other in skipped)
