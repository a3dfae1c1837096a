"""One HTTP request's work: from engine requests to samples, or to a stream that a client may leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from thalweg.infer.types import ModelMetadata, Request, RequestOutput, TokenLogprob
from thalweg.serve.errors import ApiError, bad_request
from thalweg.serve.metrics import Metrics
from thalweg.serve.openai.tokenizer import ChatTokenizer
from thalweg.serve.replicas.pool import ReplicaPool
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
T = TypeVar("T")


@dataclass
class AppState:
    """What the endpoints share."""

    pool: ReplicaPool
    metrics: Metrics
    tokenizer: ChatTokenizer
    model_info: ModelMetadata
    model_name: str
    """The name under which clients ask for the model."""
    created: int
    request_seconds: float | None = None
    aliases: tuple[str, ...] = ()
    """Other names for it; not listed."""

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
        known = ", ".join(self.model_names)
        raise ApiError(
            404,
            f"there is no model {name[:200]!r} here: ask for {known}",
            code="model_not_found",
            param="model",
        )


@dataclass
class SequenceResult:
    """What came of one sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0


@dataclass
class Usage:
    """Tokens of one HTTP request."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class Generation:
    """Runs the engine requests of one HTTP request; ``usage`` grows as outputs pass."""

    def __init__(self, app_state: AppState, requests: list[Request]) -> None:
        self.usage = Usage(num_prompt_tokens=sum(len(request.prompt) for request in requests))
        self._app_state, self._requests = app_state, requests
        self._timer = app_state.metrics.start_timer()
        self._counts_by_sequence: dict[tuple[int, int], tuple[int, int]] = {}

    async def stream(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield (request's index, output); closing it cancels what still runs."""
        async with contextlib.aclosing(self._outputs(retryable=False)) as outputs:
            async for index, output in outputs:
                if output is not None:
                    yield index, output

    async def collect(self) -> list[list[SequenceResult]]:
        """Return the samples of each request."""
        results = [[SequenceResult() for _ in range(request.params.n)] for request in self._requests]
        async with contextlib.aclosing(self._outputs(retryable=True)) as outputs:
            async for index, output in outputs:
                if output is None:
                    results[index] = [SequenceResult() for _ in results[index]]
                    continue
                result = results[index][output.index]
                result.text += output.text
                result.token_ids += output.token_ids
                result.logprobs += output.logprobs or ()
                result.prompt_logprobs += output.prompt_logprobs or ()
                result.num_tokens = output.num_generated_tokens
                if output.finish_reason is not None:
                    result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
        return results

    async def _outputs(self, retryable: bool) -> AsyncGenerator[tuple[int, RequestOutput | None]]:
        app_state = self._app_state
        with app_state.pool.admit(sum(request.params.n for request in self._requests)):
            output_stream = app_state.pool.generate(
                self._requests, retryable=retryable, timeout=app_state.request_seconds
            )
            async with contextlib.aclosing(output_stream) as outputs:
                async for index, output in outputs:
                    if output is not None:
                        self._record(index, output)
                    yield index, output

    def _record(self, index: int, output: RequestOutput) -> None:
        self._timer.record_output(index, output)
        if output.finish_reason == "error":
            if (output.error or "").startswith("the structure"):
                raise bad_request(f"{output.error}: ask for a simpler one")
            raise ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
        self._counts_by_sequence[index, output.index] = output.num_generated_tokens, output.num_cached_tokens
        if output.finished:
            self.usage.num_generated_tokens = sum(generated for generated, _ in self._counts_by_sequence.values())
            self.usage.num_cached_tokens = sum(
                c for (_, sample), (_, c) in self._counts_by_sequence.items() if sample == 0
            )


class ClientDisconnected(Exception):
    """Nobody waits for the response any more."""


async def run_until_disconnect(receive: Receive, awaitable: Awaitable[T]) -> T:
    """Await ``work``; cancel it, and raise :class:`ClientDisconnected`, when the client closes the connection."""
    work_task, disconnect_task = (
        asyncio.ensure_future(awaitable),
        asyncio.ensure_future(_wait_for_disconnect(receive)),
    )
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnected
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


class SSEResponse(Response):
    """Server-sent events from a generator of JSON objects; its first one must be at hand already."""

    def __init__(
        self,
        first_item: Any,
        items: AsyncGenerator[Any],
        on_disconnect: Callable[[], None],
        end_marker: bytes,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first_item, self._items, self._on_disconnect, self._end_marker = (
            first_item,
            items,
            on_disconnect,
            end_marker,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or stop when the client leaves."""
        headers = [(k, v) for k, v in self.raw_headers if k not in (b"content-length", b"content-type")]
        headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await run_until_disconnect(receive, self._send_events(send))
        except ClientDisconnected:
            self._on_disconnect()
        finally:
            await self._items.aclose()

    async def _send_events(self, send: Send) -> None:
        await _send_chunk(send, encode_sse(self._first_item))
        try:
            async for item in self._items:
                await _send_chunk(send, encode_sse(item))
        except ApiError as error:
            await _send_chunk(send, encode_sse(error.body()))
        except Exception:
            _LOG.exception("a stream broke")
            await _send_chunk(send, encode_sse(ApiError(500, "the server failed on this request").body()))
        else:
            await _send_chunk(send, self._end_marker)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def sse_response(
    app_state: AppState, receive: Receive, items: AsyncGenerator[Any], end_marker: bytes = b"data: [DONE]\n\n"
) -> SSEResponse:
    """Wait for the first item, so that an error before it is an HTTP status, and make the response."""
    try:
        first_item = await run_until_disconnect(receive, anext(items))
    except BaseException:
        await items.aclose()
        raise
    return SSEResponse(first_item, items, app_state.metrics.count_cancelled, end_marker)


def encode_sse(item: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _send_chunk(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
