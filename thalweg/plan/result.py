"""The result of a plan: bytes, traffic and seconds; as JSON, and as a table for people (the page is ``html.py``)."""

import csv
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thalweg.config import Config
from thalweg.observe.table import format_table
from thalweg.plan.memory.rank_memory import MemoryBreakdown, MemorySample
from thalweg.utils.formatting import format_bytes, format_seconds

with Path(__file__).with_name("spec").joinpath("labels.csv").open(encoding="utf-8", newline="") as _file:
    LABELS = {row["label"]: row for row in csv.DictReader(_file)}  # what bytes are for, and their colours
# Fields of a plan that its JSON has in another form, or not at all.
_TOLD_OTHERWISE = ("host_limit", "links", "time_breakdown", "timeline", "config", "disk_limit", "ranks_per_node")


@dataclass
class Plan:
    """What a run will need: bytes of each rank, bytes over each link, seconds of a step.

    ``fits`` is None where no limit is known.  ``suggestion``: the changes to the config (keys
    as in a ``ds_config.json``) of the cheapest run that fits, empty if this one is it, None if
    none was found or asked for.  ``tiers``: bytes beyond ``per_rank``: ``host`` and ``disk`` of one rank,
    ``disk_read_bytes`` and ``disk_written_bytes`` in a step.  ``published``: what the literature's formulas
    give for the same run (see ``formulas.py``), in bytes.  ``assumptions``: what neither
    the config nor the model says.  ``warnings``: what makes ranks hold more than their share.
    ``not_counted``: options that are on and whose effect
    is not in these numbers; the bytes are then a bound, and ``fits`` is never False.
    """

    per_rank: MemoryBreakdown
    limit: int | None
    per_host: int
    host_limit: int | None
    traffic: dict[str, int]
    links: dict[str, int]
    tiers: dict[str, int]
    step_seconds: float
    time_breakdown: dict[str, float]
    bottleneck: str
    num_parameters: int
    tokens_per_step: int
    world_size: int
    timeline: list[MemorySample] = field(default_factory=list)
    suggestion: dict[str, Any] | None = None
    reasons: list[str] = field(default_factory=list)
    not_counted: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    published: dict[str, float] = field(default_factory=dict)
    model: str = ""
    config: Config | None = None
    disk_limit: int | None = None
    ranks_per_node: int = 1

    @property
    def fits(self) -> bool | None:
        """Whether every rank stays within its device, the ranks of a host together within it and its disk."""
        excess = self._excess_by_resource
        within = max(excess.values()) <= 0 if excess else None
        return within if within or not self.not_counted else None

    @property
    def exceeded_resource(self) -> str:
        """What is exceeded the most, ``"memory"`` or ``"disk"``; of a run that fits, ``"memory"``."""
        excess = self._excess_by_resource
        if "disk" in excess and excess["disk"] > max(0, excess.get("memory", 0)):
            return "disk"
        return "memory"

    @property
    def excess_bytes(self) -> int:
        """By how much what :attr:`exceeded_resource` names is exceeded (negative: what is to spare)."""
        return self._excess_by_resource.get(self.exceeded_resource, 0)

    @property
    def _excess_by_resource(self) -> dict[str, int]:
        """Bytes beyond each limit that is known (negative: what is to spare)."""
        memory, excess = [], {}
        if self._uses_host_memory:
            memory.append(self.per_host - (self.host_limit or 0))
        if self.limit is not None and (not self._uses_host_memory or self.tiers.get("host")):
            memory.append(self.per_rank.total - self.limit)
        if memory:
            excess["memory"] = max(memory)
        if self.disk_limit is not None and self.tiers.get("disk"):
            excess["disk"] = self.tiers["disk"] * self.ranks_per_node - self.disk_limit
        return excess

    @property
    def _uses_host_memory(self) -> bool:
        """Whether something is held in a host's memory, whose size is known."""
        return self.per_host > 0 and self.host_limit is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the keys that `thalweg plan --json` prints."""
        told = {name: value for name, value in vars(self).items() if name not in _TOLD_OTHERWISE}
        return {
            **told,
            "fits": self.fits,
            "per_rank": {**asdict(self.per_rank), "total": self.per_rank.total},
            "per_host": {"total": self.per_host, "limit": self.host_limit},
            "traffic": {**self.traffic, "total": sum(self.traffic.values()), "links": self.links},
            "step_parts": self.time_breakdown,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.num_parameters / 1e6:,.1f} million parameters, "
            f"{self.world_size} rank{'s' if self.world_size > 1 else ''}, {self.tokens_per_step:,} tokens a step",
            "",
            format_byte_table(self.per_rank, self.limit, self.per_host),
            "",
            f"step: {format_seconds(self.step_seconds)}, limited by {self.bottleneck} ("
            + ", ".join(f"{name} {format_seconds(value)}" for name, value in self.time_breakdown.items())
            + ")",
        ]
        if self.traffic:
            sent = ", ".join(f"{kind} {format_bytes(value)}" for kind, value in self.traffic.items())
            links = ", ".join(f"{link} {format_bytes(value)}" for link, value in self.links.items())
            lines.append(f"sent by each rank in a step: {sent}; by link: {links}")
        if self.tiers.get("host") or self.tiers.get("disk"):
            words = {"host": "on the host", "disk": "on disk", "disk_read": "read", "disk_written": "written"}
            offloaded = [f"{words[key]} {format_bytes(value)}" for key, value in self.tiers.items() if value]
            lines.append(f"offloaded per rank (read and written: in a step): {', '.join(offloaded)}")
        if self.assumptions:
            lines.append(f"planned with: {'; '.join(self.assumptions)}")
        if self.not_counted:
            lines.append(f"not modelled, so these figures are upper bounds: {', '.join(self.not_counted)}")
        lines += [f"warning: {line}" for line in self.warnings]
        lines.append(format_verdict(self))
        return "\n".join(lines)


def format_byte_table(per_rank: MemoryBreakdown, limit: int | None = None, per_host: int = 0) -> str:
    """Bytes of one rank by what they are for."""
    parts = asdict(per_rank).items()
    rows = [[name, format_bytes(value), LABELS[name]["description"]] for name, value in parts if value]
    rows.append(["total", format_bytes(per_rank.total), "of one rank at its peak"])
    if limit is not None:
        rows.append(["limit", format_bytes(limit), "of one rank"])
    if per_host and per_host != per_rank.total:
        rows.append(["host", format_bytes(per_host), "of all its ranks, what they share counted once"])
    return format_table(["bytes a rank", "", "for"], rows)


def format_verdict(plan: Plan) -> str:
    """One line: fits or not, and what would."""
    if plan.fits is None and plan.not_counted:
        return "fits: unknown, as some memory-saving options are not modelled"
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
    return ", ".join(f'"{key}": {json.dumps(value)}' for key, value in changes.items())
