"""Bad requests by kind and at random, for R23's quick tier and for ``bench/serve.py --fuzz``."""

from __future__ import annotations

import json
import random
from typing import Any

_CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}

BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"   \n",
    "not json": b"{prompt: x}",
    "cut off": b'{"prompt": "x", "max_tok',
    "two objects": b'{"prompt": "x"}{"prompt": "y"}',
    "an array": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "invalid utf-8": b'{"prompt": "\xff\xfe\x80"}',
    "utf-16": '{"prompt": "x"}'.encode("utf-16"),
    "lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "deep array": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "nan": b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "infinity": b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "top_p": -Infinity}',
    "overflow": b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "long integer": b'{"prompt": "x", "messages": [], "n": ' + b"9" * 50_000 + b"}",
    "huge n": json.dumps({"prompt": "x", **_CHAT_BODY, "n": 2**62}).encode(),
    "negative": json.dumps({"prompt": "x", **_CHAT_BODY, "max_tokens": -1}).encode(),
    "roles": b'{"messages": [{"role": "king", "content": "x"}], "prompt": {}}',
    "image": b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "prompt": [[]]}',
    "null characters in names": b'{"\\u0000": 1, "prompt": "x"}',
    "many names": json.dumps({f"k{i}": i for i in range(5000)}).encode(),
    "many prompts": json.dumps({"prompt": ["x"] * 5000, "messages": []}).encode(),
}
"""Each is a client's error on the completion endpoints."""

_FIELDS = [
    "prompt",
    "messages",
    "input",
    "prompts",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "stream",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "stop_token_ids",
    "model",
    "user",
    "echo",
    "suffix",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "guided_regex",
    "guided_choice",
    "priority",
]
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/mii/toy", "/nothing")


def _random_text(rng: random.Random) -> str:
    codes = (rng.choice((rng.randrange(32, 127), rng.randrange(0x80, 0xD800))) for _ in range(30))
    return "".join(map(chr, codes))[: rng.randrange(31)]


def _random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 4 else 9)
    plain = (
        None, True, rng.randrange(-(2**80), 2**80), rng.uniform(-1e9, 1e9), float("nan"), float("inf"), "",
        _random_text(rng),
        rng.randrange(5),
    )  # fmt: skip
    if kind < 9:
        return plain[kind]
    if kind == 9:
        return [_random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice((*_FIELDS, "role", "content", "type")): _random_value(rng, depth + 1)
        for _ in range(rng.randrange(4))
    }


def bad_body(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that is wrong in some way, or by chance right (then it asks for few tokens)."""
    path = rng.choice(_PATHS)
    if rng.random() < 0.2:
        return path, rng.choice(list(BAD_BODIES.values()))
    fields: dict[str, Any] = {"prompt": "x", "max_tokens": 2} if rng.random() < 0.5 else dict(_CHAT_BODY, max_tokens=2)
    for _ in range(rng.randrange(1, 5)):
        name = rng.choice(_FIELDS)
        fields[name] = _random_value(rng)
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        if isinstance(fields.get(name), int):
            fields[name] = min(fields[name], 4)
    body = json.dumps(fields).encode()
    if rng.random() < 0.2:  # damage
        at = rng.randrange(len(body))
        body = body[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(4))) + body[at + 1 :]
    return path, body


def bad_bytes(rng: random.Random, index: int) -> bytes:
    """What is not HTTP, or barely."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    kinds = (
        bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400))),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X" * 100_000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        head + b"Content-Length: -5\r\n\r\n{}",
        head + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n{}",
        head + b"Content-Length: 10\r\n\r\n{}",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Name: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: local\x00host\r\n\r\n",
    )
    return kinds[index % len(kinds)]
