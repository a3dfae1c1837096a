"""OpenAI's Responses API (``POST /v1/responses``): a chat in other words, and an answer made of items.

A request becomes the chat request of the same meaning, so that templates, tools, structured output and limits are
those of ``/v1/chat/completions``.  Its answer becomes items, a message and calls of functions, by one way for both
forms: a stream sends the events as they come, a whole answer is what the events have built at the end.

Nothing is kept between requests: a conversation goes on by sending the earlier items as ``input``.  What needs a
memory of the server's, or a tool that OpenAI runs, is refused by name (``_NOT_OFFERED``), since an answer without it
would look like one with it.
"""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from thalweg.infer.types import Request, RequestOutput, SequenceResult
from thalweg.serve.errors import ApiError, BadRequest
from thalweg.serve.openai import requests as api
from thalweg.serve.openai.responses import Answer, AppState, ChatCompletion, encode_sse

# Fields that would change the answer, and what to do instead; those that say "no" (null, false) are taken.
_NOT_OFFERED = {
    "store": "this server keeps no responses; leave it out or send false",
    "previous_response_id": "this server keeps no responses; send the earlier items as input",
    "conversation": "this server keeps no conversations; send the earlier items as input",
    "background": "an answer comes on the connection that asks for it; leave it out, or stream",
    "prompt": "this server keeps no prompts; send instructions and input",
    "context_management": "nothing is compacted here; send fewer items",
    "moderation": "nothing is moderated here; leave it out",
    "response_format": "that is the field of /v1/chat/completions; its name is text.format here",
    "n": "one response has one answer; send the request again for another",
}
# What the chat's checks call a field, and what it is called here.
_FIELD_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
_ITEMS_TAKEN = "items of this type are not offered: input may hold message, function_call and function_call_output"


class InputPart(api.StrictModel):
    """A part of an item's content; text alone is understood."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str | None = None
    # The others stand in an answer that a client sends back as it came; they change nothing.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None


class _InputItem(api.StrictModel):
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    namespace: None = None
    caller: None = None
    async_: None = None


class InputMessage(_InputItem):
    """A message of anyone, in the short form or as an answer had it."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]


class InputFunctionCall(_InputItem, api.FunctionCall):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str


class InputFunctionCallOutput(_InputItem):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]


def _item_type(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return "message" if kind is None else kind if isinstance(kind, str) else "unknown"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputFunctionCallOutput, Tag("function_call_output")],
    Discriminator(_item_type, custom_error_type="item_type", custom_error_message=_ITEMS_TAKEN),
]


class TextFormat(api.StrictModel):
    """``text.format``: what is ``response_format`` of a chat, in one level."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(api.StrictModel):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None  # changes nothing, as of a chat


class ResponsesRequest(api.SamplingFields):
    """``/v1/responses``: OpenAI's fields, and those of sampling that vLLM added."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4095)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # There is no reasoning that could be included; clients without a memory of the server's ask for it always.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    reasoning: dict[str, Any] | None = None  # changes nothing, as reasoning_effort of a chat
    max_tool_calls: int | None = None  # of tools that OpenAI runs: there are none
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, str | int | bool | None] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    moderation: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer is to have log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def to_chat(self) -> api.ChatRequest:
        """Return the chat request of the same meaning; raises 400 for what is not offered."""
        for name, cure in _NOT_OFFERED.items():
            value = getattr(self, name)
            if value and not (name == "n" and value == 1):
                raise BadRequest(f"{name} is not offered: {cure}", name)
        same = {name: getattr(self, name) for name in api.SamplingFields.model_fields}
        return api.ChatRequest.model_validate({
            **same,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "tools": [_to_chat_tool(index, tool) for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _to_chat_tool_choice(self.tool_choice),
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        })  # fmt: skip

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation; calls join the assistant's message before them, as templates expect it."""
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in items:
            if isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": api.join_parts(item.content)})
            elif isinstance(item, InputFunctionCallOutput):
                messages.append({"role": "tool", "content": api.join_parts(item.output), "tool_call_id": item.call_id})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages

    def _response_format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.schema_ is None:
            raise BadRequest("text.format.schema is missing: give the JSON schema of the answer", "text")
        return {"type": "json_schema", "json_schema": {"name": form.name or "schema", "schema": form.schema_}}


def _to_chat_tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise BadRequest(
            f"tools.{index}: {str(kind)[:80]!r} is not offered: this server runs no tools of its own; give tools of "
            "type function, which your program runs",
            "tools",
        )
    try:
        kept = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        return {"function": api.FunctionDefinition.model_validate(kept)}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("tools", index, *first["loc"])))
        raise BadRequest(f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}", "tools") from None


def _to_chat_tool_choice(choice: Any) -> Any:
    """A chat puts the names one level deeper."""
    if not isinstance(choice, dict):
        return choice
    kind, tools = choice.get("type"), choice.get("tools")
    if kind == "allowed_tools":
        nested = [{"function": tool} for tool in tools] if isinstance(tools, list) else tools
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    if kind != "function":
        raise BadRequest(f"tool_choice {str(kind)[:80]!r} is not offered: demand a function of tools", "tool_choice")
    return choice


@contextlib.contextmanager
def _fields_named_as_here() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        error.param = _FIELD_NAMES.get(error.param or "", error.param)
        raise


class ResponsesAnswer(ChatCompletion):
    """``/v1/responses``: what a chat's chunks say, as items and the events that build them."""

    end_marker = b""
    last_chunk = Answer.last_chunk  # none: the last event has the usage in it

    def __init__(self, app_state: AppState, request: ResponsesRequest) -> None:
        chat = request.to_chat()
        with _fields_named_as_here():
            super().__init__(app_state, chat)
        self._asked = request
        self._id = f"resp_{secrets.token_hex(24)}"
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        # Whether the last item is a message that is being written, and what waits for its first word.
        self._is_writing = False
        self._held_text, self._held_logprobs = "", []

    def encode(self, item: dict[str, Any]) -> bytes:
        """Return one event under its name, as clients that listen to names expect it."""
        return f"event: {item['type']}\n".encode() + encode_sse(item)

    async def make_requests(self) -> list[Request]:
        with _fields_named_as_here():
            return await super().make_requests()

    def body(self, results: list[list[SequenceResult]]) -> dict[str, Any]:
        ((result,),) = results
        return [event["response"] for event in self.chunks(0, result.to_output(0)) if "response" in event][-1]

    async def stream(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[dict[str, Any]]:
        try:
            async with contextlib.aclosing(super().stream(outputs)) as events:
                async for event in events:
                    yield event
        except ApiError as error:
            if not self._num_events:  # it is the HTTP status then
                raise
            failure = {"code": "server_error", "message": error.message}
            yield self._event("response.failed", response=self._response("failed", error=failure))

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if not self._num_events:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        for chunk in super().chunks(prompt_index, output):
            (choice,) = chunk["choices"]
            yield from self._write(choice["delta"].get("content", ""), (choice["logprobs"] or {}).get("content", []))
            for call in choice["delta"].get("tool_calls", ()):
                yield from self._close_message("completed")
                yield from self._call_function(call)
        if output.finished:
            status = "incomplete" if output.finish_reason == "length" else "completed"
            if not self._items:
                yield from self._write("", [], to_end=True)
            yield from self._close_message(status)
            yield self._event(f"response.{status}", response=self._response(status))

    def _write(self, text: str, logprobs: list[dict[str, Any]], to_end: bool = False) -> Iterator[dict[str, Any]]:
        """Write into the message; blanks alone, as models put them around calls, begin none."""
        text, logprobs = self._held_text + text, self._held_logprobs + logprobs
        self._held_text, self._held_logprobs = "", []
        if not self._is_writing:
            if not text.strip() and not to_end:
                self._held_text, self._held_logprobs = text, logprobs
                return
            yield from self._open_message()
        if text or logprobs:
            (part,) = self._items[-1]["content"]
            part["text"] += text
            part["logprobs"] += logprobs
            yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _open_message(self) -> Iterator[dict[str, Any]]:
        item = {"id": f"msg_{secrets.token_hex(24)}", "type": "message", "role": "assistant", "status": "in_progress"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append({**item, "content": [part]})
        self._is_writing = True
        yield self._item_event("response.output_item.added", {**item, "content": []})
        yield self._part_event("response.content_part.added", part={**part, "logprobs": []})

    def _close_message(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._is_writing:
            return
        self._items[-1]["status"] = status
        (part,) = self._items[-1]["content"]
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._part_event("response.content_part.done", part=part)
        yield self._item_event("response.output_item.done", self._items[-1])
        self._is_writing = False

    def _call_function(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        status = "incomplete" if self._parsers[0].truncated else "completed"
        item = {"id": f"fc_{secrets.token_hex(24)}", "type": "function_call", "call_id": call["id"], "name": name}
        self._held_text, self._held_logprobs = "", []
        self._items.append({**item, "arguments": arguments, "status": status})
        own = {"item_id": item["id"], "output_index": len(self._items) - 1}
        yield self._item_event("response.output_item.added", {**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", **own, delta=arguments)
        yield self._event("response.function_call_arguments.done", **own, name=name, arguments=arguments)
        yield self._item_event("response.output_item.done", self._items[-1])

    def _part_event(self, name: str, **fields: Any) -> dict[str, Any]:
        own = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(name, **own, **fields)

    def _item_event(self, name: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(name, output_index=len(self._items) - 1, item=item)

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
        """The response as it stands, with what was asked for as OpenAI repeats it."""
        asked, usage = self._asked, self.usage
        form = asked.text.format if asked.text is not None and asked.text.format is not None else TextFormat()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._common_fields["created"],
            "completed_at": None if status == "in_progress" else int(time.time()),
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._common_fields["model"],
            "output": list(self._items),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": "disabled",
            "background": False,
            "previous_response_id": None,
            "store": False,
            "usage": None if status == "in_progress" else {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.num_generated_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
            },
        }  # fmt: skip
