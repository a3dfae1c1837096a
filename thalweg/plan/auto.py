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
from thalweg.config.batch import data_parallel_ranks
from thalweg.config.fates import is_below
from thalweg.config.problems import ConfigError
from thalweg.config.schema_base import AUTO, value_at, with_values
from thalweg.plan.changes import changed, nvme_folder
from thalweg.plan.sizes import show_bytes, show_seconds
from thalweg.utils.log import get_logger

if TYPE_CHECKING:
    from thalweg.plan.core import Plan, Question

_log = get_logger(__name__)
STAGE = "zero_optimization.stage"
STATES = "zero_optimization.offload_optimizer"
PARAMS = "zero_optimization.offload_param"
REMAT = "activation_checkpointing.policy"
MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
PLANNED = (STAGE, f"{STATES}.device", f"{PARAMS}.device", REMAT, MICRO)
_SIZES = 3  # of micro-batches that are tried, the largest ones
_SECONDS = 8.0
Level = list[list[dict[str, Any]]]


def open_paths(config: Config) -> list[str]:
    """The options that the user left to the plan: ``"auto"`` was written, and the plan has a say."""
    given = config.provenance.given
    found = []
    for path in PLANNED:
        if value_at(config, path) == AUTO and any(is_below(path, one) for one in given):
            found.append(path)
    if MICRO in found and not isinstance(value_at(config, TOTAL), int):
        found.remove(MICRO)
    if MICRO in found and isinstance(value_at(config, STEPS), int):
        found.remove(MICRO)  # it follows from the other two
    return found


def settle(config: Config, question: Question) -> Config:
    """``config`` with its :func:`open_paths` filled in, and in its provenance why; others stay open."""
    names = open_paths(config)
    if not names:
        return config
    values, why = choose(config, question, names)
    return fill(config, values, why)


def fill(config: Config, values: dict[str, Any], why: str) -> Config:
    """A copy with ``values``, each found as ``why`` says."""
    filled = dict(config.provenance.filled) | dict.fromkeys(values, why)
    settled = with_values(config, values)
    assert isinstance(settled, Config)
    settled._provenance = replace(config.provenance, filled=tuple(filled.items()))
    return settled


def choose(config: Config, question: Question, names: list[str]) -> tuple[dict[str, Any], str]:
    """Values for ``names`` by the rule, and the reason in words."""
    tries = _Tries(question, config, time.thread_time() + _SECONDS)
    for least, levels in _tiers_of(config, question, names):
        found = tries.fits(least)
        if found is False:  # then nothing in these places does
            continue
        for level in levels[_first_that_fits(tries, levels) :]:
            if fitting := tries.of(level):
                seconds, _, changes = min(fitting, key=lambda found: found[:2])
                return changes, f"the plan: the cheapest that fits, {show_seconds(seconds)} a token"
            if tries.late:
                break
        if found:  # late: what is known to fit is better than what is cheaper and may not
            return least, "the plan: the smallest in these places, which fits; the search ran out of time"
        if tries.late:
            break
    if tries.smallest is not None:
        missing, changes = tries.smallest
        return changes, f"the plan: the nearest to fitting that was found, {show_bytes(missing)} too much"
    return tries.first or {}, "nothing was planned, as the inputs of this model cannot be guessed"


def _first_that_fits(tries: _Tries, levels: list[Level]) -> int:
    """The first level of which anything may fit: with the same policies, what fits is the smaller
    micro-batches."""
    kinds = [tuple(row[0].get(REMAT) for row in level) for level in levels]
    first = len(levels)
    for kind in dict.fromkeys(kinds):
        own = [index for index, one in enumerate(kinds) if one == kind]
        low, high = 0, len(own)
        while low < high:
            middle = (low + high) // 2
            if tries.fits(levels[own[middle]][-1][0]) is False:
                low = middle + 1
            else:
                high = middle
        if low < len(own):
            first = min(first, own[low])
    return first


class _Tries:
    """Plans of candidates, each asked for once; which lacks the least; whether the time is over."""

    def __init__(self, question: Question, config: Config, deadline: float) -> None:
        self._question, self._config, self._deadline = question, config, deadline
        self._known: dict[str, Plan | None] = {}
        self.smallest: tuple[int, dict[str, Any]] | None = None
        self.first: dict[str, Any] | None = None

    @property
    def late(self) -> bool:
        """Whether no more should be asked."""
        return time.thread_time() > self._deadline

    def ask(self, changes: dict[str, Any]) -> Plan | None:
        """The plan with these values, or None where there is none."""
        key = repr(sorted(changes.items()))
        if key not in self._known:
            answer = self._known[key] = _try(self._question, self._config, changes)
            missing = 0 if answer is None else answer.missing_bytes
            if answer is not None and (self.smallest is None or missing < self.smallest[0]):
                self.smallest = missing, changes
        return self._known[key]

    def fits(self, changes: dict[str, Any]) -> bool | None:
        """Whether it fits; None where nobody can say."""
        answer = self.ask(changes)
        return None if answer is None else answer.fits is not False

    def of(self, level: Level) -> list[tuple[float, int, dict[str, Any]]]:
        """(seconds a token, place in the level, values) of all that fit; each row of ``level`` begins with
        what takes the least, and is left where that does not fit."""
        found = []
        for row, order in ((row, 1000 * index) for index, row in enumerate(level)):
            for step, changes in enumerate(row):
                self.first = self.first or changes
                answer = self.ask(changes)
                if answer is not None and answer.fits is not False:
                    found.append((answer.seconds / max(1, answer.tokens), order - step, changes))
                elif answer is not None:
                    break
                if self.late:
                    return found
        return found


def _tiers_of(
    config: Config, question: Question, names: list[str]
) -> Iterator[tuple[dict[str, Any], list[Level]]]:
    """For each placement: what takes the least there, and levels of candidates, the cheapest level first."""
    for states, params in _tiers(config, question, names):
        levels = list(_levels(config, question, names, states, params))
        if levels:
            yield levels[-1][-1][0], levels


def _levels(
    config: Config, question: Question, names: list[str], states: str, params: str
) -> Iterator[Level]:
    """Groups of candidates, a row for each policy of recomputation, the highest stage first."""
    world = question.cluster.world_size
    stages = ([3, 2, 1, 0] if world > 1 else [0]) if STAGE in names else [value_at(config, STAGE)]
    sizes = _micro_batches(config, world) if MICRO in names else [None]
    policies = ["none", "selective", "full"] if REMAT in names else [value_at(config, REMAT)]
    least = 3 if params != "none" else 1 if states != "none" else 0
    allowed = [stage for stage in stages if stage >= least]
    if STAGE in names and not allowed:  # one rank: a stage costs nothing there
        allowed = [least]
    if not allowed:
        return
    groups = ([policies[0]], policies[1:]) if params == states == "none" else (policies,)
    for micro, group in product(sizes, [group for group in groups if group]):
        rows = []
        for policy in group:
            rows.append([])
            for stage in allowed:
                values = {STAGE: stage, f"{STATES}.device": states, f"{PARAMS}.device": params}
                values |= {REMAT: policy, MICRO: micro}
                chosen = {name: values[name] for name in names}
                chosen |= _folders(config, question, chosen)
                if micro is not None:
                    chosen[STEPS] = config.train_batch_size // (micro * _data_ranks(config, world))
                rows[-1].append(chosen)
        yield rows


def _tiers(config: Config, question: Question, names: list[str]) -> Iterator[tuple[str, str]]:
    """(device of the optimizer's state, device of the parameters), the cheapest first."""
    given = [value_at(config, f"{block}.device") for block in (STATES, PARAMS)]
    choices = []
    for block, value in zip((STATES, PARAMS), given, strict=True):
        open_ = f"{block}.device" in names
        # On processors the host's memory is the ranks' own.
        host = ["cpu"] if question.cluster.device != "cpu" else []
        disk = ["nvme"] if nvme_folder(config) else []
        choices.append(["none", *host, *disk] if open_ else [value])
    cost = {"none": 0, "cpu": 1, "nvme": 2}
    pairs = [pair for pair in product(*choices) if cost[pair[1]] <= cost[pair[0]] or len(choices[0]) == 1]
    yield from sorted(pairs, key=lambda pair: (max(cost[one] for one in pair), cost[pair[1]]))


def _folders(config: Config, question: Question, chosen: dict[str, Any]) -> dict[str, Any]:
    """The folder of each tier that goes to the disk and names none."""
    blocks = [block for block in (STATES, PARAMS) if chosen.get(f"{block}.device") == "nvme"]
    return {
        f"{block}.nvme_path": nvme_folder(config)
        for block in blocks
        if not value_at(config, f"{block}.nvme_path")
    }


def _micro_batches(config: Config, world: int) -> list[int]:
    """Micro-batches that divide the batch of a step: the largest ones, some of those between, and 1."""
    each = config.train_batch_size // _data_ranks(config, world)
    sizes = [size for size in range(each, 0, -1) if each % size == 0] or [1]
    rest = sizes[_SIZES:-1]
    return sizes[:_SIZES] + rest[1 :: max(1, len(rest) // 2)] + sizes[max(_SIZES, len(sizes) - 1) :]


def _data_ranks(config: Config, world: int) -> int:
    return max(1, data_parallel_ranks(config, world)[0])


def _try(question: Question, config: Config, changes: dict[str, Any]) -> Plan | None:
    try:
        return question.answer(changed(config, changes, question.cluster.world_size, keep=(TOTAL,)))
    except ConfigError:
        return None
    except Exception as error:  # a model that cannot be rehearsed: the plan has no say then
        _log.debug("%s cannot be planned: %s", changes, error)
        return None
