"""The application: which path means what, and how errors look."""

from __future__ import annotations

import contextlib
import importlib.resources
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from thalweg.serve.errors import ApiError, bad_request, unavailable
from thalweg.serve.generation import (
    AppState,
    ClientDisconnected,
    Generation,
    run_until_disconnect,
    sse_response,
)
from thalweg.serve.openai import convert
from thalweg.serve.openai.chat import create_chat_completion
from thalweg.serve.openai.completions import create_completion
from thalweg.serve.openai.embeddings import create_embedding
from thalweg.serve.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    MiiRequest,
    parse_body,
)

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


_READ_METHODS = ["GET", "HEAD"]


def build_app(app_state: AppState, deployment_name: str | None = None) -> FastAPI:
    """Return the application; ``deployment`` is the name under ``/mii/``."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _add_error_handlers(app, app_state)
    _add_openai_routes(app, app_state)
    _add_operations_routes(app, app_state)

    @app.post("/mii/{name:path}")
    async def mii(name: str, http_request: Request) -> Response:
        if name != (deployment_name or app_state.model_name):
            raise ApiError(404, f"there is no deployment {name[:100]!r}: use {deployment_name or app_state.model_name}")
        return await _mii_response(app_state, http_request)

    return app


def _add_openai_routes(app: FastAPI, app_state: AppState) -> None:
    @app.api_route("/v1/models", methods=_READ_METHODS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(app_state, name) for name in app_state.model_names]}

    @app.api_route("/v1/models/{name:path}", methods=_READ_METHODS)
    async def model(name: str) -> dict[str, Any]:
        app_state.resolve_adapter(name)
        return _model_card(app_state, name)

    @app.post("/v1/completions")
    async def completions_endpoint(http_request: Request) -> Response:
        _require_model_kind(app_state, "text generation", generative=True)
        return await create_completion(
            app_state, parse_body(CompletionRequest, await http_request.body()), http_request
        )

    @app.post("/v1/chat/completions")
    async def chat_completions_endpoint(http_request: Request) -> Response:
        _require_model_kind(app_state, "chat", generative=True)
        return await create_chat_completion(app_state, parse_body(ChatRequest, await http_request.body()), http_request)

    @app.post("/v1/embeddings")
    async def embeddings_endpoint(http_request: Request) -> Response:
        _require_model_kind(app_state, "embeddings", generative=False)
        return await create_embedding(app_state, parse_body(EmbeddingRequest, await http_request.body()), http_request)


def _add_operations_routes(app: FastAPI, app_state: AppState) -> None:
    page = importlib.resources.files("thalweg.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.api_route("/health", methods=_READ_METHODS)
    async def health() -> Response:
        healthy, reason = app_state.pool.health()
        if not healthy:
            raise unavailable(reason, "unhealthy")
        return JSONResponse({"status": "ok", "replicas": len(app_state.pool.ready_replicas())})

    @app.api_route("/metrics", methods=_READ_METHODS)
    async def metrics() -> Response:
        return PlainTextResponse(app_state.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.api_route("/", methods=_READ_METHODS)
    async def root() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _CONTENT_SECURITY_POLICY})


def _add_error_handlers(app: FastAPI, app_state: AppState) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(http_request: Request, error: HTTPException) -> Response:
        known_paths = "see /v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings, /health, /metrics"
        text = f"{http_request.method} {http_request.url.path[:200]}: {error.detail.lower()}; {known_paths}"
        return JSONResponse(ApiError(error.status_code, text).body(), error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnected)
    async def client_disconnected(_: Request, __: ClientDisconnected) -> Response:
        app_state.metrics.count_cancelled()
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def internal_error(_: Request, __: Exception) -> Response:  # the log has the traceback
        return JSONResponse(ApiError(500, "the server failed on this request").body(), 500)


def _model_card(app_state: AppState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": app_state.created,
        "owned_by": "thalweg",
        "max_model_len": app_state.model_info.max_length,
        "parent": None if name == app_state.model_name else app_state.model_name,
    }


def _require_model_kind(app_state: AppState, task: str, generative: bool) -> None:
    if (app_state.model_info.kind != "encoder") != generative:
        other_path = "/v1/completions" if app_state.model_info.kind != "encoder" else "/v1/embeddings"
        raise bad_request(f"{app_state.model_name} cannot do {task}: use {other_path}", "model")


async def _mii_response(app_state: AppState, http_request: Request) -> Response:
    """DeepSpeed-MII's REST form: a list of ``{generated_text, prompt_length, generated_length, ...}``."""
    request = parse_body(MiiRequest, await http_request.body())
    _require_model_kind(app_state, "text generation", generative=True)
    texts = [request.prompts] if isinstance(request.prompts, str) else request.prompts
    if not texts:
        raise bad_request("prompts is empty: send at least one", "prompts")
    app_state.pool.check_capacity(len(texts))
    if request.stream and len(texts) > 1:
        raise bad_request("stream takes one prompt at a time: send the others apart", "stream")
    prompts = await convert.tokenize_prompts(list(texts), app_state.tokenizer, app_state.model_info, "prompts")
    requests = [
        convert.make_engine_request(p, convert.mii_sampling_params(request, len(p), app_state.model_info))
        for p in prompts
    ]
    if request.stream:
        prefix = texts[0] if request.return_full_text else ""
        return await sse_response(app_state, http_request.receive, _mii_chunks(Generation(app_state, requests), prefix))
    results = await run_until_disconnect(http_request.receive, Generation(app_state, requests).collect())
    responses = []
    for text, prompt, (result,) in zip(texts, prompts, results, strict=True):
        responses.append(
            {
                "generated_text": text + result.text if request.return_full_text else result.text,
                "prompt_length": len(prompt),
                "generated_length": result.num_tokens,
                "finish_reason": result.finish_reason,
            }
        )
    return JSONResponse(responses)


async def _mii_chunks(generation: Generation, prefix: str) -> AsyncGenerator[dict[str, Any]]:
    async with contextlib.aclosing(generation.stream()) as outputs:
        async for _, output in outputs:
            if prefix or output.text or output.finished:
                yield {
                    "generated_text": prefix + output.text,
                    "prompt_length": output.num_prompt_tokens,
                    "generated_length": output.num_generated_tokens,
                    "finish_reason": output.finish_reason,
                }
            prefix = ""
