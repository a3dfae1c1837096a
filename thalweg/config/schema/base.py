"""The ground of the schema: one strict, frozen block of options and the types of its values.

Rules that hold for every option of every block:

- a value has the declared type; a text is never read as a number, nor 1 as true;
- a whole number may be written 5e8; a number may be written without a point;
- ``"auto"`` is taken at every option and stands in the tree until ``resolve`` replaces it (in place
  of a whole block it means the block's defaults).
  Declared types leave it out, since a resolved config holds none (except where ``"auto"`` is
  itself one of the choices, as in ``cpu_kernels``);
- ``null`` in place of a block means that the block is absent, in place of a derived value that it is left out;
- nothing can be changed after loading: blocks are frozen, lists are tuples, free-form
  mappings are ``FrozenDict``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

AUTO: Any = "auto"
UNSET: Any = None  # the default of an option whose "auto" is a choice of its own: the plan's
_INT64_LIMIT = 2**63


class FrozenDict(dict):
    """A mapping that refuses every change; reads, prints, pickles and unpacks as a dict."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("the config is immutable; load a changed copy of its source instead")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: Any) -> FrozenDict:
        return self


def freeze(value: Any) -> Any:
    """The same tree with ``FrozenDict`` for mappings and tuples for lists.

    Blocks in them have no path that a rule could name, so their ``"auto"`` becomes the default here.
    """
    if isinstance(value, dict):
        return FrozenDict({key: _fill_auto(freeze(item)) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_fill_auto(freeze(item)) for item in value)
    return value


def _fill_auto(item: Any) -> Any:
    if not isinstance(item, Section):
        return item
    return replace_by_path(item, dict(iter_auto_options(item)))


def coerce_int(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= _INT64_LIMIT):
        raise PydanticCustomError("whole", "a whole number of 64 bits")
    return value


def to_str_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else to_tuple(value)


def to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _to_lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def canonical_dtype(value: Any) -> Any:
    """The schema's name of a dtype, where ``value`` is one of its other names."""
    return DTYPE_ALIASES.get(value.lower().removeprefix("torch."), value) if isinstance(value, str) else value


DTYPE_ALIASES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
}  # fmt: skip

Int64 = Annotated[int, BeforeValidator(coerce_int)]
NonNegativeInt = Annotated[int, BeforeValidator(coerce_int), Field(ge=0)]
PositiveInt = Annotated[int, BeforeValidator(coerce_int), Field(ge=1)]
NonNegativeFloat = pydantic.NonNegativeFloat
PositiveFloat = pydantic.PositiveFloat
UnitFloat = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
StrTuple = Annotated[tuple[str, ...], BeforeValidator(to_str_tuple)]
IntTuple = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(to_tuple)]
PositiveIntTuple = Annotated[tuple[PositiveInt, ...], BeforeValidator(to_tuple)]
Betas = Annotated[tuple[DecayRate, DecayRate], BeforeValidator(to_tuple)]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(canonical_dtype)]
AnyTuple = Annotated[tuple[Any, ...], BeforeValidator(to_tuple)]
LowerCase = BeforeValidator(_to_lower)
AnyDict = Annotated[dict[str, Any], Field(strict=True)]


def ignored(default: Any, why: str) -> Any:
    """An option that means nothing on FSDP2: it is accepted, and listed once with the reason where it was set."""
    return Field(default, json_schema_extra={"ignored": why})


def unsupported(default: Any, hint: str, on: Callable[[Any], bool] | None = None, status: str = "not offered") -> Any:
    """A switch that, where it is ``on`` (else: not at its default), is an error that says what to do instead.

    ``status``: ``"not offered"``, or ``"later"`` of work that is still to come.
    """
    notes: dict[str, Any] = {"unsupported": hint, "on": on or (lambda value: value != default), "status": status}
    return Field(default, json_schema_extra=notes)


later = partial(unsupported, status="later")


class Section(BaseModel):
    """A block of options; every field is an option of that name in the JSON."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _handle_auto_and_null(cls, value: Any, handler: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        block = get_section_type(field.annotation) is not None or any(
            dict in (option, get_origin(option)) for option in union_members(field.annotation)
        )
        if isinstance(value, str) and value == AUTO:
            return field.default if block else value
        may_be_left_out = block or field.default in (AUTO, UNSET)
        if value is None and may_be_left_out and NoneType not in union_members(field.annotation):
            return field.default
        return freeze(handler(value))


def get_section_type(annotation: Any) -> type[Section] | None:
    """The block class that an annotation such as ``ParamOffloadPolicy | None`` names, if it names one."""
    return next((one for one in union_members(annotation) if isinstance(one, type) and issubclass(one, Section)), None)


def union_members(annotation: Any) -> Iterator[Any]:
    """The members of a union, seen through ``Annotated``; any other type by itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from union_members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for option in get_args(annotation):
            yield from union_members(option)
    else:
        yield annotation


def literal_choices(annotation: Any) -> tuple[Any, ...]:
    """The literal values that an annotation allows, in order."""
    literals = (get_args(option) for option in union_members(annotation) if get_origin(option) is Literal)
    return tuple(choice for group in literals for choice in group)


@cache
def list_options(section: type[Section]) -> tuple[tuple[str, FieldInfo], ...]:
    """Every option below ``section`` as dotted path and field, depth first, blocks before their members."""
    result: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        result.append((name, field))
        inner = get_section_type(field.annotation)
        if inner:
            result += [(f"{name}.{path}", below) for path, below in list_options(inner)]
    return tuple(result)


def iter_auto_options(section: Section) -> Iterator[tuple[str, Any]]:
    """Each option below ``section`` whose value is still ``"auto"``, with its default."""
    for path, field in list_options(type(section)):
        value = get_by_path(section, path)
        if isinstance(value, str) and value == AUTO and AUTO not in literal_choices(field.annotation):
            yield path, field.default


def get_by_path(section: Any, path: str) -> Any:
    """The value at a dotted path; ``None`` where a block on the way is absent or still ``"auto"``."""
    for name in path.split("."):
        if isinstance(section, Section):
            section = getattr(section, name)
        elif isinstance(section, dict):
            section = section.get(name)
        else:
            return None
    return section


_Section = TypeVar("_Section", bound=Section)


def replace_by_path(section: _Section, values: dict[str, Any]) -> _Section:
    """A copy with the given dotted paths replaced; the values are taken as they are."""
    direct: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            direct[head] = value
    for head, inner in nested.items():
        current = direct.get(head, getattr(section, head))
        if isinstance(current, Section):
            direct[head] = replace_by_path(current, inner)
        else:
            direct[head] = FrozenDict({**current, **inner})
    return section.model_copy(update=direct)


def to_jsonable(value: Any) -> Any:
    """The JSON form of a block, mapping, tuple or scalar."""
    if isinstance(value, Section):
        return {name: to_jsonable(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    return value
