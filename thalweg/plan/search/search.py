"""The one search over configurations: what ``"auto"`` becomes, what fits instead, what ``thalweg tune`` measures.

The rule: the cheapest configuration that fits.  Candidates come in levels, in the order of what a level
costs by its nature: everything in memory; then recomputation; then a smaller micro-batch with more accumulation
(the same update); then a loss without full logits; then optimizer state on the host; then parameters there too;
then both on a disk (where the config names a folder).  A level is a row for each policy of recomputation, each
row with the highest ZeRO stage first.  All of a level are planned, and the first level of which any fits gives
the one with the fewest seconds a token.  If none fits, the nearest to it is the answer.

A :class:`SearchSpace` says what may vary.  For ``"auto"`` these are the options that the user left open; for a
suggestion everything that can make a run smaller; for ``thalweg tune`` what makes it faster.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from thalweg.activation_checkpointing.apply import default_nvme_path
from thalweg.config import Config, resolve
from thalweg.config.batch_size import resolve_dp_size
from thalweg.config.errors import ConfigError
from thalweg.config.schema.base import AUTO, get_by_path, replace_by_path
from thalweg.plan.planner import Planner
from thalweg.plan.result import Plan
from thalweg.plan.spec.cluster import Cluster
from thalweg.plan.spec.run_spec import MAX_IN_CPU_KEY
from thalweg.utils.formatting import format_bytes, format_seconds
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
STAGE_KEY = "zero_optimization.stage"
OFFLOAD_OPTIMIZER_KEY = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM_KEY = "zero_optimization.offload_param.device"
CHECKPOINTING_KEY = "activation_checkpointing.policy"
TILING_KEY = "tiling.loss"
MICRO_BATCH_KEY = "train_micro_batch_size_per_gpu"
ACCUMULATION_KEY = "gradient_accumulation_steps"
PLANNABLE_KEYS = (STAGE_KEY, OFFLOAD_OPTIMIZER_KEY, OFFLOAD_PARAM_KEY, CHECKPOINTING_KEY, MICRO_BATCH_KEY)
_POLICIES = ("none", "selective", "full")
_NUM_LARGEST_MICRO_BATCHES = 3  # of micro-batches that are tried, the largest ones
_AUTO_CPU_BUDGET_S = 8.0
_SUGGEST_CPU_BUDGET_S = 6.0
_OFFLOAD_COST = {"none": 0, "cpu": 1, "nvme": 2}
Changes = dict[str, Any]


@dataclass(frozen=True)
class SearchSpace:
    """What may vary around ``config``; only ``keys`` are ever changed (and what follows from them).

    ``stages`` from the highest down, ``policies`` from the one that saves the least, ``micro_batches`` from the
    largest (None: not varied), ``placements`` pairs (device of the optimizer's state, of the parameters), the
    cheapest first.  ``rank_batch``: samples of one rank in a step, which stay the same.
    """

    config: Config
    keys: frozenset[str]
    stages: tuple[int, ...]
    policies: tuple[str, ...]
    micro_batches: tuple[int | None, ...] = (None,)
    placements: tuple[tuple[str, str], ...] = (("none", "none"),)
    tiled_losses: tuple[bool, ...] = (False,)
    rank_batch: int = 1
    page_all_params: bool = False

    def candidate(
        self, stage: int, policy: str, micro_batch: int | None, placement: tuple[str, str], tiled: bool
    ) -> Changes:
        """The changes to the config that these choices are."""
        values = {STAGE_KEY: stage, CHECKPOINTING_KEY: policy, TILING_KEY: tiled, MICRO_BATCH_KEY: micro_batch}
        values |= dict(zip((OFFLOAD_OPTIMIZER_KEY, OFFLOAD_PARAM_KEY), placement, strict=True))
        changes = {key: values[key] for key in values if key in self.keys and values[key] is not None}
        if MICRO_BATCH_KEY in changes:
            changes[ACCUMULATION_KEY] = self.rank_batch // changes[MICRO_BATCH_KEY]
        for key in (OFFLOAD_OPTIMIZER_KEY, OFFLOAD_PARAM_KEY):
            block = key.removesuffix(".device")
            if changes.get(key) == "nvme" and not get_by_path(self.config, f"{block}.nvme_path"):
                changes[f"{block}.nvme_path"] = default_nvme_path(self.config)
        if placement[1] == "nvme" and self.page_all_params:
            changes[MAX_IN_CPU_KEY] = 0
        return changes

    def iter_candidates(self) -> Iterator[Changes]:
        """Every combination."""
        for choices in product(self.stages, self.policies, self.micro_batches, self.placements, self.tiled_losses):
            yield self.candidate(*choices)

    def levels(self, placement: tuple[str, str]) -> list[CostLevel]:
        """Candidates with this placement, the cheapest level first; none where no stage allows it."""
        optimizer_device, param_device = placement
        min_stage = 3 if param_device != "none" else 1 if optimizer_device != "none" else 0
        stages = [stage for stage in self.stages if stage >= min_stage]
        if not stages and STAGE_KEY in self.keys:  # one rank: a stage costs nothing there
            stages = [min_stage]
        if not stages:
            return []
        in_memory = placement == ("none", "none")
        groups = (self.policies[:1], self.policies[1:]) if in_memory else (self.policies,)
        return [
            CostLevel((group, tiled), [[self.candidate(s, p, size, placement, tiled) for s in stages] for p in group])
            for tiled, size, group in product(self.tiled_losses, self.micro_batches, groups)
            if group
        ]


@dataclass(frozen=True)
class CostLevel:
    """Candidates of about the same cost: a row for each policy, each beginning with what takes the least.

    Levels of one ``kind`` differ in their micro-batch alone, so that a later one needs less memory.
    """

    kind: tuple[Any, ...]
    rows: list[list[Changes]]


@dataclass
class SearchResult:
    """``changes`` of the best candidate (of the nearest one where ``fits`` is False), why, and what was tried."""

    changes: Changes
    fits: bool
    reason: str
    tried: list[tuple[Changes, Plan]] = field(default_factory=list)


def auto_space(config: Config, cluster: Cluster, keys: list[str]) -> SearchSpace:
    """What may vary where the options ``keys`` were left to the plan."""
    dp_size = max(1, resolve_dp_size(config, cluster.world_size)[0])
    all_stages = (3, 2, 1, 0) if cluster.world_size > 1 else (0,)
    rank_batch = config.train_batch_size // dp_size if MICRO_BATCH_KEY in keys else 1
    return SearchSpace(
        config,
        frozenset(keys),
        stages=all_stages if STAGE_KEY in keys else (config.zero_optimization.stage,),
        policies=_POLICIES if CHECKPOINTING_KEY in keys else (config.activation_checkpointing.policy,),
        micro_batches=_thin_out(_divisors(rank_batch)) if MICRO_BATCH_KEY in keys else (None,),
        placements=_placements(config, cluster, keys),
        tiled_losses=(config.tiling.loss,),
        rank_batch=rank_batch,
    )


def smaller_space(config: Config, cluster: Cluster) -> SearchSpace:
    """Everything that makes the run of a resolved config smaller and leaves its update as it is."""
    zero, policy = config.zero_optimization, config.activation_checkpointing.policy
    micro_batch = int(config.train_micro_batch_size_per_gpu)
    rank_batch = micro_batch * int(config.gradient_accumulation_steps)
    keys = {STAGE_KEY, CHECKPOINTING_KEY, TILING_KEY, MICRO_BATCH_KEY}
    for key, block in ((OFFLOAD_OPTIMIZER_KEY, zero.offload_optimizer), (OFFLOAD_PARAM_KEY, zero.offload_param)):
        if block.device == "none":
            keys.add(key)
    return SearchSpace(
        config,
        frozenset(keys),
        stages=tuple(range(3, zero.stage - 1, -1)) if int(config.data_parallel_size) > 1 else (zero.stage,),
        policies=_POLICIES[_POLICIES.index(policy) :],
        micro_batches=_thin_out([size for size in _divisors(rank_batch) if size <= micro_batch]),
        placements=_placements(config, cluster, keys),
        tiled_losses=(True,) if config.tiling.loss else (False, True),
        rank_batch=rank_batch,
        page_all_params=True,
    )


def tuning_space(config: Config) -> SearchSpace:
    """Stages x recomputation x ways to split the same batch into micro-batches."""
    rank_batch = int(config.train_micro_batch_size_per_gpu) * int(config.gradient_accumulation_steps)
    zero = config.zero_optimization
    return SearchSpace(
        config,
        frozenset({STAGE_KEY, CHECKPOINTING_KEY, MICRO_BATCH_KEY}),
        stages=(1, 2, 3, 0) if int(config.data_parallel_size) > 1 else (zero.stage,),
        policies=_POLICIES,
        micro_batches=tuple(_divisors(rank_batch)[:4]),
        placements=((zero.offload_optimizer.device, zero.offload_param.device),),
        tiled_losses=(config.tiling.loss,),
        rank_batch=rank_batch,
    )


def _placements(config: Config, cluster: Cluster, keys: Any) -> tuple[tuple[str, str], ...]:
    """(device of the optimizer's state, device of the parameters), the cheapest first."""
    # On processors the host's memory is the ranks' own.
    others = [*(["cpu"] if cluster.device != "cpu" else []), *(["nvme"] if default_nvme_path(config) else [])]
    choices = [
        ["none", *others] if key in keys else [get_by_path(config, key)]
        for key in (OFFLOAD_OPTIMIZER_KEY, OFFLOAD_PARAM_KEY)
    ]
    cost, is_given = _OFFLOAD_COST, len(choices[0]) == 1
    pairs = [(state, param) for state, param in product(*choices) if is_given or cost[param] <= cost[state]]
    return tuple(sorted(pairs, key=lambda pair: (max(map(_OFFLOAD_COST.__getitem__, pair)), _OFFLOAD_COST[pair[1]])))


def _divisors(number: int) -> list[int]:
    """Divisors of ``number``, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0] or [1]


def _thin_out(sizes: list[int]) -> tuple[int, ...]:
    """The largest ones, some of those between, and the last."""
    rest = sizes[_NUM_LARGEST_MICRO_BATCHES:-1]
    last = sizes[max(_NUM_LARGEST_MICRO_BATCHES, len(sizes) - 1) :]
    return (*sizes[:_NUM_LARGEST_MICRO_BATCHES], *rest[1 :: max(1, len(rest) // 2)], *last)


class PlanCache:
    """Plans of candidates, each computed once; which lacks the least; whether the time is over.

    ``known``: the plan of ``config`` as it is, if there is one.
    """

    def __init__(
        self, planner: Planner, config: Config, cpu_budget_s: float = float("inf"), known: Plan | None = None
    ) -> None:
        self._planner, self._config = planner, config
        self._deadline = time.thread_time() + cpu_budget_s
        self._plans: dict[str, Plan | None] = {} if known is None else {_cache_key({}): known}
        self.tried: list[tuple[Changes, Plan]] = []
        self.closest: tuple[int, Changes] | None = None
        self.last_error: Exception | None = None

    @property
    def timed_out(self) -> bool:
        """Whether no more should be asked."""
        return time.thread_time() > self._deadline

    def get_plan(self, changes: Changes) -> Plan | None:
        """The plan with these values, or None where the values contradict each other or cannot be planned."""
        key = _cache_key(_differing(self._config, changes))
        if key not in self._plans:
            plan = self._plans[key] = self._predict(changes)
            if plan is not None:
                self.tried.append((changes, plan))
                if self.closest is None or plan.excess_bytes < self.closest[0]:
                    self.closest = plan.excess_bytes, changes
        return self._plans[key]

    def _predict(self, changes: Changes) -> Plan | None:
        try:  # resolved anew, so that every rule is asked again; the batch of a step stays as it is
            config = replace_by_path(self._config, {"data_parallel_size": AUTO, **changes})
            return self._planner.predict(resolve(config, world_size=self._planner.cluster.world_size))
        except ConfigError:
            return None
        except (ValueError, RuntimeError) as error:  # a model that cannot be traced with these values
            self.last_error = error
            _log.debug("%s cannot be planned: %s", changes, error)
            return None

    def fits(self, changes: Changes) -> bool | None:
        """Whether it fits; None where nobody can say."""
        plan = self.get_plan(changes)
        return None if plan is None else plan.fits is not False

    def fitting_candidates(self, level: CostLevel) -> list[tuple[float, int, Changes]]:
        """(seconds a token, order of preference, values) of all that fit; a row is left where what takes the
        least of it does not."""
        fitting = []
        for row_index, row in enumerate(level.rows):
            for step, changes in enumerate(row):
                plan = self.get_plan(changes)
                if plan is not None and plan.fits is not False:
                    seconds = plan.step_seconds / max(1, plan.tokens_per_step)
                    fitting.append((seconds, 1000 * row_index - step, changes))
                elif plan is not None:
                    break
                if self.timed_out:
                    return fitting
        return fitting


def search(planner: Planner, space: SearchSpace, cpu_budget_s: float, known: Plan | None = None) -> SearchResult:
    """The best candidate of ``space`` by the rule of this module; ``known``: the plan of its config as it is."""
    plans, first = PlanCache(planner, space.config, cpu_budget_s, known), None
    for placement in space.placements:
        levels = space.levels(placement)
        if not levels:
            continue
        first, smallest = first or levels[0].rows[0][0], levels[-1].rows[-1][0]
        start, smallest_fits = 0, False
        if not plans.fits(levels[0].rows[-1][0]):  # the cheapest level will not do, or nobody knows
            smallest_fits = plans.fits(smallest)
            if smallest_fits is False:  # then nothing in these places does
                continue
            start = _first_fitting_level(plans, levels)
        for level in levels[start:]:
            if fitting := plans.fitting_candidates(level):
                seconds, _, changes = min(fitting, key=lambda candidate: candidate[:2])
                reason = f"the plan: the cheapest that fits, {format_seconds(seconds)} a token"
                return SearchResult(changes, True, reason, plans.tried)
            if plans.timed_out:
                break
        if smallest_fits:  # out of time: what is known to fit is better than what is cheaper and may not
            reason = "the plan: the smallest in these places, which fits; the search ran out of time"
            return SearchResult(smallest, True, reason, plans.tried)
        if plans.timed_out:
            break
    if plans.closest is not None:
        excess, changes = plans.closest
        reason = f"the plan: the nearest to fitting that was found, {format_bytes(excess)} too much"
        return SearchResult(changes, False, reason, plans.tried)
    reason = "nothing was planned, as the inputs of this model cannot be guessed"
    return SearchResult(first or {}, False, reason, plans.tried)


def _first_fitting_level(plans: PlanCache, levels: list[CostLevel]) -> int:
    """The first level of which anything may fit; levels of one kind shrink, so that each kind is bisected."""
    first = len(levels)
    for kind in dict.fromkeys(level.kind for level in levels):
        indices = [index for index, level in enumerate(levels) if level.kind == kind]
        low = bisect_left(indices, True, key=lambda index: plans.fits(levels[index].rows[-1][0]) is not False)
        first = min([first, *indices[low : low + 1]])
    return first


# What was left to the plan


def auto_keys(config: Config) -> list[str]:
    """The options that are left to the plan: ``"auto"`` stands there, and the plan has a say.

    A micro-batch is chosen only where the batch of a step is given (``train_batch_size``) and the number of
    accumulation steps is open: the update stays the same whatever is chosen.
    """
    keys = [path for path in PLANNABLE_KEYS if get_by_path(config, path) == AUTO]
    follows = not isinstance(config.train_batch_size, int) or isinstance(config.gradient_accumulation_steps, int)
    return [key for key in keys if key != MICRO_BATCH_KEY or not follows]


def fill_auto(config: Config, planner: Planner) -> Config:
    """``config`` with its :func:`auto_keys` filled in, and in its provenance why; others stay open."""
    keys = auto_keys(config)
    return with_auto_values(config, *choose_auto_values(config, planner, keys)) if keys else config


def choose_auto_values(config: Config, planner: Planner, keys: list[str]) -> tuple[Changes, str]:
    """Values for ``keys`` by the rule, and the reason in words."""
    result = search(planner, auto_space(config, planner.cluster, keys), _AUTO_CPU_BUDGET_S)
    return result.changes, result.reason


def with_auto_values(config: Config, values: Changes, reason: str) -> Config:
    """A copy with ``values``, each derived as ``reason`` says."""
    derived = dict(config.provenance.derived) | dict.fromkeys(values, reason)
    filled_config = replace_by_path(config, values)
    filled_config._provenance = replace(config.provenance, derived=tuple(derived.items()))
    return filled_config


# What fits instead


def suggest(
    planner: Planner, config: Config, cpu_budget_s: float = _SUGGEST_CPU_BUDGET_S, known: Plan | None = None
) -> tuple[Changes | None, list[str]]:
    """Changes that make the run of a resolved config fit, and what was tried on the way; None if nothing fits.

    ``known``: its plan as it is, which need not be computed once more.
    """
    result = search(planner, smaller_space(config, planner.cluster), cpu_budget_s, known)
    reasons = []
    for changes, plan in result.tried:
        text = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in _differing(config, changes).items())
        numbers = f"{format_bytes(plan.per_rank.total)}, {format_seconds(plan.step_seconds)}"
        reasons.append(f"{text or 'as it is'}: {numbers}{', does not fit' if plan.fits is False else ''}")
    return (_differing(config, result.changes) if result.fits else None), reasons


def _cache_key(changes: Changes) -> str:
    return repr(sorted(changes.items()))


def _differing(config: Config, changes: Changes) -> Changes:
    return {key: value for key, value in changes.items() if get_by_path(config, key) != value}
