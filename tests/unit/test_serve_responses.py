"""``/v1/responses`` as OpenAI's own client asks for it and reads it, on the toy engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve_support import ServerThread, run_router, run_toy_server
from tests.toy_engine import ToyTokenizer, expected_text
from thalweg.infer.types import RequestOutput
from thalweg.serve.openai.requests import ChatTokenizer, parse_body
from thalweg.serve.openai.responses import AppState
from thalweg.serve.openai.responses_api import ResponsesAnswer, ResponsesRequest

openai = pytest.importorskip("openai")
PATH = "/v1/responses"


class LastWords(ToyTokenizer):
    """A template that shows each message, but a prompt that is to break the engine comes bare."""

    chat_template: Any = "{{ tools }}"

    def apply_chat_template(self, messages: Any, tools: Any = None, **_: Any) -> str:
        said = messages[-1]["content"]
        return said if said.startswith("CRASH") else json.dumps([tools, messages])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with run_toy_server() as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def templated() -> Iterator[ServerThread]:
    with run_toy_server(make_tokenizer=lambda: ChatTokenizer(LastWords())) as running:
        yield running


def client_of(server: ServerThread) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_response_whole_and_streamed(server: ServerThread) -> None:
    client = client_of(server)
    asked = {"model": "toy", "instructions": "Be brief.", "input": "Hi", "temperature": 0, "max_output_tokens": 25}
    want = expected_text("System: Be brief.\nUser: Hi\nAssistant:", 25).removeprefix(" ")
    whole = client.responses.create(**asked, metadata={"run": "7"}, store=False)
    assert whole.output_text == want and whole.object == "response" and whole.model == "toy"
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.instructions, whole.temperature, whole.max_output_tokens) == ("Be brief.", 0, 25)
    assert whole.metadata == {"run": "7"} and whole.store is False and whole.error is None
    usage = whole.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (37, 25, 62)
    assert usage.input_tokens_details.cached_tokens == usage.output_tokens_details.reasoning_tokens == 0

    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert len(deltas) > 3 and "".join(deltas) == want
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    last, first = events[-1].response, events[0].response
    assert last.output_text == want and last.usage == usage and last.id == first.id
    message = events[2].item
    assert {event.item_id for event in events[3:-2]} == {message.id} == {last.output[0].id}
    lines = server.request_raw("POST", PATH, json.dumps({**asked, "stream": True}).encode())[2].split("\n")
    assert lines[0] == "event: response.created" and lines[-4] == "event: response.incomplete", "and no [DONE]"


def test_a_stream_that_is_to_include_usage_ends_as_any_other(server: ServerThread) -> None:
    more = {"stream_options": {"include_usage": True}}
    asked = {"model": "toy", "input": "x", "max_output_tokens": 3, "extra_body": more}
    events = list(client_of(server).responses.create(**asked, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.usage.output_tokens == 3


def test_the_clients_accumulator_reads_the_stream(server: ServerThread) -> None:
    with client_of(server).responses.stream(
        model="toy", input="go", max_output_tokens=400, temperature=0, extra_body={"stop": ["stone"]}
    ) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    whole = expected_text("User: go\nAssistant:", 400).removeprefix(" ")
    assert final.status == "completed" and final.output[0].status == "completed"
    assert final.output_text == texts[-1] == whole[: whole.index("stone")], "a stop string is vLLM's field"


def test_a_conversation_goes_on_by_its_items(templated: ServerThread) -> None:
    client = client_of(templated)
    tool = {"type": "function", "name": "depth", "parameters": {"type": "object", "properties": {}}, "strict": True}
    first = client.responses.create(model="toy", input="How deep?", max_output_tokens=9)
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "depth", "arguments": '{"m": 1}'}
    items = [
        {"role": "developer", "content": "Be exact."},
        {"role": "user", "content": [{"type": "input_text", "text": "How "}, {"type": "input_text", "text": "deep?"}]},
        *first.output,
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "7 m"},
    ]
    second = client.responses.create(model="toy", instructions="Go.", input=items, tools=[tool], max_output_tokens=20)
    function = {"name": "depth", "parameters": tool["parameters"], "strict": True}
    called = {"id": "c1", "type": "function", "function": {"name": "depth", "arguments": {"m": 1}}}
    messages = [
        {"role": "system", "content": "Go."},
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": first.output_text, "tool_calls": [called]},
        {"role": "tool", "content": "7 m", "tool_call_id": "c1"},
    ]
    assert second.output_text == expected_text(json.dumps([[{"type": "function", "function": function}], messages]), 20)
    by_hand = [{**item.model_dump()} for item in first.output]
    assert client.responses.create(model="toy", input=by_hand, max_output_tokens=2).output_text, "every field of it"


def test_log_probabilities(server: ServerThread) -> None:
    client, asked = client_of(server), {"model": "toy", "input": "logs", "max_output_tokens": 30, "temperature": 0}
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    whole = client.responses.create(**asked, include=include, top_logprobs=3)
    entries = whole.output[0].content[0].logprobs
    assert len(entries) == 30 and all(len(entry.top_logprobs) == 3 for entry in entries)
    events = list(client.responses.create(**asked, include=include, top_logprobs=3, stream=True))
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert client.responses.create(**asked).output[0].content[0].logprobs == [], "control: nobody asked"


@pytest.mark.parametrize(
    ("fields", "named", "cure"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "earlier items as input"),
        ({"conversation": "conv_1"}, "conversation", "earlier items as input"),
        ({"store": True}, "store", "leave it out"),
        ({"background": True}, "background", "stream"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"tools": [{"type": "web_search"}]}, "tools", "type function"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_text"),
        ({"input": []}, "input", "at least 1"),
        ({"input": "x" * 3000}, "input", "shorten it"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "at most"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "response_format", "text.format"),
        ({"extra_body": {"n": 2}}, "n", "again"),
        ({"extra_body": {"instruction": "x"}}, "instruction", "instructions"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(server: ServerThread, fields: Any, named: str, cure: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client_of(server).responses.create(**{"model": "toy", "input": "x", "stream": stream, **fields})
        assert caught.value.param == named and cure in caught.value.message, caught.value


def test_what_says_no_is_taken(server: ServerThread) -> None:
    none = dict.fromkeys(("previous_response_id", "conversation", "prompt", "tools", "text", "reasoning", "include"))
    none |= {"store": False, "background": False, "truncation": "disabled", "reasoning": {"effort": "low"}, "n": 1}
    none |= {"service_tier": "auto", "user": "me", "parallel_tool_calls": False, "prompt_cache_key": "k"}
    status, answer = server.post(PATH, input="x", max_output_tokens=3, **none)
    assert status == 200 and answer["parallel_tool_calls"] is False


def test_no_response_is_kept(server: ServerThread) -> None:
    client = client_of(server)
    made = client.responses.create(model="toy", input="x", max_output_tokens=2)
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="keeps none"):
            ask(made.id)


def test_a_stream_that_breaks_says_so_as_an_event(templated: ServerThread) -> None:
    events = list(client_of(templated).responses.create(model="toy", input="CRASH", max_output_tokens=50, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert "lost" in events[-1].response.error.message and events[-1].response.output[0].content[0].text


def test_through_a_router() -> None:
    with run_toy_server() as replica, run_router([replica.url]) as router:
        asked = {"model": "toy", "input": "far", "max_output_tokens": 12, "temperature": 0}
        whole = client_of(router).responses.create(**asked)
        assert whole.output_text == expected_text("User: far\nAssistant:", 12).removeprefix(" ")
        assert (
            list(client_of(router).responses.create(**asked, stream=True))[-1].response.output_text == whole.output_text
        )
        with pytest.raises(openai.NotFoundError, match="keeps none"):
            client_of(router).responses.retrieve("resp_1")


def answer_with(text: str, pieces: int, reason: Any, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events, and the last response, of an engine that writes ``text`` in so many pieces."""
    tool = {"type": "function", "name": "f"}
    body = {"input": "x", "tools": [tool], **fields}
    about = {"vocab_size": 257, "adapters": (), "sampling_defaults": {}}
    tokenizer, metadata = ChatTokenizer(LastWords()), type("M", (), about)()
    state = AppState(None, tokenizer, metadata, "toy", 0)  # type: ignore[arg-type]
    answer = ResponsesAnswer(state, parse_body(ResponsesRequest, json.dumps(body).encode()))
    size = -(-len(text) // pieces)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    outputs = [
        RequestOutput("", 0, (), part, finish_reason=reason if i == len(parts) - 1 else None)
        for i, part in enumerate(parts)
    ]
    events = [json.loads(json.dumps(event)) for output in outputs for event in answer.chunks(0, output)]
    return events, events[-1]["response"]


@pytest.mark.parametrize("pieces", [1, 7, 60])
def test_calls_are_items_behind_the_message(pieces: int) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    events, response = answer_with(f"Look:\n{call}\n{call}\n", pieces, "stop")
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert response["status"] == "completed" and response["output"][0]["content"][0]["text"].strip() == "Look:"
    assert all(item["arguments"] == '{"a": 1}' and item["name"] == "f" for item in response["output"][1:])
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == response["output"]
    assert [event["output_index"] for event in done] == [0, 1, 2]
    _, alone = answer_with(f"\n{call}", pieces, "stop")
    assert [item["type"] for item in alone["output"]] == ["function_call"], "a blank is no message"
    _, blank = answer_with(" \n", 1, "stop")
    assert blank["output"][0]["content"][0]["text"] == " \n"


def test_a_demanded_call_that_is_cut_short_is_incomplete() -> None:
    _, response = answer_with('{"name": "f", "arguments": {"a', 1, "length", tool_choice="required")
    (item,) = response["output"]
    assert (response["status"], item["status"], item["arguments"]) == ("incomplete", "incomplete", '{"a')
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    _, response = answer_with('{"name": "f", "arguments": {}}', 1, "stop", tool_choice=allowed)
    assert response["output"][0]["type"] == "function_call" and response["tool_choice"] == allowed
