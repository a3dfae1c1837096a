"""What a client may ask for, and what that means to an engine.

First pydantic models of OpenAI's fields and those that vLLM added to them: types are strict (no "7" for 7), numbers
finite, unknown fields refused with the nearest known one, since a typing error must not pass as a default.  Fields
that change nothing here are accepted and named in ``IGNORED_FIELDS``.  Then their translation: prompts become tokens,
fields SamplingParams; each fault is a 400 that names its field.

Tokens to text is the engine's work (it must know stop strings); what the server needs of a tokenizer is encoding, a
template, and how a token is spelled in a list of log-probabilities (:class:`ChatTokenizer`).  Encoding a long prompt
takes a while and gives up the GIL, and a chat template is a program: both happen in a thread.  The tokenizer's Rust
object is called directly, because the Python wrapper changes its state on every call and is not safe in two threads.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from thalweg.config.errors import escape_surrogates
from thalweg.infer.types import InvalidParameter, ModelMetadata, SamplingParams, StructuredOutput
from thalweg.serve.errors import ApiError, BadRequest, ContextLengthExceeded
from thalweg.serve.openai.tools import filter_allowed_tools, tool_choice_schema
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
# Fields of OpenAI's that are accepted and change nothing.
IGNORED_FIELDS = frozenset({
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "reasoning_effort", "verbosity", "modalities", "prediction", "prompt_cache_options", "prompt_cache_retention",
})  # fmt: skip
# Fields of OpenAI's that would change something: taken as null alone, which some clients send for all.
_NULL_ONLY_FIELDS = frozenset(["audio", "function_call", "functions", "moderation", "web_search_options"])

# Problems that a message names, of the first ones: each of those is compared with the others.
_MAX_REPORTED_ERRORS, _MAX_COMPARED_ERRORS = 3, 100
_MAX_N, _MAX_STOPS, _MAX_STOP_CHARS, _MAX_PROMPTS, _MAX_INPUTS = 128, 16, 256, 256, 2048
_INLINE_CHARS = 2048  # characters that are encoded on the spot
# Where an answer ends that was asked for by the plain template.
FALLBACK_STOP = "\nUser:"
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = str | Annotated[list[TokenId], Field(fail_fast=True)]
_MAX_COUNTED_TOKENS = 1 << 20  # of one text that is only counted, or cut
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class StrictModel(BaseModel):
    """Fields of a body: strict types, finite numbers, no other names."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(StrictModel):
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: each chunk says what was used so far
    include_obfuscation: bool = False


class JsonSchema(StrictModel):
    """``response_format.json_schema``."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """``structured_outputs``, as vLLM's clients send it: one of the four."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, max_length=4096)
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    json_object: bool | None = None


class SamplingFields(StrictModel):
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
    forced_bos_token_id: TokenId | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-1000, le=1000)
    cache_salt: str = Field("", max_length=256)
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, max_length=4096)
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(SamplingFields):
    """``/v1/completions``."""

    prompt: str | TokenIds | Annotated[list[Prompt], Field(min_length=1, max_length=_MAX_PROMPTS)]
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=_MAX_N)
    add_special_tokens: bool = True


class ContentPart(StrictModel):
    """A part of a message's content; text alone is understood."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str | None = None


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """An entry of ``tools``."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionCall(StrictModel):
    """The function of an earlier call."""

    name: str
    arguments: str
    # OpenAI's client adds it for itself; changes nothing.
    parsed_arguments: Any = None


class ToolCall(StrictModel):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    # From the pieces of a stream; changes nothing.
    index: int | None = None


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # vLLM's newer name of it.
    reasoning: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    audio: None = None
    # These four stand in an answer that a client sends back as it came; they change nothing.
    function_call: None = None
    # lm-eval says it of each message; changes nothing.
    type: str | None = None


class _TemplateFields(StrictModel):
    """What a chat template is told beside the messages."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, str | int | bool | None] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None


class ChatRequest(SamplingFields, _TemplateFields):
    """``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None


class EmbeddingRequest(StrictModel):
    """``/v1/embeddings``."""

    model: str | None = None
    input: str | TokenIds | Annotated[list[Prompt], Field(min_length=1, max_length=_MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    # vLLM's: the tokens that are left of a longer text; -1: as many as the model takes.
    truncate_prompt_tokens: int | None = Field(None, ge=-1)


class TokenizeRequest(_TemplateFields):
    """``/tokenize``: a prompt, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """``/detokenize``."""

    model: str | None = None
    tokens: TokenIds


class MiiRequest(StrictModel):
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
    # As transformers' pipelines take it: what a translation begins with.
    forced_bos_token_id: TokenId | None = None
    # Of one prompt: server-sent events, each with a piece of the text.
    stream: bool = False


class _LegacyQuery(StrictModel):
    query: str | list[str]


class LegacyMiiRequest(StrictModel):
    """The form of MII before 0.1: ``{"request": {"query": [...]}, "kwargs": {"max_new_tokens": 30}}``."""

    request: _LegacyQuery
    kwargs: dict[str, Any] = {}


# Its servers ran transformers' pipelines: the prompt is part of the text, no sampling.
LEGACY_MII_DEFAULTS: Mapping[str, Any] = {"do_sample": False, "return_full_text": True, "top_p": 1.0, "top_k": 50}


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_body(model_class: type[ModelT], body: bytes) -> ModelT:
    """Read a body; raises :class:`ApiError` (400) that names each wrong field."""
    body = body.removeprefix(b"\xef\xbb\xbf")  # which Windows puts before a file's text
    if not body.strip():
        raise BadRequest("the body is empty; send a JSON object")
    try:
        return model_class.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
    unknown = {e["loc"][0] for e in errors if e["type"] == "extra_forbidden"}
    fields = from_json(body) if unknown else {}
    ignored = unknown & IGNORED_FIELDS | {name for name in unknown & _NULL_ONLY_FIELDS if fields.get(name) is None}
    if not ignored - model_class.model_fields.keys():
        raise _to_api_error(model_class, errors[:_MAX_COMPARED_ERRORS])
    kept = {name: value for name, value in fields.items() if name not in ignored or name in model_class.model_fields}
    return parse_body(model_class, json.dumps(kept).encode())


def parse_mii_body(body: bytes) -> tuple[MiiRequest, bool]:
    """Read a body of ``/mii/{deployment}``, and say whether it has the form of MII before 0.1."""
    try:
        tree = from_json(body)
    except ValueError:
        tree = None
    if not isinstance(tree, dict) or "request" not in tree:
        return parse_body(MiiRequest, body), False
    legacy = parse_body(LegacyMiiRequest, body)
    fields = {**LEGACY_MII_DEFAULTS, **legacy.kwargs, "prompts": legacy.request.query}
    return parse_body(MiiRequest, json.dumps(fields).encode()), True


def _to_api_error(model_class: type[BaseModel], errors: list[Any]) -> ApiError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="json")
    lines: dict[str, str] = {}
    for loc, error in _most_specific(errors):
        name = ".".join(loc)[:80] or "the body"
        if name in lines:  # the other branches of a union
            continue
        if len(lines) == _MAX_REPORTED_ERRORS:
            lines[""] = "and more"
            break
        if error["type"] == "extra_forbidden":
            suggestions = difflib.get_close_matches(loc[-1][:40], model_class.model_fields, 1) if len(loc) == 1 else []
            hint = f"; did you mean {suggestions[0]}?" if suggestions else ""
            lines[name] = f"{name}: there is no such field{hint}"
        else:
            lines[name] = f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}"
    param = ".".join(str(part) for part in first["loc"][:1]) or None
    return BadRequest("; ".join(lines.values()), param and param[:80])


def _most_specific(errors: list[Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Leave out "should be a string" of a field that is no string but something else that has a fault.

    Returns each error behind the field it belongs to.
    """
    located = [(tuple(str(part) for part in e["loc"] if not _is_union_branch(part)), e) for e in errors]
    specific = [loc for loc, error in located if not error["type"].endswith("_type")]
    return [
        (loc, error)
        for loc, error in located
        if not error["type"].endswith("_type") or not any(loc[: len(other)] == other[: len(loc)] for other in specific)
    ]


def _is_union_branch(loc_item: object) -> bool:
    """Whether a part of a location is pydantic's name for a branch of a union, not a field."""
    names = ("str", "int", "float", "bool", "dict", "none")
    return isinstance(loc_item, str) and ("[" in loc_item or loc_item in names)


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a Hugging Face model's directory; None, with a warning, where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        cause = (str(error) or type(error).__name__).strip().splitlines()[0]
        _LOG.warning("%s has no tokenizer that can be read (%s): requests must send token ids", model, cause)
        return None


def load_chat_tokenizer(
    model: str, loader: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> ChatTokenizer:
    """Load the tokenizer of ``model``; a loader of engines may have a ``load_tokenizer`` beside it."""
    module = importlib.import_module(loader.partition(":")[0])
    custom_loader = getattr(module, "load_tokenizer", None)
    tokenizer = custom_loader(model) if custom_loader is not None else load_tokenizer(model, trust_remote_code)
    return ChatTokenizer(tokenizer, chat_template)


class ChatTokenizer:
    """A tokenizer as the endpoints use it; ``chat_template`` takes the place of the tokenizer's own."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.hf_tokenizer = tokenizer
        templates = chat_template or getattr(tokenizer, "chat_template", None)
        templates_by_name = templates if isinstance(templates, dict) else {"default": templates}
        first = next(iter(templates_by_name.values()), None)
        self.chat_template: str | None = templates_by_name.get("default") or first
        self._tool_template: str | None = templates_by_name.get("tool_use")
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # the file may keep how the texts of a training were padded and cut
            self._backend.no_padding()
            self._backend.no_truncation()
        # One thread, so that a flood of long prompts takes one core.
        self._executor = ThreadPoolExecutor(1, "thalweg-tokenizer")
        # A token's text and its bytes, which may be a part of a character.
        self.token_text = lru_cache(maxsize=200_000)(self._decode_token)
        self._max_token_chars = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template says what to do with tools."""
        return self._tool_template is not None or "tools" in (self.chat_template or "")

    async def encode(self, text: str, add_special_tokens: bool, max_tokens: int, param: str) -> list[int]:
        """Return the tokens of ``text``; raises 400 when there must be more than ``max_tokens``."""
        if self.hf_tokenizer is None:
            raise BadRequest("this model has no tokenizer: send token ids", param)
        if len(text) > max_tokens * self._max_token_chars:
            raise context_length_error(f"at least {len(text) // self._max_token_chars}", max_tokens, param)
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode, text, add_special_tokens)

    async def render_chat(self, *args: Any) -> tuple[str, bool]:
        """:meth:`apply_chat_template` in a thread: a template is a program, and a long conversation its input."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.apply_chat_template, *args)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
        add_generation_prompt: bool = True,
    ) -> tuple[str, bool]:
        """Return the prompt of a conversation, and whether special tokens must be added to it.

        ``template_kwargs`` go to the template; one that is a setting of ours is refused.
        """
        if self.chat_template is None:
            return apply_fallback_template(messages, add_generation_prompt), True
        try:
            prompt = self.hf_tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._tool_template if tools and self._tool_template else self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        except Exception as error:  # templates refuse what they do not know by raising whatever they like
            raise BadRequest(f"the model's chat template refuses this: {error}", "messages") from None
        return escape_surrogates(prompt), False  # a call's arguments may name half a character

    def _decode_token(self, token: int) -> tuple[str, list[int]]:
        if self.hf_tokenizer is None:
            return f"token_id:{token}", []
        text = self.hf_tokenizer.decode([token], clean_up_tokenization_spaces=False)
        piece = self.hf_tokenizer.convert_ids_to_tokens(token) or ""
        if num_spaces := len(piece) - len(piece.lstrip("\u2581")):  # SentencePiece's: a decoder drops the first
            text = " " * num_spaces + text.lstrip(" ")
        if "\ufffd" not in text:
            return text, list(text.encode())
        if len(piece) == 6 and piece.startswith("<0x"):
            return text, [int(piece[3:5], 16)]
        # The alphabet of byte-level tokenizers (GPT-2).
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        table = {character: byte for byte, character in bytes_to_unicode().items()}
        return text, [table[c] for c in piece] if all(c in table for c in piece) else list(text.encode())


def context_length_error(length: int | str, max_tokens: int, param: str) -> ContextLengthExceeded:
    """Return the 400 of a prompt that leaves no room."""
    return ContextLengthExceeded(
        f"the prompt has {length} tokens, and there is room for {max_tokens} beside the answer: shorten it", param
    )


def apply_fallback_template(messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Return a conversation in plain words, for models without a chat template."""
    names = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
    lines = [f"{names.get(m['role'], 'User')}: {m['content']}" for m in messages]
    return "\n".join([*lines, "Assistant:"] if add_generation_prompt else lines)


def split_prompts(prompt: Any) -> list[Prompt]:
    """Return the prompts that a ``prompt`` or ``input`` field holds: text, tokens, or a list of either."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


async def tokenize_prompts(
    prompt: Any,
    tokenizer: ChatTokenizer,
    model_info: ModelMetadata,
    param: str = "prompt",
    num_kept: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Return the token ids of each prompt in a ``prompt`` field, the first ``num_kept`` of a longer one (-1: as many as
    the model takes), whose last one stays where it is a special one."""
    max_tokens = model_info.max_length - (model_info.kind == "causal")
    num_kept = max_tokens if num_kept == -1 else num_kept
    tokenized = []
    for tokens in split_prompts(prompt):
        if isinstance(tokens, str):
            limit = _MAX_COUNTED_TOKENS if num_kept else max_tokens
            tokens = await tokenizer.encode(tokens, add_special_tokens, limit, param)
        if num_kept and len(tokens) > num_kept:
            is_ended = tokens[-1] in getattr(tokenizer.hf_tokenizer, "all_special_ids", ())
            del tokens[num_kept - is_ended : len(tokens) - is_ended]
        if not tokens:
            raise BadRequest("the prompt is empty: send at least one token", param)
        if len(tokens) > max_tokens:
            raise context_length_error(len(tokens), max_tokens, param)
        if max(tokens) >= model_info.vocab_size:
            raise BadRequest(f"token {max(tokens)} is outside the vocabulary of {model_info.vocab_size}", param)
        tokenized.append(tokens)
    return tokenized


def to_sampling_params(
    request: SamplingFields, model_info: ModelMetadata, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters, what a request leaves open as the model has it; raises 400 when they contradict
    each other."""
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream: true", "stream_options")
    same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "n", "min_tokens", "seed", "ignore_eos", "skip_special_tokens", "forced_bos_token_id")  # fmt: skip
    asked = {name: value for name in same if (value := getattr(request, name)) is not None}
    fields: dict[str, Any] = {"top_k": 0, **model_info.sampling_defaults, **asked}
    return make_sampling_params(
        **fields | {"top_k": max(fields["top_k"], 0)},
        max_tokens=max_tokens,
        logit_bias=_parse_logit_bias(request.logit_bias or {}, model_info),
        stop=_stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop=request.include_stop_str_in_output,
        logprobs=logprobs,
        structure=get_structured_output(request),
    )


def _stop_strings(request: SamplingFields | MiiRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def make_sampling_params(**fields: Any) -> SamplingParams:
    """Return SamplingParams; its own complaint is the client's."""
    try:
        return SamplingParams(**fields)
    except InvalidParameter as error:
        raise BadRequest(str(error), error.param) from None


def check_context_length(prompt: list[int], max_tokens: int | None, model_info: ModelMetadata, param: str) -> None:
    """Check ``max_tokens`` against the model's length."""
    total = len(prompt) + (max_tokens or 1)
    if model_info.kind == "causal" and total > model_info.max_length:
        raise ContextLengthExceeded(
            f"{len(prompt)} prompt tokens and {max_tokens} to generate are {total}; this model takes "
            f"{model_info.max_length}: ask for at most {model_info.max_length - len(prompt)}",
            param,
        )


def fit_max_tokens(
    prompt: list[int], params: SamplingParams, request: CompletionRequest, model_info: ModelMetadata
) -> SamplingParams:
    """Check a prompt's room; where nobody asked for a length, what there is must do."""
    num_available = model_info.max_length - len(prompt)
    is_open = model_info.kind == "causal" and "max_tokens" not in request.model_fields_set
    if is_open and params.min_tokens <= num_available:
        return replace(params, max_tokens=min(params.max_tokens or num_available, num_available))
    check_context_length(prompt, params.max_tokens, model_info, "max_tokens")
    return params


def get_structured_output(request: SamplingFields) -> StructuredOutput | None:
    """What the text must look like, from ``response_format``, ``structured_outputs`` or the ``guided_*`` fields."""
    response_format = request.response_format or ResponseFormat(type="text")
    asked = request.structured_outputs or StructuredOutputs()
    schemas = [request.guided_json, asked.json_]
    if response_format.type == "json_object" or asked.json_object:
        schemas.append({"type": "object"})
    if response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise BadRequest("json_schema is missing: give its name and schema", "response_format")
        schemas.append(response_format.json_schema.schema_)
    texts = [schema if isinstance(schema, str) else json.dumps(schema) for schema in schemas if schema is not None]
    outputs = [StructuredOutput(json_schema=text) for text in texts]
    outputs += [StructuredOutput(regex=form) for form in (request.guided_regex, asked.regex) if form is not None]
    choices = (request.guided_choice, asked.choice)
    outputs += [StructuredOutput(choices=tuple(given)) for given in choices if given is not None]
    if len(outputs) > 1:
        raise BadRequest(
            "give one form: response_format, or one of structured_outputs' json, regex, choice and json_object (by "
            "their older names guided_json, guided_regex and guided_choice)"
        )
    return outputs[0] if outputs else None


def completion_sampling_params(request: CompletionRequest, model_info: ModelMetadata) -> SamplingParams:
    """Return the parameters of a ``/v1/completions`` request."""
    if request.suffix:
        raise BadRequest("suffix is not supported: this model continues a prompt, it does not fill in", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadRequest("best_of other than n is not supported: leave it out", "best_of")
    if request.max_tokens == 0 and (request.stream or not request.echo):
        raise BadRequest("max_tokens 0 is for echo without stream: ask for 1 at least", "max_tokens")
    max_tokens = 1 if request.max_tokens == 0 else request.max_tokens
    params = to_sampling_params(request, model_info, max_tokens=max_tokens, logprobs=request.logprobs)
    return replace(params, prompt_logprobs=request.logprobs) if request.echo else params


def chat_sampling_params(request: ChatRequest, model_info: ModelMetadata, tokenizer: ChatTokenizer) -> SamplingParams:
    """Return the parameters of a ``/v1/chat/completions`` request."""
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    if tokenizer.chat_template is None and not request.stop:
        request = request.model_copy(update={"stop": [FALLBACK_STOP]})
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    params = to_sampling_params(
        request, model_info, max_tokens=max_tokens, logprobs=(request.top_logprobs or 0) if request.logprobs else None
    )
    if request.tool_choice in (None, "none", "auto"):
        return params
    try:
        call_schema = tool_choice_schema(request.tool_choice, [tool.function for tool in request.tools or ()])
    except (ValueError, TypeError) as error:
        raise BadRequest(str(error), "tool_choice") from None
    if params.structure is not None:
        raise BadRequest("a call is demanded and another form of answer too: give one", "tool_choice")
    return replace(params, structure=StructuredOutput(json_schema=json.dumps(call_schema)), stop=())


def apply_allowed_tools(request: ChatRequest) -> ChatRequest:
    """Return the request with those tools alone that its ``tool_choice`` allows."""
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return request
    try:
        mode, tools = filter_allowed_tools(choice, request.tools or ())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRequest(f"tool_choice is not understood: {error}", "tool_choice") from None
    return request.model_copy(update={"tool_choice": mode, "tools": tools})


async def tokenize_chat(request: ChatRequest, tokenizer: ChatTokenizer, model_info: ModelMetadata) -> list[int]:
    """Return the tokens of a conversation."""
    tools = None
    if request.tools and request.tool_choice != "none":
        if not tokenizer.supports_tools:
            raise BadRequest("the chat template of this model knows no tools: leave them out", "tools")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    continues, add_generation_prompt = request.continue_final_message, request.add_generation_prompt
    if continues and request.messages[-1].role != "assistant":
        raise BadRequest("continue_final_message needs an assistant's message at the end", "messages")
    if continues and add_generation_prompt:
        raise BadRequest("continue_final_message goes on with a message: leave add_generation_prompt out", "messages")
    add_generation_prompt = not continues if add_generation_prompt is None else add_generation_prompt
    messages = [_to_template_message(message) for message in request.messages]
    prompt, add_special_tokens = await tokenizer.render_chat(
        messages, tools, continues, request.chat_template_kwargs or {}, add_generation_prompt
    )
    return (await tokenize_prompts(prompt, tokenizer, model_info, "messages", add_special_tokens=add_special_tokens))[0]


async def tokenize(request: TokenizeRequest, tokenizer: ChatTokenizer, model_info: ModelMetadata) -> dict[str, Any]:
    """The body of ``/tokenize``: ids as vLLM's clients read them."""
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("give a prompt or messages", "prompt")
    if request.prompt is not None:
        tokens = await tokenizer.encode(request.prompt, request.add_special_tokens, _MAX_COUNTED_TOKENS, "prompt")
    else:
        same = ("messages", "tools", "continue_final_message", "add_generation_prompt", "chat_template_kwargs")
        chat = ChatRequest.model_validate({name: getattr(request, name) for name in same})
        tokens = await tokenize_chat(chat, tokenizer, model_info)
    texts = [tokenizer.token_text(token)[0] for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model_info.max_length, "tokens": tokens, "token_strs": texts}


async def detokenize(request: DetokenizeRequest, tokenizer: ChatTokenizer, model_info: ModelMetadata) -> dict[str, Any]:
    """The body of ``/detokenize``."""
    if tokenizer.hf_tokenizer is None:
        raise BadRequest("this model has no tokenizer", "tokens")
    if (highest := max(request.tokens)) >= model_info.vocab_size:
        raise BadRequest(f"token {highest} is outside the vocabulary of {model_info.vocab_size}", "tokens")
    return {"prompt": tokenizer.hf_tokenizer.decode(request.tokens, clean_up_tokenization_spaces=False)}


def mii_sampling_params(request: MiiRequest, num_prompt_tokens: int, model_info: ModelMetadata) -> SamplingParams:
    """Return the parameters of a request in MII's form; ``max_length`` counts the prompt and takes precedence."""
    # Of a model that listens, what it begins with.
    num_initial_tokens = 1 if model_info.kind == "seq2seq" else num_prompt_tokens
    # Where nothing is said 1024 in all, as MII has it, and one more than a prompt that is longer.
    default = max(1024, num_initial_tokens + 1) if request.max_new_tokens is None else model_info.max_length
    num_available = min(request.max_length or default, model_info.max_length) - num_initial_tokens
    max_tokens = num_available if request.max_new_tokens is None else min(request.max_new_tokens, num_available)
    if num_available < 1:
        raise BadRequest(
            f"{num_prompt_tokens} prompt tokens leave no room: max_length is {request.max_length}, the model's "
            f"{model_info.max_length}",
            "max_length",
        )
    sampled: dict[str, Any] = {"temperature": 0.0}
    if request.do_sample:
        temperature = 1.0 if request.temperature is None else request.temperature
        sampled = {"temperature": temperature, "top_p": request.top_p, "top_k": request.top_k or 0}
    return make_sampling_params(
        **sampled,
        max_tokens=max_tokens,
        min_tokens=min(request.min_new_tokens, max_tokens),
        ignore_eos=request.ignore_eos,
        stop=_stop_strings(request),
        seed=request.seed,
        forced_bos_token_id=request.forced_bos_token_id,
    )


def join_parts(content: str | Sequence[Any] | None) -> str:
    """Return a message's content as one text."""
    return content or "" if content is None or isinstance(content, str) else "".join(part.text for part in content)


def _to_template_message(message: ChatMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": join_parts(message.content)}
    if message.tool_calls:
        fields["tool_calls"] = [_to_template_call(call) for call in message.tool_calls]
    fields |= message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    return fields


def _to_template_call(call: ToolCall) -> dict[str, Any]:
    name, arguments = call.function.name, call.function.arguments
    try:  # templates expect an object, OpenAI's form is its text: of a function without any, often none
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise BadRequest(f"the arguments of the call of {name[:80]} are not JSON", "messages") from None
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": parsed}}


def _parse_logit_bias(logit_bias: dict[str, float], model_info: ModelMetadata) -> dict[int, float]:
    bias = {}
    for key, value in logit_bias.items():
        if not key.isdecimal() or len(key) > 10 or int(key) >= model_info.vocab_size:
            raise BadRequest(f"{key[:20]!r} is no token of this model", "logit_bias")
        bias[int(key)] = value
    return bias
