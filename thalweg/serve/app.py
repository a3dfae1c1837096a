"""The application: which path means what, and how errors look."""

from __future__ import annotations

import contextlib
import importlib.resources
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from thalweg.serve import lower
from thalweg.serve.chat import chat
from thalweg.serve.completions import completions
from thalweg.serve.embeddings import embeddings
from thalweg.serve.errors import ApiError, bad_request, unavailable
from thalweg.serve.generation import ClientGone, Generation, Service, start_stream, unless_gone
from thalweg.serve.schema import ChatRequest, CompletionRequest, EmbeddingRequest, MiiRequest, parse

_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


_READ = ["GET", "HEAD"]


def build_app(service: Service, deployment: str | None = None) -> FastAPI:
    """Return the application; ``deployment`` is the name under ``/mii/``."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _add_errors(app, service)
    _add_openai(app, service)
    _add_operations(app, service)

    @app.post("/mii/{name:path}")
    async def mii(name: str, http: Request) -> Response:
        if name != (deployment or service.model):
            raise ApiError(404, f"there is no deployment {name[:100]!r}: use {deployment or service.model}")
        return await _mii(service, http)

    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.api_route("/v1/models", methods=_READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in service.models]}

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def model(name: str) -> dict[str, Any]:
        service.adapter(name)
        return _model(service, name)

    @app.post("/v1/completions")
    async def complete(http: Request) -> Response:
        _needs(service, "text generation", generating=True)
        return await completions(service, parse(CompletionRequest, await http.body()), http)

    @app.post("/v1/chat/completions")
    async def converse(http: Request) -> Response:
        _needs(service, "chat", generating=True)
        return await chat(service, parse(ChatRequest, await http.body()), http)

    @app.post("/v1/embeddings")
    async def embed(http: Request) -> Response:
        _needs(service, "embeddings", generating=False)
        return await embeddings(service, parse(EmbeddingRequest, await http.body()), http)


def _add_operations(app: FastAPI, service: Service) -> None:
    page = importlib.resources.files("thalweg.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        healthy, reason = service.pool.health()
        if not healthy:
            raise unavailable(reason, "unhealthy")
        return JSONResponse({"status": "ok", "replicas": len(service.pool.ready())})

    @app.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.api_route("/", methods=_READ)
    async def root() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        known = "see /v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings, /health, /metrics"
        text = f"{http.method} {http.url.path[:200]}: {error.detail.lower()}; {known}"
        return JSONResponse(
            ApiError(error.status_code, text).body(), error.status_code, headers=error.headers
        )

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        service.metrics.cancelled()
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:  # the log has the traceback
        return JSONResponse(ApiError(500, "the server failed on this request").body(), 500)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "thalweg",
        "max_model_len": service.facts.max_length,
        "parent": None if name == service.model else service.model,
    }


def _needs(service: Service, what: str, generating: bool) -> None:
    if (service.facts.kind != "encoder") != generating:
        other = "/v1/completions" if service.facts.kind != "encoder" else "/v1/embeddings"
        raise bad_request(f"{service.model} cannot do {what}: use {other}", "model")


async def _mii(service: Service, http: Request) -> Response:
    """DeepSpeed-MII's REST form: a list of ``{generated_text, prompt_length, generated_length, ...}``."""
    ask = parse(MiiRequest, await http.body())
    _needs(service, "text generation", generating=True)
    texts = [ask.prompts] if isinstance(ask.prompts, str) else ask.prompts
    if not texts:
        raise bad_request("prompts is empty: send at least one", "prompts")
    service.pool.check(len(texts))
    if ask.stream and len(texts) > 1:
        raise bad_request("stream takes one prompt at a time: send the others apart", "stream")
    prompts = await lower.prompts(list(texts), service.text, service.facts, "prompts")
    requests = [lower.request(p, lower.mii_params(ask, len(p), service.facts)) for p in prompts]
    if ask.stream:
        before = texts[0] if ask.return_full_text else ""
        return await start_stream(service, http.receive, _mii_stream(Generation(service, requests), before))
    samples = await unless_gone(http.receive, Generation(service, requests).collect())
    answer = []
    for text, prompt, (sample,) in zip(texts, prompts, samples, strict=True):
        answer.append(
            {
                "generated_text": text + sample.text if ask.return_full_text else sample.text,
                "prompt_length": len(prompt),
                "generated_length": sample.num_tokens,
                "finish_reason": sample.finish_reason,
            }
        )
    return JSONResponse(answer)


async def _mii_stream(generation: Generation, before: str) -> AsyncGenerator[dict[str, Any]]:
    async with contextlib.aclosing(generation.stream()) as outputs:
        async for _, output in outputs:
            if before or output.text or output.finished:
                yield {
                    "generated_text": before + output.text,
                    "prompt_length": output.num_prompt_tokens,
                    "generated_length": output.num_generated_tokens,
                    "finish_reason": output.finish_reason,
                }
            before = ""
