"""From what a client asked for to what the engine takes: prompts as tokens, fields as SamplingParams."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from thalweg.infer.api import ModelFacts, Request, SamplingParams, Structure
from thalweg.serve.errors import bad_request
from thalweg.serve.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    MiiRequest,
    Prompt,
    Sampling,
    ToolCall,
)
from thalweg.serve.text import DEFAULT_STOP, Text, too_long
from thalweg.serve.tools import allowed, forced


def num_prompts(prompt: str | list[int] | list[Prompt]) -> int:
    """How many prompts a ``prompt`` or ``input`` field holds."""
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


async def prompts(
    given: Any, text: Text, facts: ModelFacts, param: str = "prompt", *, special: bool = True
) -> list[list[int]]:
    """Return the token ids of each prompt in a ``prompt`` field (text, tokens, or a list of either)."""
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    room = facts.max_length - (facts.kind == "causal")
    return [await _one_prompt(each, text, facts, room, param, special) for each in several]


async def _one_prompt(
    given: Prompt, text: Text, facts: ModelFacts, room: int, param: str, special: bool
) -> list[int]:
    tokens = await text.encode(given, special, room, param) if isinstance(given, str) else given
    if not tokens:
        raise bad_request("the prompt is empty: send at least one token", param)
    if len(tokens) > room:
        raise too_long(len(tokens), room, param)
    if max(tokens) >= facts.vocab_size:
        raise bad_request(f"token {max(tokens)} is outside the vocabulary of {facts.vocab_size}", param)
    return tokens


def sampling(
    ask: Sampling, facts: ModelFacts, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters; raises 400 when they contradict each other."""
    if ask.stream_options is not None and not ask.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    stop = [ask.stop] if isinstance(ask.stop, str) else ask.stop or []
    return build(
        max_tokens=max_tokens,
        min_tokens=ask.min_tokens or 0,
        n=ask.n or 1,
        temperature=_given(ask.temperature, 1.0),
        top_p=_given(ask.top_p, 1.0),
        top_k=max(_given(ask.top_k, 0), 0),
        min_p=_given(ask.min_p, 0.0),
        presence_penalty=_given(ask.presence_penalty, 0.0),
        frequency_penalty=_given(ask.frequency_penalty, 0.0),
        repetition_penalty=_given(ask.repetition_penalty, 1.0),
        logit_bias=_bias(ask.logit_bias or {}, facts),
        seed=ask.seed,
        stop=tuple(stop),
        stop_token_ids=tuple(ask.stop_token_ids or ()),
        include_stop=ask.include_stop_str_in_output,
        ignore_eos=ask.ignore_eos,
        skip_special_tokens=ask.skip_special_tokens,
        logprobs=logprobs,
        structure=structure(ask),
    )


def build(**fields: Any) -> SamplingParams:
    """Return SamplingParams; its own complaint is the client's."""
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        raise bad_request(str(error), name if name in fields else None) from None


def room_for(prompt: list[int], max_tokens: int | None, facts: ModelFacts, param: str) -> int | None:
    """Check ``max_tokens`` against the model's length; returns it."""
    total = len(prompt) + (max_tokens or 1)
    if facts.kind == "causal" and total > facts.max_length:
        raise bad_request(
            f"{len(prompt)} prompt tokens and {max_tokens} to generate are {total}; this model takes "
            f"{facts.max_length}: ask for at most {facts.max_length - len(prompt)}",
            param,
            "context_length_exceeded",
        )
    return max_tokens


def fitting(
    prompt: list[int], params: SamplingParams, ask: CompletionRequest, facts: ModelFacts
) -> SamplingParams:
    """Check a prompt's room; where nobody asked for a length, what there is must do."""
    room = facts.max_length - len(prompt)
    if facts.kind == "causal" and "max_tokens" not in ask.model_fields_set and params.min_tokens <= room:
        return replace(params, max_tokens=min(params.max_tokens or room, room))
    room_for(prompt, params.max_tokens, facts, "max_tokens")
    return params


def structure(ask: Sampling) -> Structure | None:
    """Return what the text must look like, from ``response_format`` or the ``guided_*`` fields."""
    found: list[Structure] = []
    form = ask.response_format
    if form is not None and form.type == "json_object":
        found.append(Structure(json_schema='{"type":"object"}'))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise bad_request("json_schema is missing: give its name and schema", "response_format")
        found.append(Structure(json_schema=json.dumps(form.json_schema.schema_)))
    if ask.guided_json is not None:
        text = ask.guided_json if isinstance(ask.guided_json, str) else json.dumps(ask.guided_json)
        found.append(Structure(json_schema=text))
    if ask.guided_regex is not None:
        found.append(Structure(regex=ask.guided_regex))
    if ask.guided_choice is not None:
        found.append(Structure(choices=tuple(ask.guided_choice)))
    if len(found) > 1:
        raise bad_request("give one of response_format, guided_json, guided_regex and guided_choice")
    return found[0] if found else None


def completion_params(ask: CompletionRequest, facts: ModelFacts) -> SamplingParams:
    """Return the parameters of a ``/v1/completions`` request."""
    if ask.suffix:
        raise bad_request(
            "suffix is not supported: this model continues a prompt, it does not fill in", "suffix"
        )
    if ask.best_of is not None and ask.best_of != (ask.n or 1):
        raise bad_request("best_of other than n is not supported: leave it out", "best_of")
    if ask.max_tokens == 0 and (ask.stream or not ask.echo):
        raise bad_request("max_tokens 0 is for echo without stream: ask for 1 at least", "max_tokens")
    most = 1 if ask.max_tokens == 0 else ask.max_tokens
    params = sampling(ask, facts, max_tokens=most, logprobs=ask.logprobs)
    return replace(params, prompt_logprobs=ask.logprobs) if ask.echo else params


def chat_params(ask: ChatRequest, facts: ModelFacts, text: Text) -> SamplingParams:
    """Return the parameters of a ``/v1/chat/completions`` request."""
    if ask.top_logprobs and not ask.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if text.template is None and not ask.stop:
        ask = ask.model_copy(update={"stop": [DEFAULT_STOP]})
    max_tokens = ask.max_completion_tokens if ask.max_completion_tokens is not None else ask.max_tokens
    params = sampling(
        ask, facts, max_tokens=max_tokens, logprobs=(ask.top_logprobs or 0) if ask.logprobs else None
    )
    try:
        call = forced(ask.tool_choice, [tool.function for tool in ask.tools or ()])
    except (ValueError, TypeError) as error:
        raise bad_request(str(error), "tool_choice") from None
    if call is None:
        return params
    if params.structure is not None:
        raise bad_request("a call is demanded and another form of answer too: give one", "tool_choice")
    return replace(params, structure=Structure(json_schema=json.dumps(call)), stop=())


def with_allowed_tools(ask: ChatRequest) -> ChatRequest:
    """Return the request with those tools alone that its ``tool_choice`` allows."""
    choice = ask.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return ask
    try:
        mode, tools = allowed(choice, ask.tools or ())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise bad_request(f"tool_choice is not understood: {error}", "tool_choice") from None
    return ask.model_copy(update={"tool_choice": mode, "tools": tools})


async def chat_prompt(ask: ChatRequest, text: Text, facts: ModelFacts) -> list[int]:
    """Return the tokens of a conversation."""
    tools = None
    if ask.tools and ask.tool_choice != "none":
        if not text.knows_tools:
            raise bad_request("the chat template of this model knows no tools: leave them out", "tools")
        tools = [tool.model_dump(exclude_none=True) for tool in ask.tools]
    if ask.continue_final_message and ask.messages[-1].role != "assistant":
        raise bad_request("continue_final_message needs an assistant's message at the end", "messages")
    messages = [_message(message) for message in ask.messages]
    prompt, special = text.chat(messages, tools, ask.continue_final_message, ask.chat_template_kwargs or {})
    return (await prompts(prompt, text, facts, "messages", special=special))[0]


def mii_params(ask: MiiRequest, num_prompt_tokens: int, facts: ModelFacts) -> SamplingParams:
    """Return the parameters of a request in MII's form; ``max_length`` counts the prompt."""
    before = (
        1 if facts.kind == "seq2seq" else num_prompt_tokens
    )  # of a model that listens, what it begins with
    room = min(ask.max_length or facts.max_length, facts.max_length) - before
    max_tokens = ask.max_new_tokens if ask.max_new_tokens is not None else room
    if room < 1 or max_tokens > facts.max_length - before:
        raise bad_request(
            f"{num_prompt_tokens} prompt tokens leave no room: max_length is {ask.max_length}, the model's "
            f"{facts.max_length}",
            "max_length",
        )
    stop = [ask.stop] if isinstance(ask.stop, str) else ask.stop or []
    return build(
        max_tokens=max_tokens,
        min_tokens=min(ask.min_new_tokens, max_tokens),
        temperature=_given(ask.temperature, 1.0) if ask.do_sample else 0.0,
        top_p=ask.top_p if ask.do_sample else 1.0,
        top_k=(ask.top_k or 0) if ask.do_sample else 0,
        ignore_eos=ask.ignore_eos,
        stop=tuple(stop),
        seed=ask.seed,
    )


def request(
    prompt: list[int], params: SamplingParams, ask: Sampling | None = None, adapter: str | None = None
) -> Request:
    """Return an engine request; the pool names it."""
    if ask is None:
        return Request("", prompt, params, adapter=adapter)
    return Request("", prompt, params, priority=ask.priority, cache_salt=ask.cache_salt, adapter=adapter)


def _message(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_called(call) for call in message.tool_calls]
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    return fields


def _called(call: ToolCall) -> dict[str, Any]:
    name, arguments = call.function.name, call.function.arguments
    try:  # templates expect an object, OpenAI's form is its text: of a function without any, often none
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise bad_request(f"the arguments of the call of {name[:80]} are not JSON", "messages") from None
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": parsed}}


def _bias(given: dict[str, float], facts: ModelFacts) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not key.isdecimal() or len(key) > 10 or int(key) >= facts.vocab_size:
            raise bad_request(f"{key[:20]!r} is no token of this model", "logit_bias")
        bias[int(key)] = value
    return bias


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
