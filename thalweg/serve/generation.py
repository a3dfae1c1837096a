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

from thalweg.infer.api import ModelFacts, Request, RequestOutput, TokenLogprob
from thalweg.serve.errors import ApiError, bad_request
from thalweg.serve.metrics import Metrics
from thalweg.serve.pool import Pool
from thalweg.serve.text import Text
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
T = TypeVar("T")


@dataclass
class Service:
    """What the endpoints share."""

    pool: Pool
    metrics: Metrics
    text: Text
    facts: ModelFacts
    model: str
    """The name under which clients ask for the model."""
    created: int
    request_seconds: float | None = None
    aliases: tuple[str, ...] = ()
    """Other names for it; not listed."""

    @property
    def models(self) -> list[str]:
        """The names that clients may ask for: the model's, and those of its adapters."""
        return [self.model, *self.facts.adapters]

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter that a ``model`` field asks for; raises 404 for an unknown name."""
        if name is None or name == self.model or name in self.aliases:
            return None
        if name in self.facts.adapters:
            return name
        known = ", ".join(self.models)
        raise ApiError(
            404,
            f"there is no model {name[:200]!r} here: ask for {known}",
            code="model_not_found",
            param="model",
        )


@dataclass
class Sample:
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

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Generation:
    """Runs the engine requests of one HTTP request; ``usage`` grows as outputs pass."""

    def __init__(self, service: Service, requests: list[Request]) -> None:
        self.usage = Usage(prompt=sum(len(request.prompt) for request in requests))
        self._service, self._requests = service, requests
        self._watch = service.metrics.watch()
        self._counted: dict[tuple[int, int], tuple[int, int]] = {}

    async def stream(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield (request's index, output); closing it cancels what still runs."""
        async with contextlib.aclosing(self._outputs(restartable=False)) as outputs:
            async for index, output in outputs:
                if output is not None:
                    yield index, output

    async def collect(self) -> list[list[Sample]]:
        """Return the samples of each request."""
        samples = [[Sample() for _ in range(request.params.n)] for request in self._requests]
        async with contextlib.aclosing(self._outputs(restartable=True)) as outputs:
            async for index, output in outputs:
                if output is None:
                    samples[index] = [Sample() for _ in samples[index]]
                    continue
                sample = samples[index][output.index]
                sample.text += output.text
                sample.token_ids += output.token_ids
                sample.logprobs += output.logprobs or ()
                sample.prompt_logprobs += output.prompt_logprobs or ()
                sample.num_tokens = output.num_generated_tokens
                if output.finish_reason is not None:
                    sample.finish_reason, sample.stop_reason = output.finish_reason, output.stop_reason
        return samples

    async def _outputs(self, restartable: bool) -> AsyncGenerator[tuple[int, RequestOutput | None]]:
        service = self._service
        with service.pool.admit(sum(request.params.n for request in self._requests)):
            generating = service.pool.generate(
                self._requests, restartable=restartable, seconds=service.request_seconds
            )
            async with contextlib.aclosing(generating) as outputs:
                async for index, output in outputs:
                    if output is not None:
                        self._note(index, output)
                    yield index, output

    def _note(self, index: int, output: RequestOutput) -> None:
        self._watch.output(index, output)
        if output.finish_reason == "error":
            if (output.error or "").startswith("the structure"):
                raise bad_request(f"{output.error}: ask for a simpler one")
            raise ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
        self._counted[index, output.index] = output.num_generated_tokens, output.num_cached_tokens
        if output.finished:
            self.usage.generated = sum(generated for generated, _ in self._counted.values())
            self.usage.cached = sum(c for (_, sample), (_, c) in self._counted.items() if sample == 0)


class ClientGone(Exception):
    """Nobody waits for the response any more."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``; cancel it, and raise :class:`ClientGone`, when the client closes the connection."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator of JSON objects; its first one must be at hand already."""

    def __init__(self, first: Any, rest: AsyncGenerator[Any], left: Callable[[], None], done: bytes) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first, self._rest, self._left, self._done = first, rest, left, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or stop when the client leaves."""
        headers = [(k, v) for k, v in self.raw_headers if k not in (b"content-length", b"content-type")]
        headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await unless_gone(receive, self._pump(send))
        except ClientGone:
            self._left()
        finally:
            await self._rest.aclose()

    async def _pump(self, send: Send) -> None:
        await _send(send, event(self._first))
        try:
            async for item in self._rest:
                await _send(send, event(item))
        except ApiError as error:
            await _send(send, event(error.body()))
        except Exception:
            _LOG.exception("a stream broke")
            await _send(send, event(ApiError(500, "the server failed on this request").body()))
        else:
            await _send(send, self._done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def start_stream(
    service: Service, receive: Receive, items: AsyncGenerator[Any], done: bytes = b"data: [DONE]\n\n"
) -> EventStream:
    """Wait for the first item, so that an error before it is an HTTP status, and make the response."""
    try:
        first = await unless_gone(receive, anext(items))
    except BaseException:
        await items.aclose()
        raise
    return EventStream(first, items, service.metrics.cancelled, done)


def event(item: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
