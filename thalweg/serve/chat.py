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

from thalweg.infer.api import TokenLogprob
from thalweg.serve import lower
from thalweg.serve.completions import finite
from thalweg.serve.generation import Generation, Sample, Service, start_stream, unless_gone
from thalweg.serve.schema import ChatRequest
from thalweg.serve.text import Text
from thalweg.serve.tools import ToolParser


async def chat(service: Service, ask: ChatRequest, http: HttpRequest) -> Response:
    """Answer one request."""
    adapter = service.adapter(ask.model)
    ask = lower.with_allowed_tools(ask)
    params = lower.chat_params(ask, service.facts, service.text)
    service.pool.check(params.n)
    prompt = await lower.chat_prompt(ask, service.text, service.facts)
    lower.room_for(prompt, params.max_tokens, service.facts, "max_completion_tokens")
    generation = Generation(service, [lower.request(prompt, params, ask, adapter)])
    answer = _Answer(service, ask)
    if ask.stream:
        return await start_stream(service, http.receive, answer.stream(generation))
    samples = await unless_gone(http.receive, generation.collect())
    return JSONResponse(answer.whole(samples[0], generation))


class _Answer:
    """The forms of one response."""

    def __init__(self, service: Service, ask: ChatRequest) -> None:
        self._text, self._ask = service.text, ask
        self._calls = bool(ask.tools) and ask.tool_choice != "none"
        self._forced = ask.tool_choice not in (None, "none", "auto")
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": ask.model or service.model,
        }

    def whole(self, samples: list[Sample], generation: Generation) -> dict[str, Any]:
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        usage = generation.usage.to_dict()
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._first(sample.text), "refusal": None}
        reason = sample.finish_reason
        if self._calls:
            parser = self._parser()
            content, calls = parser.feed(message["content"], last=True)
            if calls:
                message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
                content = content.strip() or None
                reason = reason if parser.cut else "tool_calls"
            message["content"] = content
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(sample.logprobs),
            "finish_reason": reason,
            "stop_reason": sample.stop_reason,
        }

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        parsers: defaultdict[int, ToolParser] = defaultdict(self._parser)
        begun: set[int] = set()
        async with contextlib.aclosing(generation.stream()) as outputs:
            async for _, output in outputs:
                index, text, calls = output.index, output.text, []
                if index not in begun:
                    yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
                if text and index not in begun:
                    text = self._first(text)
                begun.add(index)
                if self._calls:
                    text, calls = parsers[index].feed(text, output.finished)
                delta: dict[str, Any] = {"content": text} if text else {}
                if calls:
                    delta["tool_calls"] = calls
                called = output.finished and parsers[index].num_calls and not parsers[index].cut
                reason = "tool_calls" if called else output.finish_reason
                if delta or reason or output.logprobs:
                    yield self._chunk(index, delta, reason, self._logprobs(output.logprobs or ()))
        if self._wants_usage:
            usage = generation.usage.to_dict()
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _parser(self) -> ToolParser:
        return ToolParser(self._forced, [tool.function.name for tool in self._ask.tools or ()])

    @property
    def _wants_usage(self) -> bool:
        return self._ask.stream_options is not None and self._ask.stream_options.include_usage

    def _first(self, text: str) -> str:
        """The plain template ends in "Assistant:", so an answer begins with a blank that nobody wants."""
        return text if self._text.template is not None else text.removeprefix(" ")

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._wants_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage}

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if not self._ask.logprobs:
            return None
        content = [
            {
                **_spelled(self._text, entry.token_id, entry.logprob),
                "top_logprobs": [_spelled(self._text, token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def _spelled(text: Text, token: int, logprob: float) -> dict[str, Any]:
    spelled, in_bytes = text.spell(token)
    return {"token": spelled, "logprob": finite(logprob), "bytes": in_bytes}
