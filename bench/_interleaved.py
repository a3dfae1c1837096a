"""Contestants in alternation: batches that fit into memory, rounds of turns, paired ratios.

All contestants of a batch are alive at once and take turns, round after round, in an order that
rotates.  Where not all of them fit into memory they meet in several batches, and the first one, the
*anchor*, is in every batch; two contestants that never met are compared through it:

    ratio = (theirs / anchor in their batch) / (ours / anchor in our batch)

each a median over rounds, so a slow minute of the machine falls on both sides of every quotient.

On an accelerator nobody else computes on, each is a batch by itself: its memory is for one, and what another left
there would change what the allocator does.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _contestants import Job
from _groups import RankGroup, RankGroupError, RankPlacement, TurnResult
from _peers import deepspeed_missing_reason


@dataclass
class ContestantResult:
    """What one contestant did in one batch; `error` says why it did nothing or stopped."""

    name: str
    batch: int
    turns: list[TurnResult] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    metered_per_step: list[float] = field(default_factory=list)
    error: str = ""

    def clock_ms(self) -> list[float]:
        """Return the clock of every step in ms, in order."""
        return [1e3 * seconds for turn in self.turns for seconds in turn.clock()]

    def cpu_ms(self) -> list[float]:
        """Return the process CPU time of every step in ms, the mean over ranks."""
        return [1e3 * seconds for turn in self.turns for seconds in turn.cpu_seconds()]

    def summary(self, digits: int) -> dict[str, float]:
        """Return clock and CPU time of a step, and what was metered to that many digits, for a table."""
        return {
            "clock_ms_min": round(min(self.clock_ms()), 1),
            "clock_ms_median": round(statistics.median(self.clock_ms()), 1),
            "cpu_ms_median": round(statistics.median(self.cpu_ms()), 1),
            "link_mib": round(statistics.median(self.metered_per_step), digits),
        }

    def losses(self) -> list[float]:
        """Return the loss of every timed step, the mean over ranks."""
        return [loss for turn in self.turns for loss in turn.loss()]

    def peak_mib(self, over_import: bool = False) -> float:
        """Return the highest resident memory of a rank in MiB, or how far it rose above the imports."""
        return max(r["peak_mib"] - (r["import_mib"] if over_import else 0.0) for r in self.reports)


@dataclass(frozen=True)
class RunSettings:
    """How an interleaved run goes: rounds of `steps` steps for each, after `warmup` steps that are not counted; with
    `memory_mib` for all that are alive at once (None: most of what is free)."""

    rounds: int = 5
    steps: int = 5
    warmup: int = 2
    threads: int = 1
    memory_mib: float | None = None


class InterleavedRun:
    """The outcomes of one run; `outcomes[name]` is the contestant's first (the anchor has one a batch).

    `meter()` is a counter read before and after each turn; `ContestantResult.metered_per_step` has its rise per step.
    """

    def __init__(
        self,
        job: Job,
        world: int,
        plan: RunSettings,
        anchor: str,
        *,
        meter: Callable[[], float] | None = None,
    ) -> None:
        self.job, self.world, self.plan, self.anchor, self.meter = job, world, plan, anchor, meter
        self.outcomes: dict[str, ContestantResult] = {}
        self.anchors: list[ContestantResult] = []

    def run(self, names: Sequence[str], placements: list[RankPlacement] | None = None) -> None:
        """Run every contestant of `names`; one that fails is recorded and the others go on."""
        runnable = []
        for name in names:
            missing = missing_reason(name)
            if missing:
                self.outcomes[name] = ContestantResult(name, -1, error=missing)
            else:
                runnable.append(name)
        others = [name for name in runnable if name != self.anchor]
        batches = split_into_batches(others, self.anchor, self.job, self.world, self.plan.memory_mib)
        for number, batch in enumerate(batches):
            head = f"{self.job.name} {self.job.dtype}, {self.world} ranks, batch {number + 1} of {len(batches)}"
            log_stderr(f"{head}: {', '.join(batch)}")
            self._run_batch(number, batch, placements)

    def _run_batch(self, number: int, names: Sequence[str], placements: list[RankPlacement] | None) -> None:
        groups: dict[str, RankGroup] = {}
        outcomes = {name: ContestantResult(name, number) for name in names}
        try:
            for name in names:
                groups[name] = RankGroup(name, self.job, self.world, threads=self.plan.threads, placements=placements)
            for name in names:
                self._run_guarded(groups, outcomes[name], self._prepare)
            for turn in range(self.plan.rounds):
                order = [*names[turn % len(names) :], *names[: turn % len(names)]]
                for name in order:
                    self._run_guarded(groups, outcomes[name], self._run_turn)
            for name in names:
                self._run_guarded(groups, outcomes[name], self._report)
        except BaseException:
            for group in groups.values():
                group.stop(orderly=False)
            raise
        for group in groups.values():
            group.stop()
        self.anchors.append(outcomes.get(self.anchor) or self.outcomes[self.anchor])
        for name, outcome in outcomes.items():
            self.outcomes.setdefault(name, outcome)

    def _run_guarded(self, groups: dict[str, RankGroup], outcome: ContestantResult, action: Any) -> None:
        """Do one thing with a contestant; a failure puts it out of the batch, with its reason."""
        if outcome.name not in groups:
            return
        try:
            action(groups[outcome.name], outcome)
        except RankGroupError as error:
            log_stderr(str(error))
            outcome.error = str(error).splitlines()[0].removeprefix(f"{outcome.name}: ")
            groups.pop(outcome.name).stop(orderly=False)

    def _prepare(self, group: RankGroup, outcome: ContestantResult) -> None:
        group.wait_ready()
        group.run(self.plan.warmup)

    def _run_turn(self, group: RankGroup, outcome: ContestantResult) -> None:
        before = self.meter() if self.meter else 0.0
        outcome.turns.append(group.run(self.plan.steps))
        if self.meter:
            outcome.metered_per_step.append((self.meter() - before) / self.plan.steps)

    def _report(self, group: RankGroup, outcome: ContestantResult) -> None:
        outcome.reports = group.report()

    def succeeded(self, name: str) -> bool:
        """Return whether the contestant finished."""
        return name in self.outcomes and not self.outcomes[name].error

    def time_ratio(self, name: str, other: str) -> float:
        """Return how many times as long `theirs` took as `ours`: the median of the rounds' quotients."""
        a, b = self.outcomes[name], self.outcomes[other]
        if other == self.anchor:
            b = self.anchors[a.batch]
        if name == self.anchor:
            a = self.anchors[b.batch]
        if a.batch == b.batch:
            return _median_ratio(a, b)
        return _median_ratio(self.anchors[b.batch], b) / _median_ratio(self.anchors[a.batch], a)

    def loss_difference(self, name: str) -> float:
        """Return the largest difference of a step's loss from the anchor's."""
        pairs = zip(self.outcomes[name].losses(), self.outcomes[self.anchor].losses(), strict=True)
        return max(abs(a - b) for a, b in pairs)


def _median_ratio(ours: ContestantResult, theirs: ContestantResult) -> float:
    rounds = zip(ours.turns, theirs.turns, strict=True)
    return statistics.median(statistics.median(b.clock()) / statistics.median(a.clock()) for a, b in rounds)


def missing_reason(name: str) -> str:
    """Return why a contestant cannot take part, or an empty string."""
    if name.startswith("deepspeed"):
        reason = deepspeed_missing_reason()
        return f"absent: {reason}" if reason else ""
    return ""


# Peak resident memory over that of the imports, in multiples of the fp32 parameters, a little above what
# was measured; it only decides how many contestants are alive at once.
_MEMORY_FACTOR = {"ddp": 6.0, "fsdp2": 7.0, "deepspeed": 9.0, "thalweg": 6.0}


def estimate_mib(name: str, job: Job, world: int) -> float:
    """Return a guess of the resident MiB of all ranks of a contestant."""
    embedding = job.vocabulary * job.width * (1 if job.tied else 2)
    parameters = 4 * (embedding + 12 * job.layers * job.width**2) / 2**20
    logits = 4 * job.micro_batch * job.sequence * job.vocabulary / 2**20
    return world * (300 + _MEMORY_FACTOR[name.split("_")[0]] * parameters + 12 * logits)


def available_mib() -> float:
    """Return the memory that the machine can still give, in MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**20


def split_into_batches(
    names: Sequence[str], anchor: str, job: Job, world: int, budget_mib: float | None = None
) -> list[list[str]]:
    """Split the contestants, in order, into batches that fit; the anchor leads each of them, or the run alone."""
    if job.device != "cpu":
        return [[name] for name in [anchor, *names]]
    budget = 0.85 * available_mib() if budget_mib is None else budget_mib
    batches: list[list[str]] = []
    used = 0.0
    for name in names:
        need = estimate_mib(name, job, world)
        if not batches or used + need > budget:
            batches.append([anchor])
            used = estimate_mib(anchor, job, world)
        batches[-1].append(name)
        used += need
    return batches or [[anchor]]


def log_stderr(text: str) -> None:
    """Tell the person at the terminal what is going on; standard output is for the result alone."""
    print(text, file=sys.stderr, flush=True)
