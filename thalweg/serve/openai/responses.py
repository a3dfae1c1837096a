"""From a checked request to an HTTP response: OpenAI's objects, whole or as server-sent events.

A :class:`ChatCompletion` or :class:`Completion` is one HTTP request from its parsed body to its response.  Two
generators carry the outputs: :meth:`ReplicaPool.submit` yields what the engines' steps gave, and
:meth:`Answer.stream` turns each into the events of a stream.  Whoever stops listening closes the outer one, which
closes the inner one, which cancels the request in the engine and frees its KV blocks.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import math
import secrets
import struct
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from thalweg.infer.types import ModelMetadata, Request, RequestOutput, SamplingParams, SequenceResult, TokenLogprob
from thalweg.serve.errors import ApiError, BadRequest, NotFound
from thalweg.serve.openai import requests as api
from thalweg.serve.openai.tools import ToolParser
from thalweg.serve.replicas.pool import MAX_EMBED_PROMPTS, ReplicaPool
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
T = TypeVar("T")
# What stands for minus infinity, which JSON cannot say; OpenAI's choice.
MIN_LOGPROB = -9999.0


@dataclass
class AppState:
    """What the endpoints share."""

    pool: ReplicaPool
    tokenizer: api.ChatTokenizer
    model_info: ModelMetadata
    # The name under which clients ask for the model.
    model_name: str
    created: int
    # Other names for it; not listed.
    aliases: tuple[str, ...] = ()

    @property
    def model_names(self) -> list[str]:
        """The names that clients may ask for: the model's, and those of its adapters."""
        return [self.model_name, *self.model_info.adapters]

    def resolve_adapter(self, name: str | None) -> str | None:
        """Return the adapter that a ``model`` field asks for; raises 404 for an unknown name."""
        if name is None or name == self.model_name or name in self.aliases:
            return None
        if name in self.model_info.adapters:
            return name
        message = f"there is no model {name[:200]!r} here: ask for {', '.join(self.model_names)}"
        raise NotFound(message, "model", code="model_not_found")


@dataclass
class Usage:
    """Tokens of one HTTP request so far."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count what a step added."""
        self.num_generated_tokens += len(output.token_ids)
        if output.finished:
            self.num_cached_tokens += output.num_cached_tokens if output.index == 0 else 0

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class Answer:
    """One HTTP request that generates text; a subclass has the forms of its endpoint.

    It makes and checks the parameters when it is made, the prompts in :meth:`make_requests` (once there is room for
    them), and the objects of the response in :meth:`body` or :meth:`chunks`.
    """

    num_sequences: int
    # What ends a stream.
    end_marker = b"data: [DONE]\n\n"

    def __init__(self, app_state: AppState, stream: bool) -> None:
        self.app_state, self.streams, self.usage = app_state, stream, Usage()

    async def make_requests(self) -> list[Request]:
        """Tokenize the prompts; raises 400 for those that cannot be."""
        raise NotImplementedError

    def body(self, results: list[list[SequenceResult]]) -> Any:
        """Return the JSON of a whole response, from the samples of each prompt."""
        raise NotImplementedError

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream for one output."""
        raise NotImplementedError

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the event after the last output, if there is to be one."""
        return None

    def encode(self, item: dict[str, Any]) -> bytes:
        """Return one event of a stream as bytes."""
        return encode_sse(item)

    async def respond(self, receive: Receive) -> Response:
        """Generate and return the response; raises :class:`ApiError`, or ClientDisconnected."""
        pool = self.app_state.pool
        outputs = pool.submit(self.num_sequences, self._tokenize, self.streams)
        if self.streams:
            items = self.stream(outputs)
            first_item = await first_or_close(receive, items)
            return SSEResponse(first_item, items, pool.metrics.cancelled.inc, self.end_marker, self.encode)
        return JSONResponse(self.body(await run_until_disconnect(receive, self._collect(outputs))))

    async def stream(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a stream."""
        async with contextlib.aclosing(outputs):
            async for prompt_index, output in outputs:
                self.usage.add(output)
                for chunk in self.chunks(prompt_index, output):
                    yield chunk
        if (chunk := self.last_chunk()) is not None:
            yield chunk

    async def _collect(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> list[list[SequenceResult]]:
        results: defaultdict[tuple[int, int], SequenceResult] = defaultdict(SequenceResult)
        async with contextlib.aclosing(outputs):
            async for prompt_index, output in outputs:
                self.usage.add(output)
                results[prompt_index, output.index].add(output)
        by_prompt = itertools.groupby(sorted(results), key=lambda key: key[0])
        return [[results[key] for key in keys] for _, keys in by_prompt]

    async def _tokenize(self) -> list[Request]:
        requests = await self.make_requests()
        self.usage.num_prompt_tokens = sum(len(request.prompt) for request in requests)
        return requests


class _OpenAIAnswer(Answer):
    """What completions and chat share: identity, usage, adapter."""

    chunk_object: str

    def __init__(self, app_state: AppState, request: api.CompletionRequest | api.ChatRequest, prefix: str) -> None:
        super().__init__(app_state, bool(request.stream))
        self._request: Any = request
        self._adapter = app_state.resolve_adapter(request.model)
        self._tokenizer = app_state.tokenizer
        self._stream_options = request.stream_options or api.StreamOptions()
        self._common_fields = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model or app_state.model_name,
        }

    def last_chunk(self) -> dict[str, Any] | None:
        return self._body(self.chunk_object, []) if self._stream_options.include_usage else None

    def _engine_request(self, prompt: list[int], params: SamplingParams) -> Request:
        """Return an engine request; the pool names it."""
        fields = self._request
        return Request("", prompt, params, fields.priority, self._adapter, fields.cache_salt)

    def _body(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common_fields, "object": object_name, "choices": choices, "usage": self.usage.to_dict()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        so_far = self.usage.to_dict() if self._stream_options.continuous_usage_stats else None
        usage = {"usage": so_far} if self._stream_options.include_usage else {}
        return {**self._common_fields, "object": self.chunk_object, "choices": [choice], **usage}


class ChatCompletion(_OpenAIAnswer):
    """``/v1/chat/completions``."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, app_state: AppState, request: api.ChatRequest) -> None:
        super().__init__(app_state, request, "chatcmpl")
        self._request = request = api.apply_allowed_tools(request)
        self._params = api.chat_sampling_params(request, app_state.model_info, app_state.tokenizer)
        self.num_sequences = self._params.n
        self._parse_tool_calls = bool(request.tools) and request.tool_choice != "none"
        self._tool_call_forced = request.tool_choice not in (None, "none", "auto")
        names = [tool.function.name for tool in request.tools or ()]
        self._parsers = defaultdict[int, ToolParser](lambda: ToolParser(self._tool_call_forced, names))
        self._started: set[int] = set()

    async def make_requests(self) -> list[Request]:
        model_info = self.app_state.model_info
        prompt = await api.tokenize_chat(self._request, self._tokenizer, model_info)
        api.check_context_length(prompt, self._params.max_tokens, model_info, "max_completion_tokens")
        return [self._engine_request(prompt, self._params)]

    def body(self, results: list[list[SequenceResult]]) -> dict[str, Any]:
        return self._body("chat.completion", [self._choice(index, result) for index, result in enumerate(results[0])])

    def _choice(self, index: int, result: SequenceResult) -> dict[str, Any]:
        """What a stream of one output says, in one message."""
        *_, last = self.chunks(0, result.to_output(index))
        (choice,) = last["choices"]
        delta = choice.pop("delta")
        message: dict[str, Any] = {"role": "assistant", "content": delta.get("content", ""), "refusal": None}
        if calls := delta.get("tool_calls"):
            message["content"] = message["content"].strip() or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {**choice, "message": message, "stop_reason": result.stop_reason}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        index, text, reason, calls = output.index, output.text, output.finish_reason, []
        if index not in self._started:
            yield self._delta(index, {"role": "assistant", "content": ""}, None, None)
            if self._tokenizer.chat_template is None:  # the plain one ends in "Assistant:", which a blank follows
                text = text.removeprefix(" ")
        self._started.add(index)
        if self._parse_tool_calls:
            parser = self._parsers[index]
            text, calls = parser.feed(text)
            may_lack_calls = reason == "length" and not self._tool_call_forced
            if output.finished and not (may_lack_calls and parser.num_calls):  # half a call behind one is no text
                rest, more = parser.feed("", final=True)
                text, calls = text + rest, calls + more
            if output.finished and parser.num_calls and not (parser.truncated or may_lack_calls):
                reason = "tool_calls"
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        if delta or reason or output.logprobs:
            yield self._delta(index, delta, reason, self._logprobs(output.logprobs or ()))

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content = [
            {
                **self._token_entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._token_entry(token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        token_text, in_bytes = self._tokenizer.token_text(token)
        return {"token": token_text, "logprob": _clamp_logprob(logprob), "bytes": in_bytes}


class Completion(_OpenAIAnswer):
    """``/v1/completions``."""

    chunk_object = "text_completion"

    def __init__(self, app_state: AppState, request: api.CompletionRequest) -> None:
        super().__init__(app_state, request, "cmpl")
        self._params = api.completion_sampling_params(request, app_state.model_info)
        self.num_sequences = len(api.split_prompts(request.prompt)) * self._params.n
        self._prompts: list[list[int]] = []
        self._lengths: dict[tuple[int, int], int] = {}  # characters of each sequence that were sent

    async def make_requests(self) -> list[Request]:
        model_info, request = self.app_state.model_info, self._request
        self._prompts = await api.tokenize_prompts(
            request.prompt, self._tokenizer, model_info, add_special_tokens=request.add_special_tokens
        )
        params = [api.fit_max_tokens(prompt, self._params, request, model_info) for prompt in self._prompts]
        seeded = [_with_prompt_seed(one, i) for i, one in enumerate(params)]
        return [self._engine_request(*both) for both in zip(self._prompts, seeded, strict=True)]

    def body(self, results: list[list[SequenceResult]]) -> dict[str, Any]:
        if self._request.max_tokens == 0:  # the prompt's own logprobs are all that is wanted
            results = [
                [SequenceResult(prompt_logprobs=s.prompt_logprobs, finish_reason="length") for s in samples]
                for samples in results
            ]
            self.usage.num_generated_tokens = 0
        outputs = [(i, result.to_output(s)) for i, samples in enumerate(results) for s, result in enumerate(samples)]
        chunks = [chunk for output in outputs for chunk in self.chunks(*output)]
        return self._body("text_completion", [choice for chunk in chunks for choice in chunk["choices"]])

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        key = prompt_index, output.index
        text = output.text if key in self._lengths else self._echoed_prompt(prompt_index) + output.text
        offset = self._lengths.get(key, 0)
        self._lengths[key] = offset + len(text)
        if not (text or output.logprobs or output.finished):
            return
        logprobs_json = None
        if self._request.logprobs is not None:
            logprobs_json = self._logprobs(output.prompt_logprobs or (), 0, self._prompts[prompt_index])
            own_offset = offset + len(text) - len(output.text)  # behind an echo
            for name, values in self._logprobs(output.logprobs or (), own_offset).items():
                logprobs_json[name] += values
        yield self._chunk({
            "index": prompt_index * (self._request.n or 1) + output.index,
            "text": text,
            "logprobs": logprobs_json,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        })  # fmt: skip

    def _echoed_prompt(self, index: int) -> str:
        if not self._request.echo:
            return ""
        prompt = api.split_prompts(self._request.prompt)[index]
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._tokenizer.hf_tokenizer
        tokens = self._prompts[index]
        return "" if tokenizer is None else tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def _logprobs(
        self, entries: Iterable[TokenLogprob | None], offset: int, tokens: Sequence[int] = ()
    ) -> dict[str, Any]:
        """``tokens`` name those without an entry: a prompt's first, which nothing precedes."""
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for number, entry in enumerate(entries):
            token_id, logprob, top = tokens[number] if entry is None else entry.token_id, None, None
            if entry is not None:
                logprob = _clamp_logprob(entry.logprob)
                top = {}  # of two tokens of one name the likelier, which comes first
                for other, value in entry.top:
                    top.setdefault(self._token_name(other), _clamp_logprob(value))
            columns["tokens"].append(self._token_name(token_id))
            columns["token_logprobs"].append(logprob)
            columns["top_logprobs"].append(top)
            columns["text_offset"].append(offset)
            offset += len(self._tokenizer.token_text(token_id)[0])
        return columns

    def _token_name(self, token: int) -> str:
        """A token's text, or its bytes where it is a part of a character: names must stay apart."""
        name, in_bytes = self._tokenizer.token_text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in in_bytes) if "\ufffd" in name else name


def _with_prompt_seed(params: SamplingParams, index: int) -> SamplingParams:
    """Equal prompts of one request must not give equal samples: each has a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + (index << 32)) % 2**63)


def _clamp_logprob(value: float) -> float:
    """Return a number that JSON can say."""
    return value if math.isfinite(value) else MIN_LOGPROB


async def create_embedding(app_state: AppState, request: api.EmbeddingRequest, http_request: HttpRequest) -> Response:
    """Answer ``/v1/embeddings``."""
    app_state.resolve_adapter(request.model)
    if request.dimensions is not None:
        raise BadRequest("dimensions is not supported: leave it out, and cut the vectors", "dimensions")
    num_sequences = min(len(api.split_prompts(request.input)), MAX_EMBED_PROMPTS, app_state.pool.limits.max_outstanding)
    with app_state.pool.admit(num_sequences):
        limit = request.truncate_prompt_tokens
        prompts = await api.tokenize_prompts(request.input, app_state.tokenizer, app_state.model_info, "input", limit)
        rows = await run_until_disconnect(http_request.receive, app_state.pool.embed(prompts))
    total = sum(map(len, prompts))
    usage = json.dumps({"prompt_tokens": total, "total_tokens": total})
    data = ",".join([await _embedding_json(index, row, request.encoding_format) for index, row in enumerate(rows)])
    body = f'{{"object":"list","data":[{data}],"model":{json.dumps(app_state.model_name)},"usage":{usage}}}'
    return Response(body, media_type="application/json")


async def _embedding_json(index: int, vector: list[float], encoding_format: str) -> str:
    """One vector as JSON; spelling out thousands of them must not keep the loop from others."""
    if index % 16 == 15:
        await asyncio.sleep(0)
    embedding: Any = vector
    if encoding_format != "float":
        embedding = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return json.dumps({"object": "embedding", "index": index, "embedding": embedding})


class ClientDisconnected(Exception):
    """Nobody waits for the response any more."""


async def run_until_disconnect(receive: Receive, awaitable: Awaitable[T]) -> T:
    """Await ``awaitable``; cancel it, and raise :class:`ClientDisconnected`, when the client closes the connection."""
    work_task = asyncio.ensure_future(awaitable)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnected
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


def encode_sse(item: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class SSEResponse(StreamingResponse):
    """Server-sent events from a generator of what ``encode`` takes; its first item must be at hand already."""

    def __init__(
        self,
        first_item: Any,
        items: AsyncGenerator[Any],
        on_disconnect: Callable[[], None],
        end_marker: bytes,
        encode: Callable[[Any], bytes],
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._events(first_item), headers=headers, media_type="text/event-stream")
        self._items, self._on_disconnect = items, on_disconnect
        self._end_marker, self._encode = end_marker, encode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or stop when the client leaves."""
        try:
            await run_until_disconnect(receive, self.stream_response(send))
        except ClientDisconnected:
            self._on_disconnect()
        finally:
            await self._items.aclose()

    async def _events(self, first_item: Any) -> AsyncGenerator[bytes]:
        yield self._encode(first_item)
        try:
            async for item in self._items:
                yield self._encode(item)
        except ApiError as error:
            yield encode_sse(error.body())
        except Exception:
            _LOG.exception("a stream broke")
            yield encode_sse(ApiError("the server failed on this request").body())
        else:
            yield self._end_marker


async def first_or_close(receive: Receive, items: AsyncGenerator[T]) -> T:
    """Wait for the first item of a stream, so that an error before it is an HTTP status; an error closes it."""
    try:
        return await run_until_disconnect(receive, anext(items))
    except BaseException:
        await items.aclose()
        raise


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
