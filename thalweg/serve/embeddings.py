"""``/v1/embeddings``: OpenAI's form of what an encoder gives."""

from __future__ import annotations

import asyncio
import base64
import json
import struct

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from thalweg.serve import lower
from thalweg.serve.errors import bad_request
from thalweg.serve.generation import Service, unless_gone
from thalweg.serve.pool import EMBED_PROMPTS
from thalweg.serve.schema import EmbeddingRequest


async def embeddings(service: Service, ask: EmbeddingRequest, http: HttpRequest) -> Response:
    """Answer one request."""
    service.adapter(ask.model)
    if ask.dimensions is not None:
        raise bad_request("dimensions is not supported: leave it out, and cut the vectors", "dimensions")
    num_sequences = min(lower.num_prompts(ask.input), EMBED_PROMPTS, service.pool.limits.max_outstanding)
    service.pool.check(num_sequences)
    prompts = await lower.prompts(ask.input, service.text, service.facts, "input")
    with service.pool.admit(num_sequences):
        rows = await unless_gone(http.receive, service.pool.embed(prompts, service.request_seconds))
    total = sum(map(len, prompts))
    usage = json.dumps({"prompt_tokens": total, "total_tokens": total})
    data = ",".join([await _item(index, row, ask.encoding_format) for index, row in enumerate(rows)])
    body = f'{{"object":"list","data":[{data}],"model":{json.dumps(service.model)},"usage":{usage}}}'
    return Response(body, media_type="application/json")


async def _item(index: int, row: list[float], form: str) -> str:
    """One vector as JSON; spelling out thousands of them must not keep the loop from others."""
    if index % 16 == 15:
        await asyncio.sleep(0)
    packed = row if form == "float" else base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()
    return json.dumps({"object": "embedding", "index": index, "embedding": packed})
