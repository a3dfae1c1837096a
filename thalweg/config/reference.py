"""The reference of all options, made from the schema: ``docs/config.md``."""

import json
from typing import Any

from thalweg.config.schema import Config
from thalweg.config.schema.base import get_section_type, list_options
from thalweg.config.suggestions import describe_type
from thalweg.config.support import get_support_status, ignored_options, is_under, unread_blocks, unsupported_options

_INTRODUCTION = """# Every option of the config

Made from the schema by `thalweg config --reference`; `thalweg config FILE` checks a file against it and says what each
option resolves to. The keys are DeepSpeed's, and some of Thalweg's own.
`"auto"` is taken everywhere. Keys called `_comment`, `//` or `#` are remarks.
"""


def config_reference() -> str:
    """Markdown: a table of options for each block."""
    blocks: dict[str, list[str]] = {}
    for path, field in list_options(Config):
        block, _, name = path.rpartition(".")
        if get_section_type(field.annotation) is not None and "[" not in path:
            blocks.setdefault(path, [])
            continue
        if any(is_under(path, unread) for unread in unread_blocks(Config)):
            continue
        default = "required" if field.is_required() else _shown(field.default)
        cells = (f"`{name}`", describe_type(field.annotation, field.metadata), default, _remark(path))
        blocks.setdefault(block, []).append(f"| {' | '.join(cells)} |")
    text = _INTRODUCTION
    for block, rows in blocks.items():
        if not rows:
            continue
        rows.sort(key=lambda row: "| no effect: " in row)
        text += f"\n## {f'`{block}`' if block else 'The top level'}\n\n"
        if about := _about(block):
            text += f"{about}\n\n"
        text += "\n".join(["| option | value | default | |", "| --- | --- | --- | --- |", *rows]) + "\n"
    unread = ", ".join(f"`{block}`" for block in unread_blocks(Config))
    return (
        f"{text}\n## Blocks that nothing reads\n\nTheir keys are known, so that a misspelt one is found; "
        f"switched on, each says what to do, or that it has no effect: {unread}.\n"
    )


def _about(block: str) -> str:
    field = next((field for path, field in list_options(Config) if path == block), None)
    section = None if field is None else get_section_type(field.annotation)
    return "" if section is None else " ".join((section.__doc__ or "").split("\n\n")[0].replace("``", "`").split())


def _remark(path: str) -> str:
    status = get_support_status(path, Config)
    if status == "no effect":
        reason = next((why for option, why in ignored_options(Config).items() if is_under(path, option)), "")
        return f"no effect: {reason}"
    words = "not built yet" if status == "later" else status
    return f"{words}: {unsupported_options(Config)[path][0]}" if path in unsupported_options(Config) else ""


def _shown(value: Any) -> str:
    is_json = isinstance(value, int | float | str | bool | list | tuple | dict)
    return "" if value is None else f"`{json.dumps(value if is_json else str(value))}`"
