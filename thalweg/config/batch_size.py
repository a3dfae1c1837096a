"""The batch equation: ``train_batch_size = micro batch x accumulation steps x data-parallel ranks``.

Any one of the three is derived from the other two; with one given, the other follows from
accumulation 1; with none, the micro batch is 1.  A contradiction names both sides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from thalweg.config.errors import ConfigProblem
from thalweg.config.schema.base import AUTO, Section, get_by_path

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
_LAUNCHER_VARIABLES = {
    "WORLD_SIZE": "torchrun and thalweg run",
    "SLURM_NTASKS": "SLURM",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "PMI",
}
_TENSOR_PATHS = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
_DEGREE_PATHS = (*_TENSOR_PATHS, "sequence_parallel_size", "context_parallel_size", "pipeline.stages")


def resolve_dp_size(config: Section, world_size: int) -> tuple[int, ConfigProblem | None]:
    """What the other degrees of parallelism leave of the world, or why nothing is left."""
    degree = 1
    nontrivial = []
    for path in _DEGREE_PATHS:
        size = get_by_path(config, path)
        if path == _DEGREE_PATHS[1] and f"{_DEGREE_PATHS[0]} = {size}" in nontrivial:
            continue  # the two names of one thing
        if isinstance(size, int) and size > 1:
            degree *= size
            nontrivial.append(f"{path} = {size}")
    if world_size % degree:
        expected = f"a multiple of {' x '.join(nontrivial)}"
        return 1, ConfigProblem("world_size", world_size, expected)
    dp_size = world_size // degree
    stated = get_by_path(config, "data_parallel_size")
    if isinstance(stated, int) and stated != dp_size:
        expected = f"{dp_size}, which is world_size = {world_size}{''.join(f' / {term}' for term in nontrivial)}"
        expected += _launcher_hint(world_size, stated * degree)
        return dp_size, ConfigProblem("data_parallel_size", stated, expected)
    return dp_size, None


def resolve_batch_sizes(config: Section, world_size: int) -> tuple[dict[str, int], dict[str, str], list[ConfigProblem]]:
    """The values of the three and of ``data_parallel_size``, how each was found, and what contradicts."""
    dp_size, dp_problem = resolve_dp_size(config, world_size)
    total, micro, steps = (_as_int(get_by_path(config, path)) for path in (TOTAL, MICRO, STEPS))
    reasons: dict[str, str] = {}
    problems = [dp_problem] if dp_problem else []
    if steps is None and (total is None or micro is None):
        steps, reasons[STEPS] = 1, "no accumulation was asked for"
    if total is None:
        if micro is None:
            micro, reasons[MICRO] = 1, "no batch size was given"
        assert steps is not None
        total = micro * steps * dp_size
        reasons[TOTAL] = f"{MICRO} x {STEPS} x {dp_size} data-parallel rank{'s' if dp_size != 1 else ''}"
    elif micro is None:
        assert steps is not None
        micro = max(1, total // (steps * dp_size))
        reasons[MICRO] = f"{TOTAL} / ({STEPS} x {dp_size} data-parallel ranks)"
    elif steps is None:
        steps = max(1, total // (micro * dp_size))
        reasons[STEPS] = f"{TOTAL} / ({MICRO} x {dp_size} data-parallel ranks)"
    if total != micro * steps * dp_size and not dp_problem:
        problems.append(_mismatch_problem(total, micro, steps, dp_size, world_size, reasons))
    return {TOTAL: total, MICRO: micro, STEPS: steps, "data_parallel_size": dp_size}, reasons, problems


def _mismatch_problem(
    total: int, micro: int, steps: int, dp_size: int, world_size: int, reasons: Mapping[str, str]
) -> ConfigProblem:
    product = micro * steps * dp_size
    if reasons:
        derived_term = MICRO if MICRO in reasons else STEPS
        known_term, size = (STEPS, steps) if derived_term == MICRO else (MICRO, micro)
        step = size * dp_size
        expected = (
            f"a multiple of {known_term} x data-parallel ranks = {size} x {dp_size} = {step}, so that {derived_term} "
            f"is a whole number ({total} / {step} = {total / step:g})"
        )
        return ConfigProblem(TOTAL, total, expected + _launcher_hint(world_size, None))
    expected = (
        f"{MICRO} x {STEPS} x data-parallel ranks = {micro} x {steps} x {dp_size} = {product} "
        f"(the two sides: {total} != {product})"
    )
    fitting_dp_size = total // (micro * steps)
    fits = fitting_dp_size > 0 and fitting_dp_size * micro * steps == total
    return ConfigProblem(
        TOTAL, total, expected + _launcher_hint(world_size, fitting_dp_size * world_size // dp_size if fits else None)
    )


def _launcher_hint(world_size: int, fitting_world_size: int | None) -> str:
    """At world size 1: which launcher variable is missing, and the start that would make the sides equal."""
    suffix = f"; {fitting_world_size} ranks make the sides equal" if fitting_world_size else ""
    if world_size != 1:
        return suffix
    set_names = [name for name in _LAUNCHER_VARIABLES if os.environ.get(name)]
    if set_names:
        assignments = ", ".join(f"{name}={os.environ[name]}" for name in set_names)
        return f"; the world size is 1 by {assignments}{suffix}"
    unset = ", ".join(f"{name} ({who})" for name, who in _LAUNCHER_VARIABLES.items())
    start = f"thalweg run --nproc {fitting_world_size or 'N'}"
    return f"; the world size is 1 because no launcher variable is set: {unset}; start with {start}{suffix}"


def _as_int(value: Any) -> int | None:
    return None if value is None or value == AUTO else int(value)
