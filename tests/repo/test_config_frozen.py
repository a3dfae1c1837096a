"""The schema is frozen: adding, renaming or retyping an option is a reviewed line of a committed file."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import thalweg
from tests.repo.config_listing import LISTING_FILE, render_listing
from thalweg.config import Config, support
from thalweg.config.schema.base import AUTO, Section, get_section_type, later, list_options, literal_choices
from thalweg.config.support import get_support_status, ignored_options, is_under, unread_blocks, unsupported_options

IGNORED, UNSUPPORTED = ignored_options(Config), unsupported_options(Config)
UNSUPPORTED_BLOCKS = unread_blocks(Config)
CURE = "run `python -m tests.repo.config_listing` and review the difference"
PATHS = {path for path, _ in list_options(Config)}


def test_schema_is_the_committed_one() -> None:
    committed = LISTING_FILE.read_text(encoding="utf-8").splitlines()
    current = render_listing().splitlines()
    gone = sorted(set(committed) - set(current))
    new = sorted(set(current) - set(committed))
    assert current == committed, f"{CURE}\ngone:\n" + "\n".join(gone) + "\nnew:\n" + "\n".join(new)


def test_a_changed_default_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config.model_fields["gradient_clipping"], "default", 1.0)
    assert render_listing() != LISTING_FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*IGNORED, *UNSUPPORTED_BLOCKS, *UNSUPPORTED])
def test_tables_name_options_that_exist(path: str) -> None:
    assert path in PATHS


def test_no_option_has_two_fates() -> None:
    assert not UNSUPPORTED.keys() & IGNORED.keys()


# Work that is still to come: checkpoints that lie apart, and the search before a run.
STILL_TO_COME = ("autotuning", "checkpoint.use_node_local_storage")


def _later_elsewhere() -> set[str]:
    """Options that are still to come, by the committed list, beside those named above."""
    rows = (line.split(" | ") for line in render_listing().splitlines() if not line.startswith("#"))
    later = {row[0] for row in rows if row[-1] == "later"}
    assert len(later) > 20, "the list has another form"
    return {path for path in later if not any(is_under(path, block) for block in STILL_TO_COME)}


def test_nothing_else_is_still_to_come() -> None:
    assert not _later_elsewhere()


def test_another_option_that_is_still_to_come_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    field = dict(list_options(Config))["graph_harvesting"]
    monkeypatch.setattr(field, "json_schema_extra", later(False, "wait").json_schema_extra)
    for table in (ignored_options, unsupported_options):
        monkeypatch.setattr(support, table.__name__, table.__wrapped__)
    assert _later_elsewhere() == {"graph_harvesting"}


def test_every_block_with_a_switch_is_listed_as_not_built() -> None:
    """A block whose only use is not built must not be printed as if its options were read."""
    for path in UNSUPPORTED:
        block, _, name = path.rpartition(".")
        if name == "enabled":
            section = get_section_type(dict(list_options(Config))[block].annotation)
            assert section is not None
            found = {get_support_status(f"{block}.{key}", Config) for key in section.model_fields}
            assert found == {UNSUPPORTED[path][2]}, block
            assert any(path.startswith(one) for one in UNSUPPORTED_BLOCKS), path


def test_every_default_has_its_declared_type() -> None:
    for path, field in list_options(Config):
        block, _, _ = path.rpartition(".")
        if field.default == AUTO and AUTO not in literal_choices(field.annotation):
            continue
        holder = Config if not block else get_section_type(dict(list_options(Config))[block].annotation)
        assert holder is not None
        if not get_section_type(field.annotation) and not field.is_required():
            name = path.rpartition(".")[2]
            built = holder.model_validate({**_required(holder), name: _loose(field.default)})
            assert getattr(built, name) == field.default, path


def _required(section: type[Section]) -> dict[str, str]:
    return {name: "x" for name, field in section.model_fields.items() if field.is_required()}


def _loose(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_every_option_that_counts_as_read_is_named_outside_the_config() -> None:
    """An option that no room mentions, nor a block's own property, would be ignored in silence."""
    root = Path(thalweg.__file__).parent
    readers = [p for p in root.rglob("*.py") if root / "config" not in p.parents or p.name == "batch_size.py"]
    sources = [path.read_text(encoding="utf-8") for path in readers]
    blocks = [section for _, field in list_options(Config) if (section := get_section_type(field.annotation))]
    properties = [value.fget for block in blocks for value in vars(block).values() if isinstance(value, property)]
    text = "\n".join([*sources, *(inspect.getsource(one) for one in properties if one is not None)])
    named = {name for pair in re.findall(r"""\.(\w+)|["'](\w+)(?=["'])""", text) for name in pair}
    silent = {
        path
        for path, field in list_options(Config)
        if get_support_status(path, Config) == "read"
        and not get_section_type(field.annotation)
        and not named.issuperset(path.split("."))
    }
    assert not silent, f"read by nobody: {sorted(silent)}; read them, or say why not in config/support.py"
