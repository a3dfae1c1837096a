"""What becomes of each option that is not simply read, as the schema says beside it.

An ``unsupported`` switch belongs to work that is still to come: on, it is an error that says what to do.  An
``ignored`` option means nothing on FSDP2: it is accepted, and listed once with the reason.  An option that is neither,
and not in an ``UnreadBlock``, is read by the program.  ``get_support_status`` names which it is, and the frozen list
``tests/repo/config_schema.txt`` shows it for every option.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from thalweg.config.schema.base import Section, get_section_type, list_options
from thalweg.config.schema.unsupported import UnreadBlock


@cache
def unsupported_options(config: type[Section]) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Of each switch of later work: what to do instead, and whether a value means that it is on."""
    return {path: (notes["unsupported"], notes["on"]) for path, notes in _iter_notes(config) if "unsupported" in notes}


@cache
def ignored_options(config: type[Section]) -> dict[str, str]:
    """Why each option is without effect that is."""
    return {path: notes["ignored"] for path, notes in _iter_notes(config) if "ignored" in notes}


@cache
def unread_blocks(config: type[Section]) -> tuple[str, ...]:
    """The blocks that nothing reads."""
    sections = ((path, get_section_type(field.annotation)) for path, field in list_options(config))
    return tuple(path for path, section in sections if section and issubclass(section, UnreadBlock))


def _iter_notes(config: type[Section]) -> Any:
    return ((path, field.json_schema_extra or {}) for path, field in list_options(config))


def get_support_status(path: str, config: type[Section]) -> str:
    """``read``, ``later`` (an unsupported switch or what it rules) or ``no effect``."""
    if path in unsupported_options(config) and path != "optimizer.type":
        return "later"
    if any(is_under(path, block) for block in ignored_options(config)):
        return "no effect"
    return "later" if any(is_under(path, block) for block in unread_blocks(config)) else "read"


def is_under(path: str, block: str) -> bool:
    """Whether ``path`` is ``block`` or lies in it."""
    return path == block or path.startswith((f"{block}.", f"{block}["))
