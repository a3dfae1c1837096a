"""A small asynchronous HTTP client that can leave at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """What came of a request: ``status`` is 0 where nothing came; ``left`` where the client went first."""

    body: dict[str, Any]
    status: int = 0
    left: bool = False
    texts: list[str] = field(default_factory=list)


async def one_request(port: int, body: dict[str, Any], leave_after: float | None) -> Outcome:
    """Send a completion request; close the connection after ``leave_after`` seconds, where given."""
    return await Connection(port, keep=False).ask(body, leave_after)


class Connection:
    """A client's connection, opened when it is needed; with ``keep`` one for many requests."""

    def __init__(self, port: int, keep: bool = True) -> None:
        self._port, self._keep = port, keep
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: dict[str, Any], leave_after: float | None = None) -> Outcome:
        """Send a completion request; hang up after ``leave_after`` seconds, where given."""
        outcome, whole = Outcome(body), False
        reader, writer = self._open = self._open or await asyncio.open_connection(
            "127.0.0.1", self._port, limit=2**22
        )
        try:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
            head += "Content-Type: application/json\r\n" + ("" if self._keep else "Connection: close\r\n")
            writer.write(f"{head}\r\n".encode() + data)
            outcome.status, text = await asyncio.wait_for(_read(reader), leave_after or 60)
            whole = True
        except TimeoutError:
            assert leave_after is not None, "the server stalls"
            outcome.left = True
            return outcome
        finally:
            if not whole or not self._keep:
                await self.close()
        if outcome.status == 200:
            outcome.texts = _texts(text, body)
        return outcome

    async def close(self) -> None:
        """Hang up."""
        if self._open is not None:
            writer, self._open = self._open[1], None
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if "transfer-encoding: chunked" in head:
        data = _unchunk(await reader.readuntil(b"\r\n0\r\n\r\n"))
    else:
        data = await reader.readexactly(int(head.partition("content-length: ")[2].split("\r", 1)[0]))
    return int(head.split(" ", 2)[1]), data.decode()


def _unchunk(data: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + size + 4


def _texts(text: str, body: dict[str, Any]) -> list[str]:
    if not body.get("stream"):
        return [choice["text"] for choice in json.loads(text)["choices"]]
    texts = [""] * body.get("n", 1)
    assert text.endswith("data: [DONE]\n\n"), "the stream is whole"
    for event in text.split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts
