"""The resolved config in lines for a reader: what holds, where it comes from, what was without effect."""

from __future__ import annotations

from typing import Any

from thalweg.config.check import no_effect_notes
from thalweg.config.fates import is_below
from thalweg.config.problems import printable, show
from thalweg.config.schema_base import Section, options, plain, section_of, value_at

ALWAYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "data_parallel_size",
    "zero_optimization.stage",
    "fp16.enabled",
    "bf16.enabled",
    "gradient_clipping",
    "optimizer.type",
    "scheduler.type",
    "activation_checkpointing.policy",
    "compile.enabled",
    "cpu_kernels",
)
_WHY_DEFAULT = {
    "gradient_clipping": "no clipping, because no key asks for it (DeepSpeed 0.19 would clip at 1.0)",
    "optimizer.type": "none in the config; hand one to initialize",
    "scheduler.type": "none in the config; the rate is constant",
}


def describe(config: Section, provenance: Any) -> str:
    """One line per option that is set, derived or central; then renamed options and those without effect."""
    filled = dict(provenance.filled)
    idle = dict(no_effect_notes(provenance.given))
    lines = ["config"]
    block = ""
    for path, value in _shown(config, provenance):
        if any(is_below(path, one) for one in idle):
            continue
        head, _, name = path.rpartition(".")
        if head != block:
            block = head
            lines.append(f"  {head}" if head else "")
        indent = "    " if head else "  "
        lines.append(f"{indent}{name} = {show(plain(value))}{_origin(path, provenance, filled)}")
    if provenance.notes:
        lines += ["  older spellings", *(f"    {note}" for note in provenance.notes)]
    if idle:
        lines.append("  accepted, no effect")
        lines += [f"    {path} = {_short(value_at(config, path))}: {why}" for path, why in idle.items()]
    return printable("\n".join(lines))


def _shown(config: Section, provenance: Any) -> list[tuple[str, Any]]:
    rows = []
    for path, field in options(type(config)):
        value = value_at(config, path)
        if isinstance(value, Section) or (value is None and section_of(field.annotation)):
            continue
        if path in ("optimizer.params", "scheduler.params"):
            rows += [(f"{path}.{name}", item) for name, item in (value or {}).items()]
        elif path in ALWAYS or any(is_below(one, path) for one in provenance.given):
            rows.append((path, value))
    return sorted(rows, key=lambda row: "." in row[0])


def _origin(path: str, provenance: Any, filled: dict[str, str]) -> str:
    if path in filled:
        return f"  # {filled[path]}"
    if any(is_below(one, path) for one in provenance.given):
        return ""
    return f"  # {_WHY_DEFAULT.get(path, 'default')}"


def _short(value: Any) -> str:
    return "{ ... }" if isinstance(value, Section) else show(plain(value))
