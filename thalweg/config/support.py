"""What becomes of each option that is not simply read, as the schema says beside it.

An ``unsupported`` switch that is on is an error that says what to do; it is of work that is still to come (``later``)
or will not (``not offered``).  An ``ignored`` option means nothing on FSDP2: it is accepted, and listed once with the
reason.  An option that is neither, and not in an ``UnreadBlock``, is read by the program.  ``get_support_status`` names
which it is, and the frozen list ``tests/repo/config_schema.txt`` shows it for every option.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from thalweg.config.schema.base import Section, get_section_type, list_options
from thalweg.config.schema.unsupported import UnreadBlock


@cache
def unsupported_options(config: type[Section]) -> dict[str, tuple[str, Callable[[Any], bool], str]]:
    """Of each switch that is not built: what to do instead, whether a value means that it is on, its status."""
    keys = ("unsupported", "on", "status")
    return {path: tuple(notes[key] for key in keys) for path, notes in _iter_notes(config) if "unsupported" in notes}


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
    """``read``, ``no effect``, or ``later`` or ``not offered`` (an unsupported switch or what it rules)."""
    switches, ignored = unsupported_options(config), ignored_options(config)
    block = next((block for block in unread_blocks(config) if is_under(path, block)), "")
    switch = path if path in switches else f"{block}.enabled"
    if path not in switches and (switch in ignored or any(is_under(path, one) for one in ignored)):
        return "no effect"
    return switches[switch][2] if switch in switches else "read"


def is_under(path: str, block: str) -> bool:
    """Whether ``path`` is ``block`` or lies in it."""
    return path == block or path.startswith((f"{block}.", f"{block}["))
