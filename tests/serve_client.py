"""A small asynchronous HTTP client that can leave at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestResult:
    """What came of a request: ``status`` is 0 where nothing came; ``left`` where the client went first."""

    body: dict[str, Any]
    status: int = 0
    disconnected: bool = False
    texts: list[str] = field(default_factory=list)


async def send_request(port: int, body: dict[str, Any], disconnect_after: float | None) -> RequestResult:
    """Send a completion request; close the connection after ``disconnect_after`` seconds, where given."""
    return await Connection(port, keep_alive=False).send(body, disconnect_after)


class Connection:
    """A client's connection, opened when it is needed; with ``keep`` one for many requests."""

    def __init__(self, port: int, keep_alive: bool = True) -> None:
        self._port, self._keep_alive = port, keep_alive
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, body: dict[str, Any], disconnect_after: float | None = None) -> RequestResult:
        """Send a completion request; hang up after ``disconnect_after`` seconds, where given."""
        result, complete = RequestResult(body), False
        reader, writer = self._streams = self._streams or await asyncio.open_connection(
            "127.0.0.1", self._port, limit=2**22
        )
        try:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
            head += "Content-Type: application/json\r\n" + ("" if self._keep_alive else "Connection: close\r\n")
            writer.write(f"{head}\r\n".encode() + data)
            result.status, text = await asyncio.wait_for(_read_response(reader), disconnect_after or 60)
            complete = True
        except TimeoutError:
            assert disconnect_after is not None, "the server stalls"
            result.disconnected = True
            return result
        finally:
            if not complete or not self._keep_alive:
                await self.close()
        if result.status == 200:
            result.texts = _texts(text, body)
        return result

    async def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            writer, self._streams = self._streams[1], None
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if "transfer-encoding: chunked" in head:
        data = _decode_chunked(await reader.readuntil(b"\r\n0\r\n\r\n"))
    else:
        data = await reader.readexactly(int(head.partition("content-length: ")[2].split("\r", 1)[0]))
    return int(head.split(" ", 2)[1]), data.decode()


def _decode_chunked(data: bytes) -> bytes:
    parts, position = [], 0
    while True:
        end = data.index(b"\r\n", position)
        size = int(data[position:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        position = end + size + 4


def _texts(text: str, body: dict[str, Any]) -> list[str]:
    if not body.get("stream"):
        return [choice["text"] for choice in json.loads(text)["choices"]]
    texts = [""] * body.get("n", 1)
    assert text.endswith("data: [DONE]\n\n"), "the stream is whole"
    for event in text.split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts
