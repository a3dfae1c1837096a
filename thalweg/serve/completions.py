"""``/v1/completions``: OpenAI's form of what the engine gives."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from thalweg.infer.api import SamplingParams, TokenLogprob
from thalweg.serve import lower
from thalweg.serve.generation import Generation, Sample, Service, start_stream, unless_gone
from thalweg.serve.schema import CompletionRequest
from thalweg.serve.text import Text

FLOOR = -9999.0
"""What stands for minus infinity, which JSON cannot say; OpenAI's choice."""


async def completions(service: Service, ask: CompletionRequest, http: HttpRequest) -> Response:
    """Answer one request."""
    adapter = service.adapter(ask.model)
    params = lower.completion_params(ask, service.facts)
    service.pool.check(lower.num_prompts(ask.prompt) * params.n)
    prompts = await lower.prompts(ask.prompt, service.text, service.facts, special=ask.add_special_tokens)
    fitting = [lower.fitting(prompt, params, ask, service.facts) for prompt in prompts]
    requests = [
        lower.request(prompt, _seeded(params, i), ask, adapter)
        for i, (prompt, params) in enumerate(zip(prompts, fitting, strict=True))
    ]
    generation = Generation(service, requests)
    answer = _Answer(service, ask, prompts)
    if ask.stream:
        return await start_stream(service, http.receive, answer.stream(generation))
    samples = await unless_gone(http.receive, generation.collect())
    if ask.max_tokens == 0:  # the prompt's own logprobs are all that is wanted
        samples = [
            [Sample(prompt_logprobs=s.prompt_logprobs, finish_reason="length") for s in several]
            for several in samples
        ]
        generation.usage.generated = 0
    return JSONResponse(answer.whole(samples, generation))


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Equal prompts of one request must not give equal samples: each has a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + (index << 32)) % 2**63)


class _Answer:
    """The forms of one response."""

    def __init__(self, service: Service, ask: CompletionRequest, prompts: list[list[int]]) -> None:
        self._text, self._ask, self._prompts = service.text, ask, prompts
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": ask.model or service.model,
        }

    def whole(self, samples: list[list[Sample]], generation: Generation) -> dict[str, Any]:
        choices = [
            self._choice(
                i,
                s,
                self._echo(i) + sample.text,
                sample.logprobs,
                len(self._echo(i)),
                sample,
                sample.prompt_logprobs,
            )
            for i, several in enumerate(samples)
            for s, sample in enumerate(several)
        ]
        return {**self._head, "choices": choices, "usage": generation.usage.to_dict()}

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        lengths: dict[tuple[int, int], int] = {}
        async with contextlib.aclosing(generation.stream()) as outputs:
            async for index, output in outputs:
                key = index, output.index
                text = output.text if key in lengths else self._echo(index) + output.text
                offset = lengths.get(key, 0)
                lengths[key] = offset + len(text)
                if not (text or output.logprobs or output.finished):
                    continue
                choice = self._choice(
                    index,
                    output.index,
                    text,
                    output.logprobs or (),
                    offset + len(text) - len(output.text),
                    output,
                    output.prompt_logprobs or (),
                )
                usage = {"usage": None} if self._wants_usage else {}
                yield {**self._head, "choices": [choice], **usage}
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": generation.usage.to_dict()}

    @property
    def _wants_usage(self) -> bool:
        return self._ask.stream_options is not None and self._ask.stream_options.include_usage

    def _echo(self, index: int) -> str:
        if not self._ask.echo:
            return ""
        given = self._ask.prompt
        if isinstance(given, list) and not isinstance(given[0], int):
            given = given[index]
        if isinstance(given, str):
            return given
        tokenizer = self._text.tokenizer
        return tokenizer.decode(self._prompts[index]) if tokenizer is not None else ""

    def _choice(
        self,
        prompt: int,
        sample: int,
        text: str,
        logprobs: Iterable[TokenLogprob],
        offset: int,
        end: Any,
        before: Sequence[TokenLogprob | None] = (),
    ) -> dict[str, Any]:
        """``before``: what an echoed prompt's own tokens were worth."""
        found = None
        if self._ask.logprobs is not None:
            found = _logprobs(self._text, before, 0, self._prompts[prompt])
            for name, values in _logprobs(self._text, logprobs, offset).items():
                found[name] += values
        return {
            "index": prompt * (self._ask.n or 1) + sample,
            "text": text,
            "logprobs": found,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }


def _logprobs(
    text: Text, entries: Iterable[TokenLogprob | None], offset: int, tokens: Sequence[int] = ()
) -> dict[str, Any]:
    """``tokens`` name those without an entry: a prompt's first, which nothing precedes."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for number, entry in enumerate(entries):
        token_id = tokens[number] if entry is None else entry.token_id
        length = len(text.spell(token_id)[0])
        found["tokens"].append(_name(text, token_id))
        found["token_logprobs"].append(None if entry is None else finite(entry.logprob))
        top = None if entry is None else {_name(text, other): finite(value) for other, value in entry.top}
        found["top_logprobs"].append(top)
        found["text_offset"].append(offset)
        offset += length
    return found


def _name(text: Text, token: int) -> str:
    """A token's text, or its bytes where it is a part of a character: names must stay apart."""
    name, in_bytes = text.spell(token)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in in_bytes) if "\ufffd" in name else name


def finite(value: float) -> float:
    """Return a number that JSON can say."""
    return value if math.isfinite(value) else FLOOR
