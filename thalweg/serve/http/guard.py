"""What must be passed before the application sees a request: the connection, the TLS handshake, the request itself.

- :class:`HardenedProtocol` is uvicorn's HTTP protocol with the limits that it lacks.  A client may connect and say
  nothing, send a header a minute, ask and never read, or open thousands of connections.  Each of these costs a file
  descriptor and memory until somebody ends it.
- :class:`HandshakeGuard` stands before it under TLS.  asyncio's server begins the handshake before any protocol hears
  of the connection, so clients that connect and say nothing would be counted nowhere and stay for a minute each.
- :class:`RequestGuard` is a plain ASGI middleware: key, host, kind, size, time.  It reads the whole body, which is
  small by decree, and replays it; so no endpoint can be held up by a client that sends a byte a minute, and
  disconnecting is noticed from then on.

Java's own client, and what is built on it, asks with each request whether it may go on in HTTP/2.  The parser
takes what follows such a request for the other protocol, its body too; here it is read again as HTTP/1.1,
which is how a server declines.
"""

import asyncio
import hashlib
import hmac
import http
import json
import math
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from thalweg.serve import errors

HEADER_BYTES = 32 * 1024
# Answered without a key: the page, which asks for one, and what a load balancer polls.
PUBLIC_PATHS = frozenset({"/", "/health", "/ping"})
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


class HardenedProtocol(HttpToolsProtocol):
    """Give it to uvicorn as ``http=``; a subclass may set the limits."""

    parser: Any
    # From a connection's first moment, or a request's first byte, to the end of its headers.
    header_seconds = 10.0
    # For which a client may read nothing of an answer of which 64 KiB and more are left.
    write_seconds = 30.0
    # For what is left of a body that nobody wanted, after its answer.
    unread_body_seconds = 1.0
    max_connections = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._header_bytes = 0
        self._in_headers = True
        self._upgrade_declined = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT") and sock.family != getattr(socket, "AF_UNIX", None):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.write_seconds * 1000))
        if len(self.connections) > self.max_connections:
            self._reject(errors.Overloaded(1))
        else:
            self._start_timer("headers", self.header_seconds, self._on_header_timeout)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._start_timer("headers", self.header_seconds, self._on_header_timeout)
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed_parser(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._in_headers and self._header_bytes > HEADER_BYTES and not self.transport.is_closing():
            self._reject(errors.ApiError(f"the headers are larger than {HEADER_BYTES} bytes", status=431))

    def _feed_parser(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrade_declined:
                    return
                self._upgrade_declined = False
                data = self._headers_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # the old one may think it is at the end
                if hasattr(self.parser, "set_dangerous_leniencies"):  # as uvicorn has it
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _headers_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                options = [word.strip() for word in value.split(b",")]
                value = b", ".join(w for w in options if w.lower() not in (b"upgrade", b"http2-settings"))
            if value and name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade_declined = True
            return
        self._in_headers = False
        self._stop_timer("headers")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._upgrade_declined:
            return
        super().on_message_complete()
        self._stop_timer("unread body")
        self._in_headers, self._header_bytes = True, 0  # what comes now belongs to the next request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            # Any byte of it would end the keep-alive timer, and nothing would end the connection.
            self._start_timer("unread body", self.unread_body_seconds, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        text = "this is not HTTP that the server understands: check request line, headers and body length"
        self._reject(errors.BadRequest(text, code="http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("write")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        super().connection_lost(exc)

    def _start_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` unless the timer is stopped before; one that runs goes on."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, callback)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _check_writing(self, num_unread: float = math.inf) -> None:
        """Hang up unless less is unread than the last time: a large answer takes a slow client long."""
        self._timers.pop("write", None)
        if (num_left := self.transport.get_write_buffer_size()) < num_unread:
            self._start_timer("write", self.write_seconds, lambda: self._check_writing(num_left))
        else:
            self.transport.abort()

    def _on_header_timeout(self) -> None:
        self._timers.pop("headers", None)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # a pipelined one: it can wait
            self._start_timer("headers", self.header_seconds, self._on_header_timeout)
        elif self._header_bytes:
            self._reject(errors.RequestTimeout(f"the headers did not arrive in {self.header_seconds:g} s"))
        else:
            self.transport.close()

    def _reject(self, error: errors.ApiError) -> None:
        """Answer without the application and close; only between responses, or the answer would mix."""
        self._stop_timer("headers")
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
        lines += [f"{name.lower()}: {value}" for name, value in {**headers, **error.headers}.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the server's side of TLS; ValueError where the files are not a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        raise ValueError(
            f"{certificate} and {key} are no PEM certificate and its key ({error.reason}): check both files"
        ) from None
    return context


def _no_passphrase() -> str:
    raise ValueError("the TLS key is encrypted: give one without a passphrase, which only this user may read")


class HandshakeGuard(asyncio.Protocol):
    """Stands for ``inner`` among the server's connections until the handshake is over."""

    handshake_seconds = 10.0

    def __init__(self, inner: HardenedProtocol, context: ssl.SSLContext) -> None:
        self._inner, self._context = inner, context
        self._buffered: list[bytes] = []
        self._disconnected = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it; begin the handshake, or hang up where there are too many."""
        self.transport = transport
        connections: set[Any] = self._inner.connections
        connections.add(self)
        if len(connections) > self._inner.max_connections:
            transport.abort()
        else:
            self._handshake_task = self._inner.loop.create_task(self._handshake(transport))

    async def _handshake(self, transport: asyncio.Transport) -> None:
        if self._disconnected:
            return
        try:
            secure: Any = await self._inner.loop.start_tls(
                transport, self, self._context, server_side=True,
                ssl_handshake_timeout=self.handshake_seconds, ssl_shutdown_timeout=self.handshake_seconds,
            )  # fmt: skip
        except (OSError, RuntimeError):  # it left, speaks no TLS, or was too slow
            transport.abort()
            secure = None
        finally:
            self._inner.connections.discard(self)  # pyright: ignore[reportArgumentType]
        if secure is None or self._disconnected:
            return
        secure.set_protocol(self._inner)
        self._inner.connection_made(secure)
        for data in self._buffered:
            self._inner.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Keep what comes in the moment between the handshake's end and the change of protocols."""
        self._buffered.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone before the other one took over."""
        self._disconnected = True
        self._inner.connections.discard(self)  # pyright: ignore[reportArgumentType]

    def shutdown(self) -> None:
        """The server ends."""
        self.transport.abort()


@dataclass(frozen=True)
class BodyLimits:
    """``max_bytes`` of a request; ``timeout_seconds`` in which it must have arrived."""

    max_bytes: int = 2**23
    timeout_seconds: float = 10.0


class RequestGuard:
    """Refuses what must not pass; ``count`` is told path and status of every response.

    Without a key only names of this host are taken as ``Host``, so that a web page cannot reach a server
    on the reader's own machine by giving its address a name (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, api_keys: tuple[str, ...], limits: BodyLimits, on_response: Callable[[str, int], None]
    ) -> None:
        self._app, self._limits, self._on_response = app, limits, on_response
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] != "http":
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
            body: bytes | None = b""
            if scope["method"] == "POST":
                _check_content_type(headers)
                body = await self._read_body(headers, receive)
        except errors.ApiError as error:
            headers = {**error.headers, "connection": "close"}  # the body may be unread
            await JSONResponse(error.body(), error.status, headers)(scope, receive, send_and_count)
            return
        if body is not None:
            await self._app(scope, _replay_body(body, receive), send_and_count)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if self._key_digests:
            return
        host = headers.get(b"host", b"localhost").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in LOCAL_HOSTS:
            message = "this server answers to localhost alone: start it with --api-key for other names"
            raise errors.ApiError(message, status=403)

    def _check_api_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._key_digests or path in PUBLIC_PATHS:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._key_digests]  # all of them, whichever is right
        if scheme.lower() != b"bearer" or not any(matches):
            raise errors.InvalidApiKey(
                "send your API key as `Authorization: Bearer KEY`" if not token else "this API key is not valid"
            )

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the whole body, or None where the client left while it sent."""
        limit, seconds = self._limits.max_bytes, self._limits.timeout_seconds
        length = headers.get(b"content-length", b"0")
        too_big = not (length.isdigit() and len(length) < 20 and int(length) <= limit)
        chunks, size, deadline = [], 0, time.monotonic() + seconds
        while True:
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                if too_big:
                    break
                raise errors.RequestTimeout(f"the body did not arrive in {seconds:g} s") from None
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            too_big |= size > limit
            if too_big:  # read on for a moment: a client that is still sending would not see the answer
                chunks.clear()
                deadline = min(deadline, time.monotonic() + 1.0)
            else:
                chunks.append(message.get("body", b""))
            is_last = not message.get("more_body", False)
            if too_big and (is_last or size > 16 * limit):
                break
            if is_last:
                return b"".join(chunks)
        message = f"the body is larger than {limit} bytes: send less, or start the server with a larger --body-bytes"
        raise errors.ApiError(message, code="body_too_large", status=413)


def _check_content_type(headers: dict[bytes, bytes]) -> None:
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise errors.ApiError("send JSON with `Content-Type: application/json`", code="content_type", status=415)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise errors.BadRequest("compressed bodies are not taken: send plain JSON", code="content_encoding")


def _replay_body(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_replayed() -> Message:
        return pending.pop() if pending else await receive()

    return receive_replayed
