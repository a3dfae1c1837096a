"""The batch equation: ``train_batch_size = micro batch x accumulation steps x data-parallel ranks``.

Any one of the three is derived from the other two; with one given, the other follows from
accumulation 1; with none, the micro batch is 1.  A contradiction names both sides.

With ``elasticity`` all three follow from the ranks that there are, so that a job goes on with the same batch at
another number of them; the batch is the one that DeepSpeed finds for the same block.
"""

import math
import os
from collections.abc import Sequence
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


def resolve_batch_sizes(config: Any, world_size: int) -> tuple[dict[str, int], dict[str, str], list[ConfigProblem]]:
    """The values of the three and of ``data_parallel_size``, how each was found, and what contradicts."""
    dp_size, dp_problem = resolve_dp_size(config, world_size)
    if config.elasticity.enabled is True and not dp_problem:  # not "auto"
        return _resolve_elastic(config, dp_size, world_size // dp_size)
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
    if (product := micro * steps * dp_size) != total and not dp_problem:
        if reasons:
            derived_term = MICRO if MICRO in reasons else STEPS
            known_term, size = (STEPS, steps) if derived_term == MICRO else (MICRO, micro)
            step = size * dp_size
            expected = (
                f"a multiple of {known_term} x data-parallel ranks = {size} x {dp_size} = {step}, so that "
                f"{derived_term} is a whole number ({total} / {step} = {total / step:g})"
            )
            fitting_world_size = None
        else:
            expected = (
                f"{MICRO} x {STEPS} x data-parallel ranks = {micro} x {steps} x {dp_size} = {product} "
                f"(the two sides: {total} != {product})"
            )
            fitting_dp_size, rest = divmod(total, micro * steps)
            fitting_world_size = None if rest else fitting_dp_size * world_size // dp_size
        problems.append(ConfigProblem(TOTAL, total, expected + _launcher_hint(world_size, fitting_world_size)))
    return {TOTAL: total, MICRO: micro, STEPS: steps, "data_parallel_size": dp_size}, reasons, problems


# Numbers with more divisors than any below them: a batch that is a multiple of one goes with many numbers of ranks.
_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


def find_elastic_batch(
    limit: int, micro_batches: Sequence[int], min_ranks: int, max_ranks: int, prefer_larger: bool
) -> tuple[int, list[int]]:
    """The batch of at most ``limit`` that most numbers of ranks divide into micro-batches, and those numbers.

    ``micro_batches``: sizes of which a rank may take any, none above ``limit``.
    """

    def fitting(batch: int) -> list[int]:
        shares = [batch // micro for micro in micro_batches if batch % micro == 0]
        divisors = {d for share in shares for i in range(1, math.isqrt(share) + 1) if share % i == 0
                    for d in (i, share // i)}  # fmt: skip
        return sorted(ranks for ranks in divisors if min_ranks <= ranks <= max_ranks)

    bases = [base for base in (*micro_batches, math.lcm(*micro_batches)) if base <= limit]
    batches = {base * max(number for number in _HIGHLY_COMPOSITE if number <= limit // base) for base in bases}
    batch = max(batches, key=lambda batch: (len(fitting(batch)), batch if prefer_larger else -batch))
    return batch, fitting(batch)


def find_elastic_sizes(
    elasticity: Any, dp_size: int | None = None, degree: int = 1
) -> tuple[int, list[int], int | None, list[ConfigProblem]]:
    """(batch, data-parallel ranks that it goes with, micro-batch of ``dp_size`` ranks, what is wrong).

    ``degree``: ranks of a replica of the model.  From version 0.2 ranks come and go by hosts, and a number of them that
    does not divide the batch has one of its own, as large as ``max_train_batch_size`` lets it be.
    """
    given, by_host = elasticity, elasticity.version >= 0.2
    micros, limit = given.micro_batch_sizes or (), given.max_train_batch_size or 0

    def problem(name: str, expected: str) -> tuple[int, list[int], None, list[ConfigProblem]]:
        return 0, [], None, [ConfigProblem(f"elasticity.{name}", getattr(given, name), expected)]

    if not micros:
        return problem("micro_batch_sizes", "the sizes of which a rank may take any, since elasticity is enabled")
    if not 0.1 <= given.version <= 0.2:
        return problem("version", "0.1 or 0.2")
    degree = max(degree, given.model_parallel_size)
    ranks_of_host = given.num_gpus_per_node if by_host else 1
    if degree > 1 and not by_host:
        return problem("version", f"0.2, as {degree} ranks share a model")
    if ranks_of_host % degree:
        return problem("num_gpus_per_node", f"a multiple of the {degree} ranks that share a model")
    replicas = ranks_of_host // degree  # that come and go together
    if limit < (needed := replicas * max(micros)):
        each = f" of each of the {replicas} ranks of a host" if replicas > 1 else ""
        return problem("max_train_batch_size", f"a number of samples, at least {needed}, the largest micro-batch{each}")
    least, most = max(1, given.min_gpus // ranks_of_host), given.max_gpus // ranks_of_host
    batch, hosts = find_elastic_batch(limit // replicas, micros, least, most, given.prefer_larger_batch)
    batch, fitting = batch * replicas, [number * replicas for number in hosts]
    if dp_size is None:
        return batch, fitting, None, []
    ordered = sorted(micros, reverse=True) if given.prefer_larger_batch or not by_host else micros
    if dp_size not in fitting:
        own = [limit // (micro * dp_size) * micro * dp_size for micro in micros if micro * dp_size <= limit]
        if not by_host or not own:
            nearest = [*[n for n in fitting if n < dp_size][-1:], *[n for n in fitting if n > dp_size][:1]]
            others = " or ".join(map(str, nearest)) or "no number from min_gpus to max_gpus"
            text = f"a batch for {dp_size} data-parallel ranks: {batch} goes with {others}"
            return batch, fitting, None, [ConfigProblem("elasticity.enabled", True, text)]
        batch = max(own) if given.prefer_larger_batch else min(own)
        fitting = [dp_size]
    micro = next(micro for micro in ordered if batch // dp_size % micro == 0)
    return batch, fitting, micro, []


def _resolve_elastic(
    config: Any, dp_size: int, degree: int
) -> tuple[dict[str, int], dict[str, str], list[ConfigProblem]]:
    batch, fitting, micro, problems = find_elastic_sizes(config.elasticity, dp_size, degree)
    micro = micro or 1
    values = {TOTAL: batch, MICRO: micro, STEPS: batch // (micro * dp_size)}
    if not config.elasticity.ignore_non_elastic_batch_info and not problems:
        given = {path: _as_int(get_by_path(config, path)) for path in values}
        problems = [
            ConfigProblem(path, value, f"{values[path]}, which elasticity finds, or nothing; "
                          "elasticity.ignore_non_elastic_batch_info leaves it out of account")
            for path, value in given.items() if value not in (None, values[path])
        ]  # fmt: skip
    others = f"the same with {len(fitting)} numbers of ranks" if len(fitting) > 1 else "of this number of ranks alone"
    reasons = {TOTAL: f"elasticity: {others}", MICRO: "elasticity", STEPS: "elasticity"}
    return {**values, "data_parallel_size": dp_size}, reasons, problems


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
