"""Lists every option of the config: path, type, default and fate.

The list is committed; regenerate it with

    python -m tests.repo.config_listing
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

from thalweg.config.errors import to_json_snippet
from thalweg.config.schema import Config
from thalweg.config.schema.base import Section, get_section_type, list_options, to_jsonable
from thalweg.config.schema.optimizer import OPTIMIZERS
from thalweg.config.schema.scheduler import SCHEDULES
from thalweg.config.suggestions import describe_type
from thalweg.config.support import get_support_status

LISTING_FILE = Path(__file__).with_name("config_schema.txt")


def render_listing() -> str:
    """One line for each option, in the order of the schema, then the parameters by type."""
    lines = ["# path | type | default | fate; regenerate: python -m tests.repo.config_listing"]
    lines += [
        _line(path, field, get_support_status(path, Config))
        for path, field in list_options(Config)
        if not _is_block(field)
    ]
    lines += _nested_options()
    for block, table in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)):
        for name, model in table.items():
            for key, field in model.model_fields.items():
                lines.append(_line(f"{block}.params.{key} [{name}]", field, "read"))
    return "\n".join(lines) + "\n"


def _is_block(field: Any) -> bool:
    return get_section_type(field.annotation) is not None


def _line(path: str, field: Any, fate: str) -> str:
    kind = describe_type(field.annotation, field.metadata)
    return f"{path} | {kind} | {to_json_snippet(to_jsonable(field.default))} | {fate}"


def _nested_options() -> list[str]:
    """The options of blocks that stand in mappings, which have no path of their own."""
    lines = []
    for outer, field in list_options(Config):
        if get_origin(field.annotation) is dict and issubclass(get_args(field.annotation)[1], Section):
            for path, inner in list_options(get_args(field.annotation)[1]):
                if not _is_block(inner):
                    lines.append(_line(f"{outer}.*.{path}", inner, get_support_status(outer, Config)))
    return lines


if __name__ == "__main__":
    LISTING_FILE.write_text(render_listing(), encoding="utf-8")
