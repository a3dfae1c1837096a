"""The resolved config in lines for a reader: what holds, where it comes from, what was without effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thalweg.config.errors import escape_surrogates, to_json_snippet
from thalweg.config.schema.base import Section, get_by_path, get_section_type, list_options, to_jsonable
from thalweg.config.support import ignored_options, is_under

if TYPE_CHECKING:
    from thalweg.config.schema import Provenance

ALWAYS_SHOWN = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "data_parallel_size",
    "zero_optimization.stage", "fp16.enabled", "bf16.enabled", "gradient_clipping", "optimizer.type",
    "scheduler.type", "activation_checkpointing.policy", "compile.enabled", "cpu_kernels",
)  # fmt: skip
DEEPSPEED_DEFAULTS = {"gradient_clipping": 1.0}  # what it does where a config says nothing, and Thalweg does not
_DEFAULT_REASONS = {
    "gradient_clipping": "no clipping, because no key asks for it (DeepSpeed 0.19 would clip at "
    f"{DEEPSPEED_DEFAULTS['gradient_clipping']})",
    "optimizer.type": "none in the config; hand one to initialize",
    "scheduler.type": "none in the config; the rate is constant",
}


def format_config(config: Section, provenance: Provenance) -> str:
    """One line per option that is set, derived or central; then renamed options and those without effect."""
    derived, ignored = dict(provenance.derived), _list_ignored(config, provenance)
    lines = ["config"]
    block = ""
    for path, value in _list_shown(config, provenance):
        head, _, name = path.rpartition(".")
        if head != block:
            block = head
            lines.append(f"  {head}" if head else "")
        indent, origin = "    " if head else "  ", ""
        if path in derived or path not in provenance.user_touched:
            origin = f"  # {derived.get(path) or _DEFAULT_REASONS.get(path, 'default')}"
        lines.append(f"{indent}{name} = {to_json_snippet(to_jsonable(value))}{origin}")
    if provenance.renamed:
        lines += ["  older spellings", *(f"    {note}" for note in provenance.renamed)]
    if ignored:
        lines.append("  accepted, no effect")
        lines += [f"    {path} = {_format_value(get_by_path(config, path))}: {why}" for path, why in ignored.items()]
    return escape_surrogates("\n".join(lines))


def summarize_config(config: Section, provenance: Provenance) -> str:
    """One line: the values that every run has, what the program set beside them, and what has no effect."""
    derived, ignored = dict(provenance.derived), _list_ignored(config, provenance)
    values = {
        path: f"{path} {to_json_snippet(to_jsonable(value))}"
        for path, value in _list_shown(config, provenance)
        if path not in ALWAYS_SHOWN or value not in (None, False)
    }
    notes = [f"{name}: {', '.join(given)}" for name, given in (
        ("filled in", [f"{values.pop(path)} ({why})" for path, why in derived.items() if path in values]),
        ("older spellings", provenance.renamed),
        ("without effect", [f"{p} {_format_value(get_by_path(config, p))} ({why})" for p, why in ignored.items()]),
    ) if given]  # fmt: skip
    return escape_surrogates("; ".join([f"config: {', '.join(values.values())}", *notes]))


def _list_ignored(config: Section, provenance: Provenance) -> dict[str, str]:
    """The options without effect that the user has set, and why each has none."""
    reasons = ignored_options(type(config))
    return {p: reasons[p] for p in reasons if p in provenance.user_touched}


def _list_shown(config: Section, provenance: Provenance) -> list[tuple[str, Any]]:
    rows, ignored = [], _list_ignored(config, provenance)
    free_form = ("optimizer.params", "scheduler.params")
    wanted = {*ALWAYS_SHOWN, *free_form, *provenance.user_touched}
    for path, field in list_options(type(config)):
        if path not in wanted:
            continue
        value = get_by_path(config, path)
        if path in free_form:
            rows += [(f"{path}.{name}", item) for name, item in (value or {}).items()]
        elif not isinstance(value, Section) and not (value is None and get_section_type(field.annotation)):
            rows.append((path, value))
    shown = (row for row in rows if not any(is_under(row[0], path) for path in ignored))
    return sorted(shown, key=lambda row: "." in row[0])


def _format_value(value: Any) -> str:
    return "{ ... }" if isinstance(value, Section) else to_json_snippet(to_jsonable(value))
