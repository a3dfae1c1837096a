"""The application: which path means what, and how errors look."""

import importlib.resources
import time
import urllib.parse
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from thalweg import __version__
from thalweg.infer.types import Request as EngineRequest
from thalweg.infer.types import RequestOutput, SequenceResult
from thalweg.serve.errors import ApiError, BadRequest, NotFound, Unhealthy
from thalweg.serve.mii import deployment as mii
from thalweg.serve.openai import requests as api
from thalweg.serve.openai import responses, responses_api
from thalweg.serve.openai.responses import AppState
from thalweg.serve.replicas.router import ReplicaRouter

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


_READ_METHODS = ["GET", "HEAD"]


def build_app(app_state: AppState, deployment_name: str | None = None) -> FastAPI:
    """Return the application of a server with engines; ``deployment_name`` is the name under ``/mii/``."""
    app = _new_app(app_state.pool)
    _add_openai_routes(app, app_state)

    @app.post("/mii/{name:path}")
    async def mii_endpoint(name: str, http_request: Request) -> Response:
        if name != (deployment_name or app_state.model_name):
            raise NotFound(f"there is no deployment {name[:100]!r}: use {deployment_name or app_state.model_name}")
        request, is_legacy = api.parse_mii_body(await http_request.body())
        _require_model_kind(app_state, "text generation", generative=True)
        answer = _LegacyMiiAnswer if is_legacy else _MiiAnswer
        return await answer(app_state, request).respond(http_request.receive)

    return app


def build_router_app(router: ReplicaRouter) -> FastAPI:
    """Return the application of a server that forwards to others."""
    app = _new_app(router)

    async def forward(http_request: Request) -> Response:
        method = "GET" if http_request.method == "HEAD" else http_request.method
        target = urllib.parse.quote(http_request.url.path)
        parts: AsyncGenerator[Any] = router.submit(method, target, await http_request.body())
        response = await responses.first_or_close(http_request.receive, parts)
        if response.is_stream:
            count = router.metrics.cancelled.inc
            return responses.SSEResponse(response.body, parts, count, end_marker=b"", encode=bytes)
        await parts.aclose()
        return Response(response.body, response.status, response.headers)

    for path in ("/v1/models", "/v1/models/{name:path}"):
        app.api_route(path, methods=_READ_METHODS)(forward)
    openai = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
    for path in (*openai, "/tokenize", "/detokenize", "/mii/{name:path}"):
        app.post(path)(forward)
    return app


def _add_openai_routes(app: FastAPI, app_state: AppState) -> None:
    @app.api_route("/v1/models", methods=_READ_METHODS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(app_state, name) for name in app_state.model_names]}

    @app.api_route("/v1/models/{name:path}", methods=_READ_METHODS)
    async def model(name: str) -> dict[str, Any]:
        app_state.resolve_adapter(name)
        return _model_card(app_state, name)

    def add_generation(path: str, kind: str, request_class: Any, answer_class: Any) -> None:
        @app.post(path)
        async def generate(http_request: Request) -> Response:
            _require_model_kind(app_state, kind, generative=True)
            request = api.parse_body(request_class, await http_request.body())
            return await answer_class(app_state, request).respond(http_request.receive)

    add_generation("/v1/completions", "text generation", api.CompletionRequest, responses.Completion)
    add_generation("/v1/chat/completions", "chat", api.ChatRequest, responses.ChatCompletion)
    add_generation("/v1/responses", "chat", responses_api.ResponsesRequest, responses_api.ResponsesAnswer)

    @app.post("/v1/embeddings")
    async def embeddings_endpoint(http_request: Request) -> Response:
        _require_model_kind(app_state, "embeddings", generative=False)
        request = api.parse_body(api.EmbeddingRequest, await http_request.body())
        return await responses.create_embedding(app_state, request, http_request)

    def add_tokenizer_use(path: str, request_class: Any, answer: Any) -> None:
        @app.post(path)
        async def use(http_request: Request) -> dict[str, Any]:
            request = api.parse_body(request_class, await http_request.body())
            app_state.resolve_adapter(request.model)
            return await answer(request, app_state.tokenizer, app_state.model_info)

    add_tokenizer_use("/tokenize", api.TokenizeRequest, api.tokenize)
    add_tokenizer_use("/detokenize", api.DetokenizeRequest, api.detokenize)


def _new_app(pool: Any) -> FastAPI:
    """An application with what every server has: forms of errors, health, metrics, the page."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    page = importlib.resources.files("thalweg.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.api_route("/health", methods=_READ_METHODS)
    @app.api_route("/ping", methods=_READ_METHODS)  # what SageMaker and vLLM's clients poll
    async def health() -> Response:
        healthy, reason = pool.health()
        if not healthy:
            raise Unhealthy(reason)
        return JSONResponse({"status": "ok", "replicas": len(pool.ready_replicas())})

    @app.api_route("/v1/responses/{response_id:path}", methods=[*_READ_METHODS, "DELETE", "POST"])
    async def stored_response(response_id: str) -> Response:
        raise NotFound(
            f"there is no response {response_id[:100]!r}: this server keeps none; send the earlier items as input", "id"
        )

    @app.api_route("/version", methods=_READ_METHODS)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.api_route("/metrics", methods=_READ_METHODS)
    async def metrics() -> Response:
        return PlainTextResponse(pool.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.api_route("/", methods=_READ_METHODS)
    async def root() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _CONTENT_SECURITY_POLICY})

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=dict(error.headers))

    @app.exception_handler(HTTPException)
    async def http_error(http_request: Request, error: HTTPException) -> Response:
        known_paths = (
            "see /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings, /tokenize, /health, "
            "/metrics"
        )
        text = f"{http_request.method} {http_request.url.path[:200]}: {error.detail.lower()}; {known_paths}"
        return JSONResponse(ApiError(text, status=error.status_code).body(), error.status_code, headers=error.headers)

    @app.exception_handler(responses.ClientDisconnected)
    async def client_disconnected(_: Request, __: responses.ClientDisconnected) -> Response:
        pool.metrics.cancelled.inc()
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def internal_error(_: Request, __: Exception) -> Response:  # the log has the traceback
        return JSONResponse(ApiError("the server failed on this request").body(), 500)

    return app


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
        raise BadRequest(f"{app_state.model_name} cannot do {task}: use {other_path}", "model")


class _MiiAnswer(responses.Answer):
    """DeepSpeed-MII's REST form: a list of the fields of :class:`.deployment.Response`."""

    def __init__(self, app_state: AppState, request: api.MiiRequest) -> None:
        super().__init__(app_state, request.stream)
        self._request = request
        self._texts = [request.prompts] if isinstance(request.prompts, str) else request.prompts
        self.num_sequences = len(self._texts)
        self._lengths: list[int] = []
        self._prefix = self._texts[0] if request.return_full_text and self._texts else ""
        if not self._texts:
            raise BadRequest("prompts is empty: send at least one", "prompts")
        if request.stream and len(self._texts) > 1:
            raise BadRequest("stream takes one prompt at a time: send the others apart", "stream")

    async def make_requests(self) -> list[EngineRequest]:
        model_info = self.app_state.model_info
        prompts = await api.tokenize_prompts(self._texts, self.app_state.tokenizer, model_info, "prompts")
        self._lengths = [len(prompt) for prompt in prompts]
        return [EngineRequest("", p, api.mii_sampling_params(self._request, len(p), model_info)) for p in prompts]

    def body(self, results: list[list[SequenceResult]]) -> Any:
        items = []
        for text, length, (result,) in zip(self._texts, self._lengths, results, strict=True):
            generated = text + result.text if self._request.return_full_text else result.text
            items.append(asdict(mii.Response(generated, length, result.num_tokens, result.finish_reason)))
        return items

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if self._prefix or output.text or output.finished:
            about = output.num_prompt_tokens, output.num_generated_tokens, output.finish_reason
            yield asdict(mii.Response(self._prefix + output.text, *about))
        self._prefix = ""


class _LegacyMiiAnswer(_MiiAnswer):
    """That of MII before 0.1: the texts, and seconds."""

    def __init__(self, app_state: AppState, request: api.MiiRequest) -> None:
        super().__init__(app_state, request)
        self._start = time.perf_counter()

    def body(self, results: list[list[SequenceResult]]) -> dict[str, Any]:
        seconds = time.perf_counter() - self._start
        texts = [item["generated_text"] for item in super().body(results)]
        return {"response": texts, "timeTaken": seconds, "modelTimeTaken": seconds}
