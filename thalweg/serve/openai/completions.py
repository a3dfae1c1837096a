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

from thalweg.infer.types import SamplingParams, TokenLogprob
from thalweg.serve.generation import AppState, Generation, SequenceResult, run_until_disconnect, sse_response
from thalweg.serve.openai import convert
from thalweg.serve.openai.schema import CompletionRequest
from thalweg.serve.openai.tokenizer import ChatTokenizer

MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say; OpenAI's choice."""


async def create_completion(app_state: AppState, request: CompletionRequest, http_request: HttpRequest) -> Response:
    """Answer one request."""
    adapter = app_state.resolve_adapter(request.model)
    params = convert.completion_sampling_params(request, app_state.model_info)
    app_state.pool.check_capacity(convert.num_prompts(request.prompt) * params.n)
    prompts = await convert.tokenize_prompts(
        request.prompt,
        app_state.tokenizer,
        app_state.model_info,
        add_special_tokens=request.add_special_tokens,
    )
    params_per_prompt = [convert.fit_max_tokens(prompt, params, request, app_state.model_info) for prompt in prompts]
    requests = [
        convert.make_engine_request(prompt, _with_prompt_seed(params, i), request, adapter)
        for i, (prompt, params) in enumerate(zip(prompts, params_per_prompt, strict=True))
    ]
    generation = Generation(app_state, requests)
    builder = _CompletionResponseBuilder(app_state, request, prompts)
    if request.stream:
        return await sse_response(app_state, http_request.receive, builder.stream(generation))
    results = await run_until_disconnect(http_request.receive, generation.collect())
    if request.max_tokens == 0:  # the prompt's own logprobs are all that is wanted
        results = [
            [SequenceResult(prompt_logprobs=s.prompt_logprobs, finish_reason="length") for s in prompt_results]
            for prompt_results in results
        ]
        generation.usage.num_generated_tokens = 0
    return JSONResponse(builder.response(results, generation))


def _with_prompt_seed(params: SamplingParams, index: int) -> SamplingParams:
    """Equal prompts of one request must not give equal samples: each has a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + (index << 32)) % 2**63)


class _CompletionResponseBuilder:
    """The forms of one response."""

    def __init__(self, app_state: AppState, request: CompletionRequest, prompts: list[list[int]]) -> None:
        self._tokenizer, self._request, self._prompts = app_state.tokenizer, request, prompts
        self._common_fields = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model or app_state.model_name,
        }

    def response(self, results: list[list[SequenceResult]], generation: Generation) -> dict[str, Any]:
        choices = [
            self._choice(
                i,
                s,
                self._echoed_prompt(i) + result.text,
                result.logprobs,
                len(self._echoed_prompt(i)),
                result,
                result.prompt_logprobs,
            )
            for i, prompt_results in enumerate(results)
            for s, result in enumerate(prompt_results)
        ]
        return {**self._common_fields, "choices": choices, "usage": generation.usage.to_dict()}

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        lengths: dict[tuple[int, int], int] = {}
        async with contextlib.aclosing(generation.stream()) as outputs:
            async for index, output in outputs:
                key = index, output.index
                text = output.text if key in lengths else self._echoed_prompt(index) + output.text
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
                usage = {"usage": None} if self._include_usage else {}
                yield {**self._common_fields, "choices": [choice], **usage}
        if self._include_usage:
            yield {**self._common_fields, "choices": [], "usage": generation.usage.to_dict()}

    @property
    def _include_usage(self) -> bool:
        return self._request.stream_options is not None and self._request.stream_options.include_usage

    def _echoed_prompt(self, index: int) -> str:
        if not self._request.echo:
            return ""
        prompt = self._request.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[index]
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._tokenizer.hf_tokenizer
        return tokenizer.decode(self._prompts[index]) if tokenizer is not None else ""

    def _choice(
        self,
        prompt_index: int,
        sample_index: int,
        text: str,
        logprobs: Iterable[TokenLogprob],
        offset: int,
        last_output: Any,
        prompt_logprobs: Sequence[TokenLogprob | None] = (),
    ) -> dict[str, Any]:
        """``before``: what an echoed prompt's own tokens were worth."""
        logprobs_json = None
        if self._request.logprobs is not None:
            logprobs_json = _logprobs_json(self._tokenizer, prompt_logprobs, 0, self._prompts[prompt_index])
            for name, values in _logprobs_json(self._tokenizer, logprobs, offset).items():
                logprobs_json[name] += values
        return {
            "index": prompt_index * (self._request.n or 1) + sample_index,
            "text": text,
            "logprobs": logprobs_json,
            "finish_reason": last_output.finish_reason,
            "stop_reason": last_output.stop_reason,
        }


def _logprobs_json(
    tokenizer: ChatTokenizer, entries: Iterable[TokenLogprob | None], offset: int, tokens: Sequence[int] = ()
) -> dict[str, Any]:
    """``tokens`` name those without an entry: a prompt's first, which nothing precedes."""
    columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for number, entry in enumerate(entries):
        token_id = tokens[number] if entry is None else entry.token_id
        length = len(tokenizer.token_text(token_id)[0])
        columns["tokens"].append(_token_name(tokenizer, token_id))
        columns["token_logprobs"].append(None if entry is None else clamp_logprob(entry.logprob))
        top = (
            None
            if entry is None
            else {_token_name(tokenizer, other): clamp_logprob(value) for other, value in entry.top}
        )
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(offset)
        offset += length
    return columns


def _token_name(tokenizer: ChatTokenizer, token: int) -> str:
    """A token's text, or its bytes where it is a part of a character: names must stay apart."""
    name, in_bytes = tokenizer.token_text(token)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in in_bytes) if "\ufffd" in name else name


def clamp_logprob(value: float) -> float:
    """Return a number that JSON can say."""
    return value if math.isfinite(value) else MIN_LOGPROB
