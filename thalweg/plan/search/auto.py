"""``"auto"`` where the plan knows best: the stage, the tiers, recomputation, and the micro-batch.

The rule: the cheapest configuration that fits.  Candidates come in levels, in the order of what a level
costs by its nature: everything in memory; then recomputation; then optimizer state on the host; then
parameters there too; then both on a disk (where the config names a folder); in each of them the largest
micro-batch first.  All of a level are planned, and the first level of which any fits gives the one with the
fewest seconds a token.  If none fits, the nearest to it is taken, and the preflight says what is missing.

A micro-batch is chosen only where the batch of a step is given (``train_batch_size``) and the number of
accumulation steps is open: the update stays the same whatever is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from thalweg.config import Config
from thalweg.config.batch_size import resolve_dp_size
from thalweg.config.errors import ConfigError
from thalweg.config.schema.base import AUTO, get_by_path, replace_by_path
from thalweg.config.support import is_under
from thalweg.plan.spec.config_changes import find_nvme_path, resolve_with_changes
from thalweg.utils.formatting import format_bytes, format_seconds
from thalweg.utils.log import get_logger

if TYPE_CHECKING:
    from thalweg.plan.api import Plan, Planner

_log = get_logger(__name__)
STAGE_KEY = "zero_optimization.stage"
OFFLOAD_OPTIMIZER_KEY = "zero_optimization.offload_optimizer"
OFFLOAD_PARAM_KEY = "zero_optimization.offload_param"
CHECKPOINTING_KEY = "activation_checkpointing.policy"
MICRO_BATCH_KEY, ACCUMULATION_KEY, TRAIN_BATCH_KEY = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
PLANNABLE_KEYS = (
    STAGE_KEY,
    f"{OFFLOAD_OPTIMIZER_KEY}.device",
    f"{OFFLOAD_PARAM_KEY}.device",
    CHECKPOINTING_KEY,
    MICRO_BATCH_KEY,
)
_NUM_LARGEST_MICRO_BATCHES = 3  # of micro-batches that are tried, the largest ones
_SEARCH_CPU_BUDGET_S = 8.0
CostLevel = list[list[dict[str, Any]]]


def auto_keys(config: Config) -> list[str]:
    """The options that the user left to the plan: ``"auto"`` was written, and the plan has a say."""
    user_set = config.provenance.user_set
    keys = []
    for path in PLANNABLE_KEYS:
        if get_by_path(config, path) == AUTO and any(is_under(path, one) for one in user_set):
            keys.append(path)
    if MICRO_BATCH_KEY in keys and not isinstance(get_by_path(config, TRAIN_BATCH_KEY), int):
        keys.remove(MICRO_BATCH_KEY)
    if MICRO_BATCH_KEY in keys and isinstance(get_by_path(config, ACCUMULATION_KEY), int):
        keys.remove(MICRO_BATCH_KEY)  # it follows from the other two
    return keys


def fill_auto(config: Config, planner: Planner) -> Config:
    """``config`` with its :func:`auto_keys` filled in, and in its provenance why; others stay open."""
    keys = auto_keys(config)
    if not keys:
        return config
    values, reason = choose_auto_values(config, planner, keys)
    return with_auto_values(config, values, reason)


def with_auto_values(config: Config, values: dict[str, Any], reason: str) -> Config:
    """A copy with ``values``, each derived as ``reason`` says."""
    derived = dict(config.provenance.derived) | dict.fromkeys(values, reason)
    filled_config = replace_by_path(config, values)
    assert isinstance(filled_config, Config)
    filled_config._provenance = replace(config.provenance, derived=tuple(derived.items()))
    return filled_config


def choose_auto_values(config: Config, planner: Planner, keys: list[str]) -> tuple[dict[str, Any], str]:
    """Values for ``keys`` by the rule, and the reason in words."""
    plans = _PlanCache(planner, config, time.thread_time() + _SEARCH_CPU_BUDGET_S)
    for smallest, levels in _levels_by_placement(config, planner, keys):
        smallest_fits = plans.fits(smallest)
        if smallest_fits is False:  # then nothing in these places does
            continue
        for level in levels[_first_fitting_level(plans, levels) :]:
            if fitting := plans.fitting_candidates(level):
                seconds, _, changes = min(fitting, key=lambda found: found[:2])
                return changes, f"the plan: the cheapest that fits, {format_seconds(seconds)} a token"
            if plans.timed_out:
                break
        if smallest_fits:  # late: what is known to fit is better than what is cheaper and may not
            return smallest, "the plan: the smallest in these places, which fits; the search ran out of time"
        if plans.timed_out:
            break
    if plans.closest is not None:
        excess, changes = plans.closest
        return changes, f"the plan: the nearest to fitting that was found, {format_bytes(excess)} too much"
    return plans.first_changes or {}, "nothing was planned, as the inputs of this model cannot be guessed"


def _first_fitting_level(plans: _PlanCache, levels: list[CostLevel]) -> int:
    """The first level of which anything may fit: with the same policies, what fits is the smaller
    micro-batches."""
    kinds = [tuple(row[0].get(CHECKPOINTING_KEY) for row in level) for level in levels]
    first = len(levels)
    for kind in dict.fromkeys(kinds):
        indices = [index for index, one in enumerate(kinds) if one == kind]
        low, high = 0, len(indices)
        while low < high:
            middle = (low + high) // 2
            if plans.fits(levels[indices[middle]][-1][0]) is False:
                low = middle + 1
            else:
                high = middle
        if low < len(indices):
            first = min(first, indices[low])
    return first


class _PlanCache:
    """Plans of candidates, each asked for once; which lacks the least; whether the time is over."""

    def __init__(self, planner: Planner, config: Config, deadline: float) -> None:
        self._planner, self._config, self._deadline = planner, config, deadline
        self._plans: dict[str, Plan | None] = {}
        self.closest: tuple[int, dict[str, Any]] | None = None
        self.first_changes: dict[str, Any] | None = None

    @property
    def timed_out(self) -> bool:
        """Whether no more should be asked."""
        return time.thread_time() > self._deadline

    def get_plan(self, changes: dict[str, Any]) -> Plan | None:
        """The plan with these values, or None where there is none."""
        key = repr(sorted(changes.items()))
        if key not in self._plans:
            plan = self._plans[key] = _try_plan(self._planner, self._config, changes)
            excess = 0 if plan is None else plan.excess_bytes
            if plan is not None and (self.closest is None or excess < self.closest[0]):
                self.closest = excess, changes
        return self._plans[key]

    def fits(self, changes: dict[str, Any]) -> bool | None:
        """Whether it fits; None where nobody can say."""
        plan = self.get_plan(changes)
        return None if plan is None else plan.fits is not False

    def fitting_candidates(self, level: CostLevel) -> list[tuple[float, int, dict[str, Any]]]:
        """(seconds a token, place in the level, values) of all that fit; each row of ``level`` begins with
        what takes the least, and is left where that does not fit."""
        fitting = []
        for row, order in ((row, 1000 * index) for index, row in enumerate(level)):
            for step, changes in enumerate(row):
                self.first_changes = self.first_changes or changes
                plan = self.get_plan(changes)
                if plan is not None and plan.fits is not False:
                    fitting.append((plan.step_seconds / max(1, plan.tokens_per_step), order - step, changes))
                elif plan is not None:
                    break
                if self.timed_out:
                    return fitting
        return fitting


def _levels_by_placement(
    config: Config, planner: Planner, keys: list[str]
) -> Iterator[tuple[dict[str, Any], list[CostLevel]]]:
    """For each placement: what takes the least there, and levels of candidates, the cheapest level first."""
    for optimizer_device, param_device in _offload_placements(config, planner, keys):
        levels = list(_cost_levels(config, planner, keys, optimizer_device, param_device))
        if levels:
            yield levels[-1][-1][0], levels


def _cost_levels(
    config: Config, planner: Planner, keys: list[str], optimizer_device: str, param_device: str
) -> Iterator[CostLevel]:
    """Groups of candidates, a row for each policy of recomputation, the highest stage first."""
    world_size = planner.cluster.world_size
    stages = ([3, 2, 1, 0] if world_size > 1 else [0]) if STAGE_KEY in keys else [get_by_path(config, STAGE_KEY)]
    sizes = _micro_batches(config, world_size) if MICRO_BATCH_KEY in keys else [None]
    policies = ["none", "selective", "full"] if CHECKPOINTING_KEY in keys else [get_by_path(config, CHECKPOINTING_KEY)]
    min_stage = 3 if param_device != "none" else 1 if optimizer_device != "none" else 0
    allowed = [stage for stage in stages if stage >= min_stage]
    if STAGE_KEY in keys and not allowed:  # one rank: a stage costs nothing there
        allowed = [min_stage]
    if not allowed:
        return
    groups = ([policies[0]], policies[1:]) if param_device == optimizer_device == "none" else (policies,)
    for micro_batch, group in product(sizes, [group for group in groups if group]):
        rows = []
        for policy in group:
            rows.append([])
            for stage in allowed:
                values = {
                    STAGE_KEY: stage,
                    f"{OFFLOAD_OPTIMIZER_KEY}.device": optimizer_device,
                    f"{OFFLOAD_PARAM_KEY}.device": param_device,
                }
                values |= {CHECKPOINTING_KEY: policy, MICRO_BATCH_KEY: micro_batch}
                chosen = {name: values[name] for name in keys}
                chosen |= _nvme_paths(config, planner, chosen)
                if micro_batch is not None:
                    chosen[ACCUMULATION_KEY] = config.train_batch_size // (
                        micro_batch * _num_data_ranks(config, world_size)
                    )
                rows[-1].append(chosen)
        yield rows


def _offload_placements(config: Config, planner: Planner, keys: list[str]) -> Iterator[tuple[str, str]]:
    """(device of the optimizer's state, device of the parameters), the cheapest first."""
    configured = [get_by_path(config, f"{block}.device") for block in (OFFLOAD_OPTIMIZER_KEY, OFFLOAD_PARAM_KEY)]
    choices = []
    for block, value in zip((OFFLOAD_OPTIMIZER_KEY, OFFLOAD_PARAM_KEY), configured, strict=True):
        is_auto = f"{block}.device" in keys
        # On processors the host's memory is the ranks' own.
        host = ["cpu"] if planner.cluster.device != "cpu" else []
        disk = ["nvme"] if find_nvme_path(config) else []
        choices.append(["none", *host, *disk] if is_auto else [value])
    cost = {"none": 0, "cpu": 1, "nvme": 2}
    pairs = [pair for pair in product(*choices) if cost[pair[1]] <= cost[pair[0]] or len(choices[0]) == 1]
    yield from sorted(pairs, key=lambda pair: (max(cost[one] for one in pair), cost[pair[1]]))


def _nvme_paths(config: Config, planner: Planner, chosen: dict[str, Any]) -> dict[str, Any]:
    """The folder of each tier that goes to the disk and names none."""
    blocks = [block for block in (OFFLOAD_OPTIMIZER_KEY, OFFLOAD_PARAM_KEY) if chosen.get(f"{block}.device") == "nvme"]
    return {
        f"{block}.nvme_path": find_nvme_path(config)
        for block in blocks
        if not get_by_path(config, f"{block}.nvme_path")
    }


def _micro_batches(config: Config, world_size: int) -> list[int]:
    """Micro-batches that divide the batch of a step: the largest ones, some of those between, and 1."""
    per_rank_batch = config.train_batch_size // _num_data_ranks(config, world_size)
    sizes = [size for size in range(per_rank_batch, 0, -1) if per_rank_batch % size == 0] or [1]
    rest = sizes[_NUM_LARGEST_MICRO_BATCHES:-1]
    return (
        sizes[:_NUM_LARGEST_MICRO_BATCHES]
        + rest[1 :: max(1, len(rest) // 2)]
        + sizes[max(_NUM_LARGEST_MICRO_BATCHES, len(sizes) - 1) :]
    )


def _num_data_ranks(config: Config, world_size: int) -> int:
    return max(1, resolve_dp_size(config, world_size)[0])


def _try_plan(planner: Planner, config: Config, changes: dict[str, Any]) -> Plan | None:
    try:
        return planner.predict(
            resolve_with_changes(config, changes, planner.cluster.world_size, fixed_keys=(TRAIN_BATCH_KEY,))
        )
    except ConfigError:
        return None
    except Exception as error:  # a model that cannot be traced: the plan has no say then
        _log.debug("%s cannot be planned: %s", changes, error)
        return None
