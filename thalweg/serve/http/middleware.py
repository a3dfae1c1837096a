"""What a request must pass before anything looks at its meaning: key, host, kind, size, time.

A plain ASGI middleware.  It reads the whole body, which is small by decree, and replays it; so no endpoint
can be held up by a client that sends a byte a minute, and disconnecting is noticed from then on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thalweg.serve.errors import (
    ApiError,
    BadRequest,
    BodyTooLarge,
    Forbidden,
    InvalidApiKey,
    RequestTimeout,
    UnsupportedMediaType,
)

PUBLIC_PATHS = frozenset({"/", "/health"})
"""Answered without a key: the page, which asks for one, and what a load balancer polls."""
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class BodyLimits:
    """``max_bytes`` of a request; ``timeout_seconds`` in which it must have arrived."""

    max_bytes: int = 2**20
    timeout_seconds: float = 10.0


class RequestGuard:
    """Refuses what must not pass; ``count`` is told path and status of every response.

    Without a key only names of this host are taken as ``Host``, so that a web page cannot reach a server
    on the reader's own machine by giving its address a name (DNS rebinding).
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: tuple[str, ...],
        limits: BodyLimits,
        on_response: Callable[[str, int], None],
    ) -> None:
        self._app, self._limits, self._on_response = app, limits, on_response
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._on_response(getattr(route, "path", "other"), message["status"])
            await send(message)

        headers = dict(scope["headers"])
        try:
            self._check_host(headers)
            self._check_api_key(scope["path"], headers)
            body = b""
            if scope["method"] == "POST":
                _check_content_type(headers)
                body = await self._read_body(headers, receive)
        except _Disconnected:
            return
        except ApiError as error:
            await _send_error(error, send_and_count)
            return
        await self._app(scope, _replay_body(body, receive), send_and_count)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if self._key_digests:
            return
        host = headers.get(b"host", b"localhost").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in LOCAL_HOSTS:
            raise Forbidden("this server answers to localhost alone: start it with --api-key for other names")

    def _check_api_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._key_digests or path in PUBLIC_PATHS:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._key_digests]  # all of them, whichever is right
        if scheme.lower() != b"bearer" or not any(matches):
            raise InvalidApiKey(
                "send your API key as `Authorization: Bearer KEY`" if not token else "this API key is not valid"
            )

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._limits.max_bytes
        length = headers.get(b"content-length", b"0")
        too_big = int(length) > limit if length.isdigit() and len(length) < 20 else True
        chunks, size, deadline = [], 0, time.monotonic() + self._limits.timeout_seconds
        while True:
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                if too_big:
                    raise _body_too_large(limit) from None
                raise RequestTimeout(f"the body did not arrive in {self._limits.timeout_seconds:g} s") from None
            if message["type"] == "http.disconnect":
                raise _Disconnected
            size += len(message.get("body", b""))
            if size > limit and not too_big:
                too_big = True
            if too_big:  # read on for a moment: a client that is still sending would not see the answer
                chunks.clear()
                deadline = min(deadline, time.monotonic() + 1.0)
                if size > 16 * limit:
                    raise _body_too_large(limit)
            else:
                chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                if too_big:
                    raise _body_too_large(limit)
                return b"".join(chunks)


class _Disconnected(Exception):
    """The client left while it sent."""


def _check_content_type(headers: dict[bytes, bytes]) -> None:
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise UnsupportedMediaType("send JSON with `Content-Type: application/json`")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise BadRequest("compressed bodies are not taken: send plain JSON", code="content_encoding")


def _body_too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes: send less")


def _replay_body(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_replayed() -> Message:
        return pending.pop() if pending else await receive()

    return receive_replayed


async def _send_error(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    headers["connection"] = "close"  # the body may be unread
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
