"""The speed and memory that Thalweg promises on one host with two ranks, as checks on an interleaved run.

Each goal names a model, a contestant, a peer, and the least ratio (theirs over ours) that keeps the
promise.  A goal whose contestants did not run is left out, never counted as met.
"""

from __future__ import annotations

from dataclasses import dataclass

from _interleaved import InterleavedRun


@dataclass(frozen=True)
class PerformanceGoal:
    """`peer` over `ours` must be at least `least` in `metric` (clock or memory) on model `model`."""

    model: str
    ours: str
    peer: str
    metric: str
    min_ratio: float


def _make_goals() -> list[PerformanceGoal]:
    goals = []
    for stage in range(4):
        for kind in ("thalweg", "thalweg_torch"):
            ours, against_ddp = f"{kind}_{stage}", 1 / 1.05 if stage == 3 else 1.0
            goals.append(PerformanceGoal("69m", ours, f"deepspeed_{stage}", "clock", 2.2))
            goals.append(PerformanceGoal("small", ours, f"deepspeed_{stage}", "clock", 1.0))
            goals.append(PerformanceGoal("69m", ours, "ddp_fused", "clock", against_ddp))
            goals.append(PerformanceGoal("small", ours, "ddp_fused", "clock", against_ddp))
            goals.append(PerformanceGoal("small", ours, f"deepspeed_{stage}", "memory", 1.0))
            goals.append(PerformanceGoal("69m", ours, f"deepspeed_{stage}", "memory", 1.0))
            if stage:
                goals.append(PerformanceGoal("69m", ours, "ddp_fused", "memory", 1.0))
        goals.append(PerformanceGoal("small", f"thalweg_{stage}", "ddp_fused", "clock", 1.4))
    for stage in (2, 3):
        for model in ("small", "69m"):
            goals.append(PerformanceGoal(model, f"thalweg_torch_{stage}", f"fsdp2_comm_{stage}", "clock", 1 / 1.03))
    for stage in range(4):  # issue 15: Hugging Face's GPT-2, on a processor with AVX2 alone and on any other
        ours, deepspeed = f"thalweg_{stage}", f"deepspeed_{stage}"
        for model, of_deepspeed, of_ddp in (("hf-69m", 4.0, 1.5), ("hf-small", 1.3, 1.15)):
            goals.append(PerformanceGoal(model, ours, deepspeed, "clock", of_deepspeed))
            goals.append(PerformanceGoal(model, ours, "ddp_fused", "clock", of_ddp))
            goals.append(PerformanceGoal(model, ours, deepspeed, "memory", 1 / 0.9))
    return goals


GOALS = _make_goals()


def measure_ratio(interleaved: InterleavedRun, goal: PerformanceGoal) -> float:
    """Return theirs over ours in the goal's metric."""
    if goal.metric == "clock":
        return interleaved.time_ratio(goal.ours, goal.peer)
    return interleaved.outcomes[goal.peer].peak_mib() / interleaved.outcomes[goal.ours].peak_mib()


def check_goals(interleaved: InterleavedRun) -> list[dict[str, object]]:
    """Return each goal of this run's model that could be measured, with its ratio and whether it is met."""
    if interleaved.world != 2 or interleaved.job.dtype != "fp32":
        return []
    return [
        {
            "ours": goal.ours,
            "peer": goal.peer,
            "metric": goal.metric,
            "least": round(goal.min_ratio, 3),
            "ratio": round(measure_ratio(interleaved, goal), 3),
            "met": measure_ratio(interleaved, goal) >= goal.min_ratio,
        }
        for goal in GOALS
        if goal.model == interleaved.job.name and interleaved.succeeded(goal.ours) and interleaved.succeeded(goal.peer)
    ]
