"""The batch equation: ``train_batch_size = micro batch x accumulation steps x data-parallel ranks``.

Any one of the three is derived from the other two; with one given, the other follows from
accumulation 1; with none, the micro batch is 1.  A contradiction names both sides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from thalweg.config.problems import Problem
from thalweg.config.schema_base import AUTO, Section, value_at

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
_LAUNCHERS = {
    "WORLD_SIZE": "torchrun and thalweg run",
    "SLURM_NTASKS": "SLURM",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "PMI",
}
_DEGREES = (
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "sequence_parallel_size",
    "context_parallel_size",
    "pipeline.stages",
)


def data_parallel_ranks(config: Section, world_size: int) -> tuple[int, Problem | None]:
    """What the other degrees of parallelism leave of the world, or why nothing is left."""
    degree = 1
    used = []
    for path in _DEGREES:
        size = value_at(config, path)
        if path == _DEGREES[1] and f"{_DEGREES[0]} = {size}" in used:
            continue  # the two names of one thing
        if isinstance(size, int) and size > 1:
            degree *= size
            used.append(f"{path} = {size}")
    if world_size % degree:
        expected = f"a multiple of {' x '.join(used)}"
        return 1, Problem("world_size", world_size, expected)
    ranks = world_size // degree
    stated = value_at(config, "data_parallel_size")
    if isinstance(stated, int) and stated != ranks:
        expected = f"{ranks}, which is world_size = {world_size}{''.join(f' / {one}' for one in used)}"
        return ranks, Problem(
            "data_parallel_size", stated, expected + _launcher_hint(world_size, stated * degree)
        )
    return ranks, None


def solve(config: Section, world_size: int) -> tuple[dict[str, int], dict[str, str], list[Problem]]:
    """The values of the three and of ``data_parallel_size``, how each was found, and what contradicts."""
    ranks, fault = data_parallel_ranks(config, world_size)
    total, micro, steps = (_number(value_at(config, path)) for path in (TOTAL, MICRO, STEPS))
    if total is None:
        found = _from_micro(micro, steps, ranks)
        return found[0], found[1], [fault] if fault else []
    return _from_total(total, micro, steps, ranks, world_size, fault)


def _from_micro(micro: int | None, steps: int | None, ranks: int) -> tuple[dict[str, int], dict[str, str]]:
    why = {TOTAL: f"{MICRO} x {STEPS} x {ranks} data-parallel rank{'s' if ranks != 1 else ''}"}
    if micro is None:
        micro, why[MICRO] = 1, "no batch size was given"
    if steps is None:
        steps, why[STEPS] = 1, "no accumulation was asked for"
    values = {TOTAL: micro * steps * ranks, MICRO: micro, STEPS: steps, "data_parallel_size": ranks}
    return values, why


def _from_total(
    total: int, micro: int | None, steps: int | None, ranks: int, world_size: int, fault: Problem | None
) -> tuple[dict[str, int], dict[str, str], list[Problem]]:
    why: dict[str, str] = {}
    if micro is None:
        if steps is None:
            steps, why[STEPS] = 1, "no accumulation was asked for"
        micro = max(1, total // (steps * ranks))
        why[MICRO] = f"{TOTAL} / ({STEPS} x {ranks} data-parallel ranks)"
    elif steps is None:
        steps = max(1, total // (micro * ranks))
        why[STEPS] = f"{TOTAL} / ({MICRO} x {ranks} data-parallel ranks)"
    values = {TOTAL: total, MICRO: micro, STEPS: steps, "data_parallel_size": ranks}
    problems = [fault] if fault else []
    if total != micro * steps * ranks and not fault:
        problems.append(_mismatch(total, micro, steps, ranks, world_size, why))
    return values, why, problems


def _mismatch(
    total: int, micro: int, steps: int, ranks: int, world_size: int, why: Mapping[str, str]
) -> Problem:
    product = micro * steps * ranks
    if why:
        open_term = MICRO if MICRO in why else STEPS
        known, size = (STEPS, steps) if open_term == MICRO else (MICRO, micro)
        step = size * ranks
        expected = (
            f"a multiple of {known} x data-parallel ranks = {size} x {ranks} = {step}, so that {open_term} "
            f"is a whole number ({total} / {step} = {total / step:g})"
        )
        return Problem(TOTAL, total, expected + _launcher_hint(world_size, None))
    expected = (
        f"{MICRO} x {STEPS} x data-parallel ranks = {micro} x {steps} x {ranks} = {product} "
        f"(the two sides: {total} != {product})"
    )
    fitting = total // (micro * steps)
    fits = fitting > 0 and fitting * micro * steps == total
    return Problem(
        TOTAL, total, expected + _launcher_hint(world_size, fitting * world_size // ranks if fits else None)
    )


def _launcher_hint(world_size: int, wanted: int | None) -> str:
    """At world size 1: which launcher variable is missing, and the start that would make the sides equal."""
    fit = f"; {wanted} ranks make the sides equal" if wanted else ""
    if world_size != 1:
        return fit
    found = [name for name in _LAUNCHERS if os.environ.get(name)]
    if found:
        said = ", ".join(f"{name}={os.environ[name]}" for name in found)
        return f"; the world size is 1 by {said}{fit}"
    unset = ", ".join(f"{name} ({who})" for name, who in _LAUNCHERS.items())
    start = f"thalweg run --nproc {wanted or 'N'}"
    return f"; the world size is 1 because no launcher variable is set: {unset}; start with {start}{fit}"


def _number(value: Any) -> int | None:
    return None if value is None or value == AUTO else int(value)
