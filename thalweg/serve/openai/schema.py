"""What the endpoints accept, as pydantic models: OpenAI's fields, and those that vLLM added to them.

Types are strict (no "7" for 7), numbers finite, unknown fields refused with the nearest known one: a typing
error must not pass as a default.  Fields that change nothing here are accepted and named in ``IGNORED``.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from thalweg.serve.errors import ApiError, BadRequest

IGNORED_FIELDS = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "reasoning_effort",
        "verbosity",
        "modalities",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
    ]
)
"""Fields of OpenAI's that are accepted and change nothing."""
_NULL_ONLY_FIELDS = frozenset(["audio", "function_call", "functions", "moderation", "web_search_options"])
"""Fields of OpenAI's that would change something: taken as null alone, which some clients send for all."""

_MAX_REPORTED_ERRORS = 3  # problems that a message names
_MAX_N, _MAX_STOPS, _MAX_STOP_CHARS, _MAX_PROMPTS, _MAX_INPUTS = 128, 16, 256, 256, 2048
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = str | list[TokenId]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_StrictModel):
    """``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_StrictModel):
    """``response_format.json_schema``."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_StrictModel):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(_StrictModel):
    """The fields that completions and chat share."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    n: int | None = Field(None, ge=1, le=_MAX_N)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_STOPS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-1000, le=1000)
    cache_salt: str = Field("", max_length=256)
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, max_length=4096)
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None


class CompletionRequest(SamplingFields):
    """``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Prompt], Field(min_length=1, max_length=_MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=_MAX_N)
    add_special_tokens: bool = True


class ContentPart(_StrictModel):
    """A part of a message's content; text alone is understood."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str | None = None


class FunctionDefinition(_StrictModel):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_StrictModel):
    """An entry of ``tools``."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionCall(_StrictModel):
    """The function of an earlier call."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """OpenAI's client adds it for itself; changes nothing."""


class ToolCall(_StrictModel):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """From the pieces of a stream; changes nothing."""


class ChatMessage(_StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    audio: None = None
    function_call: None = None
    """The last four stand in an answer that a client sends back as it came; they change nothing."""

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(SamplingFields):
    """``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, str | int | bool | None] | None = None
    continue_final_message: bool = False


class EmbeddingRequest(_StrictModel):
    """``/v1/embeddings``."""

    model: str | None = None
    input: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Prompt], Field(min_length=1, max_length=_MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class MiiRequest(_StrictModel):
    """``/mii/{deployment}``: DeepSpeed-MII's REST form."""

    prompts: str | list[str]
    max_length: int | None = Field(None, ge=1, lt=2**31)
    max_new_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_new_tokens: int = Field(0, ge=0, lt=2**31)
    ignore_eos: bool = False
    return_full_text: bool = False
    do_sample: bool = True
    top_p: float = Field(0.9, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool = False
    """Of one prompt: server-sent events, each with a piece of the text."""


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_body(model_class: type[ModelT], body: bytes) -> ModelT:
    """Read a body; raises :class:`ApiError` (400) that names each wrong field."""
    body = body.removeprefix(b"\xef\xbb\xbf")  # which Windows puts before a file's text
    if not body.strip():
        raise BadRequest("the body is empty; send a JSON object")
    try:
        return model_class.model_validate_json(body)
    except ValidationError as error:
        errors = _error_list(error)
    if any(p["type"] == "extra_forbidden" and p["loc"][0] in IGNORED_FIELDS | _NULL_ONLY_FIELDS for p in errors):
        return _parse_without_ignored(model_class, body)
    raise _to_api_error(model_class, errors)


def _parse_without_ignored(model_class: type[ModelT], body: bytes) -> ModelT:
    fields = from_json(body)
    accepted = {
        name: value
        for name, value in fields.items()
        if name in model_class.model_fields
        or not (name in IGNORED_FIELDS or (name in _NULL_ONLY_FIELDS and value is None))
    }
    try:
        return model_class.model_validate_json(json.dumps(accepted))
    except ValidationError as error:
        raise _to_api_error(model_class, _error_list(error)) from None


def _error_list(error: ValidationError) -> list[Any]:
    return error.errors(include_url=False, include_input=False, include_context=False)


def _to_api_error(model_class: type[BaseModel], errors: list[Any]) -> ApiError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="json")
    lines: list[str] = []
    reported: set[str] = set()
    for error in _most_specific(errors):
        if len(lines) == _MAX_REPORTED_ERRORS:
            lines.append("and more")
            break
        loc = [str(part) for part in error["loc"] if not _is_union_branch(part)]
        name = ".".join(loc)[:80] or "the body"
        if name in reported:  # the other branches of a union
            continue
        reported.add(name)
        if error["type"] == "extra_forbidden":
            suggestions = difflib.get_close_matches(loc[-1][:40], model_class.model_fields, 1) if len(loc) == 1 else []
            lines.append(f"{name}: there is no such field{f'; did you mean {suggestions[0]}?' if suggestions else ''}")
        else:
            lines.append(f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}")
    param = ".".join(str(part) for part in first["loc"][:1]) or None
    return BadRequest("; ".join(lines), param and param[:80])


def _most_specific(errors: list[Any]) -> list[Any]:
    """Leave out "should be a string" of a field that is no string but something else that has a fault."""
    locs = [tuple(str(item) for item in p["loc"] if not _is_union_branch(item)) for p in errors]
    specific = [place for p, place in zip(errors, locs, strict=True) if not p["type"].endswith("_type")]
    return [
        p
        for p, place in zip(errors, locs, strict=True)
        if not p["type"].endswith("_type") or not any(place[: len(other)] == other[: len(place)] for other in specific)
    ]


def _is_union_branch(loc_item: object) -> bool:
    """Whether a part of a location is pydantic's name for a branch of a union, not a field."""
    return isinstance(loc_item, str) and (
        "[" in loc_item or loc_item in ("str", "int", "float", "bool", "dict", "none")
    )
