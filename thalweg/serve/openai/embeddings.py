"""``/v1/embeddings``: OpenAI's form of what an encoder gives."""

from __future__ import annotations

import asyncio
import base64
import json
import struct

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from thalweg.serve.errors import bad_request
from thalweg.serve.generation import AppState, run_until_disconnect
from thalweg.serve.openai import convert
from thalweg.serve.openai.schema import EmbeddingRequest
from thalweg.serve.replicas.pool import MAX_EMBED_PROMPTS


async def create_embedding(app_state: AppState, request: EmbeddingRequest, http_request: HttpRequest) -> Response:
    """Answer one request."""
    app_state.resolve_adapter(request.model)
    if request.dimensions is not None:
        raise bad_request("dimensions is not supported: leave it out, and cut the vectors", "dimensions")
    num_sequences = min(convert.num_prompts(request.input), MAX_EMBED_PROMPTS, app_state.pool.limits.max_outstanding)
    app_state.pool.check_capacity(num_sequences)
    prompts = await convert.tokenize_prompts(request.input, app_state.tokenizer, app_state.model_info, "input")
    with app_state.pool.admit(num_sequences):
        rows = await run_until_disconnect(
            http_request.receive, app_state.pool.embed(prompts, app_state.request_seconds)
        )
    total = sum(map(len, prompts))
    usage = json.dumps({"prompt_tokens": total, "total_tokens": total})
    data = ",".join([await _embedding_json(index, row, request.encoding_format) for index, row in enumerate(rows)])
    body = f'{{"object":"list","data":[{data}],"model":{json.dumps(app_state.model_name)},"usage":{usage}}}'
    return Response(body, media_type="application/json")


async def _embedding_json(index: int, vector: list[float], encoding_format: str) -> str:
    """One vector as JSON; spelling out thousands of them must not keep the loop from others."""
    if index % 16 == 15:
        await asyncio.sleep(0)
    packed = (
        vector if encoding_format == "float" else base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    )
    return json.dumps({"object": "embedding", "index": index, "embedding": packed})
