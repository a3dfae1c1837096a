"""OpenAI's API on the toy engine: what comes is what the engine gave, in the right form."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import pytest

from tests.serve_support import ServerThread, run_toy_server
from tests.toy_engine import ToyTokenizer, expected_text
from thalweg.infer import ModelMetadata
from thalweg.serve.openai.requests import ChatTokenizer, MiiRequest, mii_sampling_params


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with run_toy_server() as running:
        yield running
        running.wait_idle()
        assert running.engines[0].used == 0


def test_a_completion_is_what_the_engine_gives(server: ServerThread) -> None:
    answer = server.create_completion("deep river", max_tokens=40)
    (choice,) = answer["choices"]
    assert choice["text"] == expected_text("deep river", 40) and choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion" and answer["model"] == "toy"
    assert answer["usage"]["prompt_tokens"] == 10 and answer["usage"]["completion_tokens"] == 40
    assert choice["text"] != expected_text("deep rivers", 40), "negative control: another prompt, another text"


def test_prompts_in_each_form_and_n_samples(server: ServerThread) -> None:
    prompts = ["one", "zwei drei"]
    answer = server.create_completion(prompts, max_tokens=12, n=3, seed=5)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert texts[:3] == [expected_text("one", 12, 5, i) for i in range(3)] and len(set(texts)) > 1
    again = server.create_completion(prompts, max_tokens=12, n=3, seed=5)
    assert [choice["text"] for choice in again["choices"]] == texts, "a seed makes it repeatable"
    tokens = list(b"one")
    assert server.create_completion(tokens, max_tokens=9)["choices"][0]["text"] == expected_text("one", 9)
    both = server.create_completion([tokens, list(b"xy")], max_tokens=9)
    assert [choice["text"] for choice in both["choices"]] == [expected_text("one", 9), expected_text("xy", 9)]
    twins = server.create_completion(["same", "same"], max_tokens=30, seed=1)["choices"]
    assert twins[0]["text"] != twins[1]["text"], "equal prompts of one request draw apart"


@pytest.mark.parametrize("prompt", [f"stream {i}" for i in range(8)])
def test_a_stream_carries_the_same_text_and_no_broken_character(server: ServerThread, prompt: str) -> None:
    events = server.stream("/v1/completions", prompt=prompt, max_tokens=64, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]" and events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 64
    pieces = [event["choices"][0] for event in events[:-2]]
    assert "".join(piece["text"] for piece in pieces) == expected_text(prompt, 64)
    assert not any("\ufffd" in piece["text"] for piece in pieces)
    assert [piece["finish_reason"] for piece in pieces].count("length") == 1 == bool(pieces[-1]["finish_reason"])


def test_streams_of_several_samples_are_told_apart(server: ServerThread) -> None:
    events = server.stream("/v1/completions", prompt=["a", "b"], n=2, seed=7, max_tokens=20)
    texts = {}
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts[0] == expected_text("a", 20, 7, 0) and texts[1] == expected_text("a", 20, 7, 1) and len(texts) == 4


@pytest.mark.parametrize("stop", [["Flüsse"], ["川"], ["e F", "深い"], "n"])
def test_stop_strings_over_token_boundaries(server: ServerThread, stop: list[str] | str) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    hit = 0
    for i in range(12):
        whole = expected_text(f"s{i}", 60)
        ends = [whole.find(s) for s in stops if s in whole]
        want = whole[: min(ends)] if ends else whole
        answer = server.create_completion(f"s{i}", max_tokens=60, stop=stop)["choices"][0]
        events = server.stream("/v1/completions", prompt=f"s{i}", max_tokens=60, stop=stop)
        assert answer["text"] == want == "".join(e["choices"][0]["text"] for e in events[:-1])
        assert answer["finish_reason"] == ("stop" if ends else "length")
        assert answer["stop_reason"] in (stops if ends else [None])
        hit += bool(ends)
    assert hit > 3


def test_log_probabilities(server: ServerThread) -> None:
    answer = server.create_completion("logs", max_tokens=30, logprobs=2)["choices"][0]["logprobs"]
    assert len(answer["tokens"]) == len(answer["token_logprobs"]) == len(answer["text_offset"]) == 30
    assert all(len(top) == 2 for top in answer["top_logprobs"])
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "logs"}], max_tokens=30,
                       logprobs=True, top_logprobs=3)[1]["choices"][0]  # fmt: skip
    entries = chat["logprobs"]["content"]
    assert len(entries) == 30 and all(len(entry["top_logprobs"]) == 3 for entry in entries)
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="ignore")
    assert text.removeprefix(" ") == chat["message"]["content"], "the bytes make up the text"
    low = [server.create_completion(f"minus {i}", max_tokens=80, logprobs=0)["choices"][0] for i in range(4)]
    floor = [value for choice in low for value in choice["logprobs"]["token_logprobs"] if value < -9000]
    assert floor and set(floor) == {-9999.0}, "minus infinity is a number that JSON has"


def test_chat_with_the_plain_template(server: ServerThread) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    status, answer = server.post("/v1/chat/completions", messages=messages, max_tokens=25)
    want = expected_text("System: Be brief.\nUser: Hi\nAssistant:", 25)
    assert status == 200 and answer["choices"][0]["message"] == {
        "role": "assistant", "content": want.removeprefix(" "), "refusal": None}  # fmt: skip
    events = server.stream("/v1/chat/completions", messages=messages, max_tokens=25)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == want.removeprefix(" ")


def test_echo(server: ServerThread) -> None:
    assert server.create_completion("echo me", max_tokens=5, echo=True)["choices"][0][
        "text"
    ] == "echo me" + expected_text("echo me", 5)
    events = server.stream("/v1/completions", prompt="echo me", max_tokens=5, echo=True)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "echo me" + expected_text("echo me", 5)


def test_models_and_adapters(server: ServerThread) -> None:
    status, answer = server.request("GET", "/v1/models")
    assert status == 200 and [model["id"] for model in answer["data"]] == ["toy", "tuned"]
    assert server.request("GET", "/v1/models/toy")[1]["max_model_len"] == 2048
    assert server.request("GET", "/v1/models/other")[0] == 404
    assert server.create_completion("x", model="tuned", max_tokens=2)["choices"]
    status, answer = server.post("/v1/completions", prompt="x", model="other")
    assert status == 404 and answer["error"]["code"] == "model_not_found" and "toy" in answer["error"]["message"]


def test_embeddings_of_an_encoder() -> None:
    with run_toy_server("toy-encoder") as server:
        status, answer = server.post("/v1/embeddings", input=["ab", "abc", "d"])
        assert status == 200 and [item["embedding"][0] for item in answer["data"]] == [2.0, 3.0, 1.0]
        assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
        coded = server.post("/v1/embeddings", input="ab", encoding_format="base64")[1]["data"][0]["embedding"]
        assert struct.unpack("<3f", base64.b64decode(coded)) == (2.0, 195.0, 1.0)
        status, answer = server.post("/v1/completions", prompt="x")
        assert status == 400 and "/v1/embeddings" in answer["error"]["message"]


def test_a_generator_has_no_embeddings(server: ServerThread) -> None:
    status, answer = server.post("/v1/embeddings", input="ab")
    assert status == 400 and "/v1/completions" in answer["error"]["message"]


def test_the_form_of_mii(server: ServerThread) -> None:
    prompts = ["DeepSpeed is", "Seattle"]
    status, answer = server.request("POST", "/mii/toy", {"prompts": prompts, "max_new_tokens": 10, "do_sample": False})
    assert status == 200 and answer == [
        {
            "generated_text": expected_text(p, 10),
            "prompt_length": len(p),
            "generated_length": 10,
            "finish_reason": "length",
        }
        for p in prompts
    ]
    assert server.request("POST", "/mii/other", {"prompts": prompts})[0] == 404
    short = server.request("POST", "/mii/toy", {"prompts": "abcd", "max_length": 9, "return_full_text": True})[1]
    assert short[0]["generated_length"] == 5 and short[0]["generated_text"].startswith("abcd")


@pytest.mark.parametrize(
    ("fields", "prompt", "model_length", "count"),
    [
        ({}, 24, 4096, 1000), ({}, 24, 512, 488), ({}, 2000, 4096, 1), ({"max_new_tokens": 3000}, 24, 4096, 3000),
        ({"max_length": 2048}, 24, 4096, 2024), ({"max_length": 2048, "max_new_tokens": 7}, 24, 4096, 7),
    ],
)  # fmt: skip
def test_miis_texts_end_where_miis_do(fields: dict[str, int], prompt: int, model_length: int, count: int) -> None:
    """At 1024 tokens in all where nobody says how many."""
    model_info = ModelMetadata("m", "causal", model_length, 256, "fp32")
    request = MiiRequest.model_validate({"prompts": "x", **fields})
    assert mii_sampling_params(request, prompt, model_info).max_tokens == count


def test_the_form_of_mii_before_0_1(server: ServerThread) -> None:
    """Greedy, with the prompt in the text, unless ``kwargs`` say otherwise."""
    ask = {"request": {"query": ["DeepSpeed is", "request"]}, "kwargs": {"max_new_tokens": 10}}
    status, answer = server.request("POST", "/mii/toy", ask)
    assert status == 200 and answer["timeTaken"] >= answer["modelTimeTaken"] > 0
    assert answer["response"] == [prompt + expected_text(prompt, 10) for prompt in ask["request"]["query"]]
    ask = {"request": {"query": "Seattle"}, "kwargs": {"max_new_tokens": 3, "return_full_text": False}}
    assert server.request("POST", "/mii/toy", ask)[1]["response"] == [expected_text("Seattle", 3)]
    assert (
        server.request("POST", "/mii/toy", {"prompts": ["request"], "max_new_tokens": 2})[1][0]["generated_length"] == 2
    )
    for wrong in ({"request": {}}, {"request": {"query": "x"}, "kwargs": {"max_new_token": 3}}, {"request": "x"}):
        assert server.request("POST", "/mii/toy", wrong)[0] == 400, wrong


TEMPLATE = (
    "{% if tools %}tools {{ tools | length }}\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tool results here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


class TemplateTokenizer(ToyTokenizer):
    """Renders the template as transformers does."""

    chat_template = TEMPLATE

    def apply_chat_template(self, messages, tools=None, chat_template=None, add_generation_prompt=True,
                            continue_final_message=False, tokenize=False, **variables):  # fmt: skip
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(text):
            raise ValueError(text)

        environment = ImmutableSandboxedEnvironment()
        environment.globals["raise_exception"] = raise_exception
        fields = dict(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        return environment.from_string(chat_template).render(**fields)


def test_chat_with_a_template_and_tools() -> None:
    tool = {
        "type": "function",
        "function": {"name": "depth", "parameters": {"type": "object", "properties": {}}},
    }
    messages = [{"role": "user", "content": "How deep?"}]
    with run_toy_server(make_tokenizer=lambda: ChatTokenizer(TemplateTokenizer())) as server:
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=20, tools=[tool])[1]
        want = expected_text("tools 1\n[user] How deep?\n[assistant] ", 20)
        assert answer["choices"][0]["message"]["content"] == want
        none = server.post("/v1/chat/completions", messages=messages, max_tokens=20, tools=[tool], tool_choice="none")
        assert none[1]["choices"][0]["message"]["content"] == expected_text("[user] How deep?\n[assistant] ", 20)
        refused = [*messages, {"role": "tool", "content": "7", "tool_call_id": "x"}]
        status, answer = server.post("/v1/chat/completions", messages=refused)
        assert status == 400 and "no tool results here" in answer["error"]["message"]
        for key in ("tokenize", "chat_template", "tools", "messages"):
            status, answer = server.post("/v1/chat/completions", messages=messages, chat_template_kwargs={key: True})
            assert status == 400, key


def test_tools_without_a_template_that_knows_them_are_refused(server: ServerThread) -> None:
    tool = {"type": "function", "function": {"name": "depth"}}
    status, answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "?"}], tools=[tool])
    assert status == 400 and "leave them out" in answer["error"]["message"]


def test_what_the_engine_cannot_do_is_one_clear_400(server: ServerThread) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for stream in (False, True):
        status, answer = server.post("/v1/completions", prompt="x", response_format=form, stream=stream)
        assert status == 400 and "structured output" in answer["error"]["message"]


def test_metrics_add_up(server: ServerThread) -> None:
    def value(name: str) -> float:
        text = server.request_raw("GET", "/metrics", None)[2]
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    names = ["thalweg_time_to_first_token_seconds_count", "thalweg_inter_token_latency_seconds_count",
             "thalweg_request_seconds_count", "thalweg_generated_tokens_total", "thalweg_prompt_tokens_total",
             'thalweg_finished_total{reason="length"}']  # fmt: skip
    before = [value(name) for name in names]
    server.create_completion("count", max_tokens=11, n=2, seed=1)
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [2, 20, 2, 22, 5, 2]
    server.wait_idle()
    text = server.request_raw("GET", "/metrics", None)[2]
    for name in (
        "running",
        "waiting",
        "kv_use_ratio",
        "prefix_hit_tokens_total",
        "preemptions_total",
        "outstanding",
    ):
        assert f"thalweg_{name}" in text
    assert value("thalweg_outstanding ") == 0 and value("thalweg_healthy") == 1


def test_the_page_needs_nothing_from_elsewhere(server: ServerThread) -> None:
    status, headers, page = server.request_raw("GET", "/", None)
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "http://" not in page and "https://" not in page and "src=" not in page
    assert "default-src 'none'" in headers["content-security-policy"]
    assert 'id="stop"' in page


def test_the_openai_client_understands_it(server: ServerThread) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert client.completions.create(model="toy", prompt="sdk", max_tokens=8).choices[0].text == expected_text("sdk", 8)
    messages = [{"role": "user", "content": "sdk"}]
    chunks = list(client.chat.completions.create(model="toy", messages=messages, max_tokens=30, stream=True, seed=2))
    whole = client.chat.completions.create(model="toy", messages=messages, max_tokens=30, seed=2, user="me")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["toy", "tuned"]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="toy", prompt="x", temperature=7.0)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="x")
