"""``/v1/chat/completions``: OpenAI's form of what the engine gives."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from thalweg.infer.types import TokenLogprob
from thalweg.serve.generation import AppState, Generation, SequenceResult, run_until_disconnect, sse_response
from thalweg.serve.openai import convert
from thalweg.serve.openai.completions import clamp_logprob
from thalweg.serve.openai.schema import ChatRequest
from thalweg.serve.openai.tokenizer import ChatTokenizer
from thalweg.serve.openai.tools import ToolParser


async def create_chat_completion(app_state: AppState, request: ChatRequest, http_request: HttpRequest) -> Response:
    """Answer one request."""
    adapter = app_state.resolve_adapter(request.model)
    request = convert.apply_allowed_tools(request)
    params = convert.chat_sampling_params(request, app_state.model_info, app_state.tokenizer)
    app_state.pool.check_capacity(params.n)
    prompt = await convert.tokenize_chat(request, app_state.tokenizer, app_state.model_info)
    convert.check_context_length(prompt, params.max_tokens, app_state.model_info, "max_completion_tokens")
    generation = Generation(app_state, [convert.make_engine_request(prompt, params, request, adapter)])
    builder = _ChatResponseBuilder(app_state, request)
    if request.stream:
        return await sse_response(app_state, http_request.receive, builder.stream(generation))
    results = await run_until_disconnect(http_request.receive, generation.collect())
    return JSONResponse(builder.response(results[0], generation))


class _ChatResponseBuilder:
    """The forms of one response."""

    def __init__(self, app_state: AppState, request: ChatRequest) -> None:
        self._tokenizer, self._request = app_state.tokenizer, request
        self._parse_tool_calls = bool(request.tools) and request.tool_choice != "none"
        self._tool_call_forced = request.tool_choice not in (None, "none", "auto")
        self._common_fields = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model or app_state.model_name,
        }

    def response(self, results: list[SequenceResult], generation: Generation) -> dict[str, Any]:
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        usage = generation.usage.to_dict()
        return {**self._common_fields, "object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, index: int, result: SequenceResult) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._strip_template_space(result.text),
            "refusal": None,
        }
        reason = result.finish_reason
        if self._parse_tool_calls:
            parser = self._new_tool_parser()
            content, calls = parser.feed(message["content"], final=True)
            if calls:
                message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
                content = content.strip() or None
                reason = reason if parser.truncated else "tool_calls"
            message["content"] = content
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": reason,
            "stop_reason": result.stop_reason,
        }

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        parsers: defaultdict[int, ToolParser] = defaultdict(self._new_tool_parser)
        started: set[int] = set()
        async with contextlib.aclosing(generation.stream()) as outputs:
            async for _, output in outputs:
                index, text, calls = output.index, output.text, []
                if index not in started:
                    yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
                if text and index not in started:
                    text = self._strip_template_space(text)
                started.add(index)
                if self._parse_tool_calls:
                    text, calls = parsers[index].feed(text, output.finished)
                delta: dict[str, Any] = {"content": text} if text else {}
                if calls:
                    delta["tool_calls"] = calls
                called = output.finished and parsers[index].num_calls and not parsers[index].truncated
                reason = "tool_calls" if called else output.finish_reason
                if delta or reason or output.logprobs:
                    yield self._chunk(index, delta, reason, self._logprobs(output.logprobs or ()))
        if self._include_usage:
            usage = generation.usage.to_dict()
            yield {**self._common_fields, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _new_tool_parser(self) -> ToolParser:
        return ToolParser(self._tool_call_forced, [tool.function.name for tool in self._request.tools or ()])

    @property
    def _include_usage(self) -> bool:
        return self._request.stream_options is not None and self._request.stream_options.include_usage

    def _strip_template_space(self, text: str) -> str:
        """The plain template ends in "Assistant:", so an answer begins with a blank that nobody wants."""
        return text if self._tokenizer.chat_template is not None else text.removeprefix(" ")

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return {**self._common_fields, "object": "chat.completion.chunk", "choices": [choice], **usage}

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content = [
            {
                **_token_entry(self._tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_token_entry(self._tokenizer, token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def _token_entry(tokenizer: ChatTokenizer, token: int, logprob: float) -> dict[str, Any]:
    token_text, in_bytes = tokenizer.token_text(token)
    return {"token": token_text, "logprob": clamp_logprob(logprob), "bytes": in_bytes}
