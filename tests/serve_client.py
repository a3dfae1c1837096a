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
    outcome = Outcome(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
        answer = await asyncio.wait_for(_read(reader), leave_after or 60)
    except TimeoutError:
        assert leave_after is not None, "the server stalls"
        outcome.left = True
        return outcome
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    outcome.status, text = answer
    if outcome.status == 200:
        outcome.texts = _texts(text, body)
    return outcome


async def _read(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    data = await reader.read()
    if "transfer-encoding: chunked" in head:
        data = _unchunk(data)
    return int(head.split(" ", 2)[1]), data.decode()


def _unchunk(data: bytes) -> bytes:
    parts = []
    while True:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            return b"".join(parts)
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]


def _texts(text: str, body: dict[str, Any]) -> list[str]:
    if not body.get("stream"):
        return [choice["text"] for choice in json.loads(text)["choices"]]
    texts = [""] * body.get("n", 1)
    assert text.endswith("data: [DONE]\n\n"), "the stream is whole"
    for event in text.split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts
