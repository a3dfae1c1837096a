"""The connection's guard: uvicorn's HTTP protocol with the limits that it lacks.

A client may connect and say nothing, send a header a minute, ask and never read, or open thousands of
connections.  Each of these costs a file descriptor and memory until somebody ends it.

Java's own client, and what is built on it, asks with each request whether it may go on in HTTP/2.  The parser
takes what follows such a request for the other protocol, its body too; here it is read again as HTTP/1.1,
which is how a server declines.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from thalweg.serve.errors import ApiError, BadRequest, HeadersTooLarge, Overloaded, RequestTimeout

HEADER_SECONDS = 10.0
"""From a connection's first moment, or a request's first byte, to the end of its headers."""
WRITE_SECONDS = 30.0
"""For which a client may leave 64 KiB of answer unread."""
HEADER_BYTES = 32 * 1024
UNREAD_BODY_SECONDS = 1.0
"""For what is left of a body that nobody wanted, after its answer."""
MAX_CONNECTIONS = 1024
_REASON_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    429: b"Too Many Requests",
    431: b"Headers Too Large",
}


class HardenedProtocol(HttpToolsProtocol):
    """Give it to uvicorn as ``http=``; a subclass may set the limits."""

    parser: Any
    header_seconds = HEADER_SECONDS
    write_seconds = WRITE_SECONDS
    unread_body_seconds = UNREAD_BODY_SECONDS
    max_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unread_body_timer: asyncio.TimerHandle | None = None
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
            self._reject(Overloaded(1))
        else:
            self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._start_header_timer()
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed_parser(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._in_headers and self._header_bytes > HEADER_BYTES and not self.transport.is_closing():
            self._reject(HeadersTooLarge(f"the headers are larger than {HEADER_BYTES} bytes"))

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
        self._stop_header_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._upgrade_declined:
            return
        super().on_message_complete()
        self._stop_unread_body_timer()
        self._in_headers, self._header_bytes = True, 0  # what comes now belongs to the next request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            # Any byte of it would end the keep-alive timer, and nothing would end the connection.
            self._unread_body_timer = self.loop.call_later(self.unread_body_seconds, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        text = "this is not HTTP that the server understands: check request line, headers and body length"
        self._reject(BadRequest(text, code="http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        self._stop_unread_body_timer()
        super().connection_lost(exc)

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _stop_unread_body_timer(self) -> None:
        if self._unread_body_timer is not None:
            self._unread_body_timer.cancel()
            self._unread_body_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # a pipelined one: it can wait
            self._start_header_timer()
        elif self._header_bytes:
            self._reject(RequestTimeout(f"the headers did not arrive in {self.header_seconds:g} s"))
        else:
            self.transport.close()

    def _reject(self, error: ApiError) -> None:
        """Answer without the application and close; only between responses, or the answer would mix."""
        self._stop_header_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps(error.body()).encode()
        lines = [
            b"HTTP/1.1 %d %s" % (error.status, _REASON_PHRASES[error.status]),
            b"content-type: application/json",
        ]
        lines += [b"content-length: %d" % len(body), b"connection: close"]
        lines += [f"{name.lower()}: {value}".encode() for name, value in error.headers.items()]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()
