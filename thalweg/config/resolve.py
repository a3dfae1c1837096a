"""Fills in whatever was left open: each ``"auto"`` and the batch equation.

``resolve`` takes a loaded config, the world size and, where known, facts about the model, and
returns a config without ``"auto"``.  A value that nobody gave is found by the rule of its path
in ``AUTO_DEFAULTS``; where the rule knows nothing, by the schema's default.  How each value was found is
kept in ``config.provenance`` and shown by ``config.describe()``.  Resolving twice changes nothing.

The rules for buffers follow the ones that Hugging Face uses (hidden^2, 0.9 hidden^2, 10 hidden);
a model that tells no ``hidden_size`` gets the schema's defaults.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from thalweg.config.batch_size import MICRO, STEPS, TOTAL, resolve_batch_sizes
from thalweg.config.errors import ConfigError, ConfigProblem
from thalweg.config.rules import find_rule_violations, find_unsupported
from thalweg.config.schema import Config, ModelSize
from thalweg.config.schema.base import AUTO, get_by_path, iter_auto_options, literal_choices, replace_by_path
from thalweg.config.schema.optimizer import get_params_schema
from thalweg.config.schema.scheduler import REQUIRED_PARAMS
from thalweg.config.support import is_under

_BATCH_PATHS = (TOTAL, MICRO, STEPS, "data_parallel_size")
# A rule looks at the config with its batch sizes solved, and at the model's hidden size where it tells one.
AutoDefault = Callable[[Config, int | None], tuple[Any, str] | None]


def _from_hidden_size(size: Callable[[int], int], formula: str) -> AutoDefault:
    return lambda config, hidden: (size(hidden), f"{formula}, hidden_size {hidden}") if hidden else None


def _optimizer_lr(config: Config, hidden: int | None) -> tuple[Any, str] | None:
    lr = get_by_path(config, "optimizer.params.lr")
    return (lr, "optimizer.params.lr") if isinstance(lr, float) else None


def _warmup_steps(config: Config, hidden: int | None) -> tuple[Any, str] | None:
    total = get_by_path(config, "scheduler.params.total_num_steps")
    reason = "a tenth of total_num_steps, at most 1000"
    return (max(1, min(1000, total // 10)), reason) if isinstance(total, int) else None


AUTO_DEFAULTS: dict[str, AutoDefault] = {
    "gradient_clipping": lambda *_: (1.0, "asked for without a value; 1.0 as Hugging Face and DeepSpeed have it"),
    "zero_optimization.overlap_comm": lambda *_: (True, "communication always overlaps"),
    "zero_optimization.reduce_bucket_size": _from_hidden_size(lambda hidden: hidden * hidden, "hidden^2"),
    "zero_optimization.stage3_prefetch_bucket_size": _from_hidden_size(lambda h: int(0.9 * h * h), "0.9 x hidden^2"),
    "zero_optimization.stage3_param_persistence_threshold": _from_hidden_size(
        lambda hidden: 10 * hidden, "10 x hidden"
    ),
    "pipeline.stages": lambda *_: (1, "no pipeline was asked for"),
    "pipeline.micro_batches": lambda config, _: (config.gradient_accumulation_steps, STEPS),
    "scheduler.params.warmup_max_lr": _optimizer_lr,
    "scheduler.params.cycle_max_lr": _optimizer_lr,
    "scheduler.params.warmup_num_steps": _warmup_steps,
}


def resolve(config: Config, *, world_size: int, model: ModelSize | None = None) -> Config:
    """The config with nothing left open.

    ``world_size``: ranks in all, at least 1.  Raises ``ConfigError`` with all problems: a batch
    equation that does not hold (both sides shown), options that contradict each other, switches
    of what is not built yet, an ``"auto"`` that nobody can know.
    """
    resolved, problems = try_resolve(config, world_size, model)
    if problems:
        raise ConfigError(problems)
    return resolved


def try_resolve(
    config: Config, world_size: int, model: ModelSize | None = None, skipped: tuple[str, ...] = ()
) -> tuple[Config, list[ConfigProblem]]:
    """As ``resolve``, but the problems are returned; those at or below a path of ``skipped`` are left out."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        return config, [ConfigProblem("world_size", world_size, "a whole number of ranks, at least 1")]
    values, reasons, problems = resolve_batch_sizes(config, world_size)
    unknown_batch = any(path in _BATCH_PATHS for path in skipped)
    problems = [p for p in problems if not unknown_batch and not any(is_under(path, p.path) for path in skipped)]
    if config.wall_clock_breakdown and config.steps_per_print is None:
        values["steps_per_print"], reasons["steps_per_print"] = 1, "wall_clock_breakdown is shown there"
    reasons["data_parallel_size"] = f"what the other axes leave of {world_size} rank{'s' if world_size > 1 else ''}"
    resolved: Any = replace_by_path(config, values)
    hidden_size = model.hidden_size if model else None
    for path, value in _list_auto_paths(resolved):
        resolution = _resolve_auto(path, value, resolved, hidden_size)
        if isinstance(resolution, ConfigProblem):
            problems += [] if any(is_under(path, bad) for bad in skipped) else [resolution]
            continue
        resolved = replace_by_path(resolved, {path: resolution[0]})
        reasons[path] = resolution[1]
    derived = dict(config.provenance.derived) | reasons
    resolved._provenance = replace(config.provenance, derived=tuple(derived.items()))
    problems += find_rule_violations(resolved, skipped)
    problems += find_unsupported(resolved, skipped)
    return resolved, list({(problem.path, type(problem)): problem for problem in problems}.values())


def _list_auto_paths(config: Config) -> list[tuple[str, Any]]:
    """Every ``"auto"`` that stands for a value, those of ``optimizer`` before those of ``scheduler``."""
    paths = list(iter_auto_options(config))
    for block in ("optimizer", "scheduler"):
        params = get_by_path(config, f"{block}.params") or {}
        model = get_params_schema(block, get_by_path(config, f"{block}.type"))
        fields = model.model_fields if model else {}
        # The total comes first, since other parameters follow from it.
        for name in sorted(params, key=lambda key: key != "total_num_steps"):
            if params[name] == AUTO and not (name in fields and AUTO in literal_choices(fields[name].annotation)):
                paths.append((f"{block}.params.{name}", fields[name].get_default() if name in fields else None))
    return paths


def _resolve_auto(path: str, default: Any, config: Config, hidden: int | None) -> tuple[Any, str] | ConfigProblem:
    if path in AUTO_DEFAULTS and (resolution := AUTO_DEFAULTS[path](config, hidden)):
        return resolution
    block, _, name = path.rpartition(".")
    scheduler_type = get_by_path(config, "scheduler.type")
    if block == "scheduler.params" and name in REQUIRED_PARAMS.get(scheduler_type, ()):
        return ConfigProblem(path, AUTO, f'a value: "auto" is not supported here; set {name}')
    return default, "default"
