"""The plan as JSON and as a table for people; the page is in ``html.py``."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from thalweg.observe.table import format_table
from thalweg.plan.memory.rank_memory import MemoryBreakdown
from thalweg.utils.formatting import format_bytes, format_seconds

if TYPE_CHECKING:
    from thalweg.plan.api import Plan

LABEL_DESCRIPTIONS = {
    "parameters": "this rank's shard, in the master dtype",
    "gradients": "reduced, as the optimizer reads them",
    "optimizer": "the optimizer's state",
    "gathered": "unsharded parameters",
    "buffers": "communication, and the model's buffers",
    "activations": "what the backward pass needs, temporaries, unreduced gradients",
    "logits": "results as wide as the vocabulary",
    "fragmentation": "holes of the allocator",
    "process": "interpreter, torch and libraries",
}


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The object of `thalweg plan --json`."""
    breakdown = {item.name: getattr(plan.per_rank, item.name) for item in fields(MemoryBreakdown)}
    return {
        "model": plan.model,
        "num_parameters": plan.num_parameters,
        "world_size": plan.world_size,
        "per_rank": {**breakdown, "total": plan.per_rank.total},
        "limit": plan.limit,
        "per_host": {"total": plan.per_host, "limit": plan.host_limit},
        "fits": plan.fits,
        "tiers": plan.tiers,
        "not_counted": plan.not_counted,
        "published": plan.published,
        "traffic": {**plan.traffic, "total": sum(plan.traffic.values()), "links": plan.links},
        "step_seconds": plan.step_seconds,
        "step_parts": plan.time_breakdown,
        "bottleneck": plan.bottleneck,
        "tokens_per_step": plan.tokens_per_step,
        "suggestion": plan.suggestion,
        "reasons": plan.reasons,
    }


def plan_to_text(plan: Plan) -> str:
    """The plan in readable lines."""
    lines = [
        f"{plan.model}: {plan.num_parameters / 1e6:,.1f} million parameters, "
        f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}, {plan.tokens_per_step:,} tokens a step",
        "",
        format_byte_table(plan.per_rank, plan.limit, plan.per_host),
        "",
        f"step: {format_seconds(plan.step_seconds)}, limited by {plan.bottleneck} ("
        + ", ".join(f"{name} {format_seconds(value)}" for name, value in plan.time_breakdown.items())
        + ")",
    ]
    if plan.traffic:
        sent = ", ".join(f"{kind} {format_bytes(value)}" for kind, value in plan.traffic.items())
        links = ", ".join(f"{link} {format_bytes(value)}" for link, value in plan.links.items())
        lines.append(f"sent by each rank in a step: {sent}; by link: {links}")
    if plan.tiers.get("host") or plan.tiers.get("disk"):
        words = {"host": "on the host", "disk": "on disk", "disk_read": "read", "disk_written": "written"}
        offloaded = [f"{words[key]} {format_bytes(value)}" for key, value in plan.tiers.items() if value]
        lines.append(f"outside of it, of each rank (read and written: in a step): {', '.join(offloaded)}")
    if plan.not_counted:
        lines.append(f"NOT COUNTED, so that these bytes are a bound: {', '.join(plan.not_counted)}")
    lines.append(format_verdict(plan))
    return "\n".join(lines)


def format_byte_table(per_rank: MemoryBreakdown, limit: int | None = None, per_host: int = 0) -> str:
    """Bytes of one rank by what they are for."""
    rows = []
    for item in fields(MemoryBreakdown):
        value = getattr(per_rank, item.name)
        if value:
            rows.append([item.name, format_bytes(value), LABEL_DESCRIPTIONS[item.name]])
    rows.append(["total", format_bytes(per_rank.total), "of one rank at its peak"])
    if limit is not None:
        rows.append(["limit", format_bytes(limit), "of one rank"])
    if per_host and per_host != per_rank.total:
        rows.append(["host", format_bytes(per_host), "of all its ranks, what they share counted once"])
    return format_table(["bytes a rank", "", "for"], rows)


def format_verdict(plan: Plan) -> str:
    """One line: fits or not, and what would."""
    if plan.fits is None and plan.not_counted:
        return "fits: unknown, as not everything that makes it smaller is counted"
    if plan.fits is None:
        return "fits: unknown, as no limit was given"
    if plan.fits:
        return f"fits: yes, with {format_bytes(-plan.excess_bytes)} to spare"
    excess = f"{format_bytes(plan.excess_bytes)} too much"
    if plan.exceeded_resource == "disk":
        per_rank, free = format_bytes(plan.tiers["disk"]), format_bytes(plan.disk_limit or 0)
        excess += f" for the disk, which has {free} free for {plan.ranks_per_node} x {per_rank}"
    if plan.suggestion:
        return f"fits: NO, {excess}; this fits: {format_changes(plan.suggestion)}"
    return f"fits: NO, {excess}, and no configuration that was tried fits"


def format_changes(changes: dict[str, Any]) -> str:
    """Changes to a config in one line."""
    import json

    return ", ".join(f'"{key}": {json.dumps(value)}' for key, value in changes.items())
