"""Fills in whatever was left open: each ``"auto"`` and the batch equation.

``resolve`` takes a loaded config, the world size and, where known, facts about the model, and
returns a config without ``"auto"``.  A value that nobody gave is found by the rule of its path
in ``RULES``; where the rule knows nothing, by the schema's default.  How each value was found is
kept in ``config.provenance`` and shown by ``config.describe()``.  Resolving twice changes nothing.

The rules for buffers follow the ones that Hugging Face uses (hidden^2, 0.9 hidden^2, 10 hidden);
a model that tells no ``hidden_size`` gets the schema's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from thalweg.config.batch import solve
from thalweg.config.check import find_conflicts, find_not_built
from thalweg.config.fates import is_below
from thalweg.config.problems import ConfigError, Problem
from thalweg.config.schema import Config, ModelFacts
from thalweg.config.schema_base import AUTO, open_options, value_at, with_values
from thalweg.config.schema_optim import params_of
from thalweg.config.schema_schedules import REQUIRED_PARAMS

_BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "data_parallel_size",
)


@dataclass(frozen=True)
class Known:
    """What a rule may look at: the config with its batch sizes solved, the world size, the model."""

    config: Config
    world_size: int
    model: ModelFacts | None

    @property
    def hidden(self) -> int | None:
        """The model's hidden size, if it tells one."""
        return self.model.hidden_size if self.model and self.model.hidden_size else None


Rule = Callable[[Known], tuple[Any, str] | None]


def _by_hidden(size: Callable[[int], int], formula: str) -> Rule:
    return lambda known: (
        (size(known.hidden), f"{formula}, hidden_size {known.hidden}") if known.hidden else None
    )


def _optimizer_rate(known: Known) -> tuple[Any, str] | None:
    rate = value_at(known.config, "optimizer.params.lr")
    return (rate, "optimizer.params.lr") if isinstance(rate, float) else None


def _warmup_steps(known: Known) -> tuple[Any, str] | None:
    total = value_at(known.config, "scheduler.params.total_num_steps")
    if isinstance(total, int):
        return max(1, min(1000, total // 10)), "a tenth of total_num_steps, at most 1000"
    return None


RULES: dict[str, Rule] = {
    "gradient_clipping": lambda known: (
        1.0,
        "asked for without a value; 1.0 as Hugging Face and DeepSpeed have it",
    ),
    "zero_optimization.overlap_comm": lambda known: (True, "communication always overlaps"),
    "zero_optimization.reduce_bucket_size": _by_hidden(lambda hidden: hidden * hidden, "hidden^2"),
    "zero_optimization.stage3_prefetch_bucket_size": _by_hidden(lambda h: int(0.9 * h * h), "0.9 x hidden^2"),
    "zero_optimization.stage3_param_persistence_threshold": _by_hidden(
        lambda hidden: 10 * hidden, "10 x hidden"
    ),
    "pipeline.stages": lambda known: (1, "no pipeline was asked for"),
    "pipeline.micro_batches": lambda known: (
        known.config.gradient_accumulation_steps,
        "gradient_accumulation_steps",
    ),
    "scheduler.params.warmup_max_lr": _optimizer_rate,
    "scheduler.params.cycle_max_lr": _optimizer_rate,
    "scheduler.params.warmup_num_steps": _warmup_steps,
}


def resolve(config: Config, *, world_size: int, model: ModelFacts | None = None) -> Config:
    """The config with nothing left open.

    ``world_size``: ranks in all, at least 1.  Raises ``ConfigError`` with all problems: a batch
    equation that does not hold (both sides shown), options that contradict each other, switches
    of what is not built yet, an ``"auto"`` that nobody can know.
    """
    resolved, problems = resolve_all(config, world_size, model)
    if problems:
        raise ConfigError(problems)
    return resolved


def resolve_all(
    config: Config, world_size: int, model: ModelFacts | None = None, skip: Iterable[str] = ()
) -> tuple[Config, list[Problem]]:
    """As ``resolve``, but the problems are returned; those at or below a path of ``skip`` are left out."""
    skipped = tuple(skip)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        return config, [Problem("world_size", world_size, "a whole number of ranks, at least 1")]
    values, why, problems = solve(config, world_size)
    problems = [p for p in problems if not any(is_below(bad, p.path) or bad in _BATCH for bad in skipped)]
    why["data_parallel_size"] = (
        f"what the other axes leave of {world_size} rank{'s' if world_size > 1 else ''}"
    )
    solved = with_values(config, values)
    assert isinstance(solved, Config)
    known = Known(solved, world_size, model)
    for path, value in _open_paths(solved):
        found = _find(path, value, known)
        if isinstance(found, Problem):
            problems += [] if any(is_below(path, bad) for bad in skipped) else [found]
            continue
        known = replace(known, config=with_values(known.config, {path: found[0]}))
        why[path] = found[1]
    resolved = known.config
    filled = dict(config.provenance.filled) | why
    resolved._provenance = replace(config.provenance, filled=tuple(filled.items()))
    problems += find_conflicts(resolved, skipped)
    problems += find_not_built(resolved, skipped)
    return resolved, _once(problems)


def find_batch_problems(config: Config, world_size: int, skip: Iterable[str] = ()) -> list[Problem]:
    """What contradicts itself in the batch equation, unless one of its terms could not be read."""
    if any(bad in _BATCH for bad in skip):
        return []
    return solve(config, world_size)[2]


def _open_paths(config: Config) -> list[tuple[str, Any]]:
    """Every ``"auto"`` that stands for a value, those of ``optimizer`` before those of ``scheduler``."""
    found = list(open_options(config))
    for block in ("optimizer", "scheduler"):
        params = value_at(config, f"{block}.params") or {}
        model = params_of(block, value_at(config, f"{block}.type"))
        fields = model.model_fields if model else {}
        # The total comes first, since other parameters follow from it.
        for name in sorted(params, key=lambda key: key != "total_num_steps"):
            if params[name] == AUTO:
                found.append(
                    (f"{block}.params.{name}", fields[name].get_default() if name in fields else None)
                )
    return found


def _find(path: str, default: Any, known: Known) -> tuple[Any, str] | Problem:
    rule = RULES.get(path)
    found = rule(known) if rule else None
    if found:
        return found
    block, _, name = path.rpartition(".")
    kind = value_at(known.config, "scheduler.type")
    if block == "scheduler.params" and name in REQUIRED_PARAMS.get(kind, ()):
        return Problem(path, AUTO, f"a value: nobody else can know {name}")
    return default, "default"


def _once(problems: list[Problem]) -> list[Problem]:
    return list({(problem.path, type(problem)): problem for problem in problems}.values())
