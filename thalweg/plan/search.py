"""The cheapest configuration that fits: candidates in the order of what they cost.

Each candidate is a set of changes to the config.  What costs nothing in the result comes
first: a higher stage, then recomputation, then a smaller micro-batch with more
accumulation (the same update), then both.  Candidates of one micro-batch are planned, the
ones that fit are compared by their seconds, and the search ends with the first micro-batch
that has any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thalweg.config import Config
from thalweg.config.problems import ConfigError
from thalweg.plan.changes import changed
from thalweg.plan.sizes import show_bytes, show_seconds

if TYPE_CHECKING:
    from thalweg.plan.core import Plan, Question


def suggest(
    question: Question, config: Config, seconds: float = 6.0
) -> tuple[dict[str, Any] | None, list[str]]:
    """Changes that make the run fit, and what was found on the way; None if nothing tried fits in time."""
    deadline = time.monotonic() + seconds
    reasons: list[str] = []
    for level in _levels(config):
        fitting: list[tuple[float, dict[str, Any]]] = []
        for changes in level:
            answer = _try(question, config, changes)
            if answer is None:
                continue
            fits = answer.fits is not False
            reasons.append(
                f"{_words(changes)}: {show_bytes(answer.per_rank.total)}, {show_seconds(answer.seconds)}"
                f"{'' if fits else ', does not fit'}"
            )
            if fits:
                fitting.append((answer.seconds, changes))
            if time.monotonic() > deadline:
                break
        if fitting:
            return min(fitting, key=lambda pair: pair[0])[1], reasons
        if time.monotonic() > deadline:
            reasons.append("the search ran out of time")
            break
    return None, reasons


def _try(question: Question, config: Config, changes: dict[str, Any]) -> Plan | None:
    try:
        return question.answer(changed(config, changes, question.cluster.world_size))
    except ConfigError:
        return None


def _levels(config: Config) -> Iterator[list[dict[str, Any]]]:
    """Groups of candidates, the cheapest group first."""
    stage = config.zero_optimization.stage
    many = int(config.data_parallel_size) > 1
    stages = [s for s in range(stage, 4) if many] or [stage]
    policies = ["none", "selective", "full"]
    policies = policies[policies.index(config.activation_checkpointing.policy) :]
    yield [_stage(s) for s in stages if s != stage]
    yield [_stage(s) | _remat(p) for p in policies[1:] for s in dict.fromkeys((stages[-1], stage))]
    micro = int(config.train_micro_batch_size_per_gpu)
    steps = int(config.gradient_accumulation_steps)
    half = micro // 2
    while half >= 1:
        if micro % half == 0:
            batch = {
                "train_micro_batch_size_per_gpu": half,
                "gradient_accumulation_steps": steps * micro // half,
            }
            yield [batch | _stage(stages[-1]) | _remat(p) for p in dict.fromkeys((policies[0], policies[-1]))]
        half //= 2


def _stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization.stage": stage}


def _remat(policy: str) -> dict[str, Any]:
    return {"activation_checkpointing.policy": policy}


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in changes.items()) or "as it is"
