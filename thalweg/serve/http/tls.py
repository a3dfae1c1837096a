"""A connection before its TLS handshake is over.

asyncio's server begins the handshake before any protocol hears of the connection, so clients that connect
and say nothing, or a byte now and then, are counted nowhere and stay for a minute each.  Here a
:class:`HandshakeGuard` accepts the plain connection, counts it like any other, and lets the true protocol take over
once the handshake is done; one that is not done in ``handshake_seconds`` is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from thalweg.serve.http.hardened_protocol import HardenedProtocol


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


def tls_protocol_factory(
    context: ssl.SSLContext, protocol: type[HardenedProtocol] = HardenedProtocol
) -> Callable[..., asyncio.Protocol]:
    """Return what makes protocols for uvicorn, as ``http=``."""

    def make(**fields: Any) -> HandshakeGuard:
        return HandshakeGuard(protocol(**fields), context)

    return make


class HandshakeGuard(asyncio.Protocol):
    """Stands for ``inner`` among the server's connections until the handshake is over."""

    handshake_seconds = 10.0

    def __init__(self, inner: HardenedProtocol, context: ssl.SSLContext) -> None:
        self._inner, self._context = inner, context
        self._buffered: list[bytes] = []
        self._disconnects: list[Exception | None] = []
        self._handshake_task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None

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
        if self._disconnects:
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
        if secure is None or self._disconnects:
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
        self._disconnects.append(exc)
        self._inner.connections.discard(self)  # pyright: ignore[reportArgumentType]

    def shutdown(self) -> None:
        """The server ends."""
        if self.transport is not None:
            self.transport.abort()
