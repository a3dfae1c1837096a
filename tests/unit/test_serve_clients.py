"""What the clients of other servers send, and expect, beyond the plain request."""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.serve_support import ServerThread, run_toy_server
from tests.toy_engine import ToyTokenizer, expected_text
from thalweg.cli import chat
from thalweg.infer.types import ModelMetadata, RequestOutput
from thalweg.serve import server as serving
from thalweg.serve.client import iter_sse
from thalweg.serve.errors import ApiError
from thalweg.serve.mii.deployment import Client
from thalweg.serve.openai.requests import (
    ChatRequest,
    ChatTokenizer,
    apply_allowed_tools,
    parse_body,
)
from thalweg.serve.openai.responses import AppState, ChatCompletion
from thalweg.serve.openai.tools import ToolParser, tool_choice_schema

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with run_toy_server() as running:
        yield running


class Spelling(ToyTokenizer):
    """Two named templates, each of which spells out what it was given."""

    def __init__(self) -> None:
        self.chat_template: Any = {"default": "plain", "tool_use": "with tools"}

    def apply_chat_template(self, messages: Any, tools: Any = None, chat_template: Any = None, **_: Any) -> str:
        return json.dumps([chat_template, messages])


def test_templates_by_name_and_what_they_are_given() -> None:
    function = {"name": "f", "arguments": "", "parsed_arguments": {}}
    call = {"id": "abc123def", "type": "function", "function": function, "index": 0}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    result = {"role": "tool", "content": "7", "tool_call_id": "abc123def"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    called = {"id": "abc123def", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "hm"},
        {"role": "tool", "content": "7", "tool_call_id": "abc123def"},
    ]
    with run_toy_server(make_tokenizer=lambda: ChatTokenizer(Spelling())) as running:
        for given, name in ((None, "plain"), (tools, "with tools"), ([], "plain")):
            body = {"messages": [*HELLO, asked, result], "max_tokens": 9, "tools": given}
            status, answer = running.post(CHAT, **body)
            assert status == 200, answer
            want = expected_text(json.dumps([name, messages]), 9)
            assert answer["choices"][0]["message"]["content"] == want
        bad = {**asked, "tool_calls": [{**call, "function": {"name": "f", "arguments": "{"}}]}
        assert running.post(CHAT, messages=[*HELLO, bad])[0] == 400


class RefusesLongIds(Spelling):
    """As Mistral's templates do."""

    def apply_chat_template(self, messages: Any, **fields: Any) -> str:
        for call in [call for message in messages for call in message.get("tool_calls", ())]:
            if len(call["id"]) != 9 or not call["id"].isalnum():
                raise ValueError("Tool call IDs should be alphanumeric strings with length 9!")
        return "[" + ",".join(json.dumps(message, ensure_ascii=False) for message in messages) + "]"


def test_a_call_that_was_made_here_is_taken_back_by_a_template_that_counts_its_id() -> None:
    _, (call,) = ToolParser(forced=True, names=["f"]).feed('{"name": "f", "arguments": {"x": "\\ud83d"}}', final=True)
    json.dumps(call, ensure_ascii=False).encode()  # half a character cannot be sent
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    with run_toy_server(make_tokenizer=lambda: ChatTokenizer(RefusesLongIds())) as running:
        assert running.post(CHAT, messages=[*HELLO, asked], max_tokens=3)[0] == 200
        longer = {**asked, "tool_calls": [{**call, "id": "call_0123456789abcdef"}]}
        assert running.post(CHAT, messages=[*HELLO, longer], max_tokens=3)[0] == 400  # the control
        half = {**call, "function": {"name": "f", "arguments": '{"x": "\\ud83d"}'}}
        status, answer = running.post(CHAT, messages=[*HELLO, {**asked, "tool_calls": [half]}], max_tokens=3)
        assert status == 200, answer


def test_a_message_is_gone_on_with_as_vllms_clients_ask_for_it(server: ServerThread) -> None:
    """They have to say both, as vLLM refuses the two together."""
    begun = [*HELLO, {"role": "assistant", "content": "Well, "}]
    wanted = {
        "User: hello\nAssistant: Well, ": {"continue_final_message": True, "add_generation_prompt": False},
        "User: hello\nAssistant: Well, \nAssistant:": {"add_generation_prompt": True},
    }
    for prompt, asked in wanted.items():
        status, answer = server.post(CHAT, messages=begun, max_tokens=9, **asked)
        assert status == 200 and answer["choices"][0]["message"]["content"] == expected_text(prompt, 9), asked
        assert server.post("/tokenize", messages=begun, **asked)[1]["tokens"] == list(prompt.encode())
    unended = server.post("/tokenize", messages=HELLO, add_generation_prompt=False)[1]["tokens"]
    assert bytes(unended).decode() == "User: hello"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    status, answer = server.post(CHAT, messages=begun, **both)
    assert status == 400 and "add_generation_prompt" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_each_chunk_says_what_was_used_so_far_where_it_is_asked(server: ServerThread, path: str) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    used = {}
    for continuous in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        *chunks, last, _ = server.stream(path, max_tokens=20, stream_options=options, **asked)
        used[continuous] = [chunk["usage"] for chunk in chunks]
        assert last["usage"]["completion_tokens"] == 20
    counts = [usage["completion_tokens"] for usage in used[True]]
    assert counts == sorted(counts) and counts[-1] == 20 and len(set(counts)) > 2
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + n for usage, n in zip(used[True], counts, strict=True))
    assert set(map(type, used[False])) == {type(None)}


def test_fields_that_change_nothing_and_those_that_would(server: ServerThread) -> None:
    nothing = {
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_retention": "24h",
        "user": "me",
    }
    empty = dict.fromkeys(("functions", "function_call", "audio", "web_search_options"))
    parsed = {"role": "assistant", "content": "{}", "parsed": {"a": 1}, "refusal": None, "tool_calls": None}
    body = {"messages": [*HELLO, parsed, *HELLO], "max_tokens": 3}
    assert server.post(CHAT, **body, **nothing, **empty)[0] == 200
    for field, value in (("functions", []), ("audio", {}), ("web_search_options", {}), ("usr", "me")):
        status, answer = server.post(CHAT, **body, **nothing, **{field: value})
        assert status == 400 and field in answer["error"]["message"]
        assert "user" not in answer["error"]["message"].partition(";")[0], "what is ignored is no fault"


def test_a_message_as_lm_eval_and_those_who_were_answered_by_vllm_send_it() -> None:
    """lm-eval puts a type beside each role; an answer's reasoning has two names."""
    typed = [{**message, "type": "text"} for message in HELLO]
    plain = {"role": "assistant", "content": "Well"}
    with run_toy_server(make_tokenizer=lambda: ChatTokenizer(Spelling())) as running:
        for said, reasoning in (
            ({}, {}),
            ({"reasoning": None}, {}),
            ({"reasoning": None, "reasoning_content": None}, {}),
            ({"reasoning": "hm"}, {"reasoning_content": "hm"}),
            ({"reasoning": "hm", "reasoning_content": "hm"}, {"reasoning_content": "hm"}),
        ):
            status, answer = running.post(CHAT, messages=[*typed, {**plain, **said}, *typed], max_tokens=9)
            assert status == 200, answer
            want = expected_text(json.dumps(["plain", [*HELLO, {**plain, **reasoning}, *HELLO]]), 9)
            assert answer["choices"][0]["message"]["content"] == want
        for wrong in ({"typ": "text"}, {"type": 3}, {"reasoning": 3}):  # the control
            status, answer = running.post(CHAT, messages=[{**plain, **wrong}, *HELLO])
            assert status == 400 and next(iter(wrong)) in answer["error"]["message"]


def test_a_length_that_nobody_asked_for_fits(server: ServerThread) -> None:
    prompt = "x" * 2040
    assert len(server.create_completion(prompt)["choices"][0]["text"].encode()) <= 8
    assert server.create_completion(prompt)["usage"]["completion_tokens"] == 8
    assert server.create_completion("x")["usage"]["completion_tokens"] == 16
    for asked in ({"max_tokens": 16}, {"min_tokens": 12}):
        status, answer = server.post("/v1/completions", prompt=prompt, **asked)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/toy"])
def test_head_is_get_without_a_body(server: ServerThread, path: str) -> None:
    status, headers, body = server.request_raw("HEAD", path, None)
    assert (status, body) == (200, "") and int(headers["content-length"]) > 0
    assert server.request_raw("HEAD", "/v1/completions", None)[0] == 405


def test_a_model_may_be_asked_for_as_it_was_given() -> None:
    with run_toy_server(aliases=("./models/toy/",)) as running:
        answer = running.create_completion("x", model="./models/toy/", max_tokens=2)
        assert answer["choices"] and answer["model"] == "./models/toy/"
        assert [model["id"] for model in running.request("GET", "/v1/models")[1]["data"]] == ["toy", "tuned"]
        assert running.post("/v1/completions", prompt="x", model="models/toy")[0] == 404


def exchange(server: ServerThread, *pieces: bytes) -> list[bytes]:
    """Send the pieces one after the other on one connection; the last one asks to close it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.02)
        found = b""
        while data := sock.recv(65536):
            found += data
    return found.split(b"HTTP/1.1 ")[1:]


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.2"])
def test_a_request_that_offers_another_protocol_keeps_its_body(server: ServerThread, upgrade: str) -> None:
    body = json.dumps({"prompt": "java", "max_tokens": 6}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {upgrade}\r\nHTTP2-Settings: AAMAAABk\r\n"
    sized = f"{head}{offer}Content-Length: {len(body)}\r\n\r\n".encode()
    chunked = f"{head}{offer}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    whole = sized + body + chunked + last
    for pieces in ([whole], [sized, body, chunked + last], [whole[:30], whole[30:-9], whole[-9:]]):
        answers = exchange(server, *pieces)
        assert [answer[:3] for answer in answers] == [b"200"] * 3
        for answer in answers[:2]:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected_text("java", 6)
    many = sized.replace(b"Host", b"A: " + b"x" * 40_000 + b"\r\nHost")
    assert exchange(server, many[:36_000])[0].startswith(b"431"), "the limits hold"


def test_a_byte_order_mark(server: ServerThread) -> None:
    assert server.request_raw("POST", "/v1/completions", b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 2}')[0] == 200


def test_many_texts_are_embedded_in_parts() -> None:
    import torch  # noqa: F401  (the toy engine would, within the time allowed)

    texts = [f"{i}" * (1 + i % 7) for i in range(1000)]
    with run_toy_server("toy-encoder", request_seconds=1.0) as running:
        engine, parts = running.engines[0], []
        embed = engine.embed

        def noted(prompts: Any) -> Any:
            parts.append(len(prompts))
            return embed(prompts)

        engine.embed = noted
        status, answer = running.post("/v1/embeddings", input=texts)
        assert status == 200 and [item["index"] for item in answer["data"]] == list(range(1000))
        assert [item["embedding"][:2] for item in answer["data"]] == [
            [float(len(text)), float(sum(text.encode()))] for text in texts
        ]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
        assert sum(parts) == 1000 and max(parts) <= 64, "beside it others are served, and health is seen"
        parts.clear()
        assert running.post("/v1/embeddings", input=["x" * 2000] * 5)[0] == 200
        assert parts == [2, 2, 1]
        status, answer = running.post("/v1/embeddings", input=["x"] * 3000)
        said = answer["error"]["message"]
        assert status == 400 and "2048" in said and "string" not in said, said
        engine.embed = lambda prompts: time.sleep(0.3) or embed(prompts)
        status, answer = running.post("/v1/embeddings", input=["y"] * 640)
        assert status == 504 and answer["error"]["code"] == "timeout"


def test_miis_stream_takes_miis_options(server: ServerThread) -> None:
    client = Client("toy", f"http://127.0.0.1:{server.port}", None, 0)
    pieces: list[Any] = []
    options = {"max_length": 24, "do_sample": False, "return_full_text": True, "ignore_eos": True}
    (whole,) = client.generate("one two", **options)
    (streamed,) = client.generate("one two", lambda part: pieces.append(part[0]), **options)
    assert streamed == whole and whole.generated_text == "one two" + expected_text("one two", 17)
    assert "".join(map(str, pieces)) == whole.generated_text and len(pieces) > 1
    assert {piece.prompt_length for piece in pieces} == {7}
    (whole,) = client.generate("x", lambda part: None, stop="and", do_sample=False)
    assert whole.finish_reason == "stop", "without a length: until the model's own is full"
    with pytest.raises(ValueError, match="did you mean max_new_tokens"):
        client.generate("x", lambda part: None, max_new_token=3)
    with pytest.raises(ValueError, match="one prompt"):
        client.generate(["x", "y"], lambda part: None)
    assert server.request("POST", "/mii/toy", {"prompts": ["x", "y"], "stream": True})[0] == 400


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([b'data: {"a": 1}\n', b"\n"], ConnectionError),
        ([b'data: {"a": 1}\n', b'data: {"a"'], ConnectionError),
        ([b'data: {"a": 1}\n', b'data: {"error": {"message": "lost"}}\n'], ApiError),
        ([b'data: {"a": 1}\n', b"\n", b"data: [DONE]\n", b"\n"], StopIteration),
    ],
)
def test_half_a_stream_is_no_whole_one(lines: list[bytes], error: type[Exception]) -> None:
    stream = iter_sse(lines)
    assert next(stream) == {"a": 1}
    with pytest.raises(error):
        next(stream)


F, G = ("f", '{"a": 1}'), ("g", "{}")
TAGGED = '{"a": "it says \\"</tool_call>\\" and <tool_call>"}'


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        ('Look:\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "Look:\n", [F]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}',
            "",
            [F, G],
        ),
        ('{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, G]),
        ('\n[{"type": "function", "function": {"name": "g", "arguments": "{}"}}]', "", [G]),
        ('{"name": "h", "parameters": {}}', None, []),
        ('{"name": "f", "parameters": {"a"', None, []),
        ('{"answer": {"name": "f"}}', None, []),
        ('{"name": 3}', None, []),
        ("[1, 2] are numbers", None, []),
        ("[]", None, []),
        (" ", None, []),
        ("<tool_call>no call</tool_call>", None, []),
        # a tag within a string of the arguments
        (f'<tool_call>{{"name": "f", "arguments": {TAGGED}}}</tool_call>\n', "\n", [("f", TAGGED)]),
        # a tag that is missing before the next call, and at the end
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g"}</tool_call>', "", [F, G]),
        ('<tool_call> {"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g"}', "", [F, G]),
        # no calls, and one behind them
        ('<tool_call>{"f</tool_call> <tool_call>{"name": "g"}</tool_call>', '<tool_call>{"f</tool_call> ', [G]),
        ('<tool_call>{"name": 3}</tool_call> <tool_call>{"name": "g"}', '<tool_call>{"name": 3}</tool_call> ', [G]),
        ('<tool_call>{"name": "f</tool_call> and so on', None, []),
        ('<tool_call>{"name": "f", "a": "</tool_call>", "b": true, "arguments": {"a": 1}}</tool_call>', "", [F]),
    ],
)
def test_calls_in_the_forms_that_models_write(said: str, text: str | None, calls: list[Any]) -> None:
    for seed in range(20):
        rng, parser, out, found = random.Random(seed), ToolParser(names=["f", "g"]), "", []
        cuts = sorted(rng.sample(range(len(said) + 1), min(len(said), rng.choice([1, 3, 99]))))
        for begin, end in pairwise([0, *cuts, len(said)]):
            piece, more = parser.feed(said[begin:end])
            out, found = out + piece, found + more
        piece, more = parser.feed("", final=True)
        out, found = out + piece, found + more
        assert out == (said if text is None else text)
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
        assert [call["index"] for call in found] == list(range(len(calls)))
    early, _ = ToolParser(names=["f"]).feed('{"answer": ')
    assert early == '{"answer": ', "an answer that is no call is not held back"


@pytest.mark.parametrize("pieces", [1, 9, 99])
@pytest.mark.parametrize(
    ("said", "fields", "reason", "num_calls"),
    [
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f", "argum', {}, "length", 1),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_', {}, "length", 1),
        ('<tool_call>{"name": "f"}', {}, "length", 1),
        ('{"name": "f", "parameters": {}}', {}, "length", 1),
        ('{"name": "f", "arguments": {}}', {"tool_choice": "required"}, "tool_calls", 1),
        ('{"name": "f", "arguments": {"a', {"tool_choice": "required"}, "length", 1),
        ("2 <", {}, "length", 0),
    ],
)
def test_calls_of_an_answer_that_is_cut_short(
    said: str, fields: dict[str, Any], reason: str, num_calls: int, pieces: int
) -> None:
    """There may be more to come, and half a tag behind a call is no text."""
    body = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}], **fields}
    metadata: Any = ModelMetadata("toy", "causal", 99, 257, "fp32")
    app_state = AppState(None, ChatTokenizer(Spelling()), metadata, "toy", 0)  # type: ignore[arg-type]
    answer = ChatCompletion(app_state, parse_body(ChatRequest, json.dumps(body).encode()))
    size = -(-len(said) // pieces)
    parts = [said[i : i + size] for i in range(0, len(said), size)]
    outputs = [RequestOutput("", 0, (), part) for part in parts[:-1]]
    outputs.append(RequestOutput("", 0, (), parts[-1], finish_reason="length"))
    choices = [chunk["choices"][0] for output in outputs for chunk in answer.chunks(0, output)]
    text = "".join(choice["delta"].get("content", "") for choice in choices).strip()
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert (choices[-1]["finish_reason"], len(calls), text) == (reason, num_calls, "" if num_calls else said)


def test_a_demanded_call_that_is_cut_short_is_the_beginning_of_one() -> None:
    parser = ToolParser(forced=True)
    assert parser.feed('{"name": "f", "argu') == ("", [])
    text, (call,) = parser.feed('ments": {"city": "Par', final=True)
    assert text == "" and parser.truncated and call["function"] == {"name": "f", "arguments": '{"city": "Par'}
    parser = ToolParser(forced=True)
    assert parser.feed('{"name": "f', final=True) == ('{"name": "f', []) and not parser.truncated


def test_tools_may_be_allowed_by_name() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    named = [{"type": "function", "function": {"name": name}} for name in "fh"]

    def chosen(**given: Any) -> Any:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named, **given}}
        body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
        return apply_allowed_tools(parse_body(ChatRequest, json.dumps(body).encode()))

    ask = chosen()
    assert ask.tool_choice == "required" and [tool.function.name for tool in ask.tools] == ["f", "h"]
    schema = tool_choice_schema(ask.tool_choice, [tool.function for tool in ask.tools])
    assert len(schema["anyOf"]) == 2
    none = schema["anyOf"][0]["properties"]["arguments"]
    assert none["additionalProperties"] is False, "a function without parameters has none"
    for bad in ({"mode": "always"}, {"tools": []}, {"tools": [{"name": "f"}]}, {"tools": 3}):
        with pytest.raises(ApiError):
            chosen(**bad)


def test_a_prompt_may_be_echoed_alone(server: ServerThread) -> None:
    answer = server.create_completion(["one", "two"], max_tokens=0, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["one", "two"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 6
    for more in ({}, {"echo": True, "stream": True}):
        assert server.post("/v1/completions", prompt="x", max_tokens=0, **more)[0] == 400


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(server: ServerThread, text: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    monkeypatch.setattr("sys.stdin", Terminal(text))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    return chat.run(parser.parse_args(["--url", f"127.0.0.1:{server.port}/v1", *options]))


def test_a_conversation_outlives_an_error(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    long = "x" * 3000
    assert talk(server, f"{long}\nhi\n/new\n\n", monkeypatch, "--temperature", "0", "--max-tokens", "20") == 0
    out, err = capsys.readouterr()
    assert "shorten it" in err and expected_text("User: hi\nAssistant:", 20).strip() in out
    near = "x" * 2010  # 512 tokens do not fit behind it, some do
    assert talk(server, f"{near}\n\n", monkeypatch, "--temperature", "0") == 0
    out, err = capsys.readouterr()
    assert expected_text(f"User: {near}\nAssistant:", 20).strip() in out and not err


def test_idle_connections_are_kept_for_longer_than_load_balancers_keep_them() -> None:
    """AWS's and nginx's for 60 s: one that the server closes as a request comes is a 502."""
    app: Any = None
    assert serving._uvicorn_config(serving.ServeOptions("toy"), app, 1024).timeout_keep_alive > 60


def test_connections_leave_descriptors_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(4096, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert serving._raise_fd_limit() == 1024
    limits.append((256, 4096))
    assert serving._raise_fd_limit() == 1024 and limits[-1][0] == 1536
    limits.append((100, 200))
    assert serving._raise_fd_limit() == 136 and limits[-1] == (200, 200)
    limits.append((60, 60))
    with pytest.raises(OSError, match="ulimit -n"):
        serving._raise_fd_limit()
