"""The speed and memory that Thalweg promises on one host with two ranks, as checks on a duel.

Each goal names a model, a contestant, a peer, and the least ratio (theirs over ours) that keeps the
promise.  A goal whose contestants did not run is left out, never counted as met.
"""

from __future__ import annotations

from dataclasses import dataclass

from _duel import Duel


@dataclass(frozen=True)
class Goal:
    """`peer` over `ours` must be at least `least` in `metric` (clock or memory) on model `model`."""

    model: str
    ours: str
    peer: str
    metric: str
    least: float


def _goals() -> list[Goal]:
    goals = []
    for stage in range(4):
        for kind in ("thalweg", "thalweg_torch"):
            ours, against_ddp = f"{kind}_{stage}", 1 / 1.05 if stage == 3 else 1.0
            goals.append(Goal("69m", ours, f"deepspeed_{stage}", "clock", 2.2))
            goals.append(Goal("small", ours, f"deepspeed_{stage}", "clock", 1.0))
            goals.append(Goal("69m", ours, "ddp_fused", "clock", against_ddp))
            goals.append(Goal("small", ours, "ddp_fused", "clock", against_ddp))
            goals.append(Goal("small", ours, f"deepspeed_{stage}", "memory", 1.0))
            goals.append(Goal("69m", ours, f"deepspeed_{stage}", "memory", 1.0))
            if stage:
                goals.append(Goal("69m", ours, "ddp_fused", "memory", 1.0))
        goals.append(Goal("small", f"thalweg_{stage}", "ddp_fused", "clock", 1.4))
    for stage in (2, 3):
        for model in ("small", "69m"):
            goals.append(Goal(model, f"thalweg_torch_{stage}", f"fsdp2_comm_{stage}", "clock", 1 / 1.03))
    return goals


GOALS = _goals()


def ratio(duel: Duel, goal: Goal) -> float:
    """Return theirs over ours in the goal's metric."""
    if goal.metric == "clock":
        return duel.relative(goal.ours, goal.peer)
    return duel.outcomes[goal.peer].peak_mib() / duel.outcomes[goal.ours].peak_mib()


def check(duel: Duel) -> list[dict[str, object]]:
    """Return each goal of this duel's model that could be measured, with its ratio and whether it is met."""
    if duel.world != 2 or duel.job.dtype != "fp32":
        return []
    return [
        {
            "ours": goal.ours,
            "peer": goal.peer,
            "metric": goal.metric,
            "least": round(goal.least, 3),
            "ratio": round(ratio(duel, goal), 3),
            "met": ratio(duel, goal) >= goal.least,
        }
        for goal in GOALS
        if goal.model == duel.job.name and duel.usable(goal.ours) and duel.usable(goal.peer)
    ]
