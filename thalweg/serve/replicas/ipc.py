"""What passes between the server and a replica: JSON objects in frames of a length and that many bytes.

Server to replica: ``add`` (a request), ``abort``, ``embed``.  Replica to server: ``ready`` (with the model's
metadata), ``out`` (the outputs of one step), ``refused`` (a request that can never run), ``embedded``, ``beat``
(progress and gauges, several times a second), ``fatal`` (why the engine died).  Fields that hold their default are
left out; numbers may be infinite, as Python's JSON writes them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

from thalweg.infer.types import (
    EngineStats,
    ModelMetadata,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
)

Message = dict[str, Any]

_LENGTH_PREFIX = struct.Struct("!I")
_MAX_FRAME_BYTES = 256 * 2**20  # bytes; embeddings of a full batch stay far below it


def encode_frame(message: Message) -> bytes:
    """Return a message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    assert len(body) <= _MAX_FRAME_BYTES
    return _LENGTH_PREFIX.pack(len(body)) + body


def read_messages(sock: socket.socket) -> Iterator[Message]:
    """Yield messages from a blocking socket until the other side is gone."""
    with sock.makefile("rb") as file:
        while len(head := file.read(_LENGTH_PREFIX.size)) == _LENGTH_PREFIX.size:
            size = _check_frame_size(_LENGTH_PREFIX.unpack(head)[0])
            body = file.read(size)
            if len(body) < size:
                return
            yield json.loads(body)


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, or None when the other side is gone."""
    try:
        head = await reader.readexactly(_LENGTH_PREFIX.size)
        return json.loads(await reader.readexactly(_check_frame_size(_LENGTH_PREFIX.unpack(head)[0])))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _check_frame_size(size: int) -> int:
    if size > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes: the other side speaks something else")
    return size


def dump_request(request: Request) -> Message:
    """Return a request as JSON values."""
    fields = _without_defaults(request)
    fields["prompt"] = list(request.prompt)
    if request.params != SamplingParams():
        fields["params"] = _without_defaults(request.params)
        if request.params.structure is not None:
            fields["params"]["structure"] = _without_defaults(request.params.structure)
    else:
        fields.pop("params", None)
    return fields


def load_request(fields: Message) -> Request:
    """Undo :func:`dump_request`."""
    params = dict(fields.get("params", {}))
    for name in ("stop", "stop_token_ids"):
        if name in params:
            params[name] = tuple(params[name])
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    if params.get("structure") is not None:
        structure = dict(params["structure"])
        if "choices" in structure:
            structure["choices"] = tuple(structure["choices"])
        params["structure"] = StructuredOutput(**structure)
    return Request(**{**fields, "params": SamplingParams(**params)})


def dump_output(output: RequestOutput) -> Message:
    """Return an output as JSON values."""
    fields = _without_defaults(output)
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            fields[name] = [x and [x.token_id, x.logprob, x.top] for x in fields[name]]
    return fields


def load_output(fields: Message) -> RequestOutput:
    """Undo :func:`dump_output`."""
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            fields[name] = tuple(x and _load_logprob(*x) for x in fields[name])
    fields["token_ids"] = tuple(fields.get("token_ids", ()))
    return RequestOutput(**fields)


def _load_logprob(token_id: int, logprob: float, top: list[list[Any]]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, tuple((token, value) for token, value in top))


def dump_stats(stats: EngineStats) -> Message:
    """Return the gauges as JSON values."""
    return {**_without_defaults(stats), "finished": dict(stats.finished)}


def load_stats(fields: Message) -> EngineStats:
    """Undo :func:`dump_stats`."""
    return EngineStats(**fields)


def dump_model_info(model_info: ModelMetadata) -> Message:
    """Return the model's metadata as JSON values."""
    return dataclasses.asdict(model_info)


def load_model_info(fields: Message) -> ModelMetadata:
    """Undo :func:`dump_model_info`."""
    tuples = {name: tuple(fields[name]) for name in ("eos_token_ids", "adapters")}
    return ModelMetadata(**{**fields, **tuples})


def _without_defaults(value: Any) -> Message:
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }
