"""Blocks that nothing reads, as DeepSpeed names them: work that is still to come or will not, and what has no use here.

``unread.toml`` lists them, and the options without effect of the other blocks.  A config that carries such a block
switched off is accepted; a key that the block does not have is an error as everywhere, and so is a switch that is on.
The default of an option says what it takes, see :func:`_to_field`.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_origin

from pydantic import BeforeValidator, Field, create_model
from pydantic.fields import FieldInfo

from thalweg.config.schema.base import (
    AnyDict,
    FrozenDict,
    Int64,
    NonNegativeFloat,
    NonNegativeInt,
    Section,
    ignored,
    later,
    to_str_tuple,
    unsupported,
)

_TABLE = tomllib.loads(Path(__file__).parents[1].joinpath("unread.toml").read_text(encoding="utf-8"))
UNUSABLE_TYPES: dict[str, dict[str, str]] = _TABLE["unusable"]
_TYPES: dict[type, Any] = {bool: bool, int: NonNegativeInt, float: NonNegativeFloat, str: str, type(None): Any}


class UnreadBlock(Section):
    """A block whose options nothing reads."""


class Typed(NamedTuple):
    """An option whose default does not say what it takes."""

    annotation: Any
    default: Any


def _to_field(option: Any) -> tuple[Any, Any]:
    """(type, default): a value stands for its type, a tuple for a choice (its first is the default), a list for any
    list, a block (or a mapping to blocks) for itself; None is the default of an option that takes anything."""
    if isinstance(option, Typed):
        return option
    if isinstance(option, FieldInfo):
        annotation, default = _to_field(option.default)
        return annotation, Field(default, json_schema_extra=option.json_schema_extra)
    if isinstance(option, type) and issubclass(option, Section):
        return option, option()
    if get_origin(option) is dict or option == {}:
        return option or AnyDict, FrozenDict()
    if isinstance(option, tuple):
        return Literal.__getitem__(option), option[0]  # type: ignore[attr-defined]
    if isinstance(option, list):
        return Annotated[tuple[Any, ...], BeforeValidator(to_str_tuple)], tuple(option)
    return Int64 if option == -1 else _TYPES[type(option)], option


def block(base: type[Section] | tuple[type[Section], ...] = UnreadBlock, **options: Any) -> type[Section]:
    """A block of these options."""
    fields: dict[str, Any] = {key: _to_field(option) for key, option in options.items()}
    return create_model("Block", __base__=base, **fields)


def _from_table(option: Any) -> Any:
    """An option as ``unread.toml`` spells it."""
    if isinstance(option, dict):
        return block(**{key: _from_table(inner) for key, inner in option.items()})
    if isinstance(option, list) and isinstance(option[0], str):
        return tuple(option)
    return None if option == "any" else option


def without_effect(path: str) -> type[Section]:
    """The options without effect of the block at ``path`` (``"top"``: of the whole config), as a base for it."""
    reasons = _TABLE["options"][path].items()
    return block(base=Section, **{k: ignored(_from_table(v), why) for why, given in reasons for k, v in given.items()})


def _absent(section: type[Section]) -> Typed:
    """A block that is there only where it is written."""
    return Typed(section | None, None)


def _unread_block(options: dict[str, Any], hint: str = "", why: str = "") -> type[Section]:
    """What to do instead where one is enabled, or why that has no effect."""
    given = {key: _from_table(option) for key, option in options.items()}
    given |= {key: _absent(option) for key, option in given.items() if isinstance(option, type)}
    enabled = ignored(False, why) if why else later(False, f"{_REMOVE_BLOCK}; {hint}")
    return block(enabled=enabled, **given)


_REMOVE_BLOCK = "remove the block or set enabled to false"
_QUANTIZE = (
    'init_inference(quantization="int8" or "int4") serves weights in few bits, and '
    "thalweg.adapt.quantized_weight.quantize_linears keeps frozen ones so while others train"
)
# fmt: off
UNREAD_BLOCKS = block(
    without_effect("top"),
    weight_quantization=_absent(block(
        enabled=unsupported(True, f"{_REMOVE_BLOCK}; {_QUANTIZE}", on=bool), num_bits=8,
        q_type=("symmetric", "asymmetric"), q_groups=1, quantized_initialization={}, post_init_quant={})),
    **{name: _unread_block(**table) for name, table in _TABLE["blocks"].items()},
)
# fmt: on
